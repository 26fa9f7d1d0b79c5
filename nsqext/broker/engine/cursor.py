"""What a channel has before it: the read position, what came back, what is on its way, and how far it has finished.

What goes back into a channel comes next, before the queue is read on. Moving the read position forgets what is on its
way; the message that the channel has read ahead already is not here and so is not forgotten
(captured: channel_setoffset, channel_empty_connected, sub_advanced_special).
"""

from __future__ import annotations

import logging
from collections import deque
from math import inf
from typing import TYPE_CHECKING

from nsqext.broker.engine.ack_tracker import AckTracker
from nsqext.broker.engine.errors import Refusal
from nsqext.broker.engine.in_flight import Flight, InFlight
from nsqext.broker.engine.storage.delayed_queue import Delayed, DelayedQueue, Journal
from nsqext.protocol.record import MAX_ATTEMPTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqext.broker.engine.partition import Partition

__all__ = ("Cursor",)

_LOG = logging.getLogger(__name__)


class Cursor:
    """The messages of one channel, seen from its read position.

    Args:
        partition: where they come from.
        offset: where to begin.
        count: messages before that.
        on_dropped: called with each message that is on its way when the position is moved.
        journal: is told of every change of the delayed queue; None for nobody.

    Attributes:
        offset: what is read next.
        count: messages before it.
        timestamp: when the message that was read last was stored (ns); 0 for none.
        ordered: one message at a time.
        back: messages that came back and go out next.
        flights: messages at clients and deferred ones.
        confirmed: how far the channel has finished.
        delayed: its delayed queue.
        from_delay: messages on their way that came from the delayed queue, by internal id.
        requeues: how often a message came back.
    """

    def __init__(
        self,
        partition: Partition,
        offset: int,
        count: int,
        on_dropped: Callable[[Flight], None],
        journal: Journal | None = None,
        *,
        ephemeral: bool = False,
    ) -> None:
        self.offset: int = offset
        self.count: int = count
        self.timestamp: int = 0
        self.ordered = False
        self.back: deque[Flight] = deque()
        self.flights: InFlight = InFlight()
        self.confirmed: AckTracker = AckTracker(offset, count)
        self.delayed: DelayedQueue = DelayedQueue(journal)
        self.from_delay: set[int] = set()
        self.requeues: int = 0
        self._partition = partition
        self._options = partition.options
        self._surplus: list[Flight] = []  # requeued while `back` was full
        # the real server's requeuedMsgChan
        self._most_back = 2 if partition.ordered or ephemeral else partition.options.limits.max_rdy_count // 10 + 1
        self._window = partition.options.rules.confirm_window
        self._on_dropped = on_dropped
        self._ahead: Flight | None = None  # read while something that came back was taken
        self._unread = -1  # messages before the one that the disk did not give
        self._rewind: bool | None = None  # to be done before the next message is taken; True forgets the intervals

    # forwards

    def take(self) -> Flight | None:
        """Return the next message, None when there is none or too much is on its way."""
        while True:
            if self._rewind is not None:
                self._apply_rewind(self._rewind)
            flight = self._next()
            if flight is None or not self.ordered or flight.entry.offset == self.confirmed.offset:
                return flight
            self._rewind = True

    def _next(self) -> Flight | None:
        """Take what came back or what comes next; the queue is read in either case, as the real server does."""
        ahead = self._ahead or self._read()
        if self._surplus and not self.back and (ahead is None or self._options.random.random() < 0.5):
            self._refill()
        self._ahead = ahead if self.back else None
        return self.back.popleft() if self.back else ahead

    def _refill(self) -> None:
        """Move surplus messages to `back`, in random order; the real server does it in another goroutine."""
        self._options.random.shuffle(self._surplus)
        self.back.extend(self._surplus[: self._most_back])
        del self._surplus[: self._most_back]

    def _read(self) -> Flight | None:
        partition = self._partition
        if self.count >= partition.readable or self._must_wait():
            return None
        try:
            entry = partition.log.at(self.count + 1)
        except Refusal as refusal:
            self._complain(refusal)
            return None
        if entry is None:  # the queue begins behind the position
            self.jump(partition.log.start_offset, partition.log.start_count)
            entry = partition.log.at(self.count + 1)
            if entry is None:
                return None
        self.count = entry.count
        self.offset = entry.offset + entry.size
        self.timestamp = entry.record.timestamp
        return Flight(entry)

    def _complain(self, refusal: Refusal) -> None:
        """Say once for each message that the disk does not give it; the channel waits for it."""
        if self._unread != self.count:
            self._unread = self.count
            _LOG.warning("%s", refusal.text)

    def _must_wait(self) -> bool:
        return (self.ordered and bool(self.flights.table or self.back or self._surplus)) or self.is_full()

    def is_full(self) -> bool:
        """Return whether so much is finished behind an unfinished message that no more is deferred in memory."""
        return len(self.confirmed.starts) > self._window or self.is_clogged()

    def is_clogged(self) -> bool:
        """Return whether more than half of a full window of messages waits for delays."""
        deferred = self.flights.deferred
        if deferred * 2 <= self._window:
            return False
        waiting = self.count - self.confirmed.count
        return waiting >= self._window and deferred * 2 > waiting

    def confirm(self, flight: Flight) -> None:
        """Note that a message is finished."""
        entry = flight.entry
        if flight.delayed:
            self.from_delay.discard(entry.record.internal_id)
            self.delayed.remove(entry.record.internal_id)
        else:
            self.confirmed.add(entry.offset, entry.size, entry.count)
            self._partition.note_progress()

    def is_finished(self, flight: Flight) -> bool:
        """Return whether a message that was read again was finished before, or waits in the delayed queue."""
        entry = flight.entry
        if flight.delayed:
            return False
        if self.delayed.messages and not self.ordered and entry.record.internal_id in self.delayed.messages:
            return True
        if entry.offset < self.confirmed.offset:
            return not flight.kept
        return bool(self.confirmed.starts) and self.confirmed.covers(entry.offset, entry.size)

    # back

    def give_back(self, flight: Flight) -> None:
        """Let a message come again."""
        flight.owner = None
        flight.deferred = False
        self.requeues += 1
        if len(self.back) < self._most_back:
            self.back.append(flight)
        else:
            self._surplus.append(flight)

    def delay(self, flight: Flight, delay: float) -> bool:
        """Move a message to the delayed queue; a message of very many attempts waits longer, a second for each.

        Returns:
            Whether it is there; it is not where the disk did not take it.
        """
        if flight.attempts >= MAX_ATTEMPTS // 4:
            delay = max(delay, flight.attempts)
        delay = min(delay, self._options.limits.max_req_timeout)
        try:
            self.delayed.put(Delayed(flight.entry, flight.attempts, self._options.wall() + round(delay * 1e9)))
        except Refusal:
            return False
        self.confirm(flight)
        return True

    def takes_delayed(self) -> bool:
        """Return whether the delayed queue takes one more."""
        return len(self.delayed.messages) < self._options.rules.delayed_most

    def bring_delayed(self, ahead: float = 0) -> None:
        """Let come again what is due in the delayed queue within so many seconds."""
        now = self._options.wall() + round(ahead * 1e9)
        for delayed in self.delayed.due(now, self._options.rules.delayed_batch):
            internal_id = delayed.entry.record.internal_id
            if internal_id not in self.from_delay and internal_id not in self.flights.table:
                self.from_delay.add(internal_id)
                self.give_back(Flight(delayed.entry, delayed.attempts, delayed=True))

    def delayed_deadline(self) -> float:
        """Return the clock time at which the delayed queue has to be looked at; infinity when it does not."""
        if not self.delayed.messages or self.ordered or self.from_delay:
            return inf
        return self._options.clock() + max(self.delayed.first_due - self._options.wall(), 0) / 1e9

    # elsewhere

    def jump(self, offset: int, count: int) -> None:
        """Go to a position: everything before it counts as finished, nothing behind it."""
        self.confirmed.reset(offset, count)
        self._partition.note_progress()
        self.offset, self.count = offset, count
        self.drain()

    def rewind(self, *, forget: bool) -> None:
        """Read again from the confirmed position, once the message in hand is out.

        Args:
            forget: what was finished behind that position comes again, too.
        """
        self._rewind = forget

    def spare_rewind(self, flight: Flight) -> None:
        """Do without reading again when all that is on its way is the first unfinished message of an ordered channel.

        Args:
            flight: the message that has just gone out.
        """
        if self._rewind is None or not self.ordered or self.back or self._surplus or len(self.flights.table) != 1:
            return
        entry = flight.entry
        if entry.offset != self.confirmed.offset:
            return
        if self._rewind:
            self.confirmed.clear()
        self._rewind = self._ahead = None
        self.offset, self.count = entry.offset + entry.size, entry.count

    def _apply_rewind(self, forget: bool) -> None:
        self._rewind = None
        if forget:
            self.confirmed.clear()
        self.offset, self.count = self.confirmed.offset, self.confirmed.count
        self.drain()

    def drain(self) -> None:
        """Forget what is on its way."""
        for flight in self.flights.clear():
            self._on_dropped(flight)
        self.back.clear()
        self._surplus.clear()
        self._ahead = None
        self.from_delay.clear()
        self.timestamp = 0

    def cut(self, offset: int, count: int) -> None:
        """Forget what lies behind the end of a queue that was cut off there."""
        self.confirmed.cut(offset, count)
        for internal_id, delayed in list(self.delayed.messages.items()):
            if delayed.entry.offset >= offset:
                self.delayed.remove(internal_id)
        self._apply_rewind(False)
