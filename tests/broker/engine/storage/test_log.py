"""The queue of a partition: positions, search, trim."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.broker.engine.storage.log import ENTRY_COST, Log, LogEntry, MemoryBudget
from nsqext.protocol.record import Record, raw_size

SECOND = 1_000_000_000


def entries_for(log: Log, sizes: Sequence[int], timestamp: int = 0) -> list[LogEntry]:
    offset, count = log.end_offset, log.end_count
    made = []
    for size in sizes:
        count += 1
        record = Record(timestamp + count, count + 1, 0, b"x" * size)
        made.append(LogEntry(record, offset, raw_size(size, 0, False), count))
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
        self.entries: list[LogEntry] = []
        self.loads = 0

    def append(self, entries: Sequence[LogEntry]) -> None:
        self.entries += entries

    def load(self, first: tuple[int, int], end: int) -> list[LogEntry]:
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


def gapped() -> Log:
    """Return messages 1 to 14, two per segment, without 6 and 7, and without 10."""
    log = filled([1], [2, 3, 4], [5], segment_bytes=600)
    for missing, batches in ((2, [[6, 7]]), (1, [[8, 9, 10], [11]])):
        log.append_gap(log.end_offset + 40 * missing, log.end_count + missing)
        for batch in batches:
            log.append(entries_for(log, batch))
    return log


@pytest.mark.parametrize("trimmed", [0, 1, 2, 3, 5, 8, 11, 14])
def test_searches_find_what_a_look_at_every_message_finds(trimmed: int) -> None:
    log = gapped()
    log.trim(log.find_count(trimmed))
    messages = [entry for entry in map(log.at, range(16)) if entry is not None]
    counts = [entry.count for entry in messages]
    publishes = [range(2, 5), range(8, 10), range(11, 14)]
    assert counts == [count for count in range(log.start_count + 1, 15) if count not in (6, 7, 10)]
    assert [count for count in range(16) if log.gap_at(count)] == [
        count for count in (6, 7, 10) if count > log.start_count
    ]
    assert log.whole_count == next((gap - 1 for gap in (6, 10) if gap > log.start_count), 14)
    for offset in range(log.end_offset + 2):
        found = next((entry for entry in messages if entry.offset >= offset), None)
        assert log.read(offset) is found
        assert log.find_offset(offset) == (found.offset if found else log.end_offset)
        assert log.count_before(offset) == (found.count - 1 if found else 14)
    for number in range(17):
        found = next((entry for entry in messages if entry.count > number), None)
        assert log.find_count(number) == (found.offset if found else log.end_offset)
        found = next((entry for entry in messages if entry.record.timestamp >= number), None)
        assert log.find_timestamp(number) == (found.offset if found else log.end_offset)
        count = max((entry.count for entry in messages if entry.record.internal_id <= number), default=counts[0])
        publish = next((publish for publish in publishes if count in publish), [count])
        assert log.find_id(number) is log.at(next(count for count in publish if count > log.start_count))


def test_the_first_message_of_a_publish_is_found_as_long_as_the_publish_is_known() -> None:
    def found(log: Log) -> list[int]:
        entries = (log.find_id(internal_id) for internal_id in range(2, log.end_count + 2))
        return [entry.count for entry in entries if entry is not None]

    log, copied, stored = filled([1, 2], [3, 4]), Log(), Log()
    entries = [entry for entry in map(log.at, range(5)) if entry is not None]
    copied.append_runs(entries[:2])
    copied.append_runs(entries[2:])
    stored.append(entries, stored=True)
    assert (found(log), found(copied), found(stored)) == ([1, 1, 3, 3], [1, 1, 3, 3], [1, 2, 3, 4])
    log.truncate(entries[2].offset)
    assert found(log) == [1, 1]
    log.truncate(entries[1].offset)
    log.append(entries[1:])
    assert found(log) == [1, 2, 2, 2]
    log.restart(0, 0)
    for entry in entries:
        log.append([entry])
    assert found(log) == [1, 2, 3, 4]


def test_a_gap_before_the_first_record_moves_the_begin() -> None:
    log = Log()
    log.append_gap(100, 3)
    assert (log.start_offset, log.start_count, log.end_offset, log.end_count) == (100, 3, 100, 3)
    log.append(entries_for(log, [5]))
    log.append_gap(400, 9)
    assert (log.start_count, log.end_offset, log.end_count, log.whole_count) == (3, 400, 9, 4)


@pytest.mark.parametrize(
    ("before", "end", "held"),
    [
        (14, 14, 11),
        (13, 13, 10),
        (11, 11, 8),
        (10, 9, 7),
        (9, 9, 7),
        (8, 8, 6),
        (7, 5, 5),
        (5, 5, 5),
        (2, 2, 2),
        (0, 0, 0),
    ],
)
def test_a_log_is_cut_off_before_a_gap_if_nothing_is_left_behind_it(before: int, end: int, held: int) -> None:
    log = gapped()
    log.truncate(log.find_count(before))
    messages = [entry for entry in map(log.at, range(16)) if entry is not None]
    assert (log.end_count, len(messages)) == (end, held)
    assert log.end_offset == (messages[-1].offset + messages[-1].size if messages else 0)
    assert log.held == sum(entry.size + ENTRY_COST for entry in messages)


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
    every: dict[int, LogEntry | None] = {}
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


@pytest.mark.parametrize("finished", range(9))
def test_as_many_segments_are_removed_as_end_before_an_offset(finished: int) -> None:
    budget, kept = MemoryBudget(), Kept()
    log = Log(kept, segment_bytes=600, budget=budget)  # two records per segment
    for _ in range(8):
        log.append(entries_for(log, [10]))
    log.trim(log.find_count(finished))
    left = 8 - min(finished // 2 * 2, 6)
    assert (log.start_count, log.start_offset) == (8 - left, 40 * (8 - left))
    assert len(kept.entries) == left
    assert log.held == budget.held == left * (40 + ENTRY_COST)
    log.release()
    assert budget.held == 0


def test_publishes_that_are_removed_take_no_memory() -> None:
    log = filled(*[[1, 1]] * 100)
    log.trim(log.end_offset)
    assert len(log._batches) <= 1 + (log.end_count - log.start_count) / 2


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


def test_the_oldest_segments_leave_the_memory_until_the_bound_is_kept() -> None:
    kept = Kept()
    log = Log(kept, segment_bytes=600)  # two records per segment
    for _ in range(10):
        log.append(entries_for(log, [10]))
    segment = 2 * (40 + ENTRY_COST)

    def loaded(count: int) -> bool:
        """Return whether a record is read from the store."""
        before = kept.loads
        assert log.at(count) is not None
        return kept.loads > before

    assert not loaded(10)
    for bound, held in ((6 * segment, 5), (4 * segment, 4), (3 * segment - 1, 2), (segment, 1), (1, 1), (0, 0)):
        log.shrink(bound)
        assert log.held == held * segment
    assert log.read(log.end_offset) is None
    assert log.held == 0
    assert [loaded(count) for count in (10, 9, 2, 1)] == [True, False, True, False]
    log.shrink(1)
    assert log.held == 2 * segment, "the last segment, and the one that was read last"
    assert [loaded(count) for count in (1, 10)] == [False, False]


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
    kept = Kept()
    log = Log(kept)
    log.append(entries_for(log, [1, 2, 3]))
    log.restart(1000, 20)
    assert kept.entries == []
    assert (log.start_offset, log.end_offset, log.start_count, log.end_count, log.held) == (1000, 1000, 20, 20, 0)
    log.append(entries_for(log, [4]))
    assert log.at(21) is log.read(0)
