"""What a batch reads: a range per partition, fixed at its planning."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from attrs import define, evolve

from nsqext.errors import InvalidSetting, TopicNotFound
from nsqext.partitions.leaders import FIRST_CONTACT
from nsqext.spark.cluster import portal
from nsqext.spark.cluster.admin import SourceAdmin
from nsqext.spark.read.arrow import RowFormat, to_batches
from nsqext.spark.read.offsets import Range
from nsqext.spark.read.range_reader import TaskReader
from nsqext.waits import gather

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    from nsqext.spark.cluster.admin import Bounds
    from nsqext.spark.options import SourceOptions
    from nsqext.spark.read.offsets import Key
    from nsqext.spark.read.planning import Planned

SKEW_MS: int = 5000
"""Largest expected clock difference of a partition's successive leaders, in milliseconds."""


@define
class Pruning:
    """The part of a batch that its filters leave."""

    topics: frozenset[str] | None = None  #: None for all
    partitions: frozenset[int] | None = None  #: None for all
    start: int = 0  #: first message to read
    end: int | None = None  #: behind the last message
    since: int | None = None  #: milliseconds since 1970
    until: int | None = None  #: milliseconds since 1970, exclusive


async def plan(options: SourceOptions, pruning: Pruning) -> list[Range]:
    """Return the range of each partition of a batch."""
    async with SourceAdmin(options.client, first_contact=FIRST_CONTACT) as admin:
        topics = options.topics
        if options.subscribe_pattern is not None:
            matching = await admin.leaders.matching(re.compile(options.subscribe_pattern))
            if not matching:
                raise TopicNotFound(f"no topic matches subscribePattern={options.subscribe_pattern!r}")
            topics = dict.fromkeys(matching)
        read = await gather(topics, lambda topic: admin.partitions_to_read(topic, topics[topic]))
        for limit in (options.start, options.end):
            limit.check(read)
            for topic, partitions in read.items():
                for partition in partitions:
                    limit.of(topic, partition)  # raises if the option has no number for it
        keys = [
            (topic, partition)
            for topic in sorted(read)
            for partition in read[topic]
            if (pruning.topics is None or topic in pruning.topics)
            and (pruning.partitions is None or partition in pruning.partitions)
        ]
        bounds = await admin.survey(keys)
        found = await gather(keys, lambda key: _plan_one(options, pruning, admin, key, bounds[key]))
    return list(found.values())


async def _plan_one(options: SourceOptions, pruning: Pruning, admin: SourceAdmin, key: Key, bounds: Bounds) -> Range:
    topic, partition = key
    start = options.start.first_count(key, bounds, strict=options.fail_on_data_loss)
    end = options.end.last_count(key, bounds)
    if start > end and (options.fail_on_data_loss or start < bounds.end):
        raise InvalidSetting(
            f"startingOffsets is {start}, after endingOffsets, {end}", topic=topic, partition=partition
        )
    start = max(start, pruning.start)
    end = end if pruning.end is None else min(end, pruning.end)
    first, last = options.start.time_of(key), options.end.time_of(key)
    if first is not None and options.starting_offsets_by_timestamp_strategy == "error":
        options.start.since(key, await admin.count_at(topic, partition, first), bounds, strategy="error")
    since = max((time for time in (first, pruning.since) if time is not None), default=None)
    until = min((time for time in (last, pruning.until) if time is not None), default=None)
    if since is not None and start < end:
        start = max(start, await admin.count_at(topic, partition, since - SKEW_MS))
    if until is not None and start < end:
        end = min(end, await admin.count_at(topic, partition, until + SKEW_MS))
    end = max(end, 0)
    return Range(topic, partition, min(start, end), end)


def read_ranges(
    options: SourceOptions, ranges: Iterable[Range], planned: Mapping[Key, Planned] | None = None
) -> Iterator[RecordBatch]:
    """Read a task's ranges completely; without ``failOnDataLoss``, except lost messages and deleted topics."""
    rows = RowFormat.of(options)
    reader = TaskReader(options, ranges, planned)
    for found, block in portal.iterate(reader, reader.next_block):
        yield from to_batches(block.columns, block.first, found.topic, found.partition, rows)


def read_within(options: SourceOptions, ranges: Iterable[Range]) -> Iterator[RecordBatch]:
    """Read ranges, without messages of other times, contained because servers' clocks differ."""
    if not (options.start.timed or options.end.timed):
        yield from read_ranges(options, ranges)
        return
    import pyarrow.compute as pc  # takes 50 ms, in each process of a query

    columns = options.columns
    needed = columns if "timestamp" in columns else (*columns, "timestamp")
    for found in ranges:
        key = found.topic, found.partition
        since, until = options.start.time_of(key), options.end.time_of(key)
        for batch in read_ranges(evolve(options, columns=needed), [found]):
            times = batch.column("timestamp").cast("int64")
            if since is not None:
                batch = batch.filter(pc.greater_equal(times, since * 1000))
                times = batch.column("timestamp").cast("int64")
            if until is not None:
                batch = batch.filter(pc.less(times, until * 1000))
            yield batch.select(list(columns))
