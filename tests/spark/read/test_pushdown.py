"""What filters leave of a batch, and which of them Spark still has to look at."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

pytest.importorskip("pyspark")

from nsqext.spark.pyspark_features import HAS_PUSHDOWN

if not HAS_PUSHDOWN:
    pytest.skip("PySpark 4.0 does not push filters down", allow_module_level=True)

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from nsqext.spark.read.readers import FilterPruning

TOPIC, PARTITION, OFFSET, TIME = ("topic",), ("partition",), ("offset",), ("timestamp",)
MOMENT = datetime(2026, 1, 2, 3, 4, 5, 678900, tzinfo=UTC)
MS = int(MOMENT.timestamp() * 1000)


def left(*filters: Filter) -> FilterPruning:
    """What filters leave, all of which are taken over."""
    pruning = FilterPruning()
    assert pruning.take(filters) == []
    return pruning


def test_topics_and_partitions() -> None:
    assert left(EqualTo(TOPIC, "a")).topics == frozenset("a")
    assert left(In(TOPIC, ("a", "b", None))).topics == frozenset("ab")
    assert left(In(TOPIC, ("a", "b")), EqualTo(TOPIC, "b"), EqualTo(PARTITION, 3)) == FilterPruning(
        frozenset("b"), frozenset({3})
    )
    assert left(In(PARTITION, (1, 2)), In(PARTITION, (2, 3))).partitions == frozenset({2})
    assert left(EqualTo(("Partition",), 1)).partitions == frozenset({1}), "Spark does not care about case"
    assert left(EqualTo(TOPIC, None)).topics == frozenset()


@pytest.mark.parametrize(
    ("found", "start", "end"),
    [
        (EqualTo(OFFSET, 5), 5, 6),
        (GreaterThan(OFFSET, 5), 6, None),
        (GreaterThanOrEqual(OFFSET, 5), 5, None),
        (LessThan(OFFSET, 5), 0, 5),
        (LessThanOrEqual(OFFSET, 5), 0, 6),
        (LessThan(OFFSET, -5), 0, -5),
    ],
)
def test_offsets(found: Filter, start: int, end: int | None) -> None:
    assert left(found) == FilterPruning(start=start, end=end)
    assert left(found, found) == left(found)


def test_the_narrowest_bounds_count() -> None:
    found = left(GreaterThan(OFFSET, 5), GreaterThan(OFFSET, 3), LessThan(OFFSET, 9), LessThan(OFFSET, 20))
    assert (found.start, found.end) == (6, 9)


@pytest.mark.parametrize(
    ("found", "since", "until"),
    [
        (EqualTo(TIME, MOMENT), MS, MS + 2),
        (GreaterThan(TIME, MOMENT), MS, None),
        (GreaterThanOrEqual(TIME, MOMENT), MS, None),
        (LessThan(TIME, MOMENT), None, MS + 1),
        (LessThanOrEqual(TIME, MOMENT), None, MS + 2),
    ],
)
def test_times_exclude_only_ranges_that_cannot_match(found: Filter, since: int | None, until: int | None) -> None:
    pruning = FilterPruning()
    assert pruning.take([found]) == [found], "Spark looks at microseconds"
    assert pruning.since == since
    assert (pruning.until is None) == (until is None)
    if pruning.until is not None and until is not None:
        assert MS < pruning.until <= until
    pruning.take([GreaterThan(TIME, datetime.fromtimestamp(0, UTC)), LessThan(TIME, datetime(2100, 1, 1, tzinfo=UTC))])
    assert pruning.since == (since or 0)


def test_values_that_are_always_set() -> None:
    assert left(*(IsNotNull(name) for name in (TOPIC, PARTITION, OFFSET, TIME))) == FilterPruning()


@pytest.mark.parametrize(
    "found",
    [
        EqualTo(("tag",), "x"),
        EqualTo(("headers", "topic"), "x"),
        EqualTo(PARTITION, "1"),
        EqualTo(PARTITION, True),
        EqualTo(OFFSET, 1.0),
        In(PARTITION, (1, "2")),
        In(OFFSET, (1, 2)),
        GreaterThan(TOPIC, "a"),
        StringStartsWith(TOPIC, "a"),
        Not(EqualTo(TOPIC, "a")),
        EqualNullSafe(TOPIC, "a"),
        IsNull(OFFSET),
        IsNotNull(("tag",)),
        EqualTo(TIME, MOMENT.replace(tzinfo=None)),
        EqualTo(TIME, 5),
    ],
)
def test_other_filters_are_returned(found: Any) -> None:
    pruning = FilterPruning()
    assert pruning.take([found]) == [found]
    assert pruning == FilterPruning()
