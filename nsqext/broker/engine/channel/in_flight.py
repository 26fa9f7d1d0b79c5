"""Clients of a channel, and its messages in flight, deferred or acknowledged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import deque
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any

from attrs import define, field

from nsqext.broker.engine.header_filter import compile_filter
from nsqext.protocol.extjson import UnreadableHeader, read_header
from nsqext.protocol.messages import EXT_JSON, EXT_TAG, TAG_HEADER, RawMessage, message_id, tag_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from nsqext.broker.engine.storage.log import LogEntry
    from nsqext.protocol.record import Record

NO_LIMIT = 50_000
"""Most messages in flight at a client without a limit set over HTTP."""

_SLOW_AFTER = 5


@define(eq=False)
class SubscribedClient(ABC):
    """A consumer connection as its channel sees it."""

    id: int  #: unique in the node
    name: str  #: ``host:port``
    tag: str = ""  #: desired dispatch tag; empty on topics without extend support
    extend: bool = False  #: reads extend headers
    sample_rate: int = 0  #: percentage of messages to deliver; 0 for all
    ext_filter: Mapping[str, Any] = field(factory=dict)  #: of IDENTIFY
    msg_timeout: float = 60.0  #: seconds
    touch_timeout: float = 60.0  #: seconds that TOUCH adds
    ready: int = field(default=0, init=False)  #: RDY count
    matches: Callable[[Record], bool] | None = field(init=False)  #: header filter
    filtered: bool = field(init=False)  #: gets only some messages
    in_flight: int = field(default=0, init=False)
    window: int = field(default=0, init=False)  #: most messages in flight now
    limit: int = field(default=NO_LIMIT, init=False)  #: most messages in flight ever; set over HTTP
    errors: int = field(default=0, init=False)
    queued: bool = field(default=False, init=False)  #: in a selector's queue
    #: gets no further messages, being disconnected, or without its topic's new extend support (capture upgrade_ext)
    stalled: bool = field(default=False, init=False)
    messages: int = field(default=0, init=False)
    finished: int = field(default=0, init=False)
    requeued: int = field(default=0, init=False)
    timed_out: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.matches = compile_filter(self.ext_filter)
        self.filtered = self.matches is not None or self.sample_rate > 0

    @abstractmethod
    def deliver(self, message: RawMessage) -> None: ...

    @abstractmethod
    def closed(self) -> None: ...

    def refresh(self) -> None:
        """Compute the window; errors from the fifth on reduce it, down to 1."""
        ready = self.ready
        if ready:
            ready = max(min(ready, ready - self.errors + _SLOW_AFTER), 1)
        self.window = 0 if self.stalled else min(ready, self.limit)

    def stall(self) -> None:
        self.stalled = True
        self.window = 0

    def record_failure(self) -> None:
        self.errors = min(self.errors + 1, self.ready + 4 * _SLOW_AFTER)
        self.refresh()

    def record_success(self) -> None:
        """Reduce the error count by two, or faster when it is small."""
        left = self.errors - 2
        ready = self.ready
        if 0 < left < ready:
            left -= (ready - left) // 4
        self.errors = max(left, 0)
        self.refresh()


@define(eq=False)
class TagSelector:
    """Clients that can take a message, in a queue per dispatch tag.

    A message whose tag a connected client requested goes to clients of that tag, other messages to clients without tag
    (captured: tag_dispatch, tag_fallback, tag_head_of_line).
    """

    tagged: bool = field(default=False, init=False)
    _queues: dict[str, deque[SubscribedClient]] = field(factory=lambda: {"": deque()}, init=False)
    _members: dict[str, int] = field(factory=dict, init=False)

    def add(self, client: SubscribedClient) -> None:
        if client.tag:
            self._members[client.tag] = self._members.get(client.tag, 0) + 1
            self._queues.setdefault(client.tag, deque())
            self.tagged = True
        self.offer(client)

    def remove(self, client: SubscribedClient) -> None:
        if client.queued:
            self._queues[client.tag].remove(client)
            client.queued = False
        if client.tag:
            self._members[client.tag] -= 1
            if not self._members[client.tag]:
                del self._members[client.tag], self._queues[client.tag]
            self.tagged = bool(self._members)

    def has(self, tag: str) -> bool:
        return tag in self._members

    def offer(self, client: SubscribedClient) -> None:
        if not client.queued and client.in_flight < client.window:
            client.queued = True
            self._queues[client.tag].append(client)

    def renew(self, client: SubscribedClient) -> None:
        """Move a client with a new window to the end of its queue (captured: turns)."""
        if not client.queued:
            self.offer(client)
            return
        queue = self._queues[client.tag]
        if queue[-1] is not client:
            queue.remove(client)
            queue.append(client)

    def pick(self, tag: str) -> SubscribedClient | None:
        """Remove and return a client for a message."""
        queue = self._queues.get(tag)
        if queue is None:
            queue = self._queues[""]
        while queue:
            client = queue.popleft()
            client.queued = False
            if client.in_flight < client.window:
                return client
        return None


@define(eq=False)
class Delivery:
    """A message that was read and not acknowledged."""

    entry: LogEntry
    attempts: int = 0
    delayed: bool = field(default=False, kw_only=True)  #: taken from the delayed queue
    owner: SubscribedClient | None = None
    deadline: float = 0.0  #: clock time when its timeout or delay ends
    delivered: float = 0.0  #: clock time of the last delivery
    deferred: bool = False  #: delayed in memory, without owner
    behind: int = 0  #: number of the message to read before its redelivery (original generation)
    kept: bool = False  #: read ahead before the read position moved; delivered nevertheless
    key: bytes | None = None  #: None until determined, and on channels without keys

    @cached_property
    def tag(self) -> str:
        """Its dispatch tag; empty without a readable tag."""
        record = self.entry.record
        if record.version == EXT_TAG:
            return record.header.decode("utf-8", "replace")
        if record.version != EXT_JSON:
            return ""
        try:
            return tag_of(read_header(record.header, TAG_HEADER)) or ""
        except UnreadableHeader:
            return ""

    def message(self) -> RawMessage:
        entry = self.entry
        record = entry.record
        message = RawMessage()
        message.timestamp = record.timestamp
        message.attempts = self.attempts
        message.id = message_id(record.internal_id, record.trace_id)
        message.version = record.version
        message.header = record.header
        message.offset = entry.offset
        message.size = entry.size
        message.body = record.body
        return message


@define(eq=False)
class InFlight:
    """Messages at clients, and deferred messages."""

    table: dict[int, Delivery] = field(factory=dict)  #: by internal id
    deferred: int = 0
    _delays: list[tuple[float, int, Delivery]] = field(factory=list)
    _order: Iterator[int] = field(factory=count)
    # lower bound for messages at clients; the minimum costs more than a rare scan
    _earliest: float = inf

    def add(self, delivery: Delivery) -> None:
        """Add a message sent to a client, or its new deadline."""
        self.table[delivery.entry.record.internal_id] = delivery
        if delivery.deadline < self._earliest:
            self._earliest = delivery.deadline

    def remove(self, internal_id: int) -> None:
        if self.table.pop(internal_id).deferred:
            self.deferred -= 1

    def defer(self, delivery: Delivery, deadline: float) -> None:
        delivery.owner = None
        delivery.deferred = True
        delivery.deadline = deadline
        self.deferred += 1
        self.table[delivery.entry.record.internal_id] = delivery
        heappush(self._delays, (deadline, next(self._order), delivery))

    def of(self, client: SubscribedClient) -> list[Delivery]:
        found = [delivery for delivery in self.table.values() if delivery.owner is client]
        return sorted(found, key=lambda delivery: delivery.entry.offset)

    def deferred_messages(self) -> Iterator[Delivery]:
        return (delivery for delivery in self.table.values() if delivery.deferred)

    def pop_due(self, now: float) -> list[Delivery]:
        """Remove and return due messages: deferred messages, then messages at clients, by deadline."""
        found = []
        while self._delays and self._delays[0][0] <= now:
            deadline, _, delivery = heappop(self._delays)
            if self._is_current(delivery, deadline):
                found.append(delivery)
        if now >= self._earliest:
            late = [delivery for delivery in self.table.values() if not delivery.deferred and delivery.deadline <= now]
            found += sorted(late, key=lambda delivery: (delivery.deadline, delivery.entry.offset))
            left = (delivery for delivery in self.table.values() if not delivery.deferred)
            self._earliest = min((delivery.deadline for delivery in left if delivery.deadline > now), default=inf)
        for delivery in found:
            self.remove(delivery.entry.record.internal_id)
        return found

    def next_deadline(self) -> float:
        """Return a lower bound of the next deadline; infinity without messages."""
        while self._delays and not self._is_current(self._delays[0][2], self._delays[0][0]):
            heappop(self._delays)
        return min(self._delays[0][0] if self._delays else inf, self._earliest if self.table else inf)

    def _is_current(self, delivery: Delivery, deadline: float) -> bool:
        current = self.table.get(delivery.entry.record.internal_id)
        return current is delivery and delivery.deferred and delivery.deadline == deadline

    def clear(self) -> list[Delivery]:
        removed = list(self.table.values())
        self.table.clear()
        self._delays.clear()
        self.deferred = 0
        self._earliest = inf
        return removed


@define(eq=False)
class AckTracker:
    """Acknowledged position of a channel, and intervals finished out of order."""

    offset: int  #: all records before it are finished
    count: int  #: messages before it
    #: first offsets of finished intervals behind the position, sorted and merged
    starts: list[int] = field(factory=list, init=False)
    _ends: list[int] = field(factory=list, init=False)
    _counts: list[int] = field(factory=list, init=False)

    @property
    def intervals(self) -> list[tuple[int, int, int]]:
        """First offset, end offset and number of the last message of each interval."""
        return list(zip(self.starts, self._ends, self._counts, strict=True))

    def add(self, offset: int, size: int, count: int) -> bool:
        """Record a finished message; return whether the position moved."""
        starts = self.starts
        if offset == self.offset and not starts:
            self.offset = offset + size
            self.count = count
            return True
        if offset < self.offset:
            return False
        self._merge(offset, offset + size, count)
        return self._advance()

    def _advance(self) -> bool:
        starts = self.starts
        if not starts or starts[0] > self.offset:
            return False
        self.offset, self.count = self._ends[0], self._counts[0]
        del starts[0], self._ends[0], self._counts[0]
        return True

    def _merge(self, start: int, end: int, count: int) -> None:
        starts, ends, counts = self.starts, self._ends, self._counts
        first = bisect_left(ends, start)
        stop = bisect_right(starts, end)
        if first < stop:
            start = min(start, starts[first])
            end, count = max((end, count), (ends[stop - 1], counts[stop - 1]))
        starts[first:stop], ends[first:stop], counts[first:stop] = [start], [end], [count]

    def covers(self, offset: int, size: int) -> bool:
        index = bisect_right(self.starts, offset) - 1
        return index >= 0 and self._ends[index] >= offset + size

    def reset(self, offset: int, count: int) -> None:
        self.offset, self.count = offset, count
        self.clear()

    def clear(self) -> None:
        self.starts.clear()
        self._ends.clear()
        self._counts.clear()

    def restore(self, offset: int, count: int, intervals: list[tuple[int, int, int]]) -> None:
        self.reset(offset, count)
        for start, end, last in intervals:
            if end > offset:
                self._merge(max(start, offset), end, last)
        self._advance()

    def cut(self, offset: int, count: int) -> None:
        """Drop everything at and behind an offset."""
        if self.offset > offset:
            self.offset, self.count = offset, count
        first = bisect_left(self.starts, offset)
        del self.starts[first:], self._ends[first:], self._counts[first:]
        if self._ends and self._ends[-1] > offset:
            self._ends[-1], self._counts[-1] = offset, count
