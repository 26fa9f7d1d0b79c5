"""Buckets of keys (dispatch tags of messages), and how consumers divide them; ranges of the hash space, one per
consumer.

A bucket's tag has the number of buckets, so that different numbers at producers and consumers are noticed.

Ranges follow the hash layer of the Key_Failover note. The space [0, 1) is a line, not a ring. Positions are the 2**32
values of the hash, so that repeated halving is exact.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, Generic, NamedTuple, TypeVar

from nsqext.arguments import is_whole
from nsqext.errors import InvalidInput, InvalidSetting
from nsqext.protocol.hashing import murmur3_32

C = TypeVar("C", bound=Hashable)

SPACE = 1 << 32
CELL_BITS = 20
CELLS = SPACE >> CELL_BITS
_NOTHING = bytes(8 * CELLS)

_EVEN = 50  # messages per consumer counted as evenly distributed, so that a few real messages do not decide
_BUSY = 1.2  # multiple of the fair share from which a consumer is too busy
_WORTH = 0.9  # largest new share of the busiest consumer, relative to its old share, for which borders move


@lru_cache(maxsize=65_536)
def position_of(key: bytes) -> int:
    """Return the position of a key in the hash space, 0 to 2**32 - 1: its MurmurHash3, as for partitions."""
    return murmur3_32(key)


class OwnedRange(NamedTuple, Generic[C]):
    """A range of the hash space with its consumer."""

    low: float  #: from 0.0, inclusive
    high: float  #: up to 1.0, exclusive
    consumer: C


class KeyRanges(Generic[C]):
    """Divide the hash space among consumers.

    A new consumer receives the upper half of the busiest consumer's range; the less busy neighbour of a removed
    consumer receives its range. `balance`, which is not in the note, moves the borders if a consumer receives more
    messages than others.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, window: float = 10.0) -> None:
        if not window > 0:
            raise InvalidSetting(f"window={window!r} is not a positive number of seconds")
        self._load = KeyLoad(clock, window)
        self._starts: list[int] = []  # of each range, in order
        self._owners: list[C] = []

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, consumer: object) -> bool:
        return consumer in self._owners

    # Consumers

    def add_consumer(self, consumer: C) -> None:
        """Add a consumer: the range of the busiest is split; then the widest, then the lowest."""
        if consumer in self._owners:
            raise InvalidInput(f"consumer {consumer!r} has a range already", hint="remove it first")
        if not self._owners:
            self._starts, self._owners = [0], [consumer]
            return
        places = range(len(self._owners))
        place = max(places, key=lambda place: (self._weight(place), self._width(place), -place))
        self._starts.insert(place + 1, self._starts[place] + (self._width(place) + 1) // 2)
        self._owners.insert(place + 1, consumer)

    def remove_consumer(self, consumer: C) -> None:
        """Remove a consumer: its less busy neighbour receives its range; then the narrower, then the lower."""
        place = self._place_of(consumer)
        neighbours = [other for other in (place - 1, place + 1) if 0 <= other < len(self._owners)]
        heir = min(neighbours, key=lambda other: (self._weight(other), self._width(other), other), default=place)
        del self._starts[max(place, heir)], self._owners[place]

    def balance(self) -> bool:
        """Move the borders to equal shares if a consumer is too busy; return whether they moved.

        A single key cannot be divided: the borders stay if a move would not relieve the busiest consumer.
        """
        count = len(self._owners)
        if not 1 < count <= CELLS:
            return False
        weights = [self._weight(place) for place in range(count)]
        busiest = max(weights) / sum(weights)
        if busiest * count <= _BUSY:
            return False
        starts, after = self._even_starts(count)
        if after > _WORTH * busiest:
            return False
        self._starts = starts
        return True

    def _even_starts(self, count: int) -> tuple[list[int], float]:
        """Return the starts of equally loaded ranges, as far as cells allow, and the largest share."""
        cells = [messages + _EVEN * count / CELLS for messages in self._load.cells()]
        total = remaining = sum(cells)
        starts, cell, largest = [0], 0, 0.0
        for consumers in range(count, 1, -1):
            fair, taken = remaining / consumers, cells[cell]
            cell += 1
            while CELLS - cell >= consumers and taken + cells[cell] / 2 <= fair:
                taken += cells[cell]
                cell += 1
            starts.append(cell << CELL_BITS)
            remaining -= taken
            largest = max(largest, taken)
        return starts, max(largest, remaining) / total

    # Dispatch

    def at(self, position: int) -> C | None:
        """Return the consumer of a position (`position_of`); None without consumers."""
        owners = self._owners
        return owners[bisect_right(self._starts, position) - 1] if owners else None

    def record(self, position: int, count: int = 1) -> None:
        self._load.add(position, count)

    # State

    def rate(self, consumer: C) -> float:
        """Return the messages per second in a consumer's range, over half to all of the window."""
        return self._load.rate(*self._bounds(self._place_of(consumer)))

    def share(self, consumer: C) -> float:
        """Return a consumer's expected share of messages, 0 to 1, by messages or, with few, the width of its range."""
        place = self._place_of(consumer)
        return self._weight(place) / sum(map(self._weight, range(len(self._owners))))

    def ranges(self) -> list[OwnedRange[C]]:
        """Return all ranges in order; together they are [0, 1), or empty without consumers."""
        stops = [*self._starts[1:], SPACE]
        return [
            OwnedRange(start / SPACE, stop / SPACE, owner)
            for start, stop, owner in zip(self._starts, stops, self._owners, strict=bool(self._owners))
        ]

    # Internals

    def _place_of(self, consumer: C) -> int:
        if consumer not in self._owners:
            raise InvalidInput(f"consumer {consumer!r} has no range", hint="add it first")
        return self._owners.index(consumer)

    def _bounds(self, place: int) -> tuple[int, int]:
        return self._starts[place], self._starts[place + 1] if place + 1 < len(self._starts) else SPACE

    def _width(self, place: int) -> int:
        start, stop = self._bounds(place)
        return stop - start

    def _weight(self, place: int) -> float:
        """Return a range's messages, with the messages counted as evenly distributed."""
        return self._load.between(*self._bounds(place)) + self._width(place) / SPACE * _EVEN * len(self._owners)


class KeyLoad:
    """Messages of the last seconds in each of 4,096 cells of the hash space.

    The window has two halves: when the newer half is complete, the older half is dropped.
    """

    __slots__ = ("_began", "_clock", "_half", "_newer", "_older")

    def __init__(self, clock: Callable[[], float], window: float) -> None:
        self._clock = clock  # monotonic seconds
        self._half = window / 2
        self._began = clock()
        self._newer = array("Q", _NOTHING)
        self._older = array("Q", _NOTHING)

    def add(self, position: int, count: int) -> None:
        self._turn()
        self._newer[position >> CELL_BITS] += count

    def _turn(self) -> float:
        """Drop the older half if the newer is complete; return the counted seconds."""
        now = self._clock()
        if now - self._began >= self._half:
            complete = now - self._began < 2 * self._half
            self._older = self._newer if complete else array("Q", _NOTHING)
            self._newer = array("Q", _NOTHING)
            self._began = self._began + self._half if complete else now
        return self._half + now - self._began

    def cells(self) -> list[int]:
        self._turn()
        return [newer + older for newer, older in zip(self._newer, self._older, strict=True)]

    def between(self, start: int, stop: int) -> float:
        """Return the messages between two positions, in proportion for a part of a cell."""
        self._turn()
        return sum(_between(half, start, stop) for half in (self._newer, self._older))

    def rate(self, start: int, stop: int) -> float:
        """Return the messages per second between two positions."""
        seconds = self._turn()
        return self.between(start, stop) / seconds


def _between(cells: array[int], start: int, stop: int) -> float:
    first, last = start >> CELL_BITS, stop >> CELL_BITS
    before = cells[first] * (start & ((1 << CELL_BITS) - 1)) / (1 << CELL_BITS)
    behind = cells[last] * (stop & ((1 << CELL_BITS) - 1)) / (1 << CELL_BITS) if last < CELLS else 0.0
    return sum(cells[first:last]) - before + behind


__all__ = (
    "DEFAULT_KEY_TAGS",
    "Moves",
    "bucket_tag",
    "bucket_tags",
    "check_key_tags",
    "count_of_tag",
    "plan_moves",
    "shared_tag",
)

DEFAULT_KEY_TAGS: Final = 16
"""Default number of buckets of consumers that share keys by tags."""
_MOST = 1024
_PREFIX = "keys-"


def check_key_tags(count: int) -> None:
    """Raise `InvalidSetting` for an invalid number of buckets."""
    if not is_whole(count, 0, _MOST):
        raise InvalidSetting(f"key_tags={count!r} is not a number of buckets, 0 to {_MOST}")


def bucket_tag(key: bytes, count: int) -> str:
    """Return the tag of a key's bucket.

    The hash's high bits choose the bucket, its remainder the partition: independently.
    """
    return _tag(count, position_of(key) * count >> 32)


def bucket_tags(count: int) -> tuple[str, ...]:
    """Return the tags of ``count`` buckets."""
    return tuple(_tag(count, number) for number in range(count))


def shared_tag(count: int) -> str:
    """Return the tag of messages without a key, for any consumer of the channel."""
    return f"{_PREFIX}{count}-none"


def _tag(count: int, number: int) -> str:
    return f"{_PREFIX}{count}-{number}"


def count_of_tag(tag: str) -> int:
    """Return the number of buckets in the tag of a bucket or of messages without a key; 0 for other tags."""
    count, _, number = tag.removeprefix(_PREFIX).partition("-")
    return int(count) if tag.startswith(_PREFIX) and number and count.isascii() and count.isdigit() else 0


class Moves(NamedTuple):
    """A consumer's next moves of a partition's buckets."""

    claim: tuple[str, ...] = ()  #: tags of buckets without an owner
    release: tuple[str, ...] = ()  #: tags of its buckets, for consumers with fewer


def plan_moves(
    me: str, tags: Sequence[str], owners: Mapping[str, Collection[str]], members: Iterable[str], releasing: int = 0
) -> Moves:
    """Return a consumer's next moves; consumers with the same view do not claim the same bucket.

    A bucket without owner goes to the consumer with the fewest buckets. If every bucket has an owner, consumers with
    the most buckets release some until the numbers differ by at most one.

    Args:
        owners: the connected consumers of each tag.
        releasing: buckets that this consumer is releasing.
    """
    held: dict[str, list[str]] = {member: [] for member in {*members, me}}
    free = []
    for tag in tags:
        connected = owners.get(tag) or ()
        for member in connected:
            held.setdefault(member, []).append(tag)
        if not connected:
            free.append(tag)
    counts = {member: len(found) for member, found in held.items()}
    claim = []
    for tag in free:
        poorest = min(counts, key=lambda member: (counts[member], member))
        counts[poorest] += 1
        if poorest == me:
            claim.append(tag)
    if free:
        return Moves(tuple(claim))
    surplus = 0
    while True:
        poorest = min(counts, key=lambda member: (counts[member], member))
        richest = max(counts, key=lambda member: (counts[member], member))
        if counts[richest] <= counts[poorest] + 1:
            break
        counts[richest] -= 1
        counts[poorest] += 1
        surplus += richest == me
    return Moves(release=tuple(reversed(held[me]))[: max(0, surplus - releasing)])
