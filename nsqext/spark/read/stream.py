"""Topics as a stream that can be read again: `spark.readStream` with ``readMode=offset``.

Spark asks a process of its own, one for each query, what the next batch is, and other processes read it. So a reader
keeps nothing that has to be known elsewhere: all of that is in the offsets, in the ranges that tasks get, and in the
anchor channels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from attrs import evolve
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from nsqext.errors import InvalidSetting, InvalidState
from nsqext.spark.cluster import portal as bridge
from nsqext.spark.cluster.admin import Admin
from nsqext.spark.read.anchor import Anchors, starting_places
from nsqext.spark.read.batch import RangePartition, read_range
from nsqext.spark.read.offsets import Range, dump, load, split
from nsqext.spark.read.planning import Key, Standing, frozen_at, lags_of, only, plan_end, plan_ranges, with_unread
from nsqext.spark.read.rate_limit import within_bytes, within_rows

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    from nsqext.spark.options import SourceOptions
    from nsqext.spark.read.offsets import Offsets

__all__ = ("Batches", "NsqStreamReader")

logger: logging.Logger = logging.getLogger("nsqext.spark")

T = TypeVar("T")

_PAUSE = 0.2
"""Seconds between two questions to the servers while nothing comes; Spark asks a hundred times a second."""
_SHARE = 3
"""The pause is so many times as long as the answers take, where that is longer: there may be many partitions."""


class Batches:
    """Decides what the batches of a query are, by what the servers say.

    Args:
        options: what is read.
        admin: asks the servers; closed with this.
    """

    def __init__(self, options: SourceOptions, admin: Admin) -> None:
        self._options = options
        self._admin = admin
        self._anchors = Anchors(admin, options)
        self._found: dict[Key, Standing] = {}
        self._limits: dict[Key, Standing] | None = None
        self._next = 0.0
        self._looked = False

    async def initial(self) -> Offsets:
        """Return where the query begins; see `Anchors.begin`."""
        begun = await self._anchors.begin()
        if self._limits is not None:
            # the end was frozen before there were anchors
            for topic, counts in begun.items():
                for partition, count in counts.items():
                    limit = self._limits.get((topic, partition), Standing(0, 0))
                    self._limits[topic, partition] = evolve(limit, end=max(limit.end, count))
        return begun

    async def freeze(self) -> None:
        """Read nothing any more that is published from now on."""
        self._found = await self._anchors.survey()
        self._limits = dict(self._found)

    async def latest(self, start: Offsets, limit: int | None, size: int | None = None) -> Offsets:
        """Return where the batch ends that begins at ``start``.

        Args:
            start: where it begins.
            limit: how many messages it may read; None for all.
            size: how many bytes of the partitions' logs, see `within_bytes`; None for all.

        Raises:
            DataLoss: messages are gone that were not read.
            NsqError: the servers cannot be asked.
        """
        await self._pause()
        began = anyio.current_time()
        options = self._options
        begin = only(start, options.topics)
        self._found = found = await self._survey(begin)
        self._warn_of_unkept(begin)
        if self._limits is not None:
            found = frozen_at(found, self._limits)
        lags = lags_of(begin, found, fail_on_data_loss=options.fail_on_data_loss)
        counts = within_rows(lags, limit) if size is None else await within_bytes(self._admin, lags, found, size)
        end = plan_end(lags, counts)
        await self._make_anchors(start, end)
        end = with_unread(end, start)
        now = anyio.current_time()
        self._next = now + max(_PAUSE, _SHARE * (now - began)) if end == start and self._limits is None else now
        return end

    async def _survey(self, begin: Offsets) -> dict[Key, Standing]:
        # a query that ends where it was frozen has to get there
        found = await self._anchors.survey(quick=self._limits is None)
        ends = {key: standing.end for key, standing in found.items()}
        if any(
            ends.get((topic, key), count) < count for topic, counts in begin.items() for key, count in counts.items()
        ):
            # a new leader may learn a little later how far the log goes: look carefully before anything is said lost
            found = await self._anchors.survey()
        return found

    async def _pause(self) -> None:
        await anyio.sleep(max(self._next - anyio.current_time(), 0))

    def _warn_of_unkept(self, start: Offsets) -> None:
        """Tell once that anchors do not keep what is read."""
        if self._looked:
            return
        self._looked = True
        for (topic, partition), standing in self._found.items():
            count = start.get(topic, {}).get(partition)
            if count is not None and standing.anchor is not None and standing.anchor > count:
                logger.warning(
                    "topic %s, partition %d: the query reads from %d, its anchor channel stands at %d: what is between "
                    "may be cleaned away; is the checkpoint an old one, or does another query use the channel?",
                    topic,
                    partition,
                    count,
                    standing.anchor,
                )

    async def _make_anchors(self, start: Offsets, end: Offsets) -> None:
        """Make the anchors that are missing before the batch is written down anywhere."""
        for (topic, partition), standing in self._found.items():
            last = end.get(topic, {}).get(partition)
            if standing.anchor is None and last is not None:
                begin = start.get(topic, {}).get(partition, standing.start)
                await self._anchors.make((topic, partition), max(min(begin, last), standing.start))

    def report(self) -> Offsets | None:
        """Return the ends that were seen last; None before anything was seen."""
        ends: Offsets = {}
        for (topic, partition), standing in self._found.items():
            ends.setdefault(topic, {})[partition] = standing.end
        return ends or None

    async def ranges(self, start: Offsets, end: Offsets) -> list[Range]:
        """Return what the tasks of a batch read.

        Raises:
            DataLoss: messages are gone that were not read.
            NsqError: the servers cannot be asked.
        """
        options = self._options
        if self._missing(start, end):
            await self._catch_up(start, end)
        found = dict(self._found)
        for topic, counts in only(end, options.topics).items():
            for partition in counts:
                found.setdefault((topic, partition), Standing(0, 0))
        ranges = plan_ranges(start, end, found, fail_on_data_loss=options.fail_on_data_loss)
        return split(ranges, options.min_partitions, options.max_records_per_partition)

    async def _catch_up(self, start: Offsets, end: Offsets) -> None:
        """Look at the servers until they have what was written down; a new leader may learn of it a little later."""
        with anyio.move_on_after(self._options.read_timeout):
            while True:
                self._found = await self._anchors.survey()
                if not self._missing(start, end):
                    return
                await anyio.sleep(_PAUSE)

    def _missing(self, start: Offsets, end: Offsets) -> bool:
        """Return whether servers do not have something that the batch reads."""
        return any(
            (topic, partition) not in self._found or self._found[topic, partition].end < count
            for topic, counts in only(end, self._options.topics).items()
            for partition, count in counts.items()
            if start.get(topic, {}).get(partition, 0) < count
        )

    async def commit(self, end: Offsets) -> None:
        """Let the servers forget what is done; see `Anchors.follow`.

        A partition that ends before that was rolled back or made anew: its next batch steps back.
        """
        there: Offsets = {}
        for topic, counts in only(end, self._options.topics).items():
            for partition, count in counts.items():
                standing = self._found.get((topic, partition))
                if standing is None or count <= standing.end:
                    there.setdefault(topic, {})[partition] = count
        await self._anchors.follow(there)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._admin.aclose()


class NsqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics batch by batch, each of which can be read again.

    Args:
        options: what is read.

    Raises:
        InvalidSetting: the start positions cannot be read.
    """

    def __init__(self, options: SourceOptions) -> None:
        starting_places(options)
        self._options = options
        self._batches: Batches | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_batches": None}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return how much a batch reads at most, by the options ``maxOffsetsPerTrigger`` and ``maxBytesPerTrigger``."""
        rows, size = self._options.max_offsets_per_trigger, self._options.max_bytes_per_trigger
        if size is not None:
            return ReadMaxBytes(size)
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def prepareForTriggerAvailableNow(self) -> None:
        """Read nothing that is published from now on."""
        self._ask(lambda batches: batches.freeze())

    def initialOffset(self) -> dict[str, Any]:
        """Return where the query begins."""
        return dump(self._ask(lambda batches: batches.initial()))

    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return where the next batch ends."""
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        if rows is None and size is None and not isinstance(limit, ReadAllAvailable):
            raise InvalidSetting(
                f"the source knows no {type(limit).__name__}", hint="use maxOffsetsPerTrigger or maxBytesPerTrigger"
            )
        begun = load(start)
        return dump(self._ask(lambda batches: batches.latest(begun, rows, size)))

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return where the topics end, for the progress that Spark reports."""
        ends = self._batches.report() if self._batches is not None else None
        return None if ends is None else dump(ends)

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        """Return what the tasks of a batch read."""
        begun, ended = load(start), load(end)
        return [RangePartition(found) for found in self._ask(lambda batches: batches.ranges(begun, ended))]

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        """Read the range of a task, in the process that runs it."""
        if not isinstance(partition, RangePartition):
            raise InvalidState(f"{partition!r} is no range of this source")
        return read_range(self._options, partition.range)

    def commit(self, end: Mapping[str, Any]) -> None:
        """Move the anchor channels behind a batch that is done."""
        ended = load(end)
        self._ask(lambda batches: batches.commit(ended))

    def stop(self) -> None:
        """Close the connections."""
        if self._batches is not None:
            batches, self._batches = self._batches, None
            bridge.call(batches.aclose)

    def _ask(self, question: Callable[[Batches], Coroutine[Any, Any, T]]) -> T:
        async def ask() -> T:
            if self._batches is None:
                self._batches = Batches(self._options, Admin(self._options.connection))
            return await question(self._batches)

        return bridge.call(ask)
