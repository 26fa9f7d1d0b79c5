"""Batches of streaming queries as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.errors import DataLoss
from nsqext.spark.read.offsets import Key, Offsets, Range
from nsqext.spark.read.planning import (
    PartitionState,
    frozen_at,
    lags_of,
    only,
    plan_end,
    plan_ranges,
    share,
    with_unread,
)
from nsqext.spark.read.stream_planner import within_rows

KEYS = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3))
LAGS = st.dictionaries(KEYS, st.integers(0, 10**6), max_size=8)
SMALL_LAGS = st.dictionaries(KEYS, st.integers(0, 20), min_size=1, max_size=8)
LIMITS = st.none() | st.integers(1, 50)


@st.composite
def standings(draw: st.DrawFn) -> dict[Key, PartitionState]:
    """Partitions in good order: all that was published is there, and the anchor stands."""
    ends = draw(st.dictionaries(KEYS, st.integers(0, 100), max_size=8))
    return {key: PartitionState(0, end, 0) for key, end in ends.items()}


def offsets_of(found: Mapping[Key, PartitionState], portion: float) -> Offsets:
    """Part of the way through all partitions."""
    return {key: int(standing.end * portion) for key, standing in found.items()}


def end_of(
    start: Offsets, found: Mapping[Key, PartitionState], limit: int | None = None, *, strict: bool = True
) -> Offsets:
    lags = lags_of(start, found, fail_on_data_loss=strict)
    return plan_end(lags, within_rows(lags, limit))


@given(LAGS, LIMITS)
def test_shares_add_up_to_the_limit_or_the_lag(lags: dict[Key, int], limit: int | None) -> None:
    shares = share(lags, limit)
    assert shares.keys() == lags.keys()
    assert all(0 <= shares[key] <= lags[key] for key in lags)
    assert sum(shares.values()) == min(sum(lags.values()), sum(lags.values()) if limit is None else limit)


@given(LAGS.filter(lambda lags: sum(map(bool, lags.values())) > 0), st.integers(8, 10**5))
def test_every_lagging_partition_gets_a_share(lags: dict[Key, int], limit: int) -> None:
    shares = share(lags, limit)
    assert all(shares[key] for key, lag in lags.items() if lag)


@given(LAGS, st.integers(8, 10**5))
def test_a_larger_lag_gets_no_smaller_share_except_for_rounding(lags: dict[Key, int], limit: int) -> None:
    shares = share(lags, limit)
    ranked = sorted(lags, key=lambda key: lags[key])
    assert all(shares[less] <= shares[more] + 1 for less, more in pairwise(ranked))


def test_shares_are_in_proportion() -> None:
    assert share({("a", 0): 1000, ("a", 1): 3000}, 400) == {("a", 0): 100, ("a", 1): 300}
    assert share({("a", 0): 1, ("a", 1): 1}, 2) == {("a", 0): 1, ("a", 1): 1}


@pytest.mark.parametrize(("limit", "expected"), [(7, [3, 2, 2]), (10, [5, 2, 3]), (13, [7, 2, 4])])
def test_the_remainder_goes_to_the_largest_rounding_losses(limit: int, expected: list[int]) -> None:
    assert list(share({("a", 0): 10, ("a", 1): 3, ("b", 0): 6}, limit).values()) == expected


@given(st.dictionaries(KEYS, st.just(5), min_size=1, max_size=8), st.integers(1, 3))
def test_partitions_take_turns_where_the_limit_is_smaller_than_their_number(lags: dict[Key, int], limit: int) -> None:
    served: set[Key] = set()
    for turn in range(0, 2 * len(lags) * limit, limit):
        served |= {key for key, count in share(lags, limit, turn).items() if count}
    assert served == set(lags)


@given(standings(), LIMITS, st.floats(0, 1))
def test_an_end_is_between_its_start_and_the_end_of_the_queue(
    found: dict[Key, PartitionState], limit: int | None, portion: float
) -> None:
    start = offsets_of(found, portion)
    end = end_of(start, found, limit)
    for key, standing in found.items():
        assert start[key] <= end[key] <= standing.end
    count = sum(found.end - found.start for found in plan_ranges(start, end, found, fail_on_data_loss=True))
    lag = sum(standing.end - start[key] for key, standing in found.items())
    assert count == (lag if limit is None else min(lag, limit))


@given(standings(), st.integers(1, 30))
def test_batches_together_read_everything_once(found: dict[Key, PartitionState], limit: int) -> None:
    start: Offsets = {}
    read: dict[Key, list[int]] = {key: [] for key in found}
    for _ in range(1000):
        end = end_of(start, found, limit)
        if end == start:
            break
        for part in plan_ranges(start, end, found, fail_on_data_loss=True):
            read[part.topic, part.partition] += range(part.start, part.end)
        start = end
    assert read == {key: list(range(standing.end)) for key, standing in found.items()}


@given(standings(), LIMITS, st.randoms())
def test_the_plan_does_not_depend_on_the_order_of_partitions(
    found: dict[Key, PartitionState], limit: int | None, random: object
) -> None:
    items = list(found.items())
    getattr(random, "shuffle")(items)  # noqa: B009
    start = offsets_of(found, 0.5)
    one, other = end_of(start, found, limit), end_of(start, dict(items), limit)
    assert repr(one) == repr(other)
    assert repr(end_of(one, found, 0 if limit is None else None)) == repr(end_of(other, dict(items)))


@given(SMALL_LAGS, SMALL_LAGS, LIMITS)
def test_nothing_later_is_read_once_the_ends_are_frozen(
    ends: dict[Key, int], more: dict[Key, int], limit: int | None
) -> None:
    later = {
        key: PartitionState(0, ends.get(key, 0) + more.get(key, 0), 0) for key in sorted(ends.keys() | more.keys())
    }
    then = {key: PartitionState(0, count) for key, count in ends.items()}
    offsets: Offsets = {}
    for _ in range(1000):
        end = end_of(offsets, frozen_at(later, then, offsets), limit)
        if end == offsets:
            break
        offsets = end
    assert offsets == ends


def test_a_new_partition_begins_with_its_first_message() -> None:
    found = {("a", 0): PartitionState(0, 7, 5), ("a", 1): PartitionState(0, 3)}
    end = end_of({("a", 0): 5}, found)
    assert end == {("a", 0): 7, ("a", 1): 3}
    assert plan_ranges({("a", 0): 5}, end, {}, fail_on_data_loss=True) == [Range("a", 0, 5, 7), Range("a", 1, 0, 3)]


def test_a_topic_new_to_the_query_begins_at_the_retained_messages() -> None:
    found = {("a", 0): PartitionState(0, 7, 5), ("b", 0): PartitionState(40, 50)}
    start: Offsets = {("a", 0): 7}
    assert end_of(start, found) == {("a", 0): 7, ("b", 0): 50}
    assert plan_ranges(start, {("a", 0): 7, ("b", 0): 50}, found, fail_on_data_loss=True) == [Range("b", 0, 40, 50)]


def test_a_topic_that_is_new_to_the_query_waits_its_turn_without_being_lost() -> None:
    found = {("a", 0): PartitionState(0, 7, 5), ("b", 0): PartitionState(40, 50, 40)}
    first = end_of({("a", 0): 5}, found, 1)
    assert end_of(first, found) == {("a", 0): 7, ("b", 0): 50}


def test_partitions_that_are_no_longer_read_are_dropped() -> None:
    offsets: Offsets = {("a", 0): 7, ("a", 1): 8, ("b", 0): 4, ("c", 0): 1}
    assert only(offsets, {"a": (1, 2), "b": None}) == {("a", 1): 8, ("b", 0): 4}


def test_a_partition_that_is_not_read_temporarily_keeps_its_offset() -> None:
    start: Offsets = {("a", 0): 7, ("a", 1): 8, ("b", 0): 4}
    end = with_unread({("a", 1): 9, ("c", 0): 1}, start)
    assert end == {("a", 0): 7, ("a", 1): 9, ("b", 0): 4, ("c", 0): 1}
    assert plan_ranges(start, end, {}, fail_on_data_loss=True) == [Range("a", 1, 8, 9), Range("c", 0, 0, 1)]


GONE = [
    ({("a", 0): 5}, {}, "the partition does not exist"),
    ({("a", 0): 5}, {("a", 0): PartitionState(0, 4, 4)}, "5 messages were read, but the partition has only 4"),
    ({("a", 0): 5}, {("a", 0): PartitionState(0, 6)}, "the anchor channel does not exist"),
    ({("a", 0): 5}, {("a", 0): PartitionState(6, 9, 5)}, "the messages from 5 to 6 are not retained"),
    (
        {("a", 0): 5},
        {("a", 0): PartitionState(0, 9, 5), ("a", 1): PartitionState(2, 9)},
        "the messages from 0 to 2 are not retained",
    ),
    ({("a", 0): 0}, {("a", 0): PartitionState(1, 9, 0)}, "the messages from 0 to 1 are not retained"),
]


@pytest.mark.parametrize(("start", "found", "text"), GONE)
def test_lost_data_is_an_error(start: Offsets, found: dict[Key, PartitionState], text: str) -> None:
    with pytest.raises(DataLoss, match=text) as caught:
        end_of(start, found)
    assert caught.value.topic == "a"
    assert "failOnDataLoss=false" in str(caught.value)


def test_without_the_check_a_missing_partition_keeps_its_offset() -> None:
    assert end_of({("a", 0): 5, ("a", 1): 2}, {("a", 1): PartitionState(0, 3, 2)}, strict=False) == {
        ("a", 0): 5,
        ("a", 1): 3,
    }


def test_without_the_check_a_rolled_back_partition_repeats_and_continues() -> None:
    start: Offsets = {("a", 0): 5}
    back = end_of(start, {("a", 0): PartitionState(0, 4, 4)}, strict=False)
    assert back == {("a", 0): 4}
    assert plan_ranges(start, back, {("a", 0): PartitionState(0, 4, 4)}, fail_on_data_loss=False) == []
    assert end_of(back, {("a", 0): PartitionState(0, 6, 4)}, strict=False) == {("a", 0): 6}


def test_without_the_check_a_recreated_topic_begins_again() -> None:
    start: Offsets = {("a", 0): 5}
    recreated = {("a", 0): PartitionState(0, 3)}
    back = end_of(start, recreated, strict=False)
    assert back == {("a", 0): 0}
    assert plan_ranges(start, back, recreated, fail_on_data_loss=False) == []
    assert end_of(back, recreated, strict=False) == {("a", 0): 3}


def test_without_the_check_a_partition_without_an_anchor_is_read_on() -> None:
    start: Offsets = {("a", 0): 5, ("a", 1): 5}
    found = {("a", 0): PartitionState(0, 5), ("a", 1): PartitionState(0, 6)}
    assert end_of(start, found, strict=False) == {("a", 0): 5, ("a", 1): 6}


def test_without_the_check_reading_begins_with_the_retained_messages() -> None:
    start: Offsets = {("a", 0): 5}
    found = {("a", 0): PartitionState(8, 20, 5)}
    end = end_of(start, found, 4, strict=False)
    assert end == {("a", 0): 12}
    assert plan_ranges(start, end, found, fail_on_data_loss=False) == [Range("a", 0, 8, 12)]


def test_a_logged_batch_is_read_as_it_was_logged() -> None:
    """After a restart, with more messages and a new partition."""
    found = {("a", 0): PartitionState(0, 90, 3), ("a", 1): PartitionState(0, 9, 0)}
    assert plan_ranges({("a", 0): 3}, {("a", 0): 8}, found, fail_on_data_loss=True) == [Range("a", 0, 3, 8)]


def test_a_logged_batch_that_reads_nothing_of_a_partition_does_not_need_its_messages() -> None:
    assert plan_ranges({("a", 0): 8}, {("a", 0): 8}, {("a", 0): PartitionState(0, 7)}, fail_on_data_loss=True) == []


@pytest.mark.parametrize(
    ("start", "standing", "text"),
    [
        (9, PartitionState(0, 20, 9), "the batch begins at 9 and ends at 8"),
        (3, PartitionState(0, 7, 3), "the batch ends at 8, but the partition has only 7"),
        (3, PartitionState(5, 20, 3), "the messages from 3 to 5 are not retained"),
    ],
)
def test_a_logged_batch_that_cannot_be_read_is_an_error(start: int, standing: PartitionState, text: str) -> None:
    found = {("a", 0): standing}
    with pytest.raises(DataLoss, match=text):
        plan_ranges({("a", 0): start}, {("a", 0): 8}, found, fail_on_data_loss=True)
    ranges = plan_ranges({("a", 0): start}, {("a", 0): 8}, found, fail_on_data_loss=False)
    assert all(standing.start <= part.start < part.end <= standing.end for part in ranges)


def test_a_missing_anchor_is_reported_also_before_the_first_message() -> None:
    found = {("t", 0): PartitionState(0, 5, None)}
    with pytest.raises(DataLoss, match="the anchor channel does not exist"):
        lags_of({("t", 0): 0}, found, fail_on_data_loss=True)
