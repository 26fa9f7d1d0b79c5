"""Filters of a query: the topics, partitions, offsets and times that a batch has to read."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from attrs import define
from pyspark.sql import datasource as spark

from nsqext.spark.read.batch_plan import Pruning

_ALWAYS = (("topic",), ("partition",), ("offset",), ("timestamp",))
"""Columns that are never null."""


@define
class FilterPruning(Pruning):
    """A part of a batch that filters of Spark choose."""

    def take(self, filters: Iterable[spark.Filter]) -> list[spark.Filter]:
        """Apply filters, which all must match; returns those that Spark must evaluate as well."""
        return [found for found in filters if not self._take(found)]

    def _take(self, found: spark.Filter) -> bool:
        """Apply one filter; returns whether Spark does not need to evaluate it."""
        attribute: tuple[str, ...] = getattr(found, "attribute", ())
        if isinstance(found, spark.IsNotNull) and attribute in _ALWAYS:
            return True
        if len(attribute) != 1:
            return False
        name, value = attribute[0].lower(), getattr(found, "value", None)
        if name == "topic":
            return self._take_topics(found, value)
        if name == "partition":
            return self._take_partitions(found, value)
        if name == "offset" and type(value) is int:
            return self._take_offset(found, value)
        if name == "timestamp" and isinstance(value, datetime) and value.tzinfo is not None:
            self._take_time(found, value)
        return False

    def _take_topics(self, found: spark.Filter, value: Any) -> bool:
        chosen = _chosen(found, value, str)
        if chosen is None:
            return False
        self.topics: frozenset[str] | None = chosen if self.topics is None else self.topics & chosen
        return True

    def _take_partitions(self, found: spark.Filter, value: Any) -> bool:
        chosen = _chosen(found, value, int)
        if chosen is None:
            return False
        self.partitions: frozenset[int] | None = chosen if self.partitions is None else self.partitions & chosen
        return True

    def _take_offset(self, found: spark.Filter, value: int) -> bool:
        bounds = _bounds(found, value)
        if bounds is None:
            return False
        first, end = bounds
        if first is not None:
            self.start: int = max(self.start, first)
        if end is not None:
            self.end: int | None = end if self.end is None else min(self.end, end)
        return True

    def _take_time(self, found: spark.Filter, value: datetime) -> None:
        """Exclude times that cannot match; Spark evaluates the filter."""
        moment = int(value.timestamp() * 1000)
        bounds = _bounds(found, moment)
        if bounds is None:
            return
        if bounds[0] is not None:
            self.since: int | None = moment if self.since is None else max(self.since, moment)
        if bounds[1] is not None:
            self.until: int | None = moment + 1 if self.until is None else min(self.until, moment + 1)


def _chosen(found: spark.Filter, value: Any, kind: type) -> frozenset[Any] | None:
    """Return the values that a filter accepts; None for other kinds of filters."""
    if isinstance(found, spark.EqualTo):
        values = (value,)
    elif isinstance(found, spark.In):
        values = tuple(value)
    else:
        return None
    found_values = frozenset(one for one in values if one is not None)  # null equals nothing
    return found_values if all(type(one) is kind for one in found_values) else None


def _bounds(found: spark.Filter, value: int) -> tuple[int | None, int | None] | None:
    """Return the first accepted number and the number after the last one; None for other kinds of filters."""
    if isinstance(found, spark.EqualTo):
        return value, value + 1
    if isinstance(found, spark.GreaterThan):
        return value + 1, None
    if isinstance(found, spark.GreaterThanOrEqual):
        return value, None
    if isinstance(found, spark.LessThan):
        return None, value
    if isinstance(found, spark.LessThanOrEqual):
        return None, value + 1
    return None
