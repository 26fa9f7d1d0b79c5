"""What filters of a query leave of a batch: which topics and partitions, which offsets, which time."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from attrs import define
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

__all__ = ("Pruning",)

_ALWAYS = (("topic",), ("partition",), ("offset",), ("timestamp",))
"""Columns that every row has a value in."""


@define
class Pruning:
    """What is left of a batch.

    Attributes:
        topics: topics that are read; None for all.
        partitions: partitions that are read; None for all.
        start: number of the first message that may be read.
        end: number behind the last one; None without a bound.
        since: time of the first message that may be read, in milliseconds since 1970; None without a bound.
        until: time behind the last one, likewise.
    """

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    start: int = 0
    end: int | None = None
    since: int | None = None
    until: int | None = None

    def take(self, filters: Iterable[Filter]) -> list[Filter]:
        """Take in filters, all of which have to hold; returns those that Spark has to look at as well."""
        return [found for found in filters if not self._take(found)]

    def _take(self, found: Filter) -> bool:
        """Take in one filter; returns whether what is left of the batch says the same."""
        attribute: tuple[str, ...] = getattr(found, "attribute", ())
        if isinstance(found, IsNotNull) and attribute in _ALWAYS:
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

    def _take_topics(self, found: Filter, value: Any) -> bool:
        chosen = _chosen(found, value, str)
        if chosen is None:
            return False
        self.topics = chosen if self.topics is None else self.topics & chosen
        return True

    def _take_partitions(self, found: Filter, value: Any) -> bool:
        chosen = _chosen(found, value, int)
        if chosen is None:
            return False
        self.partitions = chosen if self.partitions is None else self.partitions & chosen
        return True

    def _take_offset(self, found: Filter, value: int) -> bool:
        bounds = _bounds(found, value)
        if bounds is None:
            return False
        first, behind = bounds
        if first is not None:
            self.start = max(self.start, first)
        if behind is not None:
            self.end = behind if self.end is None else min(self.end, behind)
        return True

    def _take_time(self, found: Filter, value: datetime) -> None:
        """Take in a time, which only excludes what cannot match: Spark looks at the rest."""
        moment = int(value.timestamp() * 1000)
        bounds = _bounds(found, moment)
        if bounds is None:
            return
        if bounds[0] is not None:
            self.since = moment if self.since is None else max(self.since, moment)
        if bounds[1] is not None:
            self.until = moment + 1 if self.until is None else min(self.until, moment + 1)


def _chosen(found: Filter, value: Any, kind: type) -> frozenset[Any] | None:
    """Return the values that a filter lets pass; None where it is of another kind."""
    if isinstance(found, EqualTo):
        values = (value,)
    elif isinstance(found, In):
        values = tuple(value)
    else:
        return None
    # null equals nothing, also among others
    return frozenset(one for one in values if one is not None) if _are(values, kind) else None


def _are(values: Iterable[Any], kind: type) -> bool:
    return all(one is None or type(one) is kind for one in values)


def _bounds(found: Filter, value: int) -> tuple[int | None, int | None] | None:
    """Return the first number that passes and the one behind the last; None where a filter is of another kind."""
    if isinstance(found, EqualTo):
        return value, value + 1
    if isinstance(found, GreaterThan):
        return value + 1, None
    if isinstance(found, GreaterThanOrEqual):
        return value, None
    if isinstance(found, LessThan):
        return None, value
    if isinstance(found, LessThanOrEqual):
        return None, value + 1
    return None
