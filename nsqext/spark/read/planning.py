"""What a micro-batch reads, computed from numbers: a repeated call has the same result."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from nsqext.errors import DataLoss
from nsqext.spark.read.offsets import Key, Range

if TYPE_CHECKING:
    from nsqext.partitions import Leader, MessagePosition
    from nsqext.spark.read.offsets import Offsets
    from nsqext.types import TopicMeta

LOST = "failOnDataLoss=false continues without the lost messages"


@frozen
class PartitionState:
    """State of a partition; the first three attributes count messages since its beginning."""

    start: int  #: messages not retained any more
    end: int  #: committed messages
    anchor: int | None = None  #: position of the anchor channel; None if missing
    end_offset: int = 0  #: byte offset at the end, or more
    #: deleted and created again while the query ran; earlier offsets are invalid
    recreated: bool = False
    #: in a log truncated or recreated since the last read, the first message behind the last message read
    divergence: int | None = None
    start_offset: int = 0  #: byte offset of the first retained message


_EMPTY = PartitionState(0, 0)


@frozen
class Planned:
    """What the planner has just asked about a partition, which saves requests of tasks."""

    leader: Leader
    meta: TopicMeta
    before: MessagePosition | None = None  #: the message before the batch
    start: int | None = None  #: first retained message
    start_offset: int = 0  #: its byte offset


@frozen
class Lag:
    begin: int  #: first message
    count: int  #: number of messages


def share(lags: Mapping[Key, int], limit: int | None, turn: int = 0) -> dict[Key, int]:
    """Distribute up to ``limit`` messages over partitions, in proportion to their lags.

    Every partition with a lag gets at least one message; if the limit is too small, partitions take turns: ``turn``,
    the number of read messages, rotates their order.
    """
    total = sum(lags.values())
    if limit is None or total <= limit:
        return dict(lags)
    shares = dict.fromkeys(lags, 0)
    behind = sorted(key for key, lag in lags.items() if lag)
    if limit < len(behind):
        first = turn % len(behind)
        for key in (behind[first:] + behind[:first])[:limit]:
            shares[key] = 1
        return shares
    rest, total = limit - len(behind), total - len(behind)
    for key in behind:
        shares[key] = 1 + rest * (lags[key] - 1) // total
    # the remainder goes to the partitions with the largest rounding loss
    lost = sorted(behind, key=lambda key: (-(rest * (lags[key] - 1) % total), key))
    for key in lost[: limit - sum(shares.values())]:
        shares[key] += 1
    return shares


def frozen_at(
    found: Mapping[Key, PartitionState], limits: Mapping[Key, PartitionState], read: Offsets
) -> dict[Key, PartitionState]:
    """Return partitions without messages and partitions that are newer than ``limits``.

    What was ``read`` is not newer: limits may be older than the anchors, or of a new leader that knew a shorter log.
    """
    return {
        key: evolve(
            state,
            end=min(state.end, max(limits.get(key, _EMPTY).end, read.get(key, 0))),
            end_offset=min(state.end_offset, limits.get(key, state).end_offset),
        )
        for key, state in found.items()
        if key in limits or key in read
    }


def lags_of(
    start: Offsets,
    found: Mapping[Key, PartitionState],
    *,
    fail_on_data_loss: bool,
    topics: AbstractSet[str] | None = None,
) -> dict[Key, Lag]:
    """Return the unread messages of each partition; ``topics`` were read before, by default the topics of the start.

    New partitions begin with the first retained message. Without ``fail_on_data_loss``, a deleted partition keeps its
    offset, a truncated partition goes back to the first unread message (if unknown, to the end), and a recreated
    partition begins again; a batch that sets an offset back reads nothing from that partition.
    """
    lags: dict[Key, Lag] = {}
    topics = {topic for topic, _ in start} if topics is None else topics
    for key, count in start.items():
        if key not in found and fail_on_data_loss:
            raise _lost(key, "the partition does not exist any more")
        lags[key] = Lag(count, 0)
    for key, state in found.items():
        known = lags[key].begin if key in lags else None
        if fail_on_data_loss:
            _check_kept(key, known, state, is_new_topic=key[0] not in topics)
        begin = _begin(known, state)
        steps_back = known is not None and begin < known
        if steps_back or begin >= state.end:
            lags[key] = Lag(begin, 0)
        else:
            begin = max(begin, state.start)
            lags[key] = Lag(begin, state.end - begin)
    return lags


def plan_end(lags: Mapping[Key, Lag], counts: Mapping[Key, int]) -> Offsets:
    return {key: lag.begin + counts.get(key, 0) for key, lag in sorted(lags.items())}


def _begin(known: int | None, state: PartitionState) -> int:
    if known is None:
        return state.start
    if state.divergence is not None:
        return min(known, state.divergence)
    if known <= state.end and not state.recreated:
        return known
    return state.start if state.anchor is None else state.end


def _lost(key: Key, what: str, hint: str = LOST) -> DataLoss:
    return DataLoss(what, topic=key[0], partition=key[1], hint=hint)


def _check_kept(key: Key, known: int | None, state: PartitionState, *, is_new_topic: bool) -> None:
    if known is not None and known > state.end:
        what = f"{known} messages were read, but the partition has only {state.end}: it was truncated or recreated"
        raise _lost(key, what)
    if known is not None and state.anchor is None:
        raise _lost(
            key,
            "the anchor channel does not exist: it was deleted, the topic was recreated, or the option channel was "
            "changed although the checkpoint is older",
            f"use the channel that the checkpoint was made with; {LOST}",
        )
    if (known or 0) < state.start and not is_new_topic:
        raise _lost(key, f"the messages from {known or 0} to {state.start} are not retained any more")


def only(offsets: Offsets, topics: Mapping[str, tuple[int, ...] | None]) -> Offsets:
    """Return the offsets of the given partitions of each topic; None for all."""
    return {
        (topic, partition): count
        for (topic, partition), count in offsets.items()
        if topic in topics and ((wanted := topics[topic]) is None or partition in wanted)
    }


def with_unread(end: Offsets, start: Offsets) -> Offsets:
    """Return a batch's end, with the offsets of topics removed from the query, which may be added again."""
    return dict(sorted({**start, **end}.items()))


def plan_ranges(
    start: Offsets, end: Offsets, found: Mapping[Key, PartitionState], *, fail_on_data_loss: bool
) -> list[Range]:
    """Return the non-empty ranges of a batch, ordered by topic and partition.

    Without a start, a partition begins with its first message; without a state, it is assumed complete.
    """
    ranges: list[Range] = []
    topics = {topic for topic, _ in start}
    for key, last in sorted(end.items()):
        first = start.get(key, 0)
        state = found.get(key, PartitionState(0, last))
        if fail_on_data_loss:
            _check_range(key, first, last, state, is_new_topic=key[0] not in topics)
        first, last = max(first, state.start), min(last, state.end)
        if state.divergence is not None:
            last = min(last, state.divergence)
        if first < last:
            ranges.append(Range(*key, first, last))
    return ranges


def _check_range(key: Key, first: int, last: int, state: PartitionState, *, is_new_topic: bool) -> None:
    if first > last:
        hint = "the anchor channel was moved, or resetChannel was used again: use a new checkpoint or a new channel"
        raise _lost(key, f"the batch begins at {first} and ends at {last}", hint)
    if first < last and last > state.end:
        what = f"the batch ends at {last}, but the partition has only {state.end} messages: it was truncated"
        raise _lost(key, what)
    if first < min(state.start, last) and not is_new_topic:
        raise _lost(key, f"the messages from {first} to {min(state.start, last)} are not retained any more")
