"""Deliveries of a channel: messages that were read, are at a client, or wait for a delay."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from nsqext.protocol.extjson import UnreadableHeader, read_header
from nsqext.protocol.headers import TAG_HEADER, tag_of
from nsqext.protocol.messages import EXT_JSON, EXT_TAG, RawMessage, message_id

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nsqext.broker.engine.channel.client import Client
    from nsqext.broker.engine.storage.log import Entry


class Delivery:
    """A message between the queue and its acknowledgement."""

    __slots__ = (
        "_tag",
        "attempts",
        "behind",
        "deadline",
        "deferred",
        "delayed",
        "delivered",
        "entry",
        "kept",
        "key",
        "owner",
    )

    def __init__(self, entry: Entry, attempts: int = 0, *, delayed: bool = False) -> None:
        self.entry: Entry = entry  # the stored message
        self.attempts: int = attempts  # deliveries so far
        self.owner: Client | None = None  # the client that has it; None while it is at no client
        self.deadline: float = 0.0  # clock time at which it times out or its delay ends
        self.delivered: float = 0.0  # clock time of the last delivery
        self.deferred: bool = False  # it waits for its delay and is at no client
        self.delayed: bool = delayed  # it was taken from the delayed queue
        self.behind: int = 0  # number of the message that has to be read before it is redelivered (original generation)
        self.kept: bool = False  # it was read ahead when the read position was moved, and is delivered nevertheless
        self.key: bytes | None = None  # its key; None while it was not determined, and on channels without keys
        self._tag: str | None = None

    @property
    def tag(self) -> str:
        """Dispatch tag of the message; empty for none and for an unreadable header."""
        if self._tag is None:
            self._tag = self._read_tag()
        return self._tag

    @tag.setter
    def tag(self, tag: str) -> None:
        self._tag = tag

    def _read_tag(self) -> str:
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


class InFlight:
    """Messages of a channel that are at clients or deferred."""

    __slots__ = ("_delays", "_earliest", "_order", "deferred", "table")

    def __init__(self) -> None:
        self.table: dict[int, Delivery] = {}  # deliveries by internal id
        self.deferred: int = 0  # number of deferred ones
        self._delays: list[tuple[float, int, Delivery]] = []
        self._order = count()
        # a lower bound: no message at a client times out before. The exact minimum would cost more than a rare scan
        self._earliest = inf

    def add(self, delivery: Delivery) -> None:
        """Add a message that is sent to a client, or record its new deadline."""
        self.table[delivery.entry.record.internal_id] = delivery
        if delivery.deadline < self._earliest:
            self._earliest = delivery.deadline

    def remove(self, internal_id: int) -> None:
        if self.table.pop(internal_id).deferred:
            self.deferred -= 1

    def defer(self, delivery: Delivery, deadline: float) -> None:
        """Keep a message, at no client, until a clock time."""
        delivery.owner = None
        delivery.deferred = True
        delivery.deadline = deadline
        self.deferred += 1
        self.table[delivery.entry.record.internal_id] = delivery
        heappush(self._delays, (deadline, next(self._order), delivery))

    def of(self, client: Client) -> list[Delivery]:
        """Return the messages of a client in the order of the queue."""
        found = [delivery for delivery in self.table.values() if delivery.owner is client]
        return sorted(found, key=lambda delivery: delivery.entry.offset)

    def deferred_messages(self) -> Iterator[Delivery]:
        return (delivery for delivery in self.table.values() if delivery.deferred)

    def pop_due(self, now: float) -> list[Delivery]:
        """Remove and return the messages whose deadline has passed: deferred ones first, then by deadline."""
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
        """Return a lower bound of the next deadline as clock time; infinity when nothing waits."""
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
