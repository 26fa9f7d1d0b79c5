"""The records of a damaged file: which are found, where, and how many are lost."""

from __future__ import annotations

import pytest

from nsqext.broker.engine.storage.recovery import Recovery, scan
from nsqext.protocol.record import COUNTER_BITS, Record, encode_record

PARTITION = 3
BODY = 170
SIZE = 200
JUNK = b"\xff" * SIZE
Found = list[tuple[int, int, list[int]]]


def record(counter: int, body: bytes = b"x" * BODY, *, partition: int = PARTITION, trace_id: int = 0) -> bytes:
    return encode_record(Record(1, partition << COUNTER_BITS | counter, trace_id, body))


def with_length(counter: int, more: int) -> bytes:
    """Return a record whose length is wrong by a number of bytes."""
    data = record(counter)
    return (SIZE - 4 + more).to_bytes(4, "big") + data[4:]


def found(data: bytes, start: tuple[int, int] = (0, 0), partition: int = PARTITION) -> tuple[Found, int]:
    """Return position, messages before it and counters of each run, and the position behind the last record."""
    runs, end = scan(data, start, partition)
    at = [(entry.offset, entry.size, entry.count) for run in runs for entry in run.entries]
    follows = [
        (
            start[0] + run.position + sum(entry.size for entry in run.entries[:number]),
            entry.size,
            run.count + number + 1,
        )
        for run in runs
        for number, entry in enumerate(run.entries)
    ]
    assert at == follows, "records of a run are adjacent"
    mask = (1 << COUNTER_BITS) - 1
    return [(run.position, run.count, [one.record.internal_id & mask for one in run.entries]) for run in runs], end


@pytest.mark.parametrize(
    ("parts", "runs"),
    [
        pytest.param([1, 2, 4], [(0, 0, [1, 2, 4])], id="whole"),
        pytest.param([JUNK, 3, 4], [(SIZE, 1, [3, 4])], id="the first one is damaged"),
        pytest.param([JUNK, JUNK, JUNK, 5, 6], [(3 * SIZE, 3, [5, 6])], id="the first three are damaged"),
        pytest.param([2, JUNK, 4], [(0, 0, [2]), (2 * SIZE, 2, [4])], id="one is damaged"),
        pytest.param([2, 3, JUNK, JUNK, 6], [(0, 0, [2, 3]), (4 * SIZE, 4, [6])], id="two are damaged"),
        pytest.param(
            [2, JUNK, 4, JUNK, 6, 7],
            [(0, 0, [2]), (2 * SIZE, 2, [4]), (4 * SIZE, 4, [6, 7])],
            id="one is whole between damaged ones",
        ),
        pytest.param([2, JUNK[:30], 90, 91], [(0, 0, [2]), (230, 2, [90, 91])], id="room for one"),
        pytest.param([2, JUNK[:70], 90, 91], [(0, 0, [2]), (270, 3, [90, 91])], id="room for two"),
        pytest.param([2, JUNK[:9], 90, 91], [(0, 0, [2]), (209, 2, [90, 91])], id="at least one is lost"),
        pytest.param([2, 3, JUNK, 90, JUNK, 92, 93], [(0, 0, [2, 3]), (1000, 22, [92, 93])], id="far and not followed"),
        pytest.param([2, 3, JUNK, 90], [(0, 0, [2, 3]), (600, 8, [90])], id="far, at the end"),
        pytest.param([2, 3, JUNK, 18, JUNK, 20], [(0, 0, [2, 3]), (600, 8, [18]), (1000, 10, [20])], id="near"),
        pytest.param([2, 3, JUNK, 19, JUNK, 21], [(0, 0, [2, 3]), (1000, 19, [21])], id="not near"),
        pytest.param([2, with_length(3, 9), 4, 5], [(0, 0, [2]), (400, 2, [4, 5])], id="too long"),
        pytest.param([2, with_length(3, -9), 4, 5], [(0, 0, [2]), (400, 2, [4, 5])], id="too short"),
        pytest.param([with_length(2, -9), 3, 4], [(200, 1, [3, 4])], id="the first one is too short"),
        pytest.param(
            [2, 3, with_length(4, 209), JUNK, 6, 7], [(0, 0, [2, 3]), (800, 4, [6, 7])], id="over two records"
        ),
        pytest.param([2, 3, 3, 4, 5], [(0, 0, [2]), (400, 2, [3, 4, 5])], id="the same id twice"),
        pytest.param([2, 3, 3000, 5, 6], [(0, 0, [2, 3]), (600, 3, [5, 6])], id="an id that is too large"),
        pytest.param([0, 3, 4], [(200, 1, [3, 4])], id="a counter of 0"),
        pytest.param([2, record(3, partition=4), 4], [(0, 0, [2]), (400, 2, [4])], id="a larger partition"),
        pytest.param([2, record(3, partition=2), 4], [(0, 0, [2]), (400, 2, [4])], id="a smaller partition"),
        pytest.param([2, record(1 << 49), 4, 5], [(0, 0, [2]), (400, 2, [4, 5])], id="an id far away"),
        pytest.param(
            [2, JUNK, 1 << 40, (1 << 40) + 1], [(0, 0, [2]), (400, 7, [1 << 40, (1 << 40) + 1])], id="far ids"
        ),
        pytest.param(
            [1000, 1001, JUNK, 500, 501, 1004],
            [(0, 0, [1000, 1001]), (1000, 4, [1004])],
            id="old records in the damage",
        ),
        pytest.param(
            [2, record(3, trace_id=3 << COUNTER_BITS | 4), JUNK, 5], [(0, 0, [2, 3]), (600, 3, [5])], id="trace"
        ),
    ],
)
def test_records_in_damaged_bytes(parts: list[int | bytes], runs: Found) -> None:
    data = b"".join(part if isinstance(part, bytes) else record(part) for part in parts)
    assert found(data) == (runs, len(data))
    assert found(data, (5000, 0)) == (runs, len(data))


def test_lost_messages_are_counted_from_where_the_file_begins() -> None:
    data = JUNK + JUNK + record(14) + record(15)
    assert found(data, (5000, 10)) == ([(400, 12, [14, 15])], 800)
    assert found(JUNK + record(14), (5000, 2)) == ([(200, 8, [14])], 400), "no more than had room"


@pytest.mark.parametrize("zeros", range(60, 64))
def test_a_record_is_found_behind_any_number_of_zeros(zeros: int) -> None:
    records = [record(counter, partition=0) for counter in (2, 4, 5)]
    data = records[0] + bytes(zeros) + records[1] + records[2]
    assert found(data, partition=0) == ([(0, 0, [2]), (SIZE + zeros, 2, [4, 5])], len(data))


@pytest.mark.parametrize("torn", [1, 29, 199])
def test_a_torn_record_ends_the_file(torn: int) -> None:
    assert found(record(2) + JUNK + record(4) + record(5)[:torn]) == ([(0, 0, [2]), (400, 2, [4])], 600)


@pytest.mark.parametrize("data", [b"", JUNK, record(2)[:-1], record(2, partition=4)])
def test_a_file_without_a_whole_record_is_empty(data: bytes) -> None:
    assert found(data, (5000, 100)) == ([], 0)


def test_each_kind_of_damage_is_damage() -> None:
    found = [Recovery(), Recovery(torn_file="a", torn_bytes=1), Recovery(damaged_files=["a"])]
    found += [Recovery(lost_bytes=1), Recovery(lost_messages=1)]
    assert [recovery.is_damaged for recovery in found] == [False, False, True, True, True]
