"""The anchor channels of a streaming query: durable channels without consumers, one per partition.

An anchor makes the server retain messages until the query has read them, stores where the query began, and shows its
lag. It moves only after Spark has completed a batch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Mapping
from functools import partial
from typing import TYPE_CHECKING

import anyio

from nsqext.errors import InvalidPartition, InvalidState, NsqError, TopicNotFound
from nsqext.spark.read.planning import PartitionState
from nsqext.waits import gather

if TYPE_CHECKING:
    from nsqext.spark.cluster.admin import Bounds, SourceAdmin
    from nsqext.spark.options import SourceOptions
    from nsqext.spark.read.offsets import Key, Offsets

logger: logging.Logger = logging.getLogger("nsqext.spark")

_QUICK = 0.2  # seconds to wait for written messages that the next batch can read
# seconds for which an anchor's position, with at most `_FEW` partitions, and a topic's partitions are not asked again
_FRESH = 5.0
_FEW = 500  # with more partitions, positions are requested less often
_TOPICS_INTERVAL = 5.0  # seconds between requests for the topics of `subscribePattern`
_JOIN = 2.0  # seconds for the anchor of a partition that is new to a running query
# errors of an anchor whose channel, topic or partition was deleted
_LOST = (InvalidState, InvalidPartition, TopicNotFound)
_UNKNOWN_PAUSE = 0.2  # seconds until a maybe deleted topic is looked up again


class Anchors:
    """The anchor channels of all partitions that a query reads."""

    def __init__(self, admin: SourceAdmin, options: SourceOptions) -> None:
        #: partitions that the query reads, by topic; None for all. Grows with `subscribePattern`.
        self.topics: dict[str, tuple[int, ...] | None] = dict(options.topics)
        self._admin = admin
        self._channel = options.channel or ""
        self._start_limit = options.start
        self._start_strategy = options.starting_offsets_by_timestamp_strategy
        self._reset = options.reset_channel
        self._continues = options.existing_channel == "continue"
        self._strict = options.fail_on_data_loss
        self._pattern = None if options.subscribe_pattern is None else re.compile(options.subscribe_pattern)
        self._matched_at = float("-inf")
        self._moved_to: dict[Key, int] = {}
        self._unmoved: set[Key] = set()
        self._started: set[Key] = set()  # partitions whose start `begin` has returned
        self._seen: dict[Key, tuple[float, int]] = {}
        self._begun: dict[Key, tuple[float, int]] = {}  # positions for the survey after `begin`
        self._listed: dict[str, tuple[float, list[Key]]] = {}  # partitions, with the time of the request
        self._refused: dict[Key, float] = {}  # when a new partition was not served yet
        self._missing: set[str] = set()
        self._recreated: set[str] = set()

    async def begin(self) -> Offsets:
        """Return the positions of the query's anchors; the same for each call.

        Creates missing anchors at the start; ``resetChannel`` moves all anchors there.
        """
        await self._match_topics()
        read = await gather(self.topics, lambda topic: self._admin.partitions_to_read(topic, self.topics[topic]))
        self._start_limit.check(read)
        keys = [(topic, partition) for topic, found in read.items() for partition in found]
        bounds = await self._admin.survey(keys)
        left_over = self._admin.is_incomplete(bounds, self._channel)
        anchors = await gather(
            [] if left_over else keys,
            lambda key: self._admin.anchor_count(*key, self._channel, bounds[key].channels),
        )
        existing = {key: count for key, count in anchors.items() if count is not None}
        # Spark asks twice for the start of a new query
        others = {key: count for key, count in existing.items() if key not in self._started}
        checked = [] if self._reset or self._continues or not self._start_limit.option else list(others)
        missing = [key for key in keys if self._reset or key not in existing]
        # partitions that were added after the query began, and before the end of its first batch
        begun = set() if self._reset else {topic for topic, _ in existing}
        added = {key: bounds[key].start for key in missing if key[0] in begun}
        chosen = [key for key in missing if key not in added]
        starts = added | await gather(chosen, lambda key: self._start(key, bounds[key]))
        await self._check_start(checked, others, bounds)
        if starts and not existing:
            await self._admin.create_anchors(starts, self._channel)
        else:
            await gather(starts, lambda key: self._put(key, starts[key], exists=key in existing))
        counts = {key: starts.get(key, existing.get(key, 0)) for key in keys}
        self._moved_to |= counts
        self._started |= counts.keys()
        self._begun = {key: (anyio.current_time(), count) for key, count in counts.items()}
        return counts

    async def _put(self, key: Key, count: int, *, exists: bool) -> None:
        if exists:
            await self._admin.move_anchor(*key, self._channel, count, backwards=True)
        else:
            await self._admin.create_anchor(*key, self._channel, count)

    async def _check_start(self, keys: list[Key], existing: Mapping[Key, int], bounds: Mapping[Key, Bounds]) -> None:
        """Raise an error if a query with a new checkpoint would not begin where its options say.

        A query that failed in its first batch finds anchors at what was then the latest message.
        """
        if not keys:
            return
        if self._start_limit.is_latest:
            topic, partition = keys[0]
            logger.warning(
                "option %s is ignored: the channel %s exists at %d partitions, and the query starts at its position "
                "(%d in topic %s, partition %d); use a new channel for a new query",
                self._start_limit.option,
                self._channel,
                len(keys),
                existing[keys[0]],
                topic,
                partition,
            )
            return
        # without a number for the partition, it was added after the query began
        numbered = [key for key in keys if self._start_limit.covers(key)]
        begin = await gather(numbered, lambda key: self._start(key, bounds[key]))
        begin |= {key: bounds[key].start for key in keys if key not in begin}
        for (topic, partition), count in begin.items():
            found = existing[topic, partition]
            if found != count:
                raise InvalidState(
                    f"the channel {self._channel} exists and is at message {found}, but {self._start_limit.option} "
                    f"begins at {count}, and the checkpoint is new",
                    topic=topic,
                    partition=partition,
                    hint="resetChannel=true begins at the option, existingChannel=continue at the channel's position; "
                    "a query that reads the topic for another purpose needs a channel of its own",
                )

    async def _start(self, key: Key, bounds: Bounds) -> int:
        since = self._start_limit.time_of(key)
        if since is None:
            return self._start_limit.first_count(key, bounds, strict=self._strict)
        return self._start_limit.since(
            key, await self._admin.count_at(*key, since), bounds, strategy=self._start_strategy
        )

    async def create(self, key: Key, count: int) -> None:
        """Create a partition's missing anchor; without ``failOnDataLoss``, not for a deleted topic."""
        topic, partition = key
        try:
            await self._admin.create_anchor(topic, partition, self._channel, count)
        except TopicNotFound as error:
            if self._strict:
                raise
            logger.warning("the anchor channel was not created: %s", error)
        else:
            self._moved_to[key] = count

    async def set_back(self, key: Key, count: int) -> None:
        """Move an anchor of a truncated log back to the first unread message."""
        self._moved_to[key] = count
        self._seen.pop(key, None)
        await self._admin.move_anchor(*key, self._channel, count, backwards=True)

    async def survey(self, *, quick: bool = False, known: Container[Key] | None = None) -> dict[Key, PartitionState]:
        """Return the states of all partitions; without ``failOnDataLoss``, except of deleted topics.

        Args:
            quick: the end may exclude acknowledged messages that are not readable yet, and an anchor's position and the
                number of partitions may be some seconds old.
            known: partitions that the query reads; others are left out while no leader serves them. None for all.
        """
        while True:
            try:
                return await self._survey(quick=quick, known=known)
            except (TopicNotFound, InvalidPartition):
                self._listed = {}
                # deleted during the survey, or created again with fewer partitions; the next survey skips it
                if self._strict:
                    raise

    async def _survey(self, *, quick: bool, known: Container[Key] | None) -> dict[Key, PartitionState]:
        keys = await self._existing_keys(fresh=_FRESH if quick else -1.0)
        new = [] if known is None else [key for key in keys if key not in known and key not in self._moved_to]
        served = await gather(new, self._join)
        keys = [key for key in keys if served.get(key, True)]
        fresh = _FRESH * max(len(keys) / _FEW, 1.0)
        positions = self._seen if quick else self._begun
        self._begun = {}
        bounds = await self._admin.survey(keys, *([_QUICK] if quick else []))
        anchors = await gather(keys, partial(self._anchor, bounds=bounds, known=positions, fresh=fresh))
        # a topic with anchors is the earlier topic of this name
        self._recreated &= {topic for topic, partition in keys if anchors[topic, partition] is None}
        found = {
            key: PartitionState(
                bounds[key].start,
                bounds[key].end,
                anchors[key],
                bounds[key].end_offset,
                recreated=anchors[key] is None and key[0] in self._recreated,
                start_offset=bounds[key].start_offset,
            )
            for key in keys
        }
        for (topic, partition), state in found.items():
            if state.anchor is None:
                continue
            expected = self._moved_to.setdefault((topic, partition), state.anchor)
            if state.anchor > expected:
                raise InvalidState(
                    f"another client moved the anchor channel {self._channel} from {expected} to {state.anchor}",
                    topic=topic,
                    partition=partition,
                    hint="each query, and each side of a self-join, needs a channel of its own that has no consumers",
                )
        return found

    async def _join(self, key: Key) -> bool:
        """Create the anchor of a partition that is new to the query; return whether a leader serves the partition.

        The real server refuses channels of a partition for two minutes after its topic was expanded.
        """
        topic, partition = key
        if anyio.current_time() - self._refused.get(key, float("-inf")) < _FRESH:
            return False
        try:
            with anyio.fail_after(_JOIN):
                bounds = await self._admin.bounds(topic, partition, _QUICK)
                if await self._admin.anchor_count(topic, partition, self._channel) is None:
                    await self.create(key, bounds.start)
        except (TimeoutError, NsqError) as error:
            if isinstance(error, NsqError) and not error.retryable:
                raise
            if key not in self._refused:
                logger.warning(
                    "topic %s, partition %d is new, and no node serves it yet: the query reads it later",
                    topic,
                    partition,
                )
            self._refused[key] = anyio.current_time()
            return False
        self._refused.pop(key, None)
        return True

    async def _match_topics(self) -> None:
        if self._pattern is None or anyio.current_time() - self._matched_at < _TOPICS_INTERVAL:
            return
        matching = await self._admin.leaders.matching(self._pattern)
        self._matched_at = anyio.current_time()
        for topic in matching:
            if topic not in self.topics:
                logger.info("the topic %s matches subscribePattern", topic)
                self.topics[topic] = None
        if not self.topics:
            logger.warning("no topic matches subscribePattern=%r", self._pattern.pattern)

    async def _keys(self, topic: str, fresh: float) -> list[Key]:
        listed = self._listed.get(topic)
        if listed is not None and anyio.current_time() - listed[0] <= fresh:
            return listed[1]
        wanted = self.topics[topic]
        existing = await self._admin.leaders.partitions(topic)
        keys = [(topic, partition) for partition in sorted(existing) if wanted is None or partition in wanted]
        self._listed[topic] = anyio.current_time(), keys
        return keys

    async def _existing_keys(self, *, fresh: float) -> list[Key]:
        """Return all partitions as of ``fresh`` seconds ago; without ``failOnDataLoss``, except of deleted topics."""
        await self._match_topics()

        async def keys_of(topic: str) -> list[Key]:
            keys = await self._keys_unless_deleted(topic, fresh)
            if keys is None:
                if topic not in self._missing:
                    logger.warning("the topic %s does not exist any more: the query continues without it", topic)
                self._missing.add(topic)
                return []
            if topic in self._missing:
                self._missing.remove(topic)
                self._recreated.add(topic)
            return keys

        return [key for keys in (await gather(self.topics, keys_of)).values() for key in keys]

    async def _keys_unless_deleted(self, topic: str, fresh: float) -> list[Key] | None:
        """Return a topic's partitions; without ``failOnDataLoss``, None once the topic counts as deleted."""
        while True:
            try:
                return await self._keys(topic, fresh)
            except TopicNotFound:
                if self._strict:
                    raise
                if await self._admin.leaders.is_deleted(topic):
                    return None
                await anyio.sleep(_UNKNOWN_PAUSE)

    async def _anchor(
        self, key: Key, *, bounds: Mapping[Key, Bounds], known: Mapping[Key, tuple[float, int]], fresh: float
    ) -> int | None:
        """Return an anchor's position, a ``known`` one for ``fresh`` seconds; None if it is missing."""
        expected = self._moved_to.get(key)
        if expected is not None and bounds[key].channels.get(self._channel) == expected:
            # where publishers make the listed position inexact, it is past the anchor
            self._seen[key] = (anyio.current_time(), expected)
            return expected
        seen, anchor = known.get(key, (float("-inf"), None))
        if anyio.current_time() - seen > fresh:
            anchor = await self._admin.anchor_count(*key, self._channel, bounds[key].channels)
            if anchor is not None:
                self._seen[key] = (anyio.current_time(), anchor)
                if expected is not None and anchor < expected:
                    self._unmoved.add(key)  # the server did not move it, or a new leader does not know it
        return anchor

    async def advance(self, end: Offsets) -> None:
        """Move the anchors forward to the end of a completed batch; the next call repeats failed moves."""
        counts = {
            key: count
            for key, count in end.items()
            if key[0] not in self._missing
            and ((moved := self._moved_to.get(key, -1)) < count or (moved == count and key in self._unmoved))
        }

        async def move(key: Key) -> None:
            # before the outcome is known, because the server may move the anchor and its response be lost
            self._moved_to[key] = counts[key]
            self._unmoved.discard(key)
            seen, _ = self._seen.get(key, (float("-inf"), 0))
            known = anyio.current_time() - seen <= _FRESH
            try:
                # the next request for the position shows whether the anchor is there
                await (self._admin.push_anchor if known else self._admin.move_anchor)(*key, self._channel, counts[key])
            except NsqError as error:
                if error.retryable:
                    self._unmoved.add(key)
                if not error.retryable and (self._strict or not isinstance(error, _LOST)):
                    raise
                logger.warning("the anchor channel was not moved: %s", error)

        await gather(counts, move)
