"""What a batch of a streaming query reads: decided from numbers alone, the same way whenever it is asked again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import frozen

from nsqext.errors import DataLoss
from nsqext.spark.read.offsets import Range

if TYPE_CHECKING:
    from nsqext.spark.read.offsets import Offsets

__all__ = ("Key", "Lag", "Standing", "frozen_at", "lags_of", "only", "plan_end", "plan_ranges", "share", "with_unread")

Key = tuple[str, int]
"""Topic and partition."""

_LOST = "give failOnDataLoss=false to go on without it"


@frozen
class Standing:
    """What is known of a partition at the moment; the first three are numbers of messages since its beginning.

    Attributes:
        start: messages that are not kept any more.
        end: messages that are there for good.
        anchor: place of the anchor channel; None where there is no such channel.
        end_offset: byte offset behind the end, or more.
    """

    start: int
    end: int
    anchor: int | None = None
    end_offset: int = 0


@frozen
class Lag:
    """What a batch could read of a partition.

    Attributes:
        begin: number of the first message.
        count: how many they are.
    """

    begin: int
    count: int


def share(lags: Mapping[Key, int], limit: int | None, turn: int = 0) -> dict[Key, int]:
    """Share a number of messages out over partitions, in proportion to how far each lags behind.

    Every partition that lags gets at least one; where the limit does not suffice for that, they take turns. The limit
    is never exceeded, and always used up where there is enough.

    Args:
        lags: how many messages each could take.
        limit: how many there are to share; None for as many as they can take.
        turn: whose turn it is; grows by the number of messages that are read.

    Returns:
        A number for each partition, 0 included.
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
    # what was lost to rounding goes where the most was lost
    lost = sorted(behind, key=lambda key: (-(rest * (lags[key] - 1) % total), key))
    for key in lost[: limit - sum(shares.values())]:
        shares[key] += 1
    return shares


def frozen_at(found: Mapping[Key, Standing], limits: Mapping[Key, Standing]) -> dict[Key, Standing]:
    """Return partitions as if nothing had been published, and none been made, since a moment.

    Args:
        found: what is known of them now.
        limits: what was known of them at the moment.
    """
    return {
        key: Standing(
            standing.start,
            min(standing.end, limits[key].end),
            standing.anchor,
            min(standing.end_offset, limits[key].end_offset),
        )
        for key, standing in found.items()
        if key in limits
    }


def lags_of(start: Offsets, found: Mapping[Key, Standing], *, fail_on_data_loss: bool) -> dict[Key, Lag]:
    """Return what the next batch could read.

    Partitions that are new begin with the first message that is kept. Without ``fail_on_data_loss``, a partition that
    is gone stays where it is, one that was rolled back goes back too, and one that was made anew begins again; such a
    step back reads nothing.

    Args:
        start: where the batch begins.
        found: what is known of the partitions.
        fail_on_data_loss: refuse to go on where messages are gone.

    Raises:
        DataLoss: messages are gone that were not read.
    """
    lags: dict[Key, Lag] = {}
    for topic, counts in start.items():
        for partition, count in counts.items():
            key = (topic, partition)
            if key not in found and fail_on_data_loss:
                raise DataLoss("the partition is gone", topic=topic, partition=partition, hint=_LOST)
            lags[key] = Lag(count, 0)
    for key, standing in found.items():
        known = lags[key].begin if key in lags else None
        if fail_on_data_loss:
            _check_kept(key, known, standing, is_new_topic=key[0] not in start)
        begin = _begin(known, standing)
        steps_back = known is not None and begin < known
        if steps_back or begin >= standing.end:
            lags[key] = Lag(begin, 0)
        else:
            begin = max(begin, standing.start)
            lags[key] = Lag(begin, standing.end - begin)
    return lags


def plan_end(lags: Mapping[Key, Lag], counts: Mapping[Key, int]) -> Offsets:
    """Return where a batch ends.

    Args:
        lags: what it could read.
        counts: how many messages it reads.
    """
    end: Offsets = {}
    for key in sorted(lags):
        topic, partition = key
        end.setdefault(topic, {})[partition] = lags[key].begin + counts.get(key, 0)
    return end


def _begin(known: int | None, standing: Standing) -> int:
    if known is None:
        return standing.start
    if known <= standing.end:
        return known
    return standing.start if standing.anchor is None else standing.end


def _check_kept(key: Key, known: int | None, standing: Standing, *, is_new_topic: bool) -> None:
    topic, partition = key
    if known is not None and known > standing.end:
        raise DataLoss(
            f"{known} messages were read, and the partition has only {standing.end}: it was rolled back or made anew",
            topic=topic,
            partition=partition,
            hint=_LOST,
        )
    if known is not None and standing.anchor is None:
        raise DataLoss(
            "the anchor channel is gone: it was deleted, or the topic was made anew",
            topic=topic,
            partition=partition,
            hint=_LOST,
        )
    if (known or 0) < standing.start and not is_new_topic:
        raise DataLoss(
            f"the messages from {known or 0} to {standing.start} are not kept any more",
            topic=topic,
            partition=partition,
            hint=_LOST,
        )


def only(offsets: Offsets, topics: Mapping[str, tuple[int, ...] | None]) -> Offsets:
    """Return what offsets say about partitions that are read, and nothing about others.

    Args:
        offsets: the offsets.
        topics: the partitions that are read by topic; None for all.
    """
    kept: Offsets = {}
    for topic, counts in offsets.items():
        if topic in topics:
            wanted = topics[topic]
            kept[topic] = {number: count for number, count in counts.items() if wanted is None or number in wanted}
    return kept


def with_unread(end: Offsets, start: Offsets) -> Offsets:
    """Return the end of a batch together with what is known of partitions that are not read at the moment.

    A topic that a query leaves out for a while goes on where it was when it is read again.

    Args:
        end: where the batch ends.
        start: where it begins, partitions that it does not read included.
    """
    return {topic: {**start.get(topic, {}), **end.get(topic, {})} for topic in sorted({*start, *end})}


def plan_ranges(start: Offsets, end: Offsets, found: Mapping[Key, Standing], *, fail_on_data_loss: bool) -> list[Range]:
    """Return what a batch reads, by topic and partition; empty ranges are left out.

    Args:
        start: where it begins; a partition that is not named begins with its first message.
        end: where it ends.
        found: what is known of the partitions; those of which nothing is known are taken to have everything.
        fail_on_data_loss: refuse to go on where messages are gone.

    Raises:
        DataLoss: messages are gone that were not read, or the batch ends before it begins.
    """
    ranges: list[Range] = []
    for topic, ends in sorted(end.items()):
        for partition, last in sorted(ends.items()):
            first = start.get(topic, {}).get(partition, 0)
            standing = found.get((topic, partition), Standing(0, last))
            if fail_on_data_loss:
                _check_range(topic, partition, first, last, standing, is_new_topic=topic not in start)
            first, last = max(first, standing.start), min(last, standing.end)
            if first < last:
                ranges.append(Range(topic, partition, first, last))
    return ranges


def _check_range(topic: str, partition: int, first: int, last: int, standing: Standing, *, is_new_topic: bool) -> None:
    if first > last:
        raise DataLoss(
            f"the batch begins at {first} and ends at {last}",
            topic=topic,
            partition=partition,
            hint="was the anchor channel moved, or resetChannel given again? use a new checkpoint, or a new channel",
        )
    if first < last and last > standing.end:
        raise DataLoss(
            f"the batch ends at {last}, and the partition has only {standing.end} messages: it was rolled back",
            topic=topic,
            partition=partition,
            hint=_LOST,
        )
    if first < min(standing.start, last) and not is_new_topic:
        raise DataLoss(
            f"the messages from {first} to {min(standing.start, last)} are not kept any more",
            topic=topic,
            partition=partition,
            hint=_LOST,
        )
