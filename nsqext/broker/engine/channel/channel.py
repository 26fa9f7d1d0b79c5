"""A channel of the redesigned server: clients, delivery, responses to messages, switches.

The channel reads a message ahead, which blocks later messages until a client can take it (captured: tag_head_of_line).
"""

from __future__ import annotations

import logging
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from nsqext.broker.engine.channel.cursor import ChannelCounters, Cursor, Latencies, PartitionView
from nsqext.broker.engine.channel.in_flight import AckTracker, Delivery, SubscribedClient, TagSelector
from nsqext.broker.engine.channel.rules import NOT_IN_FLIGHT, ChannelRateLimit, RequeueRules, not_owned, passes_filters
from nsqext.broker.engine.options import PLAIN
from nsqext.broker.engine.storage.log import AT_END, Refusal, StartPosition
from nsqext.broker.engine.storage.partition_store import ChannelState
from nsqext.protocol.names import is_ephemeral
from nsqext.protocol.record import MAX_ATTEMPTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from nsqext.broker.engine.storage.delayed_queue import Delayed

logger: logging.Logger = logging.getLogger(__name__)


class Channel:
    """Channel that reads from an offset with ``count`` messages before it."""

    def __init__(self, partition: PartitionView, name: str, offset: int, count: int) -> None:
        self.name = name
        self.ephemeral: bool = is_ephemeral(name)  #: deleted with the last client
        self.paused: bool = False  #: nothing is delivered
        self.skipped: bool = False  #: every message is discarded
        self.traced: bool = False  #: logs deliveries and finished messages (`/message/trace/enable`)
        self.cursor: Cursor = self._make_cursor(partition, (offset, count))
        self.read_ahead: Delivery | None = None  #: read, not yet delivered
        self.clients: dict[int, SubscribedClient] = {}
        self.timeouts: int = 0
        self.latencies: Latencies = Latencies()
        self.kind = PLAIN
        self._partition = partition
        self._options = partition.options
        self._clock = partition.options.clock
        self._in_flight = self.cursor.in_flight
        self._selector = TagSelector()
        rate = partition.options.rules.rate_limit
        self._rate_limit = ChannelRateLimit(rate, self._clock()) if rate > 0 else None
        self._requeue_rules = RequeueRules(partition.options, self.cursor, on_disk=not self.ephemeral)
        self._moves: list[Callable[[], None]] = []  # of the position, delayed
        self._pumping = False
        self._closed = False

    def _make_cursor(self, partition: PartitionView, position: tuple[int, int]) -> Cursor:
        return Cursor(partition, self.name, position, self._dropped)

    @property
    def ordered(self) -> bool:
        """All clients together get a single message at a time, in queue order."""
        return self.cursor.ordered

    @property
    def acked(self) -> AckTracker:
        return self.cursor.acked

    # Clients

    def subscribe(self, client: SubscribedClient, *, ordered: bool = False, start: StartPosition | None = None) -> None:
        """Add a client, with ``ordered`` as SUB_ORDERED does; only the first client's ``start`` counts.

        Raises `Refusal` with the text for E_INVALID, or "Consume is disabled currently".
        """
        if self._closed or self._partition.suspended:
            raise Refusal("Consume is disabled currently")
        position = None
        if start is not None and not self.clients:
            position = start.find(self._partition.log, clustered=self._options.clustered)
        if not self._partition.extend:
            client.tag = ""
        self.clients[client.id] = client
        if ordered:
            self._make_ordered()
        if position is not None:
            self._jump(position)
        self._selector.add(client)
        self.pump()

    def _jump(self, position: tuple[int, int]) -> None:
        read_ahead = self.read_ahead
        self.cursor.jump(*position)
        if read_ahead is not None:
            read_ahead.kept = True
            if read_ahead.delayed:
                self.cursor.from_delayed.add(read_ahead.entry.record.internal_id)

    def _make_ordered(self) -> None:
        """Become ordered: read again from the acknowledged position.

        A message read ahead is delivered before, and so twice with the same attempts, for any RDY count (captured:
        sub_ordered_first_reset_duplicate).
        """
        if not self.ordered:
            self.cursor.ordered = True
            self._move(partial(self.cursor.rewind, forget=True))

    def _move(self, move: Callable[[], None]) -> None:
        """Move, first when the message read ahead waits for no client of its tag."""
        self._moves.append(move)
        self._make_moves()

    def _make_moves(self) -> None:
        while self._moves and not self._waits_for_tag:
            self._moves.pop(0)()

    @property
    def _waits_for_tag(self) -> bool:
        """Whether the message read ahead waits for a client of its tag: moves are then delayed."""
        return self._selector.tagged and self.read_ahead is not None and self._selector.has(self.read_ahead.tag)

    def unsubscribe(self, client: SubscribedClient) -> None:
        """Remove a client; requeue its messages in flight without counting the attempt."""
        if self.clients.pop(client.id, None) is None:
            return
        self._selector.remove(client)
        client.stall()
        self._requeue_all_of(client)
        if self.ephemeral and not self.clients and not self._closed:
            self._partition.delete_channel(self.name)
        self.pump()

    def _requeue_all_of(self, client: SubscribedClient) -> None:
        """Requeue a client's messages in flight in random order, as the real server, which iterates over a Go map.

        As there, other clients may receive some of them, and new messages, before the last is requeued.
        """
        random = self._options.random
        deliveries = self._in_flight.of(client)
        random.shuffle(deliveries)
        for delivery in deliveries:
            self._in_flight.remove(delivery.entry.record.internal_id)
            delivery.attempts -= 1
            self.cursor.requeue(delivery)
            if random.random() < 0.5:
                self.pump()

    def set_ready(self, client: SubscribedClient, count: int) -> None:
        client.ready = count
        if client.id in self.clients:
            client.refresh()
            self._selector.renew(client)
            self.pump()

    def set_client_limit(self, prefix: str, limit: int) -> None:
        """Limit the messages in flight of clients whose ``host:port`` has a prefix."""
        for client in self.clients.values():
            if client.name.startswith(prefix):
                client.limit = limit
                client.refresh()
                self._selector.renew(client)
        self.pump()

    def set_rate_limit(self, rate: int) -> None:
        """Limit the KiB of large messages per second; zero or less changes nothing."""
        if rate > 0:
            self._rate_limit = ChannelRateLimit(rate, self._clock())

    def _dropped(self, delivery: Delivery) -> None:
        client = delivery.owner
        delivery.owner = None
        if client is not None:
            client.in_flight -= 1
            client.requeued += 1
            self._selector.renew(client)

    def _failed(self, client: SubscribedClient) -> None:
        client.record_failure()

    # Delivery

    def pump(self) -> None:
        if self._must_not_pump():
            return
        self._pumping = True
        selector, limit = self._selector, self._rate_limit
        try:
            while True:
                if self._moves:
                    self._make_moves()
                delivery = self.read_ahead
                if delivery is None:
                    delivery = self.read_ahead = self._take()
                elif self.skipped and not self._waits_for_tag:
                    self.cursor.skip_queue()
                if delivery is None or self.paused:
                    return
                if limit is not None and limit.holds(delivery, self._clock()):
                    return
                client = selector.pick(delivery.tag if selector.tagged else "")
                if client is None:
                    return
                self.read_ahead = None
                self._deliver(client, delivery)
                selector.offer(client)
        finally:
            self._pumping = False

    def _must_not_pump(self) -> bool:
        """Touch the partition; return whether deliveries must wait or are being made."""
        if not self._partition.touched:
            self._partition.touch()
        return self._pumping or self._options.turn.defers(self)

    def _take(self) -> Delivery | None:
        if self._partition.suspended:
            return None
        if self.skipped:
            self.cursor.skip_queue()
            return None
        delivery = self.cursor.take()
        while delivery is not None and delivery.attempts and self._is_ignored(delivery):
            self.cursor.acknowledge(delivery)
            delivery = self.cursor.take()
        return delivery

    def _is_ignored(self, delivery: Delivery) -> bool:
        age = self._options.wall() - delivery.entry.record.timestamp
        return self._options.rules.ignores(delivery.attempts, age / 1e9)

    def _deliver(self, client: SubscribedClient, delivery: Delivery) -> None:
        filtered = client.filtered and not passes_filters(client, delivery, self._partition)
        if filtered or self.cursor.is_finished(delivery):
            self.cursor.acknowledge(delivery)
            return
        known = self._in_flight.table.get(delivery.entry.record.internal_id)
        if known is not None:  # a client has it; read again after a move of the position
            if known.delayed and not delivery.delayed:
                self.cursor.acknowledge(delivery)
            return
        delivery.owner = client
        delivery.attempts = self._next_attempt(delivery.attempts)
        delivery.delivered = now = self._clock()
        delivery.deadline = now + client.msg_timeout
        self._in_flight.add(delivery)
        client.in_flight += 1
        client.messages += 1
        if self._partition.extend and not (client.extend or self._options.extend_compatible()):
            client.stall()
            return
        if self.traced:
            self._trace("delivered to", delivery, client)
        client.deliver(delivery.message())

    def _trace(self, event: str, delivery: Delivery, client: SubscribedClient) -> None:
        record, who = delivery.entry.record, client.name
        values = (record.internal_id, record.trace_id, delivery.attempts, event, who)
        logger.info("CHANNEL(%s): message %d, trace id %d, attempt %d %s %s", self.name, *values)

    def _next_attempt(self, attempts: int) -> int:
        return min(attempts + 1, MAX_ATTEMPTS)

    # Responses to messages

    def finish(self, client: SubscribedClient, internal_id: int) -> None:
        """Finish a message; raises `Refusal` if it is not in flight at this client."""
        delivery = self._in_flight.table.get(internal_id)
        if delivery is None or delivery.owner is not client:
            raise self._refused(client, NOT_IN_FLIGHT if delivery is None else not_owned(delivery, client))
        self._in_flight.remove(internal_id)
        self.cursor.acknowledge(delivery)
        self.latencies.add(self._clock() - delivery.delivered, self._options.wall() - delivery.entry.record.timestamp)
        client.in_flight -= 1
        client.finished += 1
        if client.errors:
            client.record_success()
        if self.traced:
            self._trace("finished by", delivery, client)
        self._selector.renew(client)
        self.pump()

    def finish_forced(self, internal_id: int) -> None:
        """Finish a message at any client, or a deferred message; else raises `Refusal`."""
        delivery = self._in_flight.table.get(internal_id)
        if delivery is None:
            raise Refusal(NOT_IN_FLIGHT)
        self._in_flight.remove(internal_id)
        self.cursor.acknowledge(delivery)
        self._dropped(delivery)
        self.pump()

    def finish_deferred(self) -> None:
        for delivery in list(self._in_flight.deferred_messages()):
            self.finish_forced(delivery.entry.record.internal_id)

    def requeue(self, client: SubscribedClient, internal_id: int, delay: float) -> None:
        """Requeue a message after ``delay`` seconds, or raise `Refusal`.

        An ordered channel ignores REQ with a delay: the message times out (captured: sub_ordered_requeue).
        """
        if delay > 0 and (self.ordered or self._partition.ordered):
            return
        delivery = self._in_flight.table.get(internal_id)
        if delivery is None:
            raise self._refused(client, NOT_IN_FLIGHT)
        now = self._clock()
        refusal = self._requeue_rules.refusal(delivery, client, delay, now)
        if refusal:
            raise self._refused(client, refusal)
        self._in_flight.remove(internal_id)
        self._dropped(delivery)
        if delay <= 0:
            self.cursor.requeue(delivery)
        elif not (self._requeue_rules.leaves_memory(delivery, delay, now) and self.cursor.delay(delivery, delay)):
            self._in_flight.defer(delivery, self._requeue_rules.deferred_until(delivery, delay, now))
        self.pump()

    def touch(self, client: SubscribedClient, internal_id: int) -> None:
        """Restart a message's timeout, up to the longest time in flight; raises `Refusal` as `finish`."""
        delivery = self._in_flight.table.get(internal_id)
        if delivery is None:
            raise Refusal(NOT_IN_FLIGHT)
        if delivery.owner is not client:
            raise Refusal(not_owned(delivery, client))
        longest = delivery.delivered + self._options.limits.max_msg_timeout
        delivery.deadline = min(self._clock() + client.touch_timeout, longest)
        self._in_flight.add(delivery)
        self._partition.touch()

    def _refused(self, client: SubscribedClient, text: str) -> Refusal:
        self._failed(client)
        return Refusal(text)

    # Time

    def tick(self) -> float:
        """Process timeouts and delays; return the clock time of the next call."""
        now = self._clock()
        for delivery in self._in_flight.pop_due(now):
            self._expire(delivery)
        if self.clients and self.cursor.delayed_deadline() <= now:
            self.cursor.requeue_delayed()
        self.pump()
        if self.cursor.blocked_by_disk:
            return now
        due = self._in_flight.next_deadline()
        if not self.clients:
            return due
        limit = self._rate_limit
        held = limit.until if limit is not None else now
        return min(due, self.cursor.delayed_deadline(), held if held > now else inf)

    def _expire(self, delivery: Delivery) -> None:
        client = delivery.owner
        if not delivery.deferred:
            self.timeouts += 1
        if client is not None:
            client.in_flight -= 1
            client.timed_out += 1
            self._failed(client)
            self._selector.renew(client)
        self.cursor.requeue(delivery)

    # Switches

    def set_offset(self, position: StartPosition) -> None:
        """Move the read position; messages in flight are discarded, the message read ahead is kept.

        If this message waits for its tag, it moves when it was taken. Raises `Refusal` for an unknown position.
        """
        found = position.find(self._partition.log, clustered=self._options.clustered)
        self._move(partial(self._jump, found))
        self.pump()

    def empty(self) -> None:
        """Move to the end and empty the delayed queue."""
        self.cursor.delayed.clear()
        self.set_offset(AT_END)

    def requeue_delayed(self, ahead: float = 0) -> None:
        """Requeue messages of the delayed queue that are due within ``ahead`` seconds."""
        self.cursor.requeue_delayed(ahead)
        self.pump()

    def redeliver_unfinished(self) -> None:
        """Read again from the acknowledged position (``/channel/fixconfirmed``)."""
        if not (self.skipped or self.paused or self.ordered):
            self._move(partial(self.cursor.rewind, forget=False))
            self.pump()

    def set_ordered(self, ordered: bool) -> None:
        """Make the channel ordered, or unordered, which closes its clients."""
        if ordered:
            self._make_ordered()
            self.pump()
        elif self.ordered:
            self.cursor.ordered = False
            self._close_clients()

    def set_paused(self, paused: bool) -> None:
        self.paused = paused
        self._partition.note_channels()
        self.pump()

    def set_skipped(self, skipped: bool) -> None:
        """Discard all messages, or stop this at the queue's end."""
        self.skipped = skipped
        self._partition.note_channels()
        self.empty()

    # Leader changes, close, disk

    def suspend(self) -> None:
        """Remove all clients and messages in flight, because another node is the leader."""
        self._close_clients()
        for client in self.clients.values():
            self._selector.remove(client)
            client.stall()
        self.clients.clear()
        self.read_ahead = None
        self._moves.clear()
        if self.ordered:
            self.acked.clear()
        self.cursor.drain()
        self.cursor.rewind(forget=False)
        if self.ephemeral:
            self._partition.delete_channel(self.name)

    def restart(self) -> None:
        """Forget clients, messages in flight, counters and order, as a restarted process."""
        self.suspend()
        self.cursor.ordered = False
        self.cursor.requeues = self.timeouts = 0
        self.latencies = Latencies()

    def close(self) -> None:
        self._closed = True
        self._close_clients()

    def _close_clients(self) -> None:
        for client in list(self.clients.values()):
            client.closed()

    def state(self) -> ChannelState:
        acked, kind = self.acked, self.kind
        return ChannelState(
            self.name,
            acked.offset,
            acked.count,
            acked.intervals,
            self.paused,
            self.skipped,
            kind.type,
            kind.key_header,
            kind.fixed,
            len(self.cursor.delayed.messages),
        )

    def restore(self, state: ChannelState, delayed: Iterable[Delayed]) -> None:
        log = self._partition.log
        self.paused = state.paused
        self.skipped = state.skipped
        self.cursor.restore(state, delayed)
        self.cut(log.end_offset, log.end_count)
        self._partition.note_restored()

    def cut(self, offset: int, count: int) -> None:
        if self.read_ahead is not None and self.read_ahead.entry.offset >= offset:
            self.read_ahead = None
        self.cursor.cut(offset, count)

    def stats(self) -> ChannelCounters:
        stats = self.cursor.stats()
        stats.timeout_count = self.timeouts
        return stats
