"""The hash layer of Key_Failover: each consumer serves one range of the hash space (Key_Failover note, hash layer).

The space [0, 1) is a line and not a ring: the first and the last range are no neighbours. Inside, positions are the
2**32 values of the hash, so halves of halves stay exact.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

from nsqext.dispatch.window import SlidingWindow
from nsqext.errors import InvalidInput, InvalidSetting
from nsqext.protocol.hashing import murmur3_32

__all__ = ("KeyRange", "KeyRanges", "position_of")

C = TypeVar("C", bound=Hashable)

SPACE = 1 << 32


@lru_cache(maxsize=65_536)
def position_of(key: bytes) -> int:
    """Return where a key lies in the hash space, 0 to 2**32 - 1: its MurmurHash3, which also chooses partitions."""
    return murmur3_32(key)


class KeyRange(NamedTuple, Generic[C]):
    """A range of the hash space and the consumer that serves it.

    Attributes:
        low: where it begins, from 0.0.
        high: where it ends, up to 1.0; not in it.
        consumer: who serves it.
    """

    low: float
    high: float
    consumer: C


class KeyRanges(Generic[C]):
    """Shares the hash space out among consumers; what it covers, it covers exactly once.

    Every consumer has one range. A newcomer takes the upper half of the busiest consumer's; when a consumer leaves, the
    less busy one of its neighbours takes its range over. What was dispatched of late belongs to the range: after a
    split either half counts with half of it, so several newcomers in a row do not all take from the same consumer.

    Args:
        clock: seconds that never go backwards.
        window: seconds over which dispatch rates are taken.

    Raises:
        InvalidSetting: the window is not positive.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, window: float = 10.0) -> None:
        if not window > 0:
            raise InvalidSetting(f"window={window!r} is not a positive number of seconds")
        self._clock = clock
        self._window = window
        self._starts: list[int] = []  # where each range begins, in order
        self._owners: list[C] = []  # who serves it
        self._rates: dict[C, SlidingWindow] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, consumer: object) -> bool:
        return consumer in self._rates

    # who comes and goes

    def add_consumer(self, consumer: C) -> None:
        """Let a consumer in: it takes the upper half of the range of the busiest one.

        Among equally busy ones, the widest range is split, and the lowest of those.

        Raises:
            InvalidInput: it is in already, or no range can be split any more.
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
            raise InvalidInput(f"no range is left to split for consumer {consumer!r}")
        place = max(wide, key=lambda place: (self._rate_at(place, now), self._width(place), -place))
        middle = self._starts[place] + (self._width(place) + 1) // 2
        self._rates[consumer] = self._rates[self._owners[place]].halve()
        self._starts.insert(place + 1, middle)
        self._owners.insert(place + 1, consumer)

    def remove_consumer(self, consumer: C) -> None:
        """Let a consumer go: the less busy one of its neighbours takes its range over.

        Among equally busy ones, the one with the narrower range does, and the lower one of those.

        Raises:
            InvalidInput: it is not in.
        """
        place = self._place_of(consumer)
        gone = self._rates.pop(consumer)
        now = self._clock()
        del self._owners[place]
        if not self._owners:
            self._starts.clear()
            return
        # while both of its borders stand, the neighbours' widths do not contain what is given away
        heirs = [other for other in (place - 1, place + 1) if 0 <= other < len(self._starts)]
        owner = {other: self._owners[other if other < place else place] for other in heirs}
        heir = min(heirs, key=lambda other: (self._rates[owner[other]].rate(now), self._width(other), other))
        self._rates[owner[heir]].merge(gone)
        del self._starts[place if heir < place else place + 1]

    # who gets what

    def get_consumer(self, key: bytes) -> C | None:
        """Return the consumer that serves a key, None while there is no consumer."""
        return self.at(position_of(key))

    def at(self, position: int) -> C | None:
        """Return the consumer that serves a position of the hash space (`position_of`), None while there is none."""
        owners = self._owners
        return owners[bisect_right(self._starts, position) - 1] if owners else None

    def record_dispatch(self, consumer: C, count: int = 1) -> None:
        """Note that messages were given to a consumer.

        Raises:
            InvalidInput: it is not in.
        """
        rate = self._rates.get(consumer)
        if rate is None:
            raise self._missing(consumer)
        rate.add(self._clock(), count)

    # how it stands

    def rate(self, consumer: C) -> float:
        """Return how many messages a second a consumer was given, over the window.

        Raises:
            InvalidInput: it is not in.
        """
        rate = self._rates.get(consumer)
        if rate is None:
            raise self._missing(consumer)
        return rate.rate(self._clock())

    def ranges(self) -> list[KeyRange[C]]:
        """Return all ranges in order; together they are [0, 1), or nothing while there is no consumer."""
        stops = [*self._starts[1:], SPACE]
        return [
            KeyRange(start / SPACE, stop / SPACE, owner)
            for start, stop, owner in zip(self._starts, stops, self._owners, strict=bool(self._owners))
        ]

    # inside

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
