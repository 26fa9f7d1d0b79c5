"""Topics as a batch, `spark.read`, and as streams, `spark.readStream`.

Filters and options choose the ranges of a batch at its planning. For a stream with ``readMode=offset``, one process
plans the next batch, and other processes read it: all state is in offsets, ranges and anchor channels.

``readMode=channel`` is for the original NSQ and topics that accept only registered channels, where ranges cannot be
read again. The planning process holds a batch's messages in flight, and finishes them after Spark has completed the
batch. Messages unfinished at the end of the process are redelivered in another batch: at least once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import define
from pyspark.sql import datasource as spark
from pyspark.sql.datasource import (
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
    SimpleDataSourceStreamReader,
)

from nsqext.errors import InvalidInput, InvalidSetting, InvalidState
from nsqext.partitions.leaders import FIRST_CONTACT
from nsqext.spark.cluster import portal
from nsqext.spark.cluster.admin import SourceAdmin
from nsqext.spark.pyspark_features import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from nsqext.spark.read.batch_plan import Pruning, plan, read_ranges, read_within
from nsqext.spark.read.channel_batches import ChannelReader, rows_of
from nsqext.spark.read.offsets import Range, dump, load, plan_tasks
from nsqext.spark.read.planner_lock import PlannerLock, is_planner
from nsqext.spark.read.stream_planner import StreamPlanner, dump_last, load_last

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import RecordBatch

    from nsqext.spark.options import SourceOptions
    from nsqext.spark.read.offsets import Key, Offsets
    from nsqext.spark.read.planning import Planned

_ALWAYS = (("topic",), ("partition",), ("offset",), ("timestamp",))  # never null


class TaskRanges(InputPartition):
    def __init__(self, ranges: Iterable[Range], planned: Mapping[Key, Planned] | None = None) -> None:
        self.ranges: tuple[Range, ...] = tuple(ranges)
        self.planned: Mapping[Key, Planned] = {} if planned is None else planned
        super().__init__(", ".join(map(str, self.ranges)))


def tasks_of(
    options: SourceOptions, ranges: Iterable[Range], planned: Mapping[Key, Planned] | None = None
) -> list[TaskRanges]:
    """Divide the ranges of a batch into tasks, each with what is ``planned`` for its partitions."""
    tasks = plan_tasks(
        ranges,
        min_messages=options.min_messages_per_task,
        max_tasks=options.max_tasks,
        min_tasks=options.min_partitions,
        max_records=options.max_records_per_partition,
    )
    known = planned or {}
    made: list[TaskRanges] = []
    for task in tasks:
        keys = {(found.topic, found.partition) for found in task}
        made.append(TaskRanges(task, {key: known[key] for key in keys & known.keys()}))
    return made


@define
class FilterPruning(Pruning):
    """A part of a batch, chosen by Spark's filters."""

    def take(self, filters: Iterable[spark.Filter]) -> list[spark.Filter]:
        """Apply filters, which all must match; return filters that Spark must evaluate, too."""
        return [found for found in filters if not self._take(found)]

    def _take(self, found: spark.Filter) -> bool:
        """Apply one filter; return whether Spark need not evaluate it."""
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
    """Return the values that a filter accepts; None for other filters."""
    if isinstance(found, spark.EqualTo):
        values = (value,)
    elif isinstance(found, spark.In):
        values = tuple(value)
    else:
        return None
    found_values = frozenset(one for one in values if one is not None)  # null equals nothing
    return found_values if all(type(one) is kind for one in found_values) else None


def _bounds(found: spark.Filter, value: int) -> tuple[int | None, int | None] | None:
    """Return the first accepted number and the number after the last; None for other filters."""
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
    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._pruning = Pruning()

    def partitions(self) -> list[TaskRanges]:
        return tasks_of(self._options, portal.call(plan, self._options, self._pruning))

    def read(self, partition: InputPartition | None) -> Iterator[RecordBatch]:
        if not isinstance(partition, TaskRanges):
            return  # Spark replaces an empty list of partitions by a list with None
        yield from read_within(self._options, partition.ranges)


class NsqPushdownReader(NsqReader):
    """`NsqReader` for processes in which Spark pushes filters down."""

    def __init__(self, options: SourceOptions) -> None:
        super().__init__(options)
        self._pruning: FilterPruning = FilterPruning()

    def pushFilters(self, filters: list[spark.Filter]) -> Iterable[spark.Filter]:
        """Exclude ranges that cannot match; return the filters that Spark must evaluate, too."""
        return self._pruning.take(filters)


T = TypeVar("T")


class NsqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics in batches that can be read again."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._planner: StreamPlanner | None = None
        self._planned: dict[str, Any] | None = None
        self._lock: PlannerLock | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_planner": None, "_planned": None, "_lock": None}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit of a batch: ``maxOffsetsPerTrigger``, ``maxBytesPerTrigger`` or ``minOffsetsPerTrigger``."""
        options = self._options
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        if options.max_offsets_per_trigger is not None:
            return ReadMaxRows(options.max_offsets_per_trigger)
        least = options.min_offsets_per_trigger
        return ReadAllAvailable() if least is None else ReadMinRows(least)

    def prepareForTriggerAvailableNow(self) -> None:
        """Exclude messages published from now on."""
        self._call(lambda planner: planner.freeze())

    def initialOffset(self) -> dict[str, Any]:

        async def initial(planner: StreamPlanner) -> dict[str, Any]:
            return _with_last(await planner.initial(), planner)

        return self._call(initial)

    def latestOffset(self, start: Mapping[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        """Return the end of the next batch.

        PySpark 4.0 and 4.1 pass no arguments: the next batch begins at the end of the last planned batch, with the
        options' limit. A restarted query first plans the checkpoint's last batch; a query without a planned batch is
        new.
        """
        if limit is None:
            limit = self.getDefaultReadLimit()
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        if rows is None and size is None and not isinstance(limit, (ReadAllAvailable, ReadMinRows)):
            raise InvalidSetting(
                f"the source does not support {type(limit).__name__}",
                hint="use maxOffsetsPerTrigger or maxBytesPerTrigger",
            )
        if start is None:
            start = self._planned = self._planned or self.initialOffset()
        begin = load(start)
        last = load_last(start, begin)

        async def latest(planner: StreamPlanner) -> dict[str, Any]:
            # with the trigger "once", Spark replaces the limits
            at_once = isinstance(limit, ReadAllAvailable)
            return _with_last(await planner.latest(begin, rows, size, last, at_once=at_once), planner)

        return self._call(latest)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the partitions' ends and metrics, for ``StreamingQueryProgress.sources[].latestOffset``."""
        return self._planner.report() if self._planner is not None else None

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        begin, until = load(start), load(end)
        self._planned = dict(end)
        known, last = load_last(start, begin), load_last(end, until)

        async def planned(planner: StreamPlanner) -> list[TaskRanges]:
            ranges = await planner.ranges(begin, until, known, last)
            return tasks_of(self._options, ranges, planner.planned_of(ranges))

        return self._call(planned)

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        """Read the ranges of a task, in the process that runs it."""
        if not isinstance(partition, TaskRanges):
            raise InvalidState(f"{partition!r} was not planned by this source")
        return read_ranges(self._options, partition.ranges, partition.planned)

    def commit(self, end: Mapping[str, Any]) -> None:
        """Move the anchor channels to the end of a completed batch."""
        done = load(end)
        self._call(lambda planner: planner.commit(done))

    def stop(self) -> None:
        if self._planner is not None:
            planner, self._planner = self._planner, None
            portal.call(planner.aclose)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _call(self, method: Callable[[StreamPlanner], Coroutine[Any, Any, T]]) -> T:
        if self._lock is None and is_planner():
            lock = PlannerLock(self._options)
            lock.acquire()
            self._lock = lock

        async def call() -> T:
            if self._planner is None:
                self._planner = StreamPlanner(
                    self._options, SourceAdmin(self._options.client, first_contact=FIRST_CONTACT)
                )
            return await method(self._planner)

        return portal.call(call)


def _with_last(offsets: Offsets, planner: StreamPlanner) -> dict[str, Any]:
    return {**dump(offsets), **dump_last(planner.last)}


logger: logging.Logger = logging.getLogger("nsqext.spark")

_VERSION = 1


class NsqChannelReader(SimpleDataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._channel: ChannelReader | None = None
        self._ends = False
        self._ended = False

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_channel": None, "_ends": False, "_ended": False}

    def initialOffset(self) -> dict[str, Any]:
        """Return the start of a new query: offsets count messages."""
        return _dump(0)

    def prepareForTriggerAvailableNow(self) -> None:
        """Exclude messages published from now on."""
        self._ends = True
        self._opened().freeze()

    def read(self, start: Mapping[str, Any]) -> tuple[Iterator[pa.RecordBatch], dict[str, Any]]:
        """Return the next batch and its end, after Spark has completed the previous batch."""
        number = _load(start)
        messages = [] if self._ended else self._opened().take(number)
        if self._ends and not messages:
            # later messages belong to the next query, which may start before this process ends
            self._ended = True
            self.stop()
        return iter(rows_of(self._options, messages)), _dump(number + len(messages))

    def readBetweenOffsets(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        """Return nothing: the server redelivers an incomplete batch's messages in another batch."""
        logger.warning(
            "the batch from %d to %d was not completed when the query ended: its messages are delivered again",
            _load(start),
            _load(end),
        )
        return iter(())

    def commit(self, end: Mapping[str, Any]) -> None:
        if self._channel is not None:
            self._channel.finish(_load(end))

    def stop(self) -> None:
        """Close the connections; unfinished messages are redelivered."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            channel.close()

    def _opened(self) -> ChannelReader:
        if self._channel is None:
            self._channel = ChannelReader(self._options)
        return self._channel


def _dump(number: int) -> dict[str, Any]:
    return {"v": _VERSION, "consumed": number}


def _load(offset: Mapping[str, Any]) -> int:
    number = offset.get("consumed")
    if offset.get("v") != _VERSION or not isinstance(number, int):
        raise InvalidInput(
            f"{offset!r} is not an offset of a consumed channel",
            hint="a checkpoint belongs to one readMode: use that mode, or a new checkpoint",
        )
    return number
