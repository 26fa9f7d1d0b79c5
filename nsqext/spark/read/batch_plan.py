"""What a batch reads: a range of each partition, fixed when it is planned."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Self

import pyarrow.compute as pc
from attrs import define, evolve, frozen

from nsqext.errors import DataLoss, InvalidPartition, InvalidSetting, TopicNotFound
from nsqext.spark.cluster import portal
from nsqext.spark.cluster.admin import Admin
from nsqext.spark.cluster.gather import gather
from nsqext.spark.cluster.leader_locator import FIRST_CONTACT
from nsqext.spark.read.arrow import RowFormat, to_batches
from nsqext.spark.read.offsets import EARLIEST, LATEST, OffsetSpec, Range, parse_ending, parse_starting, parse_times
from nsqext.spark.read.range_reader import TaskReader

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    from nsqext.spark.cluster.bounds import Bounds
    from nsqext.spark.options import SourceOptions
    from nsqext.spark.read.planning import Key

__all__ = ("Limits", "Pruning", "plan", "read_ranges", "read_within")

_SKEW_MS = 5000
"""Largest expected difference between the clocks of successive leaders of a partition, in milliseconds."""


@define
class Pruning:
    """The part of a batch that its filters do not exclude.

    Attributes:
        topics: topics to read; None for all.
        partitions: partitions to read; None for all.
        start: number of the first message to read.
        end: number after the last message; None without a bound.
        since: first time to read, in milliseconds since 1970; None without a bound.
        until: first time not to read; None without a bound.
    """

    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    start: int = 0
    end: int | None = None
    since: int | None = None
    until: int | None = None


@frozen
class Limits:
    """Start and end of partitions according to the options."""

    starting: OffsetSpec | None
    ending: OffsetSpec | None
    since: int | None
    until: int | None
    since_by_partition: OffsetSpec | None
    until_by_partition: OffsetSpec | None

    @classmethod
    def of(cls, options: SourceOptions) -> Self:
        """Return the limits that the options of a batch ask for."""
        starting = parse_starting(options.starting_offsets or "earliest")
        if LATEST in (starting.default, *(count for named in starting.named.values() for count in named.values())):
            raise InvalidSetting(
                "startingOffsets cannot be latest in a batch: the batch would be empty",
                hint="write earliest, or numbers",
            )
        since, until = options.starting_offsets_by_timestamp, options.ending_offsets_by_timestamp
        return cls(
            starting if options.starting_timestamp is None and since is None else None,
            parse_ending(options.ending_offsets or "latest")
            if options.ending_timestamp is None and until is None
            else None,
            options.starting_timestamp,
            options.ending_timestamp,
            parse_times(since, "startingOffsetsByTimestamp") if since is not None else None,
            parse_times(until, "endingOffsetsByTimestamp") if until is not None else None,
        )

    @property
    def timed(self) -> bool:
        """Whether messages are chosen by their time."""
        times = (self.since, self.until, self.since_by_partition, self.until_by_partition)
        return any(limit is not None for limit in times)

    def times(self, topic: str, partition: int) -> tuple[int | None, int | None]:
        """Return the first time to read and the first time not to read, in milliseconds since 1970."""
        since, until = self.since_by_partition, self.until_by_partition
        return (
            self.since if since is None else since.of(topic, partition),
            self.until if until is None else until.of(topic, partition),
        )

    def check(self, read: Mapping[str, Iterable[int]]) -> None:
        """Check that offsets and times name exactly the partitions that are read."""
        for spec in (self.starting, self.ending, self.since_by_partition, self.until_by_partition):
            if spec is None:
                continue
            spec.check(read)
            for topic, partitions in read.items():
                for partition in partitions:
                    spec.of(topic, partition)


async def plan(options: SourceOptions, pruning: Pruning) -> list[Range]:
    """Return the range of each partition that a batch reads."""
    limits = Limits.of(options)
    async with Admin(options.client, first_contact=FIRST_CONTACT) as admin:
        topics = options.topics
        if options.subscribe_pattern is not None:
            matching = await admin.leaders.matching(re.compile(options.subscribe_pattern))
            if not matching:
                raise TopicNotFound(f"no topic matches subscribePattern={options.subscribe_pattern!r}")
            topics = dict.fromkeys(matching)
        read = await gather(topics, lambda topic: _partitions(admin, topic, topics[topic]))
        limits.check(read)
        keys = [
            (topic, partition)
            for topic in sorted(read)
            for partition in read[topic]
            if _is_left(pruning, topic, partition)
        ]
        bounds = await admin.bounds.survey(keys)
        found = await gather(keys, lambda key: _plan_one(options, limits, pruning, admin, key, bounds[key]))
    return list(found.values())


def _is_left(pruning: Pruning, topic: str, partition: int) -> bool:
    return (pruning.topics is None or topic in pruning.topics) and (
        pruning.partitions is None or partition in pruning.partitions
    )


async def _partitions(admin: Admin, topic: str, wanted: Iterable[int] | None) -> list[int]:
    existing = await admin.leaders.partitions(topic)
    if wanted is None:
        return sorted(existing)
    chosen = sorted(wanted)
    for partition in chosen:
        if partition not in existing:
            raise InvalidPartition(
                f"the option assign has a partition that does not exist: the topic has {len(existing)}",
                topic=topic,
                partition=partition,
            )
    return chosen


async def _plan_one(
    options: SourceOptions, limits: Limits, pruning: Pruning, admin: Admin, key: Key, bounds: Bounds
) -> Range:
    topic, partition = key
    start, end = bounds.start, bounds.end
    if limits.starting is not None:
        start = _start(limits.starting.of(topic, partition), bounds, options, topic, partition)
    if limits.ending is not None:
        end = _end(limits.ending.of(topic, partition), bounds, topic, partition)
    if start > end:
        raise InvalidSetting(
            f"startingOffsets is {start}, after endingOffsets, {end}", topic=topic, partition=partition
        )
    start = max(start, pruning.start)
    end = end if pruning.end is None else min(end, pruning.end)
    first, last = limits.times(topic, partition)
    since = max((time for time in (first, pruning.since) if time is not None), default=None)
    until = min((time for time in (last, pruning.until) if time is not None), default=None)
    if since is not None and start < end:
        start = max(start, await admin.bounds.count_at(topic, partition, max(since - _SKEW_MS, 0)))
    if until is not None and start < end:
        end = min(end, await admin.bounds.count_at(topic, partition, until + _SKEW_MS))
    return Range(topic, partition, min(start, max(end, 0)), max(end, 0))


def _start(asked: int, bounds: Bounds, options: SourceOptions, topic: str, partition: int) -> int:
    if asked == EARLIEST:
        return bounds.start
    if asked < bounds.start and options.fail_on_data_loss:
        raise DataLoss(
            f"startingOffsets is {asked}, but the first retained message is {bounds.start}",
            topic=topic,
            partition=partition,
            hint="start at earliest (-2), or use failOnDataLoss=false",
        )
    if asked > bounds.end:
        raise _after_end("startingOffsets", asked, bounds, topic, partition)
    return max(asked, bounds.start)


def _end(asked: int, bounds: Bounds, topic: str, partition: int) -> int:
    if asked == LATEST:
        return bounds.end
    if asked > bounds.end:
        raise _after_end("endingOffsets", asked, bounds, topic, partition)
    return max(asked, bounds.start)


def _after_end(option: str, asked: int, bounds: Bounds, topic: str, partition: int) -> InvalidSetting:
    return InvalidSetting(
        f"{option} is {asked}, but the partition ends at {bounds.end}", topic=topic, partition=partition
    )


def read_ranges(options: SourceOptions, ranges: Iterable[Range]) -> Iterator[RecordBatch]:
    """Read the ranges of a task completely.

    Without ``failOnDataLoss``, messages that are not retained any more and deleted topics are skipped.
    """
    rows = RowFormat(options.columns, options.headers_as_array, options.client.decompress)
    reader = TaskReader(options, ranges)
    for found, block in portal.iterate(reader, reader.next_block):
        yield from to_batches(block.columns, block.first, found.topic, found.partition, rows)


def read_within(options: SourceOptions, limits: Limits, ranges: Iterable[Range]) -> Iterator[RecordBatch]:
    """Read ranges, without messages of other times: ranges contain also those of servers whose clocks differ."""
    if not limits.timed:
        yield from read_ranges(options, ranges)
        return
    columns = options.columns
    needed = columns if "timestamp" in columns else (*columns, "timestamp")
    for found in ranges:
        since, until = limits.times(found.topic, found.partition)
        for batch in read_ranges(evolve(options, columns=needed), [found]):
            times = batch.column("timestamp").cast("int64")
            if since is not None:
                batch = batch.filter(pc.greater_equal(times, since * 1000))
                times = batch.column("timestamp").cast("int64")
            if until is not None:
                batch = batch.filter(pc.less(times, until * 1000))
            yield batch.select(list(columns))
