"""Topics as a batch: `spark.read`. The ranges to read are fixed when the query is planned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from nsqext.spark.cluster import portal
from nsqext.spark.read.batch_plan import Pruning, plan, read_within
from nsqext.spark.read.offsets import Range, plan_tasks
from nsqext.spark.read.pushdown import FilterPruning
from nsqext.spark.read.range_limits import RangeLimits

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql.datasource import Filter

    from nsqext.spark.options import SourceOptions


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


class NsqReader(DataSourceReader):
    """Reads topics as a batch."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._limits = RangeLimits.of(options)
        self._pruning = Pruning()

    def partitions(self) -> list[TaskRanges]:
        """Return the tasks of the batch."""
        return tasks_of(self._options, portal.call(plan, self._options, self._pruning))

    def read(self, partition: InputPartition | None) -> Iterator[RecordBatch]:
        """Read the ranges of one task."""
        if not isinstance(partition, TaskRanges):
            return  # Spark replaces an empty list of partitions by one None
        yield from read_within(self._options, self._limits, partition.ranges)


class NsqPushdownReader(NsqReader):
    """The same, for processes in which Spark pushes filters down."""

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        self._pruning: FilterPruning = FilterPruning()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Exclude ranges that cannot match; returns the filters that Spark must evaluate as well."""
        return self._pruning.take(filters)
