"""Assign ranges of the hash space to consumers, one each (Key_Failover note, hash layer).

The space [0, 1) is a line, not a ring: the first and the last range are not adjacent. Internally, positions are the
2**32 values of the hash, so that repeated halving is exact.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

from nsqext.errors import InvalidInput, InvalidSetting
from nsqext.protocol.hashing import murmur3_32

__all__ = ("KeyRange", "KeyRanges", "SlidingWindow", "position_of")

C = TypeVar("C", bound=Hashable)

SPACE = 1 << 32
_SLOTS = 20


@lru_cache(maxsize=65_536)
def position_of(key: bytes) -> int:
    """Return the position of a key in the hash space, 0 to 2**32 - 1: its MurmurHash3, as for partitions."""
    return murmur3_32(key)


class SlidingWindow:
    """Counts of the last seconds, in twenty slots; a slot is dropped when it is entirely too old.

    Args:
        seconds: length of the window.
    """

    __slots__ = ("_seconds", "_slots", "_total")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._slots: deque[tuple[int, float]] = deque()  # number and count of each slot
        self._total = 0.0

    def _number(self, now: float) -> int:
        return int(now * _SLOTS // self._seconds)

    def add(self, now: float, count: float) -> None:
        """Add to the count."""
        number, slots = self._number(now), self._slots
        if slots and slots[-1][0] >= number:
            slots[-1] = (slots[-1][0], slots[-1][1] + count)
        else:
            slots.append((number, count))
        self._total += count

    def rate(self, now: float) -> float:
        """Return the count per second over the window."""
        oldest, slots = self._number(now) - _SLOTS, self._slots
        while slots and slots[0][0] <= oldest:
            self._total -= slots.popleft()[1]
        if not slots:
            self._total = 0.0  # sums of fractions leave rounding errors
        return self._total / self._seconds

    def halve(self) -> SlidingWindow:
        """Move half of the counts to a new window and return it."""
        other = SlidingWindow(self._seconds)
        self._slots = deque((number, count / 2) for number, count in self._slots)
        self._total /= 2
        other._slots, other._total = self._slots.copy(), self._total
        return other

    def merge(self, other: SlidingWindow) -> None:
        """Add the counts of another window of the same length."""
        counts = dict(self._slots)
        for number, count in other._slots:
            counts[number] = counts.get(number, 0.0) + count
        self._slots = deque(sorted(counts.items()))
        self._total += other._total


class KeyRange(NamedTuple, Generic[C]):
    """A range of the hash space and the consumer that serves it.

    Attributes:
        low: its start, from 0.0, inclusive.
        high: its end, up to 1.0, exclusive.
        consumer: the consumer that serves it.
    """

    low: float
    high: float
    consumer: C


class KeyRanges(Generic[C]):
    """Divide the hash space among consumers: each position belongs to one consumer.

    Each consumer has one range. A new consumer receives the upper half of the busiest consumer's range. When a consumer
    is removed, the less busy one of its neighbours receives its range. A split divides the recent dispatches of the
    range too, so that several new consumers do not all split the same range.

    Args:
        clock: seconds that never go backwards.
        window: seconds over which dispatch rates are measured.

    Raises:
        InvalidSetting: the window is not positive.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, window: float = 10.0) -> None:
        if not window > 0:
            raise InvalidSetting(f"window={window!r} is not a positive number of seconds")
        self._clock = clock
        self._window = window
        self._starts: list[int] = []  # start of each range, in order
        self._owners: list[C] = []  # consumer of each range
        self._rates: dict[C, SlidingWindow] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, consumer: object) -> bool:
        return consumer in self._rates

    # Consumers

    def add_consumer(self, consumer: C) -> None:
        """Add a consumer, which receives the upper half of the busiest consumer's range.

        Among equally busy ones, the widest range is split; among equally wide ones, the lowest.

        Raises:
            InvalidInput: it has a range already, or no range can be split further.
        """
        if consumer in self._rates:
            raise InvalidInput(f"consumer {consumer!r} has a range already", hint="remove it first")
        if not self._owners:
            self._starts, self._owners = [0], [consumer]
            self._rates[consumer] = SlidingWindow(self._window)
            return
        now = self._clock()
        wide = [place for place in range(len(self._owners)) if self._width(place) > 1]
        if not wide:
            raise InvalidInput(f"no range can be split for consumer {consumer!r}")
        place = max(wide, key=lambda place: (self._rate_at(place, now), self._width(place), -place))
        middle = self._starts[place] + (self._width(place) + 1) // 2
        self._rates[consumer] = self._rates[self._owners[place]].halve()
        self._starts.insert(place + 1, middle)
        self._owners.insert(place + 1, consumer)

    def remove_consumer(self, consumer: C) -> None:
        """Remove a consumer; the less busy one of its neighbours receives its range.

        Among equally busy ones, the one with the narrower range; among equally narrow ones, the lower.

        Raises:
            InvalidInput: it has no range.
        """
        place = self._place_of(consumer)
        gone = self._rates.pop(consumer)
        now = self._clock()
        del self._owners[place]
        if not self._owners:
            self._starts.clear()
            return
        # computed before a border is removed: the widths of the neighbours must not include the removed range
        heirs = [other for other in (place - 1, place + 1) if 0 <= other < len(self._starts)]
        owner = {other: self._owners[other if other < place else place] for other in heirs}
        heir = min(heirs, key=lambda other: (self._rates[owner[other]].rate(now), self._width(other), other))
        self._rates[owner[heir]].merge(gone)
        del self._starts[place if heir < place else place + 1]

    # Dispatch

    def get_consumer(self, key: bytes) -> C | None:
        """Return the consumer that serves a key; None if there is no consumer."""
        return self.at(position_of(key))

    def at(self, position: int) -> C | None:
        """Return the consumer that serves a position of the hash space (`position_of`); None without consumers."""
        owners = self._owners
        return owners[bisect_right(self._starts, position) - 1] if owners else None

    def record_dispatch(self, consumer: C, count: int = 1) -> None:
        """Record that messages were dispatched to a consumer.

        Raises:
            InvalidInput: it has no range.
        """
        rate = self._rates.get(consumer)
        if rate is None:
            raise self._missing(consumer)
        rate.add(self._clock(), count)

    # State

    def rate(self, consumer: C) -> float:
        """Return the messages per second that were dispatched to a consumer, over the window.

        Raises:
            InvalidInput: it has no range.
        """
        rate = self._rates.get(consumer)
        if rate is None:
            raise self._missing(consumer)
        return rate.rate(self._clock())

    def ranges(self) -> list[KeyRange[C]]:
        """Return all ranges in order; together they are [0, 1), or empty without consumers."""
        stops = [*self._starts[1:], SPACE]
        return [
            KeyRange(start / SPACE, stop / SPACE, owner)
            for start, stop, owner in zip(self._starts, stops, self._owners, strict=bool(self._owners))
        ]

    # Internals

    def _missing(self, consumer: C) -> InvalidInput:
        return InvalidInput(f"consumer {consumer!r} has no range", hint="add it first")

    def _place_of(self, consumer: C) -> int:
        if consumer not in self._rates:
            raise self._missing(consumer)
        return self._owners.index(consumer)

    def _width(self, place: int) -> int:
        stop = self._starts[place + 1] if place + 1 < len(self._starts) else SPACE
        return stop - self._starts[place]

    def _rate_at(self, place: int, now: float) -> float:
        return self._rates[self._owners[place]].rate(now)
