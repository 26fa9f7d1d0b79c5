"""Offsets, ranges and how they are shared out."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import InvalidInput, InvalidSetting
from nsqext.partitions import MessagePosition
from nsqext.protocol.names import MAX_PARTITION
from nsqext.spark.cluster.admin import Bounds
from nsqext.spark.read.offsets import (
    EARLIEST,
    LATEST,
    Offsets,
    Range,
    RangeLimit,
    dump,
    load,
    parse_ending,
    parse_starting,
    parse_time,
    parse_times,
    plan_tasks,
)
from nsqext.spark.read.stream_planner import dump_last, load_last

counts = st.integers(min_value=0, max_value=2**63)
keys = st.tuples(st.sampled_from(["a", "orders.x", "t_1"]), st.integers(min_value=0, max_value=254))
offsets = st.dictionaries(keys, counts)


@given(offsets)
def test_offsets_survive_json(found: Offsets) -> None:
    data = dump(found)
    assert load(data) == found
    assert load(json.dumps(data)) == found
    assert json.loads(json.dumps(data)) == data


def test_the_json_is_the_documented_one_in_a_fixed_order() -> None:
    text = '{"v": 1, "topics": {"a": {"2": 7, "10": 0}, "b": {"0": 1}}}'
    assert json.dumps(dump({("b", 0): 1, ("a", 10): 0, ("a", 2): 7})) == text


@pytest.mark.parametrize(
    "data",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"v": 1}',
        {"topics": {}},
        {"v": 1, "topics": []},
        {"v": 1, "topics": {"t": []}},
        {"v": 1, "topics": {"t": {"x": 1}}},
        {"v": 1, "topics": {"t": {"-1": 1}}},
        {"v": 1, "topics": {"t": {"0": -1}}},
        {"v": 1, "topics": {"t": {"0": True}}},
        {"v": 1, "topics": {"t": {"0": 1.5}}},
        {"v": 1, "topics": {"": {"0": 1}}},
    ],
)
def test_invalid_offsets(data: Any) -> None:
    with pytest.raises(InvalidInput, match="not offsets of this source"):
        load(data)


def test_offsets_of_a_newer_version() -> None:
    with pytest.raises(InvalidInput, match="version 2; this package reads version 1"):
        load({"v": 2, "topics": {}})


def test_ranges() -> None:
    found = Range("t", 1, 5, 9)
    assert (len(found), str(found)) == (4, "t[1] 5..9")
    assert pickle.loads(pickle.dumps(found)) == found  # noqa: S301
    for start, end in ((-1, 3), (4, 3)):
        with pytest.raises(InvalidInput, match="not a range"):
            Range("t", 1, start, end)


def test_names_of_positions() -> None:
    assert parse_starting("Earliest").of("t", 3) == EARLIEST
    assert parse_starting("latest").of("t", 3) == LATEST
    assert parse_ending("latest").of("t", 3) == LATEST


def test_positions_by_partition() -> None:
    places = evolve(parse_starting('{"t": {"0": 23, "1": -1, "2": -2}}'), option="startingOffsets")
    assert [places.of("t", partition) for partition in range(3)] == [23, LATEST, EARLIEST]
    assert parse_starting(f'{{"t": {{"{MAX_PARTITION}": 0}}}}').named == {("t", MAX_PARTITION): 0}
    with pytest.raises(InvalidSetting, match=r"startingOffsets has no offset .*topic t, partition 3"):
        places.of("t", 3)
    with pytest.raises(InvalidSetting, match=r"names a partition that is not read \(topic t, partition 2\)"):
        places.check({"t": [0, 1]})
    places.check({"t": [0, 1, 2], "u": [0]})
    assert parse_starting(json.dumps(dump({("t", 0): 4}))) == RangeLimit(None, {("t", 0): 4})
    assert parse_starting('{"topics": {"0": 4}}') == RangeLimit(None, {("topics", 0): 4}), "a topic has this name"


def test_positions_by_topic() -> None:
    places = evolve(parse_starting('{"t": "eArLiEst", "u": {"0": 23}, "w": "latest"}'), option="startingOffsets")
    assert [places.of("t", 5), places.of("u", 0), places.of("w", 1)] == [EARLIEST, 23, LATEST]
    assert (places.is_latest, places.is_earliest) == (True, True)
    places.check({"t": [0, 1], "u": [0], "w": [0]})
    with pytest.raises(InvalidSetting, match=r"names a topic that is not read \(topic w\)"):
        places.check({"t": [0], "u": [0]})
    with pytest.raises(InvalidSetting, match=r"has no offset .*topic u, partition 1"):
        places.of("u", 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "it is not JSON"),
        ("first", "it is not JSON"),
        ("7", "it is not an object of topics"),
        ("[1]", "it is not an object of topics"),
        ('{"t": 3}', "topic 't' has no offsets by partition"),
        ('{"t": [3]}', "topic 't' has no offsets by partition"),
        ('{"t": "first"}', "topic 't' has no offsets by partition"),
        ('{"t": {"x": 3}}', "'x' is not a partition"),
        ('{"t": {"1_0": 3}}', "'1_0' is not a partition"),
        ('{"t": {"1024": 3}}', "'1024' is not a partition"),
        ('{"t": {"0": -3}}', "-3 is not a valid number"),
        ('{"t": {"0": "4"}}', "'4' is not a valid number"),
        ('{"v": 9, "topics": {}}', "the offsets have version 9"),
    ],
)
def test_offsets_that_are_invalid(text: str, expected: str) -> None:
    with pytest.raises(InvalidSetting, match="write earliest, latest, or JSON") as caught:
        parse_starting(text)
    assert expected in str(caught.value)


@pytest.mark.parametrize("text", ["earliest", '{"t": {"0": -2}}', '{"t": "earliest"}'])
def test_nothing_ends_at_the_beginning(text: str) -> None:
    with pytest.raises(InvalidSetting, match="it cannot be earliest"):
        parse_ending(text)


ranges = st.lists(
    st.builds(
        lambda partition, start, size: Range("t", partition, start, start + size),
        st.integers(min_value=0, max_value=9),
        st.integers(min_value=0, max_value=100),
        st.integers(min_value=0, max_value=60),
    ),
    max_size=6,
)
limits = st.none() | st.integers(min_value=1, max_value=80)


@given(ranges, st.integers(min_value=1, max_value=80), limits, limits, limits)
def test_tasks_cover_the_ranges_once(
    given: list[Range], worth: int, highest: int | None, least: int | None, most: int | None
) -> None:
    tasks = plan_tasks(given, min_messages=worth, max_tasks=highest, min_tasks=least, max_records=most)
    numbers = [
        (piece.partition, number) for task in tasks for piece in task for number in range(piece.start, piece.end)
    ]
    assert numbers == [(found.partition, number) for found in given for number in range(found.start, found.end)]
    assert all(len(piece) for task in tasks for piece in task), "an empty range"
    sizes = [sum(map(len, task)) for task in tasks]
    if most is not None:
        assert all(size <= most for size in sizes)
    if least is not None:
        assert len(tasks) >= min(least, len(numbers))
    if highest is not None and least is None and most is None:
        assert len(tasks) <= highest
    if sizes:
        assert max(sizes) - min(sizes) <= 1, "tasks are of equal size"
    assert tasks == plan_tasks(given, min_messages=worth, max_tasks=highest, min_tasks=least, max_records=most)


def test_small_partitions_share_a_task_and_large_ones_are_split() -> None:
    small = [Range("t", partition, 0, 500) for partition in range(254)]
    assert len(plan_tasks(small, min_messages=20_000, max_tasks=256)) == 7
    assert len(plan_tasks([Range("t", 0, 0, 1000), Range("t", 1, 0, 500_000)], min_messages=20_000)) == 26
    assert plan_tasks([Range("t", 0, 7, 7)]) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x", "it is not JSON"),
        ("[]", "it is not an object of topics"),
        ('{"t": {"0": -2}}', "-2 is not a valid number"),
    ],
)
def test_times_that_are_invalid(text: str, expected: str) -> None:
    with pytest.raises(InvalidSetting, match="milliseconds since 1970") as caught:
        parse_times(text)
    assert expected in str(caught.value)


def test_times() -> None:
    times = parse_times('{"t": {"0": 5, "3": 1700000000000}}')
    assert [times.of("t", partition) for partition in (0, 3)] == [5, 1_700_000_000_000]
    assert parse_times('{"t": {"0": 0}}').time_of(("t", 0)) == parse_time("0").time_of(("t", 0)) == 0
    with pytest.raises(InvalidSetting, match="has no time for this partition") as caught:
        times.of("t", 1)
    assert "-2" not in str(caught.value)


LAST = {("orders", 0): MessagePosition(4, 77, 0, 1_700_000_000_123_456_789)}


def test_the_last_messages_of_a_checkpoint() -> None:
    stored = {**dump({("orders", 0): 5, ("orders", 1): 0}), **dump_last(LAST)}
    text = json.dumps(stored)
    assert json.loads(text)["last"] == {
        "orders": {"0": {"id": 77, "offset": 0, "timestamp": LAST["orders", 0].timestamp}}
    }
    offsets = load(text)
    assert offsets == {("orders", 0): 5, ("orders", 1): 0}
    assert load_last(json.loads(text), offsets) == LAST


def test_a_checkpoint_without_last_messages_is_read() -> None:
    old = {"v": 1, "topics": {"orders": {"0": 5}}}
    assert load_last(old, load(old)) == {}
    assert dump_last({}) == {}


@pytest.mark.parametrize(
    "last",
    [
        5,
        {"orders": 5},
        {"orders": {"0": 5}},
        {"orders": {"0": {"id": 1}}},
        {"orders": {"0": {"id": -1, "offset": 0, "timestamp": 0}}},
    ],
)
def test_last_messages_of_another_form_are_refused(last: object) -> None:
    with pytest.raises(InvalidInput, match="the member last is invalid"):
        load_last({"v": 1, "topics": {"orders": {"0": 5}}, "last": last}, {("orders", 0): 5})


def test_the_limit_of_a_task_is_kept_although_there_are_more_tasks_than_wanted() -> None:
    tasks = plan_tasks([Range("t", 0, 0, 100)], max_tasks=2, max_records=10)
    assert [sum(map(len, task)) for task in tasks] == [10] * 10


def test_an_end_before_the_first_retained_message_leaves_nothing() -> None:
    assert parse_ending('{"t": {"0": 3}}').last_count(("t", 0), Bounds(10, 50, 500)) == 10
