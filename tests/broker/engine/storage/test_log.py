"""The queue of a partition: positions, search, trim."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.broker.engine.storage.log import Entry, Log
from nsqext.protocol.record import Record, raw_size

SECOND = 1_000_000_000


def entries_for(log: Log, sizes: Sequence[int], timestamp: int = 0) -> list[Entry]:
    offset, count = log.end_offset, log.end_count
    made = []
    for size in sizes:
        count += 1
        record = Record(timestamp + count, count + 1, 0, b"x" * size)
        made.append(Entry(record, offset, raw_size(size, 0, False), count))
        offset += made[-1].size
    return made


def filled(*batches: Sequence[int], segment_bytes: int = 2000) -> Log:
    log = Log(segment_bytes=segment_bytes)
    for batch in batches:
        log.append(entries_for(log, batch))
    return log


class Kept:
    """A store in a list."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.loads = 0

    def append(self, entries: Sequence[Entry]) -> None:
        self.entries += entries

    def load(self, first: tuple[int, int], end: int) -> list[Entry]:
        self.loads += 1
        return [entry for entry in self.entries if first[0] <= entry.offset < end]

    def trim(self, offset: int) -> None:
        self.entries = [entry for entry in self.entries if entry.offset >= offset]

    def truncate(self, offset: int) -> None:
        self.entries = [entry for entry in self.entries if entry.offset < offset]

    def restart(self, offset: int, count: int) -> None:
        self.entries = []


def test_positions_of_records() -> None:
    log = filled([1, 10], [5])
    assert [log.read(offset).offset for offset in (0, 31, 71)] == [0, 31, 71]  # type: ignore[union-attr]
    assert log.read(32).offset == 71  # type: ignore[union-attr]
    assert log.read(106) is None
    assert (log.end_offset, log.end_count) == (106, 3)
    assert [log.find_offset(offset) for offset in (0, 1, 31, 100, 999)] == [0, 31, 31, 106, 106]
    assert [log.find_count(before) for before in (0, 1, 2, 3, 9)] == [0, 31, 71, 106, 106]
    assert [log.count_before(offset) for offset in (0, 31, 106)] == [0, 1, 3]


def test_find_by_time() -> None:
    log = Log(segment_bytes=200)
    for second in range(10):
        log.append(entries_for(log, [1, 1], second * SECOND))
    first = log.find_timestamp(4 * SECOND)
    entry = log.read(first)
    assert entry is not None
    assert entry.count == 9
    assert log.find_timestamp(0) == 0
    assert log.find_timestamp(99 * SECOND) == log.end_offset


def test_find_by_id_returns_the_first_message_of_the_publish() -> None:
    log = filled([2, 2, 2, 2], [2], [2])
    found = [log.find_id(internal_id) for internal_id in range(9)]
    ids = [entry.record.internal_id for entry in found if entry is not None]
    assert ids == [2, 2, 2, 2, 2, 2, 6, 7, 7]
    assert Log().find_id(2) is None


@given(st.lists(st.lists(st.integers(1, 900), min_size=1, max_size=6), min_size=1, max_size=30), st.data())
def test_every_record_is_found_by_every_key(batches: list[list[int]], data: st.DataObject) -> None:
    log = filled(*batches)
    log.trim(data.draw(st.integers(0, log.end_offset)))
    offset = log.start_offset
    for count in range(log.start_count + 1, log.end_count + 1):
        entry = log.at(count)
        assert entry is not None
        assert (entry.offset, entry.count) == (offset, count)
        assert log.read(offset) is entry
        assert log.read(max(offset - 1, 0)) is entry
        offset += entry.size
    assert offset == log.end_offset
    assert log.at(log.start_count) is None
    assert log.at(log.end_count + 1) is None


@given(st.lists(st.integers(1, 900), min_size=1, max_size=40), st.integers(0, 40))
def test_truncate_keeps_earlier_records(sizes: list[int], keep: int) -> None:
    log = filled(*[[size] for size in sizes])
    keep = min(keep, len(sizes))
    log.truncate(log.find_count(keep))
    assert log.end_count == keep
    log.append(entries_for(log, [7]))
    last = log.at(keep + 1)
    assert last is not None
    assert last.offset + last.size == log.end_offset


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=5))
def test_runs_of_another_log_are_copied_with_their_gaps(runs: list[tuple[int, int]]) -> None:
    source, copied = Log(segment_bytes=2000), Log(segment_bytes=2000)
    every: dict[int, Entry | None] = {}
    for missing, size in runs:
        if missing:
            every |= dict.fromkeys(range(source.end_count + 1, source.end_count + missing + 1))
            source.append_gap(source.end_offset + 100 * missing, source.end_count + missing)
        made = entries_for(source, [10] * size)
        source.append(made)
        every |= {entry.count: entry for entry in made}
    copied.append_runs([entry for entry in every.values() if entry is not None])
    assert {count: copied.at(count) for count in every} == every
    assert (copied.end_offset, copied.end_count) == (source.end_offset, source.end_count)


def test_trim_removes_whole_segments() -> None:
    log = filled(*[[500]] * 40)
    held = log.held
    log.trim(log.find_count(39))
    assert 0 < log.start_count < 39
    assert log.held < held / 4
    assert log.read(0) is log.at(log.start_count + 1)


def test_segments_leave_memory_and_are_loaded_again() -> None:
    kept = Kept()
    log = Log(kept, segment_bytes=2000)
    for _ in range(40):
        log.append(entries_for(log, [500]))
    log.shrink(4000)
    assert log.held <= 6000
    assert [log.at(count).count for count in range(1, 41)] == list(range(1, 41))  # type: ignore[union-attr]
    assert kept.loads > 5
    log.truncate(log.find_count(3))
    assert (log.end_count, len(kept.entries)) == (3, 3)


def test_truncated_memory_is_counted_once() -> None:
    log = Log(Kept(), segment_bytes=2000)
    for _ in range(40):
        log.append(entries_for(log, [500]))
    log.shrink(0)
    log.truncate(log.find_count(5))
    held = log.held
    log.shrink(0)
    assert [log.at(count) is None for count in (5, 6)] == [False, True]
    log.truncate(0)
    assert (held > 0, log.held) == (True, 0)


def test_a_log_alone_keeps_its_memory() -> None:
    log = filled(*[[500]] * 40)
    held = log.held
    log.shrink(0)
    assert log.held == held


def test_restart_continues_at_another_position() -> None:
    log = filled([1, 2, 3])
    log.restart(1000, 20)
    assert (log.start_offset, log.end_offset, log.start_count, log.end_count, log.held) == (1000, 1000, 20, 20, 0)
    log.append(entries_for(log, [4]))
    assert log.at(21) is log.read(0)


@pytest.mark.parametrize("count", [0, 1, 99])
def test_an_empty_log(count: int) -> None:
    log = Log()
    assert log.at(count) is None
    assert log.read(count) is None
    assert log.find_count(count) == log.find_offset(count) == log.find_timestamp(count) == 0
