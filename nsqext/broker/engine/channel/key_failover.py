"""Channels of type key_failover: each key has one client at a time (Key_Failover note).

The replay set holds messages read and not delivered, by key, in queue order. While a client has messages of a key in
flight, other clients receive no messages of the key: its order survives every change of the ranges.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any

from attrs import define, field

from nsqext.broker.engine.channel.channel import Channel
from nsqext.broker.engine.channel.cursor import ChannelCounters, Cursor, KeyRangeStats, PartitionView
from nsqext.broker.engine.channel.in_flight import Delivery, SubscribedClient, TagSelector
from nsqext.broker.engine.channel.rules import RequeueRules
from nsqext.broker.engine.storage.log import Refusal, StartPosition
from nsqext.errors import ProtocolError
from nsqext.key_ranges import KeyRanges, position_of
from nsqext.protocol.headers import decode_headers
from nsqext.protocol.messages import EXT_JSON, header_text, tag_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqext.broker.engine.options import ChannelKind

_BALANCE = 2.0  # seconds after a change of the ranges, or a check, until an overloaded consumer gives keys away
_NOT_ORDERED = "channel {name} is dispatched by key_failover and cannot be consumed in order"


def key_of(delivery: Delivery, header: str) -> bytes:
    """Return the key of a message: a header's text or whole number, else a key from its id; set its dispatch tag."""
    record = delivery.entry.record
    if record.version == EXT_JSON:
        try:
            headers: dict[str, Any] = decode_headers(record.header)
        except ProtocolError:
            headers = {}
        delivery.tag = tag_of(headers) or ""
        value = header_text(headers, header)
        if value is not None:
            return value.encode("utf-8", "surrogatepass")
    return b"\0id\0%d" % record.internal_id


@define(eq=False)
class KeyQueue:
    """The messages of a key."""

    key: bytes
    pending: deque[Delivery] = field(factory=deque)  #: in queue order
    in_flight: set[Delivery] = field(factory=set)  #: at the holder
    #: requeued with a delay; later messages wait
    blocked: set[Delivery] = field(factory=set)
    holder: SubscribedClient | None = None  #: the client with messages of the key
    queued: SubscribedClient | None = None  #: the client whose heap has this queue
    position: int = field(init=False)  #: in the hash space of keys

    @position.default
    def _position(self) -> int:
        return position_of(self.key)

    def put(self, delivery: Delivery) -> None:
        pending, offset = self.pending, delivery.entry.offset
        index = len(pending)
        while index and pending[index - 1].entry.offset > offset:
            index -= 1
        pending.insert(index, delivery)

    @property
    def is_deliverable(self) -> bool:
        """Whether no earlier message of the key blocks the first pending message."""
        if not self.pending:
            return False
        first = self.pending[0].entry.offset
        return not self.blocked or all(first < delivery.entry.offset for delivery in self.blocked)


@define(eq=False)
class KeySelector(TagSelector):
    """The clients of a key_failover channel, with key ranges for each dispatch tag."""

    _clock: Callable[[], float]
    _header: str
    #: clock time of the next `balance`; infinity without changes
    balance_due: float = field(default=inf, init=False)
    waiting: int = field(default=0, init=False)  #: size of the replay set
    _key_queues: dict[bytes, KeyQueue] = field(factory=dict, init=False)
    _ranges: dict[str, KeyRanges[SubscribedClient]] = field(factory=dict, init=False)
    # by the offset of a queue's first message
    _heaps: dict[SubscribedClient, list[tuple[int, int, KeyQueue]]] = field(factory=dict, init=False)
    _free: dict[SubscribedClient, None] = field(factory=dict, init=False)  # may take messages
    _ready: dict[SubscribedClient, None] = field(factory=dict, init=False)  # heap or window changed

    # Clients

    def add(self, client: SubscribedClient) -> None:
        """Add a client, with the upper half of the busiest client's range."""
        self._heaps[client] = []
        self._ranges.setdefault(client.tag, KeyRanges(clock=self._clock)).add_consumer(client)
        self._ranges_changed()
        self._balance_later()

    def remove(self, client: SubscribedClient) -> None:
        """Remove a client: a neighbour takes its range; its messages in flight stay until requeued."""
        if self._heaps.pop(client, None) is None:
            return
        self._free.pop(client, None)
        self._ready.pop(client, None)
        ranges = self._ranges[client.tag]
        ranges.remove_consumer(client)
        if not ranges:
            del self._ranges[client.tag]
        self._ranges_changed()
        self._balance_later()

    def balance(self) -> None:
        self.balance_due = inf
        moved = [ranges.balance() for ranges in self._ranges.values()]
        if any(moved):
            self._ranges_changed()

    def _balance_later(self) -> None:
        self.balance_due = self._clock() + _BALANCE if len(self._heaps) > 1 else inf

    def _ranges_changed(self) -> None:
        self.tagged: bool = any(self._ranges)
        for heap in self._heaps.values():
            heap.clear()
        for queue in self._key_queues.values():
            queue.queued = None
            self._enqueue(queue)

    def offer(self, client: SubscribedClient) -> None:
        if client in self._heaps:
            self._free[client] = self._ready[client] = None

    renew = offer  #: keys decide, clients have no order

    @property
    def can_take(self) -> bool:
        while self._free:
            client = next(iter(self._free))
            if client.in_flight < client.window:
                return True
            del self._free[client]
        return False

    def next_ready(self) -> SubscribedClient | None:
        while self._ready:
            client = next(iter(self._ready))
            if client.in_flight < client.window and self._heaps[client]:
                return client
            del self._ready[client]
        return None

    def client_for(self, delivery: Delivery, queue: KeyQueue) -> SubscribedClient | None:
        """Return the client for a message; None if only clients with other tags are connected."""
        ranges = self._ranges_for(delivery)
        return None if ranges is None else ranges.at(queue.position)

    def _ranges_for(self, delivery: Delivery) -> KeyRanges[SubscribedClient] | None:
        ranges = self._ranges.get(delivery.tag) if self.tagged else None
        return self._ranges.get("") if ranges is None else ranges

    # Messages

    def put(self, delivery: Delivery) -> None:
        key, is_new = delivery.key, delivery.key is None
        if key is None:
            key = delivery.key = key_of(delivery, self._header)
        queue = self._key_queues.get(key)
        if queue is None:
            queue = self._key_queues[key] = KeyQueue(key)
        queue.put(delivery)
        if is_new:
            self._count(delivery, queue)
        self.waiting += 1
        if queue.pending[0] is delivery:
            queue.queued = None  # it may be for another client
        self._enqueue(queue)

    def _count(self, delivery: Delivery, queue: KeyQueue) -> None:
        """Count a message that was read; its delivery depends on RDY counts."""
        ranges = self._ranges_for(delivery)
        if ranges is not None:
            ranges.record(queue.position)
            if self.balance_due == inf:
                self._balance_later()

    def _enqueue(self, queue: KeyQueue) -> None:
        if queue.queued is not None or not queue.is_deliverable:
            return
        first = queue.pending[0]
        client = self.client_for(first, queue)
        if client is not None and queue.holder in (None, client):
            heappush(self._heaps[client], (first.entry.offset, id(queue), queue))
            queue.queued = client
            self._ready[client] = None

    def next_for(self, client: SubscribedClient) -> Delivery | None:
        """Remove and return a client's next message; the client then holds its key."""
        heap = self._heaps.get(client)
        while heap:
            queue = heappop(heap)[2]
            if queue.queued is not client:
                continue  # queued again
            queue.queued = None
            if not queue.is_deliverable:
                continue  # an earlier message of the key is delayed, until `release`
            delivery = queue.pending.popleft()
            self.waiting -= 1
            queue.in_flight.add(delivery)
            queue.holder = client
            return delivery
        return None

    def delivered(self, delivery: Delivery) -> None:
        queue = self._queue_of(delivery)
        if queue is not None:
            self._settle(queue)

    def release(self, delivery: Delivery) -> None:
        """Release the key of a message without client and delay."""
        queue = self._queue_of(delivery)
        if queue is None:
            return
        queue.in_flight.discard(delivery)
        queue.blocked.discard(delivery)
        if not queue.in_flight:
            queue.holder = None
        self._settle(queue)

    def block(self, delivery: Delivery) -> None:
        """Block the key of a requeued message until `release`."""
        queue = self._queue_of(delivery)
        if queue is not None and delivery in queue.in_flight:
            queue.in_flight.remove(delivery)
            queue.blocked.add(delivery)
            if not queue.in_flight:
                queue.holder = None

    def _queue_of(self, delivery: Delivery) -> KeyQueue | None:
        return None if delivery.key is None else self._key_queues.get(delivery.key)

    def _settle(self, queue: KeyQueue) -> None:
        if queue.pending:
            self._enqueue(queue)
        elif not queue.in_flight and not queue.blocked:
            del self._key_queues[queue.key]

    def clear(self) -> None:
        self._key_queues.clear()
        self.waiting = 0
        for heap in self._heaps.values():
            heap.clear()

    # Statistics

    def ranges(self) -> list[tuple[str, float, float, SubscribedClient, float]]:
        """Return tag, low, high, client and messages per second of each range."""
        return [
            (tag, low, high, client, ranges.rate(client))
            for tag, ranges in sorted(self._ranges.items())
            for low, high, client in ranges.ranges()
        ]

    def waiting_for(self) -> dict[SubscribedClient | None, int]:
        """Return the size of the replay set by client; None for messages without client."""
        found: dict[SubscribedClient | None, int] = {}
        for queue in self._key_queues.values():
            if queue.pending:
                client = self.client_for(queue.pending[0], queue)
                found[client] = found.get(client, 0) + len(queue.pending)
        return found

    @property
    def held(self) -> int:
        return sum(queue.holder is not None for queue in self._key_queues.values())


class KeyFailoverCursor(Cursor):
    """Moves requeued messages to the replay set, in queue order."""

    requeues: int

    def __init__(self, partition: PartitionView, position: tuple[int, int], channel: KeyFailoverChannel) -> None:
        super().__init__(partition, channel.name, position, channel._dropped)
        self._keys = channel.keys

    def _must_wait(self) -> bool:
        return self._keys.waiting >= self._options.rules.replay_limit

    def is_full(self) -> bool:
        """Return whether deferred messages reach the bound of the replay set."""
        return self.in_flight.deferred >= self._options.rules.replay_limit

    def acknowledge(self, delivery: Delivery) -> None:
        self._keys.release(delivery)
        super().acknowledge(delivery)

    def requeue(self, delivery: Delivery) -> None:
        delivery.owner = None
        delivery.deferred = False
        self.requeues += 1
        self._keys.put(delivery)
        self._keys.release(delivery)

    def drain(self) -> None:
        super().drain()
        self._keys.clear()


class KeyFailoverChannel(Channel):
    """A channel that sends all messages of a key to the same client."""

    cursor: KeyFailoverCursor

    def __init__(self, partition: PartitionView, name: str, offset: int, count: int, kind: ChannelKind) -> None:
        self.keys: KeySelector = KeySelector(partition.options.clock, kind.key_header)
        super().__init__(partition, name, offset, count)
        self.kind = kind
        self._selector = self.keys
        # later messages of its key wait for a requeued message
        self._requeue_rules = RequeueRules(partition.options, self.cursor, on_disk=False)

    def _make_cursor(self, partition: PartitionView, position: tuple[int, int]) -> KeyFailoverCursor:
        return KeyFailoverCursor(partition, position, self)

    def subscribe(self, client: SubscribedClient, *, ordered: bool = False, start: StartPosition | None = None) -> None:
        """Add a client with a key range; raises `Refusal` for an ordered subscription."""
        if ordered:
            raise Refusal(_NOT_ORDERED.format(name=self.name))
        super().subscribe(client, start=start)

    def set_ordered(self, ordered: bool) -> None:
        if ordered:
            raise Refusal(_NOT_ORDERED.format(name=self.name))

    def _requeue_all_of(self, client: SubscribedClient) -> None:
        for delivery in self._in_flight.of(client):
            self._in_flight.remove(delivery.entry.record.internal_id)
            delivery.attempts -= 1
            self.cursor.requeue(delivery)

    def _dropped(self, delivery: Delivery) -> None:
        self.keys.block(delivery)
        super()._dropped(delivery)

    def set_rate_limit(self, rate: int) -> None:
        """Refuse: messages of many keys are read ahead."""
        raise Refusal(f"channel {self.name} is dispatched by {self.kind} and has no rate limit")

    def pump(self) -> None:
        if self._must_not_pump():
            return
        self._pumping = True
        keys = self.keys
        try:
            while not self.paused:
                client = keys.next_ready()
                if client is not None:
                    self._serve(client)
                    continue
                delivery = self._take() if keys.can_take or self.skipped else None
                if delivery is None:
                    return
                keys.put(delivery)
        finally:
            self._pumping = False

    def _serve(self, client: SubscribedClient) -> None:
        keys = self.keys
        while client.in_flight < client.window and (delivery := keys.next_for(client)) is not None:
            self._deliver(client, delivery)
            keys.delivered(delivery)
            if client.stalled:  # other clients get this client's keys
                keys.remove(client)

    def tick(self) -> float:
        """Balance overloaded clients, then tick as other channels."""
        if self.keys.balance_due <= self._clock():
            self.keys.balance()
        return min(super().tick(), self.keys.balance_due)

    def stats(self) -> ChannelCounters:
        stats, keys = super().stats(), self.keys
        waiting = keys.waiting_for()
        stats.backlogs += keys.waiting
        stats.replay_count = keys.waiting
        stats.held_keys = keys.held
        stats.key_ranges = [
            KeyRangeStats(low, high, tag, client.id, client.name, rate, waiting.get(client, 0))
            for tag, low, high, client, rate in keys.ranges()
        ]
        return stats
