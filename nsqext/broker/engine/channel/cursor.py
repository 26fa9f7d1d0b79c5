"""A channel's read and acknowledged positions, with requeued messages and messages in flight.

Requeued messages precede the queue. A move of the read position discards everything in flight; the message read ahead,
outside the cursor, is still delivered (captured: channel_setoffset, channel_empty_connected, sub_advanced_special).
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from math import inf
from typing import TYPE_CHECKING, Protocol

from attrs import define, field

from nsqext.broker.engine.channel.in_flight import AckTracker, Delivery, InFlight
from nsqext.broker.engine.storage.delayed_queue import Delayed, DelayedJournal, DelayedQueue
from nsqext.broker.engine.storage.log import Log, LogEntry, Refusal
from nsqext.protocol.names import is_ephemeral
from nsqext.protocol.record import MAX_ATTEMPTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nsqext.broker.engine.options import PartitionOptions
    from nsqext.broker.engine.storage.partition_store import ChannelState

_BUCKETS = 12
_BOUNDS = tuple(16 << number for number in range(_BUCKETS - 1))
logger: logging.Logger = logging.getLogger(__name__)


@define(eq=False)
class Latencies:
    """Histogram of finished messages: below 16 ms, 32 ms, 64 ms, …"""

    consume: list[int] = field(factory=lambda: [0] * _BUCKETS)  #: by time since the message was stored
    delivery: list[int] = field(factory=lambda: [0] * _BUCKETS)  #: by time since its delivery

    def add(self, held: float, age: int) -> None:
        """Count a message by seconds since its delivery and nanoseconds since its storage."""
        self.delivery[bisect_right(_BOUNDS, held * 1000)] += 1
        self.consume[bisect_right(_BOUNDS, age // 1_000_000)] += 1


@define
class KeyRangeStats:
    """Key range of a key_failover channel."""

    low: float  #: bounds, 0 to 1
    high: float
    tag: str  #: dispatch tag; each tag has separate ranges
    client_id: int
    remote_address: str
    rate: float  #: messages per second recently read
    waiting: int  #: messages of the replay set


@define(kw_only=True)
class ChannelCounters:
    """Counters of a channel; sizes in bytes, times in nanoseconds since 1970."""

    depth: int  #: unfinished messages (redesigned server) or undelivered messages (original)
    depth_size: int  #: their bytes in the queue
    depth_timestamp: int  #: time stamp of the last message read; 0 without messages
    backend_depth: int  #: the part of ``depth`` on disk
    backlogs: int  #: messages never delivered, with deferred messages
    in_flight_count: int  #: messages at clients; the redesigned server adds deferred messages
    deferred_count: int  #: messages whose delay runs in memory
    deferred_from_delay_count: int  #: unfinished messages from the delayed queue
    message_count: int  #: messages that entered the channel
    requeue_count: int
    timeout_count: int = 0
    delayed_queue_count: int
    delayed_queue_recent: int  #: when its first message is due; 0 if empty
    replay_count: int = 0  #: messages read that wait for the client of their key
    held_keys: int = 0  #: keys with messages in flight
    key_ranges: list[KeyRangeStats] = field(factory=list)


class PartitionView(Protocol):
    """What channels use of `nsqext.broker.engine.partition.Partition`."""

    topic: str
    options: PartitionOptions
    log: Log
    extend: bool
    ordered: bool
    suspended: bool
    readable: int
    readable_offset: int
    touched: bool

    @property
    def journal(self) -> DelayedJournal | None: ...
    def touch(self) -> None: ...
    def delete_channel(self, name: str) -> None: ...
    def note_progress(self) -> None: ...
    def note_restored(self) -> None: ...
    def note_channels(self) -> None: ...


class Cursor:
    """Messages of a channel from a position: an offset, and the messages before it."""

    def __init__(
        self, partition: PartitionView, channel: str, position: tuple[int, int], on_dropped: Callable[[Delivery], None]
    ) -> None:
        self.channel: str = channel
        self.offset: int = position[0]  #: of the next record to read
        self.count: int = position[1]  #: messages before it
        self.timestamp: int = 0  #: time stamp (ns) of the last message read; 0 without messages
        self.ordered: bool = False
        self.requeued: deque[Delivery] = deque()  #: delivered next
        self.in_flight: InFlight = InFlight()
        self.acked: AckTracker = AckTracker(*position)
        self.delayed: DelayedQueue = DelayedQueue(channel, self._journal(partition, channel))
        #: internal ids of unfinished messages from the delayed queue
        self.from_delayed: set[int] = set()
        self.requeues: int = 0
        self._partition = partition
        self._options = partition.options
        self._window = partition.options.rules.confirm_window
        self._on_dropped = on_dropped  # called with each message in flight when the position moves
        # bound of `requeued`, as of the real server's requeuedMsgChan; further messages wait in a Go map, without order
        small = partition.ordered or is_ephemeral(channel)
        self._max_requeued = 2 if small else partition.options.limits.max_rdy_count // 10 + 1
        self._overflow: list[Delivery] = []
        self._read_ahead: Delivery | None = None  # read while a requeued message was taken
        self._unreadable: int | None = None  # messages before a message that the disk did not return
        self._rewind: bool | None = None  # rewind before the next message; True drops the intervals

    def _journal(self, partition: PartitionView, channel: str) -> DelayedJournal | None:
        return None if is_ephemeral(channel) else partition.journal

    # Reading and acknowledging

    def take(self) -> Delivery | None:
        """Return the next message; None at the end, or while too many are not acknowledged."""
        rewound = False
        while True:
            if self._rewind is not None:
                self._apply_rewind(self._rewind)
                rewound = True
            delivery = self._next()
            if delivery is None or not self.ordered or delivery.entry.offset == self.acked.offset:
                return delivery
            if rewound:
                self._move_to(delivery.entry)
                return delivery
            self._rewind = True

    def _move_to(self, entry: LogEntry) -> None:
        """Move the acknowledged position, which is inside a message, to a message's start."""
        logger.warning(
            "%s: the acknowledged position %d is not the start of a message; it moves to %d",
            self.channel,
            self.acked.offset,
            entry.offset,
        )
        self.acked.reset(entry.offset, entry.count - 1)
        self._partition.note_progress()

    def _next(self) -> Delivery | None:
        """Take a requeued message or the queue's next message; both read the queue, as in the real server."""
        ahead = self._read_ahead or self._read()
        if self._overflow and not self.requeued and (ahead is None or self._options.random.random() < 0.5):
            self._refill()
        self._read_ahead = ahead if self.requeued else None
        return self.requeued.popleft() if self.requeued else ahead

    def _refill(self) -> None:
        """Move random messages from the overflow to `requeued`, as the real server."""
        self._options.random.shuffle(self._overflow)
        self.requeued.extend(self._overflow[: self._max_requeued])
        del self._overflow[: self._max_requeued]

    def _read(self) -> Delivery | None:
        partition = self._partition
        if self.count >= partition.readable or (self._must_wait() and not self._starts_over()):
            return None
        try:
            entry = partition.log.at(self.count + 1)
        except Refusal as refusal:
            if self._unreadable != self.count:  # logged once
                self._unreadable = self.count
                logger.warning("%s", refusal.text)
            return None
        if entry is None:
            before = self.count
            self._pass_over_missing()
            return self._read() if self.count != before else None
        self._unreadable = None
        self.count = entry.count
        self.offset = entry.offset + entry.size
        self.timestamp = entry.record.timestamp
        return Delivery(entry)

    def _starts_over(self) -> bool:
        """Forget what was finished out of order, if only this stops a reader at the acknowledged position.

        A new leader may start so. As in the real server, finished messages are redelivered.
        """
        if self.count != self.acked.count or not self.acked.starts:
            return False
        logger.warning("%s: too many messages are finished out of order; they are delivered again", self.channel)
        self.acked.clear()
        self._partition.note_progress()
        return True

    def _pass_over_missing(self) -> None:
        """Acknowledge messages lost on disk, or move to the start of the queue."""
        gap = self._partition.log.gap_at(self.count + 1)
        if gap is None:
            self.jump(self._partition.log.start_offset, self._partition.log.start_count)
        else:
            self.acked.add(gap.first_offset, gap.end_offset - gap.first_offset, gap.end_count)
            self._partition.note_progress()
            self.offset, self.count = gap.end_offset, gap.end_count

    @property
    def blocked_by_disk(self) -> bool:
        """Whether the disk did not return the next message, which each tick tries again."""
        return self._unreadable == self.count and self.count < self._partition.readable

    def _must_wait(self) -> bool:
        return (self.ordered and bool(self.in_flight.table or self.requeued or self._overflow)) or self.is_full()

    def is_full(self) -> bool:
        """Return whether too many messages are finished out of order or deferred to read on."""
        return len(self.acked.starts) > self._window or self.is_clogged()

    def is_blocked(self) -> bool:
        return len(self.acked.starts) >= self._window

    def is_clogged(self) -> bool:
        """Return whether the window is full and more than half of it deferred."""
        return 2 * self.in_flight.deferred > self.count - self.acked.count >= self._window

    def acknowledge(self, delivery: Delivery) -> None:
        entry = delivery.entry
        if delivery.delayed:
            self.from_delayed.discard(entry.record.internal_id)
            self.delayed.remove(entry.record.internal_id)
        else:
            self.acked.add(entry.offset, entry.size, entry.count)
            self._partition.note_progress()

    def is_finished(self, delivery: Delivery) -> bool:
        """Return whether a message needs no delivery: finished, or in the delayed queue."""
        entry = delivery.entry
        if delivery.delayed:
            return False
        if self.delayed.messages and not self.ordered and entry.record.internal_id in self.delayed.messages:
            return True
        if entry.offset < self.acked.offset:
            return not delivery.kept
        return bool(self.acked.starts) and self.acked.covers(entry.offset, entry.size)

    # Requeued and delayed messages

    def requeue(self, delivery: Delivery) -> None:
        delivery.owner = None
        delivery.deferred = False
        self.requeues += 1
        if len(self.requeued) < self._max_requeued:
            self.requeued.append(delivery)
        else:
            self._overflow.append(delivery)

    def delay(self, delivery: Delivery, delay: float) -> bool:
        """Move a message to the delayed queue; return False if its journal could not be written.

        After very many attempts, it waits at least a second for each.
        """
        if delivery.attempts >= MAX_ATTEMPTS // 4:
            delay = max(delay, delivery.attempts)
        delay = min(delay, self._options.limits.max_req_timeout)
        due = self._options.wall() + round(delay * 1e9)
        try:
            self.delayed.put(Delayed(delivery.entry, delivery.attempts, due))
        except Refusal:
            return False
        self.acknowledge(delivery)
        return True

    def requeue_delayed(self, ahead: float = 0) -> None:
        now = self._options.wall() + round(ahead * 1e9)
        for delayed in self.delayed.due(now, self._options.rules.delayed_batch):
            internal_id = delayed.entry.record.internal_id
            if internal_id not in self.from_delayed and internal_id not in self.in_flight.table:
                self.from_delayed.add(internal_id)
                self.requeue(Delivery(delayed.entry, delayed.attempts, delayed=True))

    def delayed_deadline(self) -> float:
        """Return the clock time of the delayed queue's next message; infinity while it is not read."""
        if not self.delayed.messages or self.ordered or self.from_delayed:
            return inf
        return self._options.clock() + max(self.delayed.first_due - self._options.wall(), 0) / 1e9

    # Other positions

    def jump(self, offset: int, count: int) -> None:
        """Move to a position: everything before it is finished."""
        self.acked.reset(offset, count)
        self._partition.note_progress()
        self.offset, self.count = offset, count
        self.drain()

    def rewind(self, *, forget: bool) -> None:
        """Read again from the acknowledged position, after the message read ahead.

        ``forget`` also redelivers messages finished out of order.
        """
        self._rewind = forget

    def _apply_rewind(self, forget: bool) -> None:
        self._rewind = None
        if forget:
            self.acked.clear()
        self.offset, self.count = self.acked.offset, self.acked.count
        self.drain()

    def skip_queue(self) -> None:
        partition = self._partition
        if self.count < partition.readable:
            self.jump(partition.readable_offset, partition.readable)

    def drain(self) -> None:
        for delivery in self.in_flight.clear():
            self._on_dropped(delivery)
        self.requeued.clear()
        self._overflow.clear()
        self._read_ahead = None
        self.from_delayed.clear()
        self.timestamp = 0

    def restore(self, state: ChannelState, delayed: Iterable[Delayed]) -> None:
        log = self._partition.log
        # a full disk may have lost the position, not the removal of records before it
        offset, count = max((state.offset, state.count), (log.start_offset, log.start_count))
        self.acked.restore(offset, count, state.intervals)
        for message in delayed:
            self.delayed.restore(message)

    def cut(self, offset: int, count: int) -> None:
        """Discard everything at and behind an offset."""
        self.acked.cut(offset, count)
        for internal_id, delayed in list(self.delayed.messages.items()):
            if delayed.entry.offset >= offset:
                self.delayed.remove(internal_id)
        self._apply_rewind(False)

    def stats(self) -> ChannelCounters:
        partition, acked, in_flight, delayed = self._partition, self.acked, self.in_flight, self.delayed
        depth = partition.readable - acked.count
        return ChannelCounters(
            depth=depth,
            depth_size=partition.readable_offset - acked.offset,
            depth_timestamp=self.timestamp,
            backend_depth=depth,
            backlogs=depth if self.ordered else in_flight.deferred + max(partition.readable - self.count, 0),
            in_flight_count=len(in_flight.table),
            deferred_count=in_flight.deferred,
            deferred_from_delay_count=len(self.from_delayed),
            message_count=partition.readable,
            requeue_count=self.requeues,
            delayed_queue_count=len(delayed.messages),
            delayed_queue_recent=delayed.first_due,
        )
