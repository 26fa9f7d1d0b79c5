"""The anchor channel of a streaming query: a durable channel that nobody consumes.

It keeps messages from being cleaned away before the query has read them, remembers where the query began, and shows
its lag to everybody who looks at the servers' statistics. Its place only moves when Spark says that a batch is done.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import anyio

from nsqext.errors import DataLoss, InvalidPartition, InvalidSetting, InvalidState, NsqError, TopicNotFound
from nsqext.spark.cluster.gather import together
from nsqext.spark.read.offsets import EARLIEST, LATEST, Places, parse_starting
from nsqext.spark.read.planning import Key, Standing

if TYPE_CHECKING:
    from nsqext.spark.cluster.admin import Admin, Bounds
    from nsqext.spark.options import SourceOptions
    from nsqext.spark.read.offsets import Offsets

__all__ = ("Anchors", "starting_places")

logger: logging.Logger = logging.getLogger("nsqext.spark")

_QUICK = 0.2
"""Seconds to wait for messages that are written and not yet shown, where they can also wait for the next batch."""
_FRESH = 5.0
"""Seconds for which an anchor is taken to be where it was."""


def starting_places(options: SourceOptions) -> Places | None:
    """Return where partitions begin that have no anchor yet; None where a time says so.

    Raises:
        InvalidSetting: the option cannot be read, or would make a restarted query begin somewhere else.
    """
    if options.starting_timestamp is not None:
        return None
    places = parse_starting(options.starting_offsets or "latest")
    moving = LATEST in (places.default, *(count for counts in places.named.values() for count in counts.values()))
    if options.reset_channel and moving:
        raise InvalidSetting(
            "resetChannel cannot start at the latest message: a query that is started again after a crash in its first "
            "batch would skip what came meanwhile",
            hint="give startingOffsets earliest or numbers, a startingTimestamp, or a new channel without resetChannel",
        )
    return places


class Anchors:
    """The anchor channel at every partition that a query reads.

    Args:
        admin: asks the servers; it stays its owner's.
        options: what is read.

    Raises:
        InvalidSetting: the start positions cannot be read.
    """

    def __init__(self, admin: Admin, options: SourceOptions) -> None:
        self._admin = admin
        self._topics = options.topics
        self._channel = options.channel or ""
        self._timestamp = options.starting_timestamp
        self._places = starting_places(options)
        self._reset = options.reset_channel
        self._strict = options.fail_on_data_loss
        self._asked: dict[Key, int] = {}
        self._seen: dict[Key, tuple[float, int]] = {}
        self._gone: set[str] = set()

    async def begin(self) -> Offsets:
        """Return where the query begins, which is the same whenever it is asked: where the anchors stand.

        Anchors that are not there are made, at the start positions; all of them where the channel is to be reset.

        Raises:
            DataLoss: a start position lies before the messages that are kept.
            InvalidPartition: a partition is named that the topic does not have.
            InvalidSetting: a start position lies behind the last message.
            NsqError: the servers cannot be asked, or refuse.
        """
        keys = [key for topic in self._topics for key in await self._keys(topic)]
        self._check_named(keys)
        counts = await together(keys, self._begin)
        return _offsets(counts)

    async def _begin(self, key: Key) -> int:
        topic, partition = key
        anchor = await self._admin.anchor_count(topic, partition, self._channel)
        if anchor is not None and not self._reset:
            self._asked[key] = anchor
            return anchor
        count = await self._start(topic, partition)
        if anchor is None:
            await self.make(key, count)
        else:
            await self._admin.move_anchor(topic, partition, self._channel, count, backwards=True)
            self._asked[key] = count
        return count

    async def _start(self, topic: str, partition: int) -> int:
        bounds = await self._admin.bounds(topic, partition)
        if self._places is None:
            count = await self._admin.count_at(topic, partition, self._timestamp or 0)
        else:
            count = _place(self._places, topic, partition, bounds)
        if count < bounds.start and self._strict:
            raise DataLoss(
                f"startingOffsets is {count}, and only messages from {bounds.start} on are kept",
                topic=topic,
                partition=partition,
                hint="start at earliest (-2), or give failOnDataLoss=false",
            )
        return max(count, bounds.start)

    def _check_named(self, keys: Iterable[Key]) -> None:
        read: dict[str, set[int]] = {}
        for topic, partition in keys:
            read.setdefault(topic, set()).add(partition)
        for topic, wanted in self._topics.items():
            for partition in wanted or ():
                if partition not in read.get(topic, ()):
                    raise InvalidPartition(
                        "assign names a partition that there is not", topic=topic, partition=partition
                    )
        if self._places is not None:
            self._places.check(read)

    async def make(self, key: Key, count: int) -> None:
        """Make the anchor at a partition that has none.

        Args:
            key: the partition.
            count: where it stands: number of messages before it.
        """
        topic, partition = key
        await self._admin.create_anchor(topic, partition, self._channel, count)
        self._asked[key] = count

    async def survey(self, *, quick: bool = False) -> dict[Key, Standing]:
        """Look at all partitions that are read; without ``failOnDataLoss``, a topic that is gone has none.

        Args:
            quick: an end may be without messages that the servers show a little later, and an anchor be where it was
                some seconds ago; otherwise an end holds everything that was acknowledged before.

        Raises:
            InvalidState: somebody else moves the anchors of this query.
            NsqError: the servers cannot be asked.
        """
        keys = await self._there()
        # anchors first: none stands behind an end that was told later
        anchors = await together(keys, partial(self._anchor, quick=quick))
        bounds = await self._admin.survey(keys, *([_QUICK] if quick else []))
        found = {
            key: Standing(bounds[key].start, bounds[key].end, anchors[key], bounds[key].end_offset) for key in keys
        }
        for (topic, partition), standing in found.items():
            if standing.anchor is None:
                continue
            asked = self._asked.setdefault((topic, partition), standing.anchor)
            if standing.anchor > asked:
                raise InvalidState(
                    f"somebody else moved the anchor channel {self._channel} from {asked} to {standing.anchor}",
                    topic=topic,
                    partition=partition,
                    hint="each query needs a channel of its own, which nobody consumes",
                )
        return found

    async def _keys(self, topic: str) -> list[Key]:
        wanted = self._topics[topic]
        there = await self._admin.partitions(topic)
        return [(topic, partition) for partition in sorted(there) if wanted is None or partition in wanted]

    async def _there(self) -> list[Key]:
        """Return all partitions that are read, without those of topics that are gone, where that is allowed."""
        keys: list[Key] = []
        for topic in self._topics:
            try:
                keys += await self._keys(topic)
                self._gone.discard(topic)
            except TopicNotFound:
                if self._strict:
                    raise
                if topic not in self._gone:
                    logger.warning("the topic %s is gone: the query goes on without it", topic)
                self._gone.add(topic)
        return keys

    async def _anchor(self, key: Key, *, quick: bool) -> int | None:
        topic, partition = key
        seen, anchor = self._seen.get(key, (float("-inf"), None))
        if not quick or anyio.current_time() - seen > _FRESH:
            anchor = await self._admin.anchor_count(topic, partition, self._channel)
            if anchor is not None:
                self._seen[key] = (anyio.current_time(), anchor)
        return anchor

    async def follow(self, end: Offsets) -> None:
        """Move the anchors behind what is done, never backwards.

        An anchor that cannot be moved now is moved with the next batch: nothing is lost by that.

        Raises:
            NsqError: the servers refuse for good.
        """
        counts = {
            (topic, partition): count
            for topic, counts in end.items()
            for partition, count in counts.items()
            if self._asked.get((topic, partition), -1) < count
        }

        async def move(key: Key) -> None:
            topic, partition = key
            self._asked[key] = counts[key]
            try:
                await self._admin.move_anchor(topic, partition, self._channel, counts[key])
            except NsqError as error:
                if not error.retryable and (self._strict or not isinstance(error, InvalidState)):
                    raise
                logger.warning("the anchor channel stays where it is for now: %s", error)

        await together(counts, move)


def _place(places: Places, topic: str, partition: int, bounds: Bounds) -> int:
    count = places.of(topic, partition)
    if count == EARLIEST:
        return bounds.start
    if count == LATEST:
        return bounds.end
    if count > bounds.end:
        raise InvalidSetting(
            f"startingOffsets is {count}, and there are only {bounds.end} messages", topic=topic, partition=partition
        )
    return count


def _offsets(counts: Mapping[Key, int]) -> Offsets:
    offsets: Offsets = {}
    for (topic, partition), count in counts.items():
        offsets.setdefault(topic, {})[partition] = count
    return offsets
