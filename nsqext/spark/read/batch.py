"""Topics as a batch: `spark.read`. Filters and options choose the ranges to read when the query is planned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from attrs import define
from pyspark.sql import datasource as spark
from pyspark.sql.datasource import DataSourceReader, InputPartition

from nsqext.spark.cluster import portal
from nsqext.spark.read.batch_plan import Pruning, plan, read_within
from nsqext.spark.read.offsets import Range, plan_tasks

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    from nsqext.spark.options import SourceOptions

_ALWAYS = (("topic",), ("partition",), ("offset",), ("timestamp",))  # columns that are never null


class TaskRanges(InputPartition):
    """The ranges that one task reads."""

    def __init__(self, ranges: Iterable[Range]) -> None:
        self.ranges: tuple[Range, ...] = tuple(ranges)
        super().__init__(", ".join(map(str, self.ranges)))


def tasks_of(options: SourceOptions, ranges: Iterable[Range]) -> list[TaskRanges]:
    """Distribute ranges over tasks, as the options say."""
    planned = plan_tasks(
        ranges,
        min_messages=options.min_messages_per_task,
        max_tasks=options.max_tasks,
        min_tasks=options.min_partitions,
        max_records=options.max_records_per_partition,
    )
    return [TaskRanges(task) for task in planned]


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
        if name in ("topic", "partition"):
            chosen, member = _chosen(found, value, str if name == "topic" else int), f"{name}s"
            if chosen is not None:
                known = getattr(self, member)
                setattr(self, member, chosen if known is None else known & chosen)
            return chosen is not None
        if name == "offset" and type(value) is int and (bounds := _bounds(found, value)) is not None:
            first, end = bounds
            self.start: int = max(self.start, first or 0)
            self.end: int | None = _least(self.end, end)
            return True
        if name == "timestamp" and isinstance(value, datetime) and value.tzinfo is not None:
            # excludes times that cannot match; Spark evaluates the filter
            moment = int(value.timestamp() * 1000)
            first, end = _bounds(found, moment) or (None, None)
            if first is not None:
                self.since: int | None = max(self.since or 0, moment)
            if end is not None:
                self.until: int | None = _least(self.until, moment + 1)
        return False


def _least(one: int | None, other: int | None) -> int | None:
    return min((number for number in (one, other) if number is not None), default=None)


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


class NsqReader(DataSourceReader):
    """Reads topics as a batch."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._pruning = Pruning()

    def partitions(self) -> list[TaskRanges]:
        """Return the tasks of the batch."""
        return tasks_of(self._options, portal.call(plan, self._options, self._pruning))

    def read(self, partition: InputPartition | None) -> Iterator[RecordBatch]:
        """Read the ranges of one task."""
        if not isinstance(partition, TaskRanges):
            return  # Spark replaces an empty list of partitions by one None
        yield from read_within(self._options, partition.ranges)


class NsqPushdownReader(NsqReader):
    """The same, for processes in which Spark pushes filters down."""

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        self._pruning: FilterPruning = FilterPruning()

    def pushFilters(self, filters: list[spark.Filter]) -> Iterable[spark.Filter]:
        """Exclude ranges that cannot match; returns the filters that Spark must evaluate as well."""
        return self._pruning.take(filters)
