"""How far a channel has acknowledged its queue: a position, and intervals that were finished behind it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class AckTracker:
    """The acknowledged position of a channel, with the intervals that were finished out of order."""

    __slots__ = ("_counts", "_ends", "count", "offset", "starts")

    def __init__(self, offset: int, count: int) -> None:
        self.offset: int = offset  # every record before this offset is finished
        self.count: int = count  # messages before that offset
        # first offsets of the finished intervals behind the position, sorted; adjacent intervals are merged
        self.starts: list[int] = []
        self._ends: list[int] = []
        self._counts: list[int] = []

    @property
    def intervals(self) -> list[tuple[int, int, int]]:
        """First offset, end offset and number of the last message of each interval."""
        return list(zip(self.starts, self._ends, self._counts, strict=True))

    def add(self, offset: int, size: int, count: int) -> bool:
        """Record a finished message; return whether the position moved."""
        starts = self.starts
        if offset == self.offset and not starts:
            self.offset = offset + size
            self.count = count
            return True
        if offset < self.offset:
            return False
        self._merge(offset, offset + size, count)
        return self._advance()

    def _advance(self) -> bool:
        starts = self.starts
        if not starts or starts[0] > self.offset:
            return False
        self.offset, self.count = self._ends[0], self._counts[0]
        del starts[0], self._ends[0], self._counts[0]
        return True

    def _merge(self, start: int, end: int, count: int) -> None:
        starts, ends, counts = self.starts, self._ends, self._counts
        first = bisect_left(ends, start)
        stop = bisect_right(starts, end)
        if first < stop:
            start = min(start, starts[first])
            end, count = max((end, count), (ends[stop - 1], counts[stop - 1]))
        starts[first:stop], ends[first:stop], counts[first:stop] = [start], [end], [count]

    def covers(self, offset: int, size: int) -> bool:
        """Return whether a record lies in a finished interval behind the position."""
        index = bisect_right(self.starts, offset) - 1
        return index >= 0 and self._ends[index] >= offset + size

    def reset(self, offset: int, count: int) -> None:
        """Move to another position and drop the intervals."""
        self.offset, self.count = offset, count
        self.clear()

    def clear(self) -> None:
        self.starts.clear()
        self._ends.clear()
        self._counts.clear()

    def restore(self, offset: int, count: int, intervals: list[tuple[int, int, int]]) -> None:
        """Load a stored position with its intervals; parts of intervals before the position are ignored."""
        self.reset(offset, count)
        for start, end, last in intervals:
            if end > offset:
                self._merge(max(start, offset), end, last)
        self._advance()

    def cut(self, offset: int, count: int) -> None:
        """Drop everything at and behind an offset, because the queue was truncated there."""
        if self.offset > offset:
            self.offset, self.count = offset, count
        first = bisect_left(self.starts, offset)
        del self.starts[first:], self._ends[first:], self._counts[first:]
        if self._ends and self._ends[-1] > offset:
            self._ends[-1], self._counts[-1] = offset, count
