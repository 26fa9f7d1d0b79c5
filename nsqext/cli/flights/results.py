"""Results of a demo run: receipts, received messages, and the violations found in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from attrs import define, field, frozen

from nsqext.cli.flights.rows import Flight
from nsqext.types import Receipt

__all__ = ("ConsumerCounts", "DemoResults", "PartitionLine", "ReceivedMessage")


class ReceivedMessage(Protocol):
    """The parts of a received message that are compared with its flight and receipt."""

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
class ConsumerCounts:
    """Counts of one consumer.

    Attributes:
        name: name in the tables.
        tag: tag of the subscription, or None.
        expected: number of flights with this tag.
        received: number of received messages, by tag.
        out_of_order: messages received after a later one of the same key.
    """

    name: str
    tag: str | None
    expected: int = 0
    received: Counter[str | None] = field(factory=Counter)
    out_of_order: int = 0
    _last: dict[str, int] = field(factory=dict, init=False)

    @property
    def total(self) -> int:
        """Number of received messages."""
        return self.received.total()

    def add(self, flight: Flight) -> None:
        """Count a received flight."""
        self.received[flight.tag] += 1
        if flight.key is not None:
            if self._last.get(flight.key, 0) > flight.number:
                self.out_of_order += 1
            self._last[flight.key] = flight.number


@frozen
class PartitionLine:
    """One line of the table by partition.

    Attributes:
        partition: partition number.
        nodes: nodes in the receipts; more than one if the leader moved.
        receipts: number of acknowledged publishes.
        received: number of messages received from the partition.
        last_offset: largest offset of a receipt; -1 without receipts.
    """

    partition: int
    nodes: tuple[str, ...]
    receipts: int
    received: int
    last_offset: int


class DemoResults:
    """Receipts and received messages of one run.

    Args:
        flights: flights to publish.
        consumers: one for each tag that occurs in the flights, and one without a tag.

    Attributes:
        altered: received messages that match no flight in body, headers and tag.
        misrouted: messages received by a consumer with another tag.
        unfinished: messages whose FIN was rejected.
    """

    def __init__(self, flights: Sequence[Flight], consumers: Sequence[ConsumerCounts]) -> None:
        self.flights = flights
        self.consumers: dict[str | None, ConsumerCounts] = {counts.tag: counts for counts in consumers}
        self.altered: int = 0
        self.misrouted: int = 0
        self.unfinished = 0
        self._by_number = {flight.number: flight for flight in flights}
        self._receipts: dict[int, Receipt] = {}
        self._deliveries: Counter[int] = Counter()
        self._positions: dict[int, tuple[int, int, int, int]] = {}
        self._by_partition: Counter[int] = Counter()
        for flight in flights:
            self.consumers[flight.tag].expected += 1

    def add_receipt(self, flight: Flight, receipt: Receipt) -> None:
        """Record the receipt of a publish."""
        self._receipts[flight.number] = receipt

    def add_message(self, counts: ConsumerCounts, message: ReceivedMessage) -> None:
        """Record a message received by a consumer."""
        self._by_partition[message.partition] += 1
        flight = self._by_number.get(message.trace_id)
        if flight is None or (message.body, message.headers, message.tag) != (flight.body, flight.headers, flight.tag):
            self.altered += 1
            return
        self._deliveries[flight.number] += 1
        self._positions[flight.number] = (message.partition, message.internal_id, message.offset, message.size)
        counts.add(flight)
        if self.consumers[flight.tag] is not counts:
            self.misrouted += 1

    @property
    def acknowledged(self) -> int:
        """Number of acknowledged publishes."""
        return len(self._receipts)

    @property
    def total(self) -> int:
        """Number of received messages, altered and duplicated ones included."""
        return self._by_partition.total()

    @property
    def complete(self) -> bool:
        """Whether every flight has been received by a consumer."""
        return len(self._deliveries) == len(self.flights)

    @property
    def lost(self) -> int:
        """Number of flights that were never received."""
        return len(self.flights) - len(self._deliveries)

    @property
    def duplicated(self) -> int:
        """Number of deliveries beyond the first of each flight."""
        return self._deliveries.total() - len(self._deliveries)

    @property
    def out_of_order(self) -> int:
        """Number of messages received after a later one of the same key, over all consumers."""
        return sum(counts.out_of_order for counts in self.consumers.values())

    @property
    def mismatched(self) -> int:
        """Number of messages whose partition, id, offset or size differs from the receipt."""
        return sum(
            self._positions.get(number, position) != position
            for number, receipt in self._receipts.items()
            for position in [(receipt.partition, receipt.message_id, receipt.offset, receipt.size)]
        )

    def partitions(self, count: int) -> list[PartitionLine]:
        """Return a line for each partition from 0 to ``count`` - 1, and for other partitions that occurred."""
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

    def violations(self) -> dict[str, int]:
        """Return the number of messages by kind of violation; all are 0 in a good run."""
        return {
            "lost": self.lost,
            "duplicated": self.duplicated,
            "received by the wrong consumer": self.misrouted,
            "out of order": self.out_of_order,
            "altered": self.altered,
            "at another position than in the receipt": self.mismatched,
            "not acknowledged": len(self.flights) - self.acknowledged,
            "not finished": self.unfinished,
        }
