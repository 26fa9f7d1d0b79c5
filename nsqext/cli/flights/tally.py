"""The demo's book: what was published, what arrived where, and what is wrong with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from attrs import define, field, frozen

from nsqext.cli.flights.rows import Flight
from nsqext.types import Receipt

__all__ = ("Arrival", "PartitionLine", "Side", "Tally")


class Arrival(Protocol):
    """What is looked at in a message that arrived."""

    @property
    def trace_id(self) -> int: ...

    @property
    def internal_id(self) -> int: ...

    @property
    def partition(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, Any]: ...

    @property
    def tag(self) -> str | None: ...

    offset: int
    size: int
    body: bytes


@define
class Side:
    """One consumer.

    Attributes:
        name: what it is called in the tables.
        tag: the tag that it asks for, or None.
        expected: how many flights are meant for it.
        received: how many messages arrived, by the tag that they carry.
        out_of_order: messages that came after a later one of the same key.
    """

    name: str
    tag: str | None
    expected: int = 0
    received: Counter[str | None] = field(factory=Counter)
    out_of_order: int = 0
    _last: dict[str, int] = field(factory=dict, init=False)

    @property
    def total(self) -> int:
        """All messages that arrived here."""
        return self.received.total()

    def note(self, flight: Flight) -> None:
        """Count a flight in."""
        self.received[flight.tag] += 1
        if flight.key is not None:
            if self._last.get(flight.key, 0) > flight.number:
                self.out_of_order += 1
            self._last[flight.key] = flight.number


@frozen
class PartitionLine:
    """One line of the table by partition.

    Attributes:
        partition: its number.
        nodes: the nodes that stored into it; more than one after a change of leader.
        receipts: publishes that were confirmed.
        received: messages that arrived from it.
        last_offset: largest offset of a receipt; -1 without any.
    """

    partition: int
    nodes: tuple[str, ...]
    receipts: int
    received: int
    last_offset: int


class Tally:
    """Counts receipts and arrivals of the flights of one run.

    Args:
        flights: what is published.
        sides: the consumers; exactly one asks for each tag that occurs, and one for none.

    Attributes:
        foreign: messages that are none of the flights, or whose content is not what was published.
        misplaced: messages that came to a consumer that they are not meant for.
        unfinished: messages that could not be finished.
    """

    def __init__(self, flights: Sequence[Flight], sides: Sequence[Side]) -> None:
        self.flights = flights
        self.sides: dict[str | None, Side] = {side.tag: side for side in sides}
        self.foreign: int = 0
        self.misplaced: int = 0
        self.unfinished = 0
        self._by_number = {flight.number: flight for flight in flights}
        self._receipts: dict[int, Receipt] = {}
        self._arrivals: Counter[int] = Counter()
        self._places: dict[int, tuple[int, int, int, int]] = {}
        self._by_partition: Counter[int] = Counter()
        for flight in flights:
            self.sides[flight.tag].expected += 1

    def published(self, flight: Flight, receipt: Receipt) -> None:
        """Note the receipt of a publish."""
        self._receipts[flight.number] = receipt

    def arrived(self, side: Side, message: Arrival) -> None:
        """Note a message that arrived at a consumer."""
        self._by_partition[message.partition] += 1
        flight = self._by_number.get(message.trace_id)
        if flight is None or (message.body, message.headers, message.tag) != (flight.body, flight.headers, flight.tag):
            self.foreign += 1
            return
        self._arrivals[flight.number] += 1
        self._places[flight.number] = (message.partition, message.internal_id, message.offset, message.size)
        side.note(flight)
        if self.sides[flight.tag] is not side:
            self.misplaced += 1

    @property
    def confirmed(self) -> int:
        """How many publishes were confirmed."""
        return len(self._receipts)

    @property
    def total(self) -> int:
        """How many messages arrived, all counted."""
        return self._by_partition.total()

    @property
    def complete(self) -> bool:
        """Whether every flight has arrived somewhere."""
        return len(self._arrivals) == len(self.flights)

    @property
    def lost(self) -> int:
        """Parcels that never arrived."""
        return len(self.flights) - len(self._arrivals)

    @property
    def duplicated(self) -> int:
        """Arrivals of flights that had arrived before."""
        return self._arrivals.total() - len(self._arrivals)

    @property
    def out_of_order(self) -> int:
        """Messages that overtook another one of their key, at any consumer."""
        return sum(side.out_of_order for side in self.sides.values())

    @property
    def mismatched(self) -> int:
        """Messages that arrived from another place in the queue than their receipt tells."""
        return sum(
            self._places.get(number, place) != place
            for number, receipt in self._receipts.items()
            for place in [(receipt.partition, receipt.message_id, receipt.offset, receipt.size)]
        )

    def partitions(self, count: int) -> list[PartitionLine]:
        """Return a line for each of so many partitions, and for others that occurred."""
        found: dict[int, list[Receipt]] = {partition: [] for partition in range(count)}
        for receipt in self._receipts.values():
            found.setdefault(receipt.partition, []).append(receipt)
        for partition in self._by_partition:
            found.setdefault(partition, [])
        return [
            PartitionLine(
                partition=partition,
                nodes=tuple(sorted({receipt.node for receipt in receipts})),
                receipts=len(receipts),
                received=self._by_partition[partition],
                last_offset=max((receipt.offset for receipt in receipts if receipt.offset is not None), default=-1),
            )
            for partition, receipts in sorted(found.items())
        ]

    def verdict(self) -> dict[str, int]:
        """Return what may be wrong, each with its count; all are 0 in a good run."""
        return {
            "lost": self.lost,
            "duplicated": self.duplicated,
            "at the wrong consumer": self.misplaced,
            "out of order": self.out_of_order,
            "not what was published": self.foreign,
            "elsewhere than their receipt tells": self.mismatched,
            "not confirmed": len(self.flights) - self.confirmed,
            "not finished": self.unfinished,
        }
