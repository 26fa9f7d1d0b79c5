"""Messages on their way through a channel: read, at a client, or deferred."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nsqext.broker.engine.consumer_state import Client
    from nsqext.broker.engine.key_selector import KeyLine
    from nsqext.broker.engine.storage.log import Entry

__all__ = ("Flight", "InFlight")


class Flight:
    """A message on its way.

    Attributes:
        entry: the stored message.
        attempts: deliveries so far.
        owner: the client that has it; None while nobody does.
        deadline: clock time at which it times out or its delay ends.
        delivered: clock time of the last delivery.
        deferred: it waits for its delay and belongs to nobody.
        delayed: it came back from the delayed queue.
        behind: messages that have to be read before it is given out again (original generation).
        kept: it was in hand when the read position was moved, and goes out all the same.
        tag: its dispatch tag; None while nobody looked.
        line: the messages of its key; None while nobody looked, and on channels that know no keys.
    """

    __slots__ = (
        "attempts",
        "behind",
        "deadline",
        "deferred",
        "delayed",
        "delivered",
        "entry",
        "kept",
        "line",
        "owner",
        "tag",
    )

    def __init__(self, entry: Entry, attempts: int = 0, *, delayed: bool = False) -> None:
        self.entry: Entry = entry
        self.attempts: int = attempts
        self.owner: Client | None = None
        self.deadline: float = 0.0
        self.delivered: float = 0.0
        self.deferred: bool = False
        self.delayed: bool = delayed
        self.behind: int = 0
        self.kept: bool = False
        self.tag: str | None = None
        self.line: KeyLine | None = None


class InFlight:
    """The messages of a channel that are at clients or deferred.

    Attributes:
        table: messages by internal id.
        deferred: how many of them are deferred.
    """

    __slots__ = ("_delays", "_earliest", "_order", "deferred", "table")

    def __init__(self) -> None:
        self.table: dict[int, Flight] = {}
        self.deferred: int = 0
        self._delays: list[tuple[float, int, Flight]] = []
        self._order = count()
        # no message at a client times out before; to know the true minimum would cost more than a scan now and then
        self._earliest = inf

    def add(self, flight: Flight) -> None:
        """Take in a message that goes to a client."""
        self.table[flight.entry.record.internal_id] = flight
        if flight.deadline < self._earliest:
            self._earliest = flight.deadline

    def moved(self, flight: Flight) -> None:
        """Hear that the deadline of a message that is at a client is another one now."""
        if flight.deadline < self._earliest:
            self._earliest = flight.deadline

    def pop(self, internal_id: int) -> None:
        """Take a message out."""
        if self.table.pop(internal_id).deferred:
            self.deferred -= 1

    def defer(self, flight: Flight, deadline: float) -> None:
        """Let a message wait; it belongs to nobody meanwhile."""
        flight.owner = None
        flight.deferred = True
        flight.deadline = deadline
        self.deferred += 1
        self.table[flight.entry.record.internal_id] = flight
        heappush(self._delays, (deadline, next(self._order), flight))

    def of(self, client: Client) -> list[Flight]:
        """Return the messages of a client in the order of the queue."""
        found = [flight for flight in self.table.values() if flight.owner is client]
        return sorted(found, key=lambda flight: flight.entry.offset)

    def waiting(self) -> Iterator[Flight]:
        """Return the deferred messages."""
        return (flight for flight in self.table.values() if flight.deferred)

    def due(self, now: float) -> list[Flight]:
        """Take out and return the messages whose time is over, delays first."""
        found = []
        while self._delays and self._delays[0][0] <= now:
            deadline, _, flight = heappop(self._delays)
            if self._waits(flight, deadline):
                found.append(flight)
        if now >= self._earliest:
            late = [flight for flight in self.table.values() if not flight.deferred and flight.deadline <= now]
            found += sorted(late, key=lambda flight: (flight.deadline, flight.entry.offset))
            self._earliest = min(
                (flight.deadline for flight in self.table.values() if not flight.deferred and flight.deadline > now),
                default=inf,
            )
        for flight in found:
            self.pop(flight.entry.record.internal_id)
        return found

    def next_deadline(self) -> float:
        """Return a clock time before which nothing is due; infinity when nothing waits."""
        while self._delays and not self._waits(self._delays[0][2], self._delays[0][0]):
            heappop(self._delays)
        return min(self._delays[0][0] if self._delays else inf, self._earliest if self.table else inf)

    def _waits(self, flight: Flight, deadline: float) -> bool:
        current = self.table.get(flight.entry.record.internal_id)
        return current is flight and flight.deferred and flight.deadline == deadline

    def clear(self) -> list[Flight]:
        """Take everything out and return it."""
        gone = list(self.table.values())
        self.table.clear()
        self._delays.clear()
        self.deferred = 0
        self._earliest = inf
        return gone
