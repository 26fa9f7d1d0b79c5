"""Offsets, ranges and how they are shared out."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import InvalidInput, InvalidSetting
from nsqext.spark.read.offsets import (
    EARLIEST,
    LATEST,
    Offsets,
    Places,
    Range,
    dump,
    load,
    parse_ending,
    parse_starting,
    split,
)

counts = st.integers(min_value=0, max_value=2**63)
offsets = st.dictionaries(
    st.sampled_from(["a", "orders.x", "t_1"]), st.dictionaries(st.integers(min_value=0, max_value=254), counts)
)


@given(offsets)
def test_offsets_survive_json(found: Offsets) -> None:
    data = dump(found)
    assert load(data) == found
    assert load(json.dumps(data)) == found
    assert json.loads(json.dumps(data)) == data


def test_the_json_is_the_documented_one_in_a_fixed_order() -> None:
    text = '{"v": 1, "topics": {"a": {"2": 0, "10": 7}, "b": {}}}'
    assert json.dumps(dump({"b": {}, "a": {10: 7, 2: 0}})) == text


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
def test_what_are_no_offsets(data: Any) -> None:
    with pytest.raises(InvalidInput, match="no offsets of this source"):
        load(data)


def test_offsets_of_a_newer_version() -> None:
    with pytest.raises(InvalidInput, match="version 2, this package reads version 1"):
        load({"v": 2, "topics": {}})


def test_ranges() -> None:
    found = Range("t", 1, 5, 9)
    assert (len(found), str(found)) == (4, "t[1] 5..9")
    assert pickle.loads(pickle.dumps(found)) == found  # noqa: S301
    for start, end in ((-1, 3), (4, 3)):
        with pytest.raises(InvalidInput, match="no range"):
            Range("t", 1, start, end)


def test_words_for_places() -> None:
    assert parse_starting(" Earliest ").of("t", 3) == EARLIEST
    assert parse_starting("latest").of("t", 3) == LATEST
    assert parse_ending("latest").of("t", 3) == LATEST


def test_places_by_partition() -> None:
    places = parse_starting('{"t": {"0": 23, "1": -1, "2": -2}}')
    assert [places.of("t", partition) for partition in range(3)] == [23, LATEST, EARLIEST]
    with pytest.raises(InvalidSetting, match=r"startingOffsets says nothing .*topic t, partition 3"):
        places.of("t", 3)
    with pytest.raises(InvalidSetting, match=r"names a partition that is not read \(topic t, partition 2\)"):
        places.check({"t": [0, 1]})
    places.check({"t": [0, 1, 2], "u": [0]})
    assert parse_starting(json.dumps(dump({"t": {0: 4}}))) == Places("startingOffsets", None, {"t": {0: 4}})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "it is not JSON"),
        ("first", "it is not JSON"),
        ("7", "it names no topics"),
        ("[1]", "it names no topics"),
        ('{"t": 3}', "topic 't' has no offsets by partition"),
        ('{"t": [3]}', "topic 't' has no offsets by partition"),
        ('{"t": {"x": 3}}', "'x' is no partition"),
        ('{"t": {"1_0": 3}}', "'1_0' is no partition"),
        ('{"t": {"9999": 3}}', "'9999' is no partition"),
        ('{"t": {"0": -3}}', "-3 is no offset"),
        ('{"t": {"0": "4"}}', "'4' is no offset"),
        ('{"v": 9, "topics": {}}', "these offsets are of version 9"),
    ],
)
def test_places_that_cannot_be_read(text: str, told: str) -> None:
    with pytest.raises(InvalidSetting, match="startingOffsets=") as caught:
        parse_starting(text)
    assert told in str(caught.value)


@pytest.mark.parametrize("text", ["earliest", '{"t": {"0": -2}}'])
def test_nothing_ends_at_the_beginning(text: str) -> None:
    with pytest.raises(InvalidSetting, match="endingOffsets cannot be earliest"):
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


@given(ranges, limits, limits)
def test_pieces_cover_the_ranges_once(given: list[Range], least: int | None, most: int | None) -> None:
    pieces = split(given, least, most)
    numbers = [(piece.partition, number) for piece in pieces for number in range(piece.start, piece.end)]
    assert numbers == [(found.partition, number) for found in given for number in range(found.start, found.end)]
    assert all(pieces), "an empty piece"
    if most is not None:
        assert all(len(piece) <= most for piece in pieces)
    if least is not None:
        assert len(pieces) >= min(least, len(numbers))
    elif most is None:
        assert len(pieces) == sum(1 for found in given if len(found))
    assert pieces == split(given, least, most)


def test_larger_ranges_are_cut_more() -> None:
    pieces = split([Range("t", 0, 0, 90), Range("t", 1, 10, 20)], 4)
    assert pieces == [Range("t", 0, 0, 30), Range("t", 0, 30, 60), Range("t", 0, 60, 90), Range("t", 1, 10, 20)]


def test_limits_that_are_none() -> None:
    with pytest.raises(InvalidSetting, match="minPartitions=0"):
        split([], 0)
    with pytest.raises(InvalidSetting, match="maxRecordsPerPartition=-1"):
        split([], None, -1)
