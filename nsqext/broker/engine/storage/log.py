"""The queue of a partition: records in the order of their virtual byte offsets.

Segments are removed as a whole. With a store, they leave the memory and are read again when needed. A gap stands for
records lost on disk.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

import msgspec
from attrs import define, field, frozen

from nsqext.protocol.server.go_format import parse_int

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nsqext.protocol.record import Record


class Refusal(Exception):
    """The engine or the coordinator refuses a request."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text  #: the real server's, without the error code


FIRST_COUNTER = 2
"""Counter in the internal id of a partition's first message (captured in partition_ids)."""
ENTRY_COST = 512
"""Bytes of memory for a record, besides its size."""
_SEGMENT_ENTRIES = 1024
_SEGMENT_BYTES = 1024 * 1024
_offset = attrgetter("offset")
_first_offset = attrgetter("first_offset")
_first_count = attrgetter("first_count")
_KINDS = ("timestamp", "special", "virtual_queue", "msgcount")
_SEGMENT = 500_000  # entries in a file of the real server's commit log; a position before the first file is not found


class MemoryUser(Protocol):
    """A queue that can free memory."""

    def free_memory(self) -> None: ...


@define(eq=False)
class MemoryBudget:
    """Bytes of messages that a node keeps in memory."""

    limit: float = inf  #: bytes
    held: int = 0
    _users: dict[MemoryUser, None] = field(factory=dict)
    _fruitless: float = inf  # bytes held when nothing could be freed

    def add(self, user: MemoryUser) -> None:
        self._users[user] = None

    def remove(self, user: MemoryUser) -> None:
        self._users.pop(user, None)

    @property
    def is_exceeded(self) -> bool:
        return self.held > self.limit

    def reclaim(self) -> None:
        """Let every queue free memory, unless this was fruitless and little changed since."""
        if self.held > self._fruitless * 31 / 32:
            return
        self._fruitless = inf
        for user in list(self._users):
            user.free_memory()
        if self.is_exceeded:
            self._fruitless = self.held


class LogEntry(msgspec.Struct, eq=False, gc=False):
    """A stored message."""

    record: Record
    offset: int  #: virtual byte offset in the queue
    size: int  #: raw bytes; offset + size is the next record's offset
    count: int  #: its number in the queue, from 1


class LogStore(Protocol):
    """Storage of a log; see `nsqext.broker.engine.storage.segments.SegmentStore`."""

    def append(self, entries: Sequence[LogEntry]) -> None: ...
    def load(self, first: tuple[int, int], end: int) -> list[LogEntry]: ...
    def trim(self, offset: int) -> None: ...
    def truncate(self, offset: int) -> None: ...
    def restart(self, offset: int, count: int) -> None: ...


class Segment:
    """Adjacent records; ``entries`` is None for a gap, and for records only in the store."""

    __slots__ = ("cost", "end_count", "end_offset", "entries", "first_count", "first_offset", "is_gap")

    def __init__(self, first_offset: int, first_count: int) -> None:
        self.first_offset: int = first_offset
        self.end_offset: int = first_offset
        self.first_count: int = first_count
        self.end_count: int = first_count
        self.entries: list[LogEntry] | None = []
        self.cost: int = 0
        self.is_gap: bool = False


class Log:
    """Records of a partition from an offset, with ``count`` messages before it."""

    def __init__(
        self,
        store: LogStore | None = None,
        offset: int = 0,
        count: int = 0,
        *,
        segment_bytes: int = _SEGMENT_BYTES,
        cache_bytes: int | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        self.start_offset: int = offset  #: of the first record
        self.end_offset: int = offset  #: behind the last record
        self.start_count: int = count  #: messages before it
        self.end_count: int = count
        self.held: int = 0  #: bytes in memory
        self._store = store  # None for memory only
        self._segment_bytes = segment_bytes
        self._cache_bytes = cache_bytes  # with a store, bytes in memory; None without bound
        self._budget = budget or MemoryBudget()
        self._segments = [Segment(offset, count)]
        self._hot = self._segments[0]
        self._batches: list[tuple[int, int]] = []  # first and last number of messages published together

    def _hold(self, size: int) -> None:
        self.held += size
        self._budget.held += size

    def release(self) -> None:
        self._hold(-self.held)

    # Writing

    def append(self, entries: Sequence[LogEntry], *, stored: bool = False) -> None:
        """Append records published together, which continue the log."""
        if self._store is not None and not stored:
            self._store.append(entries)
        segment = self._segments[-1]
        total = 0
        for entry in entries:
            held = segment.entries
            if held is None or len(held) >= _SEGMENT_ENTRIES or segment.cost >= self._segment_bytes:
                segment = self._begin_segment(entry.offset, entry.count - 1)
                held = segment.entries
            if held is not None:
                held.append(entry)
            cost = entry.size + ENTRY_COST
            segment.cost += cost
            total += cost
            segment.end_offset = entry.offset + entry.size
            segment.end_count = entry.count
        self._hold(total)
        if len(entries) > 1 and not stored:
            self._batches.append((entries[0].count, entries[-1].count))
        self.end_offset, self.end_count = segment.end_offset, segment.end_count

    def _begin_segment(self, offset: int, count: int) -> Segment:
        if self._cache_bytes is not None:
            self.shrink(self._cache_bytes)
        segment = Segment(offset, count)
        self._segments.append(segment)
        return segment

    def append_gap(self, offset: int, count: int) -> None:
        """Append a gap up to a position (offset, messages before it)."""
        if self.end_count == self.start_count:
            self._begin_at(offset, count)
            return
        gap = Segment(self.end_offset, self.end_count)
        gap.entries, gap.is_gap = None, True
        gap.end_offset, gap.end_count = self.end_offset, self.end_count = offset, count
        self._segments.append(gap)

    def append_runs(self, entries: Sequence[LogEntry]) -> None:
        """Append records of another log; a jump before or between them is a gap."""
        first = 0
        for stop in range(1, len(entries) + 1):
            if stop == len(entries) or entries[stop].offset != entries[stop - 1].offset + entries[stop - 1].size:
                if entries[first].offset != self.end_offset:
                    self.append_gap(entries[first].offset, entries[first].count - 1)
                self.append(entries[first:stop])
                first = stop

    # Reading

    def at(self, count: int) -> LogEntry | None:
        """Return the message with a number; None outside the log and in a gap."""
        hot = self._hot
        if not hot.first_count < count <= hot.end_count:
            if not self.start_count < count <= self.end_count:
                return None
            self._hot = hot = self._segment_of(count)
        entries = hot.entries
        if entries is None:
            if hot.is_gap:
                return None
            entries = self._load(hot)
        return entries[count - hot.first_count - 1]

    def _segment_of(self, count: int) -> Segment:
        return self._segments[bisect_left(self._segments, count, key=_first_count) - 1]

    def gap_at(self, count: int) -> Segment | None:
        """Return the gap at a number, if any."""
        if not self.start_count < count <= self.end_count:
            return None
        segment = self._segment_of(count)
        return segment if segment.is_gap else None

    @property
    def whole_count(self) -> int:
        """Number of the last message before the first gap."""
        return next((segment.first_count for segment in self._segments if segment.is_gap), self.end_count)

    def _at_or_after(self, count: int) -> LogEntry | None:
        entry, gap = self.at(count), self.gap_at(count)
        return entry if gap is None else self.at(gap.end_count + 1)

    def read(self, offset: int) -> LogEntry | None:
        """Return the first record at or behind an offset; None at the end."""
        if offset >= self.end_offset:
            return None
        segment = self._segments[max(bisect_right(self._segments, offset, key=_first_offset) - 1, 0)]
        if segment.is_gap:
            return self.at(segment.end_count + 1)
        entries = segment.entries if segment.entries is not None else self._load(segment)
        number = bisect_left(entries, offset, key=_offset)
        return entries[number] if number < len(entries) else self._at_or_after(segment.end_count + 1)

    def count_before(self, offset: int) -> int:
        """Return the number of messages before the first record at or behind an offset."""
        entry = self.read(offset)
        return self.end_count if entry is None else entry.count - 1

    def find_offset(self, offset: int) -> int:
        """Return the offset of the first record at or behind an offset, else the end."""
        entry = self.read(offset)
        return self.end_offset if entry is None else entry.offset

    def find_count(self, before: int) -> int:
        """Return the offset of the record behind ``before`` messages, or in a gap of the next record."""
        entry = self._at_or_after(max(before, self.start_count) + 1)
        return self.end_offset if entry is None else entry.offset

    def find_timestamp(self, timestamp: int) -> int:
        """Return the offset of the first message at or after a time (ns), else the end."""
        low, high = self.start_count, self.end_count
        while low < high:
            middle = (low + high) // 2
            entry = self._at_or_after(middle + 1)
            if entry is not None and entry.record.timestamp < timestamp:
                low = entry.count
            else:
                high = middle
        return self.find_count(low)

    def find_id(self, internal_id: int) -> LogEntry | None:
        """Return the first message of an id's publish, as the real server (captured: message_get).

        A smaller id finds the first message, a larger id the last publish; None if the queue is empty.
        """
        if self.end_count == self.start_count:
            return None
        low, high = self.start_count + 1, self.end_count
        while low < high:
            middle = high - (high - low) // 2
            entry = self._at_or_after(middle)
            if entry is not None and entry.record.internal_id > internal_id:
                high = middle - 1
            else:
                low = middle
        index = bisect_right(self._batches, low, key=lambda batch: batch[0]) - 1
        if index >= 0 and self._batches[index][1] >= low:
            low = max(self._batches[index][0], self.start_count + 1)
        return self._at_or_after(low)

    def _load(self, segment: Segment) -> list[LogEntry]:
        if self._store is None:
            return []
        entries = self._store.load((segment.first_offset, segment.first_count), segment.end_offset)
        segment.entries = entries
        self._hot = segment
        self._hold(segment.cost)
        if self._cache_bytes is not None:
            self.shrink(self._cache_bytes)
        return entries

    # Removing

    def trim(self, offset: int) -> None:
        """Remove records before an offset, in whole segments."""
        index = 0
        while index < len(self._segments) - 1 and (
            self._segments[index].end_offset <= offset or self._segments[index].is_gap
        ):
            if self._segments[index].entries is not None:
                self._hold(-self._segments[index].cost)
            index += 1
        if index:
            del self._segments[:index]
            self._hot = first = self._segments[0]
            self.start_offset, self.start_count = first.first_offset, first.first_count
            del self._batches[: bisect_left(self._batches, self.start_count, key=lambda batch: batch[1])]
        if self._store is not None:
            self._store.trim(self.start_offset)

    def truncate(self, offset: int) -> None:
        index = len(self._segments) - 1
        while index and (self._segments[index].first_offset >= offset or self._segments[index].is_gap):
            index -= 1
        segment = self._segments[index]
        entries = segment.entries if segment.entries is not None else self._load(segment)
        if self._store is not None:
            self._store.truncate(min(offset, segment.end_offset))
        while len(self._segments) > index + 1:
            removed = self._segments.pop()
            self._hold(-removed.cost if removed.entries is not None else 0)
        while entries and entries[-1].offset >= offset:
            cost = entries.pop().size + ENTRY_COST
            segment.cost -= cost
            self._hold(-cost)
        last = entries[-1] if entries else None
        segment.end_offset = last.offset + last.size if last else segment.first_offset
        segment.end_count = last.count if last else segment.first_count
        self._hot = segment
        self.end_offset, self.end_count = segment.end_offset, segment.end_count
        while self._batches and self._batches[-1][1] > self.end_count:
            self._batches.pop()

    def restart(self, offset: int, count: int) -> None:
        """Remove everything; continue at a position, before which the leader has nothing."""
        if self._store is not None:
            self._store.restart(offset, count)
        self._begin_at(offset, count)
        self._hold(-self.held)
        self._batches.clear()

    def _begin_at(self, offset: int, count: int) -> None:
        self.start_offset = self.end_offset = offset
        self.start_count = self.end_count = count
        self._segments = [Segment(offset, count)]
        self._hot = self._segments[0]

    def shrink(self, bound: int) -> None:
        """With a store, drop segments from memory, oldest first, down to ``bound`` bytes.

        Unless the bound is 0, keep the last segment and the segment read last.
        """
        if self._store is None:
            return
        for segment in self._segments if bound == 0 else self._segments[:-1]:
            if self.held <= bound:
                return
            if segment.entries and (bound == 0 or segment is not self._hot):
                segment.entries = None
                self._hold(-segment.cost)


@frozen
class StartPosition:
    """A position of SUB_ADVANCED and ``/channel/setoffset``."""

    #: ``timestamp`` (seconds since 1970), ``virtual_queue`` (bytes), ``msgcount`` (from 1; 0 means 1) or ``special``
    kind: str
    value: int

    @classmethod
    def parse(cls, text: str) -> StartPosition:
        """Parse ``kind:number``; raises `Refusal` as the real server (captured: sub_advanced_offset_errors)."""
        kind, colon, number = text.partition(":")
        if not colon or ":" in number or kind not in _KINDS:
            raise Refusal(f"invalid consume offset:{text}")
        try:
            return cls(kind, parse_int(number, "ParseInt"))
        except ValueError as error:
            raise Refusal(str(error)) from None

    def find(self, log: Log, *, clustered: bool = True) -> tuple[int, int]:
        """Return the offset and the number of messages before it; inside a record, of the next record.

        A node without cluster finds only the end. Raises `Refusal` with the real server's text.
        """
        if self.kind == "special":
            if self.value != -1:
                raise Refusal("not supported offset type")
            return log.end_offset, log.end_count
        if not clustered:
            raise Refusal("Not supported while coordinator disabled")
        nanoseconds = self.value * 1_000_000_000
        if self.kind == "timestamp" and (nanoseconds + (1 << 63)) % (1 << 64) < 1 << 63:
            # the real server refuses seconds that are negative in 64 bits of nanoseconds
            raise Refusal(f"Invalid timestamp {self.value}")
        if self.kind != "timestamp" and -(-self.value // _SEGMENT) < -1:
            raise Refusal("search commit log data not found")
        if log.end_count == log.start_count:
            raise Refusal("commit log end of file")
        if self.kind == "timestamp":
            offset = log.find_timestamp(nanoseconds)
        elif self.kind == "msgcount":
            offset = log.find_count(max(self.value - 1, 0))
        else:
            offset = log.find_offset(max(self.value, log.start_offset))
        return offset, log.count_before(offset)


AT_END = StartPosition("special", -1)
