"""Micro-batches of a streaming query: where they end, which ranges they read, whether logs have changed.

A checkpoint has the id, the byte offset and the time of the message before each offset, which no other message shares,
to detect truncated logs and recreated topics that have grown beyond the offset.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import anyio
from attrs import evolve

from nsqext.errors import DataLoss, InvalidSetting
from nsqext.partitions import MessagePosition
from nsqext.spark.read.anchor import Anchors
from nsqext.spark.read.offsets import Key, by_partition, by_topic, dump
from nsqext.spark.read.planning import (
    LOST,
    Lag,
    PartitionState,
    Planned,
    frozen_at,
    lags_of,
    only,
    plan_end,
    plan_ranges,
    share,
    with_unread,
)
from nsqext.waits import gather

if TYPE_CHECKING:
    from nsqext.spark.cluster.admin import SourceAdmin
    from nsqext.spark.options import SourceOptions
    from nsqext.spark.read.offsets import Offsets, Range

logger: logging.Logger = logging.getLogger("nsqext.spark")

LastMessages = Mapping[Key, MessagePosition]
"""The message before each partition's offset, as far as the checkpoint has it."""

_MEMBERS = ("id", "offset", "timestamp")


def dump_last(last: LastMessages) -> dict[str, Any]:
    """Return the member ``last`` of a checkpoint's offsets, in a fixed order."""
    found = {key: {name: getattr(message, name) for name in _MEMBERS} for key, message in last.items()}
    return {"last": by_topic(found)} if found else {}


def load_last(data: Mapping[str, Any], offsets: Offsets) -> LastMessages:
    """Return a checkpoint's last messages of partitions with an offset; earlier versions wrote no last messages."""
    return {
        key: MessagePosition(offsets[key] - 1, *(message[name] for name in _MEMBERS))
        for key, message in by_partition(data, "last", _MEMBERS).items()
        if offsets.get(key)
    }


class TruncationCheck:
    def __init__(self, admin: SourceAdmin, *, fail_on_data_loss: bool) -> None:
        self._admin = admin
        self._strict = fail_on_data_loss

    async def last_messages(
        self, end: Offsets, states: Mapping[Key, PartitionState], start: Offsets, known: LastMessages
    ) -> LastMessages:
        """Return the last messages before ``end``; ``known`` messages before ``start`` where the offset is the same."""
        wanted = {
            key: count
            for key, count in end.items()
            if (key not in known or start.get(key) != count)
            and (state := states.get(key)) is not None
            and state.start < count <= state.end
        }
        found = await gather(wanted, lambda key: self._admin.message(*key, wanted[key] - 1))
        kept = {key: message for key, message in known.items() if end.get(key) == message.count + 1}
        # for a message just removed, the server returns the first retained message
        return kept | {key: message for key, message in found.items() if message.count == wanted[key] - 1}

    async def divergences(self, known: LastMessages, states: Mapping[Key, PartitionState]) -> dict[Key, int]:
        """Return the first unread message of each changed log, where reading continues without ``failOnDataLoss``."""
        keys = [key for key, message in known.items() if key in states and states[key].start <= message.count]
        found = await gather(keys, lambda key: self._divergence(key, known[key], states[key]))
        return {key: count for key, count in found.items() if count is not None}

    async def _divergence(self, key: Key, known: MessagePosition, state: PartitionState) -> int | None:
        topic, partition = key
        if known.count < state.end:
            found = await self._admin.message(topic, partition, known.count)
            if found == known or found.count != known.count:
                return None
            change = (
                f"message {known.count}, the last message read, was {_shown(known)}, and is {_shown(found)} now: "
                "the log was truncated and has grown again, or the topic was recreated"
            )
            if self._strict:
                raise DataLoss(change, topic=topic, partition=partition, hint=LOST)
            logger.warning("topic %s, partition %d: %s", topic, partition, change)
        elif self._strict:
            return None  # its length shows it, see `lags_of`
        return min(known.count + 1, await self._admin.count_since(topic, partition, known.timestamp + 1))


def _shown(message: MessagePosition) -> str:
    time = datetime.fromtimestamp(message.timestamp / 1e9, UTC).isoformat(timespec="milliseconds")
    return f"the message with id {message.id} at byte offset {message.offset}, stored at {time}"


_PAUSE = 0.2  # seconds between requests without new messages; Spark asks a hundred times a second
_PAUSE_FACTOR = 3  # shortest pause relative to the requests' duration, because there may be many partitions


class StreamPlanner:
    def __init__(self, options: SourceOptions, admin: SourceAdmin) -> None:
        self._options = options
        self._admin = admin  # closed with this object
        self._anchors = Anchors(admin, options)
        self._check = TruncationCheck(admin, fail_on_data_loss=options.fail_on_data_loss)
        self.last: LastMessages = {}  #: before the offsets returned last
        self._divergences: dict[Key, int] = {}
        self._before: LastMessages = {}  # the last messages before the planned batch, which the servers still have
        self._states: dict[Key, PartitionState] = {}
        self._frozen: dict[Key, PartitionState] | None = None
        self._planned: Offsets = {}
        self._batch_at: float | None = None
        self._surveyed: tuple[float, int] | None = None
        self._rate = 0.0
        self._next = 0.0
        self._checked = False
        self._initial: tuple[Offsets, LastMessages] | None = None

    async def initial(self) -> Offsets:
        """Return the start of the query; see `Anchors.begin`. Spark asks twice."""
        if self._initial is not None:
            begun, self.last = self._initial
            return begun
        begun = await self._anchors.begin()
        bounds = await self._admin.survey(begun, _PAUSE)
        states = {key: PartitionState(found.start, found.end) for key, found in bounds.items()}
        self.last = await self._check.last_messages(begun, states, {}, {})
        self._initial = begun, self.last
        return begun

    async def freeze(self) -> None:
        self._states = await self._anchors.survey()
        self._frozen = dict(self._states)

    async def latest(
        self,
        start: Offsets,
        limit: int | None,
        size: int | None = None,
        last: LastMessages | None = None,
        *,
        at_once: bool = False,
    ) -> Offsets:
        """Return the end of the batch that begins at ``start``, after Spark has completed the batch before it.

        Without new messages, the anchors move there now: Spark calls `commit` only after it has planned the next batch.

        Args:
            limit: largest number of messages; None for no limit.
            size: approximate bytes of the partitions' logs, see `within_bytes`; None for no limit.
            last: the last messages before ``start``, as far as known.
            at_once: do not wait for ``minOffsetsPerTrigger``.
        """
        await anyio.sleep_until(self._next)
        began = anyio.current_time()
        options = self._options
        self._check_topics(start)
        begin = self._only(start)
        last = last or {}
        await self._survey(begin, last)
        states = self._states
        self._warn_of_unretained(begin)
        if self._frozen is not None:
            states = frozen_at(states, self._frozen, begin)
        known = {topic for topic, _ in start}
        lags = lags_of(begin, states, fail_on_data_loss=options.fail_on_data_loss, topics=known)
        if not at_once and self._waits_for_more(sum(lag.count for lag in lags.values())):
            end = start
        else:
            counts = within_rows(lags, limit) if size is None else await within_bytes(self._admin, lags, states, size)
            end = plan_end(lags, counts)
            await self._create_anchors(start, end)
            end = with_unread(end, start)
        self.last = last if end == start else await self._check.last_messages(end, self._states, start, last)
        now = anyio.current_time()
        if end == start:
            await self.commit(start)
            self._next = now if self._frozen is not None else now + max(_PAUSE, _PAUSE_FACTOR * (now - began))
        else:
            self._batch_at = self._next = now
        self._planned = end
        return end

    def _waits_for_more(self, unread: int) -> bool:
        """Return whether a batch is not the first, smaller than ``minOffsetsPerTrigger``, and not overdue."""
        least = self._options.min_offsets_per_trigger
        if least is None or self._frozen is not None or unread >= least:
            return False
        now = anyio.current_time()
        if self._batch_at is None:
            self._batch_at = now
            return False
        return now - self._batch_at < self._options.max_trigger_delay

    async def _survey(self, begin: Offsets, last: LastMessages) -> None:
        """Request the partitions' states, and compare the last messages of partitions with new messages."""
        # AvailableNow must read everything acknowledged before; PySpark 4.0 and 4.1 do not announce it, and a process's
        # first batch may be its only batch
        first = self._surveyed is None
        found = await self._anchors.survey(quick=self._frozen is None and not first, known=begin)
        ends = {key: state.end for key, state in found.items()}
        if any(ends.get(key, count) < count for key, count in begin.items()):
            # a new leader may need some time to learn the end of the log
            found = await self._anchors.survey(known=begin)
        now, total = anyio.current_time(), sum(state.end for state in found.values())
        if self._surveyed is not None and now > self._surveyed[0]:
            self._rate = max(total - self._surveyed[1], 0) / (now - self._surveyed[0])
        self._surveyed = now, total
        changed = {key: state for key, state in found.items() if first or state.end != begin.get(key)}
        self._divergences = await self._check.divergences(last, changed)
        for key, count in self._divergences.items():
            found[key] = evolve(found[key], divergence=count)
            if (found[key].anchor or 0) > count:
                await self._anchors.set_back(key, count)
        self._states = found
        self._before = {key: message for key, message in last.items() if key not in self._divergences}

    def _warn_of_unretained(self, start: Offsets) -> None:
        """Log once that anchors are ahead of the checkpoint."""
        if self._checked:
            return
        self._checked = True
        for (topic, partition), state in self._states.items():
            count = start.get((topic, partition))
            if count is not None and state.anchor is not None and state.anchor > count:
                logger.warning(
                    "topic %s, partition %d: the query reads from %d, but its anchor channel is at %d: the server may "
                    "remove the messages in between; the checkpoint is old, or another query uses the channel",
                    topic,
                    partition,
                    count,
                    state.anchor,
                )

    async def _create_anchors(self, start: Offsets, end: Offsets) -> None:
        counts = {
            key: max(min(start.get(key, state.start), end[key]), state.start)
            for key, state in self._states.items()
            if state.anchor is None and key in end
        }
        await gather(counts, lambda key: self._anchors.create(key, counts[key]))

    def report(self) -> dict[str, Any] | None:
        """Return the partitions' ends and metrics for the query's progress; None before the first batch."""
        if not self._states:
            return None
        states = self._states
        behind = {key: max(state.end - self._planned.get(key, state.start), 0) for key, state in states.items()}
        metrics = {
            "messagesBehind": sum(behind.values()),
            "publishedPerSecond": round(self._rate, 1),
            "behind": by_topic(behind),
            "earliest": by_topic({key: state.start for key, state in states.items()}),
        }
        return {**dump({key: state.end for key, state in states.items()}), "metrics": metrics}

    async def ranges(
        self, start: Offsets, end: Offsets, last_of_start: LastMessages | None = None, last: LastMessages | None = None
    ) -> list[Range]:
        self._check_topics(end)
        if self._is_missing(start, end):
            await self._catch_up(start, end)
        states = dict(self._states)
        if end != self._planned:
            # an earlier process planned the batch
            for known in (last_of_start or {}, last or {}):
                for key, count in (await self._check.divergences(known, states)).items():
                    states[key] = evolve(states[key], divergence=count)
            self._before = last_of_start or {}
        for key in self._only(end):
            states.setdefault(key, PartitionState(0, 0))
        return plan_ranges(start, end, states, fail_on_data_loss=self._options.fail_on_data_loss)

    def planned_of(self, ranges: Iterable[Range]) -> dict[Key, Planned]:
        """Return what tasks need not ask about the ranges of the batch."""
        firsts = {(found.topic, found.partition): found.start for found in ranges}
        planned: dict[Key, Planned] = {}
        # without a state, the query no longer reads the partition: a logged batch still does
        for key, (leader, meta) in self._admin.leaders.known(firsts.keys() & self._states.keys()).items():
            before, state = self._before.get(key), self._states[key]
            retained = before is not None and state.start <= before.count == firsts[key] - 1
            planned[key] = Planned(leader, meta, before if retained else None, state.start, state.start_offset)
        return planned

    def _check_topics(self, offsets: Offsets) -> None:
        """Refuse a checkpoint without any topic of the query, whose messages would all be read from the first."""
        options = self._options
        known = sorted({topic for topic, _ in offsets})
        pattern = options.subscribe_pattern
        if known and not any(
            topic in options.topics if pattern is None else re.fullmatch(pattern, topic) for topic in known
        ):
            wanted = ", ".join(options.topics) if pattern is None else f"the pattern {pattern}"
            raise InvalidSetting(
                f"the checkpoint is of a query of {', '.join(known)}, and this one reads {wanted}",
                hint="use a new checkpoint, or subscribe to a topic of the earlier query too",
            )

    def _only(self, offsets: Offsets) -> Offsets:
        pattern = self._options.subscribe_pattern
        if pattern is None:
            return only(offsets, self._options.topics)
        return {key: count for key, count in offsets.items() if re.fullmatch(pattern, key[0])}

    async def _catch_up(self, start: Offsets, end: Offsets) -> None:
        """Wait until the servers have a stored batch's messages; a new leader may need some time."""
        timeout = self._options.read_timeout
        until = anyio.current_time() + timeout
        self._states = await self._anchors.survey()
        if self._is_missing(start, end):
            logger.warning("the servers do not have all messages of the next batch: waiting, %g s at most", timeout)
        while self._is_missing(start, end) and (anyio.current_time() < until or await self._may_return(end)):
            await anyio.sleep(_PAUSE)
            self._states = await self._anchors.survey()

    async def _may_return(self, end: Offsets) -> bool:
        """Return whether an unknown topic of a batch does not count as deleted yet."""
        known = {topic for topic, _ in self._states}
        unknown = {topic for topic, _ in self._only(end)} - known
        return not all([await self._admin.leaders.is_deleted(topic) for topic in sorted(unknown)])

    def _is_missing(self, start: Offsets, end: Offsets) -> bool:
        return any(
            key not in self._states or self._states[key].end < count
            for key, count in self._only(end).items()
            if start.get(key, 0) < count
        )

    async def commit(self, end: Offsets) -> None:
        """Move the anchors to the end of a completed batch; see `Anchors.advance`.

        The anchor of a truncated or recreated partition stays; the next batch sets its offset back.
        """
        existing: Offsets = {}
        for key, count in self._only(end).items():
            state = self._states.get(key)
            if state is None or count <= state.end:
                existing[key] = min(count, self._divergences.get(key, count))
        await self._anchors.advance(existing)

    async def aclose(self) -> None:
        await self._admin.aclose()


def _turn(lags: Mapping[Key, Lag]) -> int:
    return sum(lag.begin for lag in lags.values())


def within_rows(lags: Mapping[Key, Lag], limit: int | None) -> dict[Key, int]:
    """Return the number of messages to read from each partition, at most ``limit`` in total."""
    return share({key: lag.count for key, lag in lags.items()}, limit, _turn(lags))


async def within_bytes(
    admin: SourceAdmin, lags: Mapping[Key, Lag], found: Mapping[Key, PartitionState], limit: int
) -> dict[Key, int]:
    """Return the number of messages to read from each partition, about ``limit`` bytes of logs in total.

    A partition with a share reads at least one message, so the total may exceed it by one message per partition.
    """
    behind = {key: lag for key, lag in lags.items() if lag.count}

    firsts = await gather(behind, lambda key: admin.message(*key, behind[key].begin))
    sizes = {key: max(found[key].end_offset - first.offset, 1) for key, first in firsts.items()}
    shares = share(sizes, limit, _turn(lags))

    async def count_of(key: Key) -> int:
        lag, stop = behind[key], firsts[key].offset + shares[key]
        if shares[key] in (0, sizes[key]):
            return lag.count if shares[key] else 0
        last = lag.begin + lag.count - 1
        if lag.count > 1 and stop < (await admin.message(*key, last)).offset:
            last = await admin.count_before(*key, stop)
        # the end of the last message may be unknown; the next batch reads it
        return max(last - lag.begin, 1)

    return await gather(behind, count_of)
