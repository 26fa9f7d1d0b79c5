"""How often something happened of late: counts in a sliding window, without a clock of its own."""

from __future__ import annotations

from collections import deque

__all__ = ("SlidingWindow",)

_SLOTS = 20


class SlidingWindow:
    """Counts of the last so many seconds, kept in twenty slots; a slot leaves when all of it is too old.

    Args:
        seconds: length of the window.
    """

    __slots__ = ("_seconds", "_slots", "_total")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._slots: deque[tuple[int, float]] = deque()  # number of the slot, what was counted in it
        self._total = 0.0

    def _number(self, now: float) -> int:
        return int(now * _SLOTS // self._seconds)

    def add(self, now: float, count: float) -> None:
        """Count something that happens now."""
        number, slots = self._number(now), self._slots
        if slots and slots[-1][0] >= number:
            slots[-1] = (slots[-1][0], slots[-1][1] + count)
        else:
            slots.append((number, count))
        self._total += count

    def rate(self, now: float) -> float:
        """Return how much was counted in a second, over the whole window."""
        oldest, slots = self._number(now) - _SLOTS, self._slots
        while slots and slots[0][0] <= oldest:
            self._total -= slots.popleft()[1]
        if not slots:
            self._total = 0.0  # sums of fractions leave dust
        return self._total / self._seconds

    def halve(self) -> SlidingWindow:
        """Give half of what was counted to a new window, and return that."""
        other = SlidingWindow(self._seconds)
        self._slots = deque((number, count / 2) for number, count in self._slots)
        self._total /= 2
        other._slots, other._total = self._slots.copy(), self._total
        return other

    def merge(self, other: SlidingWindow) -> None:
        """Take over what another window of the same length counted."""
        counts = dict(self._slots)
        for number, count in other._slots:
            counts[number] = counts.get(number, 0.0) + count
        self._slots = deque(sorted(counts.items()))
        self._total += other._total
