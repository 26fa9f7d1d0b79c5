"""The queue of one partition: records in the order of their virtual byte offsets.

Records are kept in segments. What every channel has behind it may be dropped (`Log.trim`); with a store behind the log,
segments that nobody reads leave the memory and are read again from there (`Log.shrink`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from attrs import define

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nsqext.protocol.record import Record

__all__ = ("ENTRY_COST", "Entry", "Log", "LogStore")

ENTRY_COST = 512
"""Bytes that a record takes in memory besides its own, as counted against the memory bound."""

_SEGMENT_ENTRIES = 1024
_SEGMENT_BYTES = 1024 * 1024


@define(eq=False)
class Entry:
    """A stored message.

    Attributes:
        record: the message.
        offset: virtual byte offset of the record in the partition's queue.
        size: raw size in bytes; offset + size is the offset of the next record.
        count: number of the message in the partition, from 1.
    """

    record: Record
    offset: int
    size: int
    count: int


class LogStore(Protocol):
    """Where the records of a log are kept besides its memory."""

    def append(self, entries: Sequence[Entry]) -> None:
        """Store records at the end."""

    def load(self, first: tuple[int, int], end: int) -> list[Entry]:
        """Return the records from a position (offset, messages before it) to an end offset."""

    def trim(self, offset: int) -> None:
        """Forget what lies before an offset, as far as that is easy."""

    def truncate(self, offset: int) -> None:
        """Forget what lies at or behind an offset."""

    def restart(self, offset: int, count: int) -> None:
        """Forget everything and go on at a position."""


class _Segment:
    """Neighbouring records; without them when they are only in the store."""

    __slots__ = ("cost", "end_count", "end_offset", "entries", "first_count", "first_offset")

    def __init__(self, first_offset: int, first_count: int) -> None:
        self.first_offset = self.end_offset = first_offset
        self.first_count = self.end_count = first_count
        self.entries: list[Entry] | None = []
        self.cost = 0


_offset = attrgetter("offset")
_first_offset = attrgetter("first_offset")
_first_count = attrgetter("first_count")


class Log:
    """Records of one partition.

    Args:
        store: keeps the records too; None for memory alone.
        offset: offset of the first record.
        count: messages that were there before it.
        segment_bytes: memory of a segment, the smallest part that is dropped at a time.

    Attributes:
        start_offset: offset of the first record that is still there.
        start_count: messages before it.
        end_offset: offset behind the last record.
        end_count: number of the last message.
        held: bytes in memory, as counted against the memory bound.
    """

    def __init__(
        self,
        store: LogStore | None = None,
        offset: int = 0,
        count: int = 0,
        *,
        segment_bytes: int = _SEGMENT_BYTES,
    ) -> None:
        self.start_offset: int = offset
        self.end_offset: int = offset
        self.start_count: int = count
        self.end_count: int = count
        self.held: int = 0
        self._store = store
        self._segment_bytes = segment_bytes
        self._segments = [_Segment(offset, count)]
        self._hot = self._segments[0]
        self._batches: list[tuple[int, int]] = []  # first and last count of what was published together

    def append(self, entries: Sequence[Entry], *, stored: bool = False) -> None:
        """Add records that were published together; their offsets and counts have to follow on the last one's.

        Args:
            entries: the records.
            stored: they come from the store.
        """
        if self._store is not None and not stored:
            self._store.append(entries)
        segment = self._segments[-1]
        for entry in entries:
            held = segment.entries
            if held is None or len(held) >= _SEGMENT_ENTRIES or segment.cost >= self._segment_bytes:
                segment = _Segment(entry.offset, entry.count - 1)
                self._segments.append(segment)
                held = segment.entries
            if held is not None:
                held.append(entry)
            cost = entry.size + ENTRY_COST
            segment.cost += cost
            self.held += cost
            segment.end_offset = entry.offset + entry.size
            segment.end_count = entry.count
        if len(entries) > 1 and not stored:
            self._batches.append((entries[0].count, entries[-1].count))
        self.end_offset, self.end_count = segment.end_offset, segment.end_count

    def at(self, count: int) -> Entry | None:
        """Return the message with this number; None when it is not there."""
        hot = self._hot
        if not hot.first_count < count <= hot.end_count:
            if not self.start_count < count <= self.end_count:
                return None
            place = bisect_left(self._segments, count, key=_first_count) - 1
            self._hot = hot = self._segments[place]
        entries = hot.entries
        if entries is None:
            entries = self._load(hot)
        return entries[count - hot.first_count - 1]

    def read(self, offset: int) -> Entry | None:
        """Return the first record at or behind an offset; None at the end."""
        if offset >= self.end_offset:
            return None
        place = max(bisect_right(self._segments, offset, key=_first_offset) - 1, 0)
        while self._segments[place].end_offset <= offset:
            place += 1
        segment = self._segments[place]
        entries = segment.entries if segment.entries is not None else self._load(segment)
        number = bisect_left(entries, offset, key=_offset)
        return entries[number] if number < len(entries) else self.at(segment.end_count + 1)

    def count_before(self, offset: int) -> int:
        """Return how many messages lie before the record at an offset."""
        entry = self.read(offset)
        return self.end_count if entry is None else entry.count - 1

    def find_offset(self, offset: int) -> int:
        """Return the offset of the first record at or behind an offset; the end's when there is none."""
        entry = self.read(offset)
        return self.end_offset if entry is None else entry.offset

    def find_count(self, before: int) -> int:
        """Return the offset of the record with so many messages before it; the nearest one that is there."""
        entry = self.at(max(before, self.start_count) + 1)
        return self.end_offset if entry is None else entry.offset

    def find_timestamp(self, timestamp: int) -> int:
        """Return the offset of the first message of this time (ns) or later; the end's when there is none."""
        low, high = self.start_count, self.end_count
        while low < high:
            middle = (low + high) // 2
            entry = self.at(middle + 1)
            if entry is not None and entry.record.timestamp < timestamp:
                low = middle + 1
            else:
                high = middle
        return self.find_count(low)

    def find_id(self, internal_id: int) -> Entry | None:
        """Return what the real server finds for an id: the first message of the publish that it came with.

        An id below the first one gives the first message, one above the last gives the last publish; None only in an
        empty queue (captured: message_get).
        """
        if self.end_count == self.start_count:
            return None
        low, high = self.start_count + 1, self.end_count
        while low < high:
            middle = (low + high + 1) // 2
            entry = self.at(middle)
            if entry is not None and entry.record.internal_id > internal_id:
                high = middle - 1
            else:
                low = middle
        place = bisect_right(self._batches, low, key=lambda batch: batch[0]) - 1
        if place >= 0 and self._batches[place][1] >= low:
            low = max(self._batches[place][0], self.start_count + 1)
        return self.at(low)

    def trim(self, offset: int) -> None:
        """Drop records before an offset, in whole segments; what is left begins at `start_offset`."""
        place = 0
        while place < len(self._segments) - 1 and self._segments[place].end_offset <= offset:
            if self._segments[place].entries is not None:
                self.held -= self._segments[place].cost
            place += 1
        if place:
            del self._segments[:place]
            self._hot = first = self._segments[0]
            self.start_offset, self.start_count = first.first_offset, first.first_count
            del self._batches[: bisect_left(self._batches, self.start_count, key=lambda batch: batch[1])]
        if self._store is not None:
            self._store.trim(self.start_offset)

    def truncate(self, offset: int) -> None:
        """Drop the records at and behind an offset."""
        place = len(self._segments) - 1
        while place and self._segments[place].first_offset >= offset:
            place -= 1
        segment = self._segments[place]
        entries = segment.entries if segment.entries is not None else self._load(segment)
        if self._store is not None:
            self._store.truncate(offset)
        while len(self._segments) > place + 1:
            gone = self._segments.pop()
            self.held -= gone.cost if gone.entries is not None else 0
        while entries and entries[-1].offset >= offset:
            cost = entries.pop().size + ENTRY_COST
            segment.cost -= cost
            self.held -= cost
        last = entries[-1] if entries else None
        segment.end_offset = last.offset + last.size if last else segment.first_offset
        segment.end_count = last.count if last else segment.first_count
        self._hot = segment
        self.end_offset, self.end_count = segment.end_offset, segment.end_count
        while self._batches and self._batches[-1][1] > self.end_count:
            self._batches.pop()

    def restart(self, offset: int, count: int) -> None:
        """Drop everything and go on at a position, as a replica does whose leader has nothing older."""
        if self._store is not None:
            self._store.restart(offset, count)
        self.start_offset = self.end_offset = offset
        self.start_count = self.end_count = count
        self.held = 0
        self._segments = [_Segment(offset, count)]
        self._hot = self._segments[0]
        self._batches.clear()

    def shrink(self, bound: int) -> None:
        """Let segments leave the memory, the oldest first, until no more than so many bytes are held.

        Only a log with a store does; the last segment and the one that was read last stay.
        """
        if self._store is None:
            return
        for segment in self._segments[:-1]:
            if self.held <= bound:
                return
            if segment.entries is not None and segment is not self._hot:
                segment.entries = None
                self.held -= segment.cost

    def _load(self, segment: _Segment) -> list[Entry]:
        if self._store is None:
            return []
        entries = self._store.load((segment.first_offset, segment.first_count), segment.end_offset)
        segment.entries = entries
        self.held += segment.cost
        return entries
