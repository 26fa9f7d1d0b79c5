"""Topics as a batch: `spark.read`. What is read is fixed when the query is planned."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import pyarrow.compute as pc
from attrs import frozen
from pyspark.sql.datasource import DataSourceReader, InputPartition

from nsqext.errors import DataLoss, InvalidPartition, InvalidSetting
from nsqext.spark.cluster import portal as bridge
from nsqext.spark.cluster.admin import Admin
from nsqext.spark.cluster.gather import together
from nsqext.spark.read.arrow import to_batches
from nsqext.spark.read.offsets import EARLIEST, LATEST, Places, Range, parse_ending, parse_starting, split
from nsqext.spark.read.pushdown import Pruning
from nsqext.spark.read.range_reader import RangeReader

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyspark.sql.datasource import Filter

    from nsqext.spark.cluster.admin import Bounds
    from nsqext.spark.options import SourceOptions
    from nsqext.spark.read.planning import Key

__all__ = ("NsqPushingReader", "NsqReader", "RangePartition", "plan", "read_range")

logger: logging.Logger = logging.getLogger("nsqext.spark")

_SKEW_MS = 5000
"""How far the clocks of servers that led a partition one after the other may differ, in milliseconds."""


class RangePartition(InputPartition):
    """What one task reads.

    Args:
        found: the messages.

    Attributes:
        range: the messages.
    """

    def __init__(self, found: Range) -> None:
        super().__init__(str(found))
        self.range: Range = found


def read_range(options: SourceOptions, found: Range) -> Iterator[RecordBatch]:
    """Read a range, all of it, or raise.

    Where ``failOnDataLoss`` is false, and messages at its beginning are not kept any more, it goes on behind them.

    Raises:
        DataLoss: messages are not kept any more.
        RangeIncomplete: a message did not come in time.
        NsqError: the servers refuse, or cannot be reached.
    """
    while True:
        first = found.start
        try:
            for block in bridge.blocks(_reader(options, found)):
                yield from to_batches(
                    block,
                    found.topic,
                    found.partition,
                    options.include_headers,
                    decompress=options.connection.decompress,
                )
                first = block.first + len(block)
        except DataLoss:
            kept = None if options.fail_on_data_loss else bridge.call(_kept, options, found)
            if kept is None or kept <= first:
                raise
            logger.warning("messages %d..%d of %s are gone", first, kept, found)
            if kept >= found.end:
                return
            found = Range(found.topic, found.partition, kept, found.end)
        else:
            return


def _reader(options: SourceOptions, found: Range) -> RangeReader:
    return RangeReader(
        options.connection,
        found,
        timeout=options.read_timeout,
        rdy=options.rdy,
        block_rows=options.arrow_batch_rows,
        channel=options.channel,
    )


async def _kept(options: SourceOptions, found: Range) -> int:
    async with Admin(options.connection) as admin:
        return (await admin.bounds(found.topic, found.partition)).start


# Planning


@frozen
class _Limits:
    """Where partitions begin and end, as the options say it."""

    starting: Places | None
    ending: Places | None
    since: int | None
    until: int | None

    @classmethod
    def of(cls, options: SourceOptions) -> _Limits:
        starting = parse_starting(options.starting_offsets or "earliest")
        if LATEST in (starting.default, *(count for named in starting.named.values() for count in named.values())):
            raise InvalidSetting(
                "startingOffsets cannot be latest in a batch: nothing lies behind that",
                hint="write earliest, or numbers",
            )
        return cls(
            starting if options.starting_timestamp is None else None,
            parse_ending(options.ending_offsets or "latest") if options.ending_timestamp is None else None,
            options.starting_timestamp,
            options.ending_timestamp,
        )


async def plan(options: SourceOptions, pruning: Pruning) -> list[Range]:
    """Return what a batch reads: one range for each partition that is not empty.

    Raises:
        TopicNotFound: there is no such topic.
        InvalidPartition: a partition is assigned that the topic does not have.
        InvalidSetting: an offset lies behind the end of its partition.
        DataLoss: the start lies before the messages that are kept.
        NsqError: the servers cannot be asked.
    """
    limits = _Limits.of(options)
    async with Admin(options.connection) as admin:
        read = {topic: await _partitions(admin, topic, wanted) for topic, wanted in options.topics.items()}
        _check_named(limits, read)
        keys = [
            (topic, partition)
            for topic in sorted(read)
            for partition in read[topic]
            if _is_left(pruning, topic, partition)
        ]
        bounds = await admin.survey(keys)
        found = await together(keys, lambda key: _plan_one(options, limits, pruning, admin, key, bounds[key]))
    return list(found.values())


def _check_named(limits: _Limits, read: Mapping[str, Iterable[int]]) -> None:
    for places in (limits.starting, limits.ending):
        if places is None:
            continue
        places.check(read)
        for topic, partitions in read.items():
            for partition in partitions:
                places.of(topic, partition)


def _is_left(pruning: Pruning, topic: str, partition: int) -> bool:
    return (pruning.topics is None or topic in pruning.topics) and (
        pruning.partitions is None or partition in pruning.partitions
    )


async def _partitions(admin: Admin, topic: str, wanted: Iterable[int] | None) -> list[int]:
    there = await admin.partitions(topic)
    if wanted is None:
        return sorted(there)
    chosen = sorted(wanted)
    for partition in chosen:
        if partition not in there:
            raise InvalidPartition(
                f"the option assign names a partition that there is not: the topic has {len(there)}",
                topic=topic,
                partition=partition,
            )
    return chosen


async def _plan_one(
    options: SourceOptions, limits: _Limits, pruning: Pruning, admin: Admin, key: Key, bounds: Bounds
) -> Range:
    topic, partition = key
    start, end = bounds.start, bounds.end
    if limits.starting is not None:
        start = _start(limits.starting.of(topic, partition), bounds, options, topic, partition)
    if limits.ending is not None:
        end = _end(limits.ending.of(topic, partition), bounds, topic, partition)
    if start > end:
        raise InvalidSetting(f"the start, {start}, lies behind the end, {end}", topic=topic, partition=partition)
    start = max(start, pruning.start)
    end = end if pruning.end is None else min(end, pruning.end)
    since = max((time for time in (limits.since, pruning.since) if time is not None), default=None)
    until = min((time for time in (limits.until, pruning.until) if time is not None), default=None)
    if since is not None and start < end:
        start = max(start, await admin.count_at(topic, partition, max(since - _SKEW_MS, 0)))
    if until is not None and start < end:
        end = min(end, await admin.count_at(topic, partition, until + _SKEW_MS))
    return Range(topic, partition, min(start, max(end, 0)), max(end, 0))


def _start(asked: int, bounds: Bounds, options: SourceOptions, topic: str, partition: int) -> int:
    if asked == EARLIEST:
        return bounds.start
    if asked < bounds.start and options.fail_on_data_loss:
        raise DataLoss(
            f"startingOffsets is {asked}, and only messages from {bounds.start} on are kept",
            topic=topic,
            partition=partition,
            hint="start at earliest (-2), or give failOnDataLoss=false",
        )
    if asked > bounds.end:
        raise _behind("startingOffsets", asked, bounds, topic, partition)
    return max(asked, bounds.start)


def _end(asked: int, bounds: Bounds, topic: str, partition: int) -> int:
    if asked == LATEST:
        return bounds.end
    if asked > bounds.end:
        raise _behind("endingOffsets", asked, bounds, topic, partition)
    return max(asked, bounds.start)


def _behind(option: str, asked: int, bounds: Bounds, topic: str, partition: int) -> InvalidSetting:
    return InvalidSetting(
        f"{option} is {asked}, and the partition ends at {bounds.end}", topic=topic, partition=partition
    )


# What Spark asks


class NsqReader(DataSourceReader):
    """Reads topics as a batch.

    Args:
        options: what is read.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._pruning = Pruning()
        _Limits.of(options)

    def partitions(self) -> list[RangePartition]:
        """Return what the tasks read; from now on that is fixed.

        Raises:
            NsqError: see `plan`.
        """
        options = self._options
        ranges = bridge.call(plan, options, self._pruning)
        return [
            RangePartition(piece) for piece in split(ranges, options.min_partitions, options.max_records_per_partition)
        ]

    def read(self, partition: InputPartition | None) -> Iterator[RecordBatch]:
        """Read what `partitions` gave to one task.

        Raises:
            NsqError: see `read_range`.
        """
        if not isinstance(partition, RangePartition):
            return  # Spark reads nothing in this way
        since, until = self._options.starting_timestamp, self._options.ending_timestamp
        for batch in read_range(self._options, partition.range):
            yield _trimmed(batch, since, until)


def _trimmed(batch: RecordBatch, since: int | None, until: int | None) -> RecordBatch:
    """Return the rows of a time, in milliseconds: ranges hold what servers with other clocks may have stored, too."""
    if since is None and until is None:
        return batch
    times = batch.column("timestamp").cast("int64")
    if since is not None:
        batch = batch.filter(pc.greater_equal(times, since * 1000))
        times = batch.column("timestamp").cast("int64")
    return batch if until is None else batch.filter(pc.less(times, until * 1000))


class NsqPushingReader(NsqReader):
    """The same, for sessions that let sources written in Python filter."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Leave out what filters exclude; returns those that Spark has to look at as well."""
        return self._pruning.take(filters)
