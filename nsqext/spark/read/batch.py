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
            return self._take_choice(name, _chosen(found, value, str if name == "topic" else int))
        if name == "offset" and type(value) is int:
            return self._take_offset(found, value)
        if name == "timestamp" and isinstance(value, datetime) and value.tzinfo is not None:
            self._take_time(found, value)
        return False

    def _take_choice(self, name: str, chosen: frozenset[Any] | None) -> bool:
        if chosen is None:
            return False
        if name == "topic":
            self.topics: frozenset[str] | None = chosen if self.topics is None else self.topics & chosen
        else:
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
