"""Topics as a stream that can be read again: `spark.readStream` with ``readMode=offset``.

For each query Spark asks one process for the next batch, and other processes read it. The reader therefore has no state
that another process needs: everything is in the offsets, in the ranges of tasks, and in the anchor channels.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from nsqext.errors import InvalidSetting, InvalidState
from nsqext.spark.cluster import portal
from nsqext.spark.cluster.admin import Admin
from nsqext.spark.cluster.leader_locator import FIRST_CONTACT
from nsqext.spark.pyspark_features import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from nsqext.spark.read.batch import TaskRanges, tasks_of
from nsqext.spark.read.batch_plan import read_ranges
from nsqext.spark.read.offsets import dump, load
from nsqext.spark.read.stream_planner import StreamPlanner
from nsqext.spark.read.truncation import dump_last, load_last

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    from nsqext.spark.options import SourceOptions
    from nsqext.spark.read.offsets import Offsets

T = TypeVar("T")


class NsqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics batch by batch, each of which can be read again."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._planner: StreamPlanner | None = None
        self._planned: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_planner": None, "_planned": None}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of a batch: ``maxOffsetsPerTrigger`` or ``maxBytesPerTrigger``."""
        rows, size = self._options.max_offsets_per_trigger, self._options.max_bytes_per_trigger
        if size is not None:
            return ReadMaxBytes(size)
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def prepareForTriggerAvailableNow(self) -> None:
        """Exclude messages that are published from now on."""
        self._call(lambda planner: planner.freeze())

    def initialOffset(self) -> dict[str, Any]:
        """Return the start of the query."""

        async def initial(planner: StreamPlanner) -> dict[str, Any]:
            return _with_last(await planner.initial(), planner)

        return self._call(initial)

    def latestOffset(self, start: Mapping[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        """Return the end of the next batch.

        PySpark 4.0 and 4.1 pass no arguments. The next batch then begins at the end of the one that was planned last,
        and has the limit of the options. In a restarted query Spark plans the last batch of the checkpoint first (an
        empty range if it was completed); a query without a planned batch is new.
        """
        if limit is None:
            limit = self.getDefaultReadLimit()
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        if rows is None and size is None and not isinstance(limit, ReadAllAvailable):
            raise InvalidSetting(
                f"the source does not support {type(limit).__name__}",
                hint="use maxOffsetsPerTrigger or maxBytesPerTrigger",
            )
        if start is None:
            start = self._planned = self._planned or self.initialOffset()
        begin = load(start)
        last = load_last(start, begin)

        async def latest(planner: StreamPlanner) -> dict[str, Any]:
            return _with_last(await planner.latest(begin, rows, size, last), planner)

        return self._call(latest)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the ends of the partitions and metrics, for ``StreamingQueryProgress.sources[].latestOffset``."""
        return self._planner.report() if self._planner is not None else None

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        """Return the tasks of a batch."""
        begin, until = load(start), load(end)
        self._planned = dict(end)
        known, last = load_last(start, begin), load_last(end, until)
        return tasks_of(self._options, self._call(lambda planner: planner.ranges(begin, until, known, last)))

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        """Read the ranges of a task, in the process that runs it."""
        if not isinstance(partition, TaskRanges):
            raise InvalidState(f"{partition!r} was not planned by this source")
        return read_ranges(self._options, partition.ranges)

    def commit(self, end: Mapping[str, Any]) -> None:
        """Move the anchor channels to the end of a completed batch."""
        done = load(end)
        self._call(lambda planner: planner.commit(done))

    def stop(self) -> None:
        """Close the connections."""
        if self._planner is not None:
            planner, self._planner = self._planner, None
            portal.call(planner.aclose)

    def _call(self, method: Callable[[StreamPlanner], Coroutine[Any, Any, T]]) -> T:
        async def call() -> T:
            if self._planner is None:
                self._planner = StreamPlanner(self._options, Admin(self._options.client, first_contact=FIRST_CONTACT))
            return await method(self._planner)

        return portal.call(call)


def _with_last(offsets: Offsets, planner: StreamPlanner) -> dict[str, Any]:
    return {**dump(offsets), **dump_last(planner.last)}
