"""A real day of flights as messages, and the check of what consumers received of them."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
from attrs import define, field, frozen

from nsqext.errors import InvalidState
from nsqext.types import Receipt

if TYPE_CHECKING:
    from nsqext import Message

CANARY = "canary"
"""Tag of the flights of American Airlines."""

_FILE = "flights-2013-01-01.csv"


@frozen
class Flight:
    """A flight to publish."""

    number: int  # 1 for the first; published as the trace id, which identifies the flight when it is received
    body: bytes
    headers: Mapping[str, str]
    key: str  # the aircraft, or the flight number if the tail number is unknown
    tag: str | None


def read_flights() -> list[Flight]:
    """Return the flights: from the package, or from ``examples/data`` in a source checkout."""
    here = Path(__file__)
    for folder in (here.parent / "data", here.parents[3] / "examples" / "data"):
        path = folder / _FILE
        if path.is_file():
            with path.open(encoding="utf-8", newline="") as file:
                return [_flight(number, row) for number, row in enumerate(csv.DictReader(file), 1)]
    raise InvalidState(f"{_FILE} is not part of this installation", hint="install the wheel, or run a checkout")


def _flight(number: int, row: dict[str, str]) -> Flight:
    headers = {name: row[name] for name in ("carrier", "origin", "dest")}
    key = row["flight"] if row["tailnum"] in ("", "NA") else row["tailnum"]
    return Flight(number, orjson.dumps(row), headers, key, CANARY if row["carrier"] == "AA" else None)


@define
class FlightCheck:
    """Receipts and received messages of one run."""

    flights: Sequence[Flight]
    receipts: dict[int, Receipt] = field(factory=dict)
    deliveries: Counter[int] = field(factory=Counter)  # how often each flight was received, by number
    # number of messages by partition and tag of the consumer
    received: Counter[tuple[int, str | None]] = field(factory=Counter)
    wrong: Counter[str] = field(factory=Counter)  # number of messages by kind of violation
    _positions: dict[int, tuple[int, ...]] = field(factory=dict, init=False)
    _last: dict[tuple[str | None, str], int] = field(factory=dict, init=False)

    def add(self, consumer_tag: str | None, message: Message) -> None:
        """Check a message that the consumer of a tag received."""
        self.received[message.partition, consumer_tag] += 1
        number = message.trace_id
        flight = self.flights[number - 1] if 0 < number <= len(self.flights) else None
        if flight is None or (message.body, message.headers, message.tag) != (flight.body, flight.headers, flight.tag):
            self.wrong["altered"] += 1
            return
        self.deliveries[number] += 1
        self._positions[number] = (message.partition, message.internal_id, message.offset, message.size)
        self.wrong["received by the wrong consumer"] += flight.tag != consumer_tag
        self.wrong["out of order"] += self._last.get((consumer_tag, flight.key), 0) > number
        self._last[consumer_tag, flight.key] = number

    @property
    def complete(self) -> bool:
        """Whether every flight was received."""
        return len(self.deliveries) == len(self.flights)

    def violations(self) -> dict[str, int]:
        """Return the number of messages by kind of violation; all are 0 in a good run."""
        count, received = len(self.flights), len(self.deliveries)
        moved = sum(
            self._positions.get(number, found) != found
            for number, one in self.receipts.items()
            for found in [(one.partition, one.message_id, one.offset, one.size)]
        )
        kinds = ("received by the wrong consumer", "out of order", "altered", "not finished")
        return {
            "lost": count - received,
            "duplicated": self.deliveries.total() - received,
            **{kind: self.wrong[kind] for kind in kinds},
            "at another position than in the receipt": moved,
            "not acknowledged": count - len(self.receipts),
        }
