"""How far a channel has finished: a position, and what was finished out of order behind it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

__all__ = ("AckTracker",)


class AckTracker:
    """The confirmed position of a channel with the intervals that were finished behind it.

    Attributes:
        offset: everything before this offset is finished.
        count: messages before it.
        starts: first offsets of the intervals behind the position, in order; neighbours are merged.
    """

    __slots__ = ("_counts", "_ends", "count", "offset", "starts")

    def __init__(self, offset: int, count: int) -> None:
        self.offset: int = offset
        self.count: int = count
        self.starts: list[int] = []
        self._ends: list[int] = []
        self._counts: list[int] = []

    @property
    def intervals(self) -> list[tuple[int, int, int]]:
        """First offset, end offset and last message's number of each interval."""
        return list(zip(self.starts, self._ends, self._counts, strict=True))

    def add(self, offset: int, size: int, count: int) -> bool:
        """Note that a record is finished; returns whether the position moved."""
        starts = self.starts
        if offset == self.offset and not starts:
            self.offset = offset + size
            self.count = count
            return True
        if offset < self.offset:
            return False
        self._merge(offset, offset + size, count)
        return self._move_on()

    def _move_on(self) -> bool:
        starts = self.starts
        if not starts or starts[0] > self.offset:
            return False
        self.offset, self.count = self._ends[0], self._counts[0]
        del starts[0], self._ends[0], self._counts[0]
        return True

    def _merge(self, start: int, end: int, count: int) -> None:
        starts, ends, counts = self.starts, self._ends, self._counts
        place = bisect_left(ends, start)
        stop = bisect_right(starts, end)
        if place < stop:
            start = min(start, starts[place])
            end, count = max((end, count), (ends[stop - 1], counts[stop - 1]))
        starts[place:stop], ends[place:stop], counts[place:stop] = [start], [end], [count]

    def covers(self, offset: int, size: int) -> bool:
        """Return whether a record lies in an interval behind the position."""
        place = bisect_right(self.starts, offset) - 1
        return place >= 0 and self._ends[place] >= offset + size

    def reset(self, offset: int, count: int) -> None:
        """Go to another position and forget the intervals."""
        self.offset, self.count = offset, count
        self.clear()

    def clear(self) -> None:
        """Forget the intervals."""
        self.starts.clear()
        self._ends.clear()
        self._counts.clear()

    def restore(self, offset: int, count: int, intervals: list[tuple[int, int, int]]) -> None:
        """Take over a position and intervals that were kept elsewhere; what they have before the position is done."""
        self.reset(offset, count)
        for start, end, last in intervals:
            if end > offset:
                self._merge(max(start, offset), end, last)
        self._move_on()

    def cut(self, offset: int, count: int) -> None:
        """Forget what lies at or behind an offset, because the queue ends there now."""
        if self.offset > offset:
            self.offset, self.count = offset, count
        place = bisect_left(self.starts, offset)
        del self.starts[place:], self._ends[place:], self._counts[place:]
        if self._ends and self._ends[-1] > offset:
            self._ends[-1], self._counts[-1] = offset, count
