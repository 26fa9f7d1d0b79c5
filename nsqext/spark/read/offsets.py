"""Where in topics a query is: offsets as JSON, ranges of messages, and how ranges are shared out over tasks.

An offset is the number of messages of a partition that were consumed, which is also the number, counted from 0, of the
next one. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heapreplace
from typing import Any

import orjson
from attrs import field, frozen

from nsqext.errors import InvalidInput, InvalidName, InvalidSetting
from nsqext.protocol.names import MAX_PARTITION, check_topic

__all__ = (
    "EARLIEST",
    "LATEST",
    "VERSION",
    "Offsets",
    "Places",
    "Range",
    "dump",
    "load",
    "parse_ending",
    "parse_starting",
    "split",
)

Offsets = dict[str, dict[int, int]]
"""Number of messages consumed by topic and partition."""

VERSION = 1
"""Of the JSON that Spark keeps in its checkpoints."""

EARLIEST = -2
"""The oldest message that is kept, where an option takes offsets."""
LATEST = -1
"""Behind the last message, where an option takes offsets."""

_WORDS = {"earliest": EARLIEST, "latest": LATEST}
_SHOWN = 120


@frozen
class Range:
    """Messages of one partition.

    Attributes:
        topic: the topic.
        partition: the partition.
        start: number of the first message, counted from 0.
        end: number behind the last one.

    Raises:
        InvalidInput: the end is before the start, or the start below 0.
    """

    topic: str
    partition: int
    start: int
    end: int

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise InvalidInput(
                f"{self.start}..{self.end} is no range of messages", topic=self.topic, partition=self.partition
            )

    def __len__(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}] {self.start}..{self.end}"


@frozen
class Places:
    """What an option says about where to begin or to end.

    Attributes:
        option: name of the option, for errors.
        default: `EARLIEST` or `LATEST`, for all partitions; None where each is named.
        named: offsets by topic and partition, `EARLIEST` and `LATEST` among them.
    """

    option: str
    default: int | None
    named: Mapping[str, Mapping[int, int]] = field(factory=dict)

    def of(self, topic: str, partition: int) -> int:
        """Return the offset for a partition: a count, `EARLIEST` or `LATEST`.

        Raises:
            InvalidSetting: the option names offsets, and none for this partition.
        """
        if self.default is not None:
            return self.default
        found = self.named.get(topic, {}).get(partition)
        if found is None:
            raise InvalidSetting(
                f"{self.option} says nothing about this partition",
                topic=topic,
                partition=partition,
                hint="name every partition that is read; -2 stands for the earliest message, -1 for the latest",
            )
        return found

    def check(self, read: Mapping[str, Iterable[int]]) -> None:
        """Check that only partitions are named that are read.

        Raises:
            InvalidSetting: another one is named.
        """
        for topic, partitions in self.named.items():
            known = set(read.get(topic, ()))
            for partition in partitions:
                if partition not in known:
                    raise InvalidSetting(
                        f"{self.option} names a partition that is not read", topic=topic, partition=partition
                    )


def dump(offsets: Mapping[str, Mapping[int, int]]) -> dict[str, Any]:
    """Return offsets as Spark keeps them: ``{"v": 1, "topics": {"orders": {"0": 5}}}``, always in the same order."""
    topics = {
        topic: {str(partition): offsets[topic][partition] for partition in sorted(offsets[topic])}
        for topic in sorted(offsets)
    }
    return {"v": VERSION, "topics": topics}


def load(data: Mapping[str, Any] | str | bytes) -> Offsets:
    """Return the offsets in what `dump` made, or in its JSON text.

    Raises:
        InvalidInput: somebody else made it, or a newer version of this package.
    """
    if isinstance(data, str | bytes):
        try:
            data = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise _not_ours(data, str(error)) from None
    if not isinstance(data, Mapping) or not isinstance(data.get("topics"), Mapping) or "v" not in data:
        raise _not_ours(data, "it has no members v and topics")
    version = data["v"]
    if version != VERSION:
        raise InvalidInput(
            f"these offsets are of version {version!r}, this package reads version {VERSION}",
            hint="the checkpoint was written by another version of nsqext: use that one, or a new checkpoint",
        )
    try:
        return {topic: dict(_pairs(topic, partitions, lowest=0)) for topic, partitions in data["topics"].items()}
    except (AttributeError, TypeError, ValueError, InvalidName) as error:
        raise _not_ours(data, str(error)) from None


def _not_ours(data: object, reason: str) -> InvalidInput:
    return InvalidInput(
        f"{repr(data)[:_SHOWN]} are no offsets of this source: {reason}",
        hint="is this the checkpoint of a query over another source?",
    )


def _pairs(topic: str, partitions: Mapping[str, Any], lowest: int) -> Iterator[tuple[int, int]]:
    check_topic(topic)
    if not isinstance(partitions, Mapping):
        raise TypeError(f"topic {topic!r} has no offsets by partition")
    for key, count in partitions.items():
        yield _partition(key), _count(count, lowest)


def _partition(key: str | int) -> int:
    if not str(key).isdecimal() or int(key) > MAX_PARTITION:
        raise ValueError(f"{key!r} is no partition")
    return int(key)


def _count(count: object, lowest: int) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < lowest:
        raise ValueError(f"{count!r} is no offset")
    return count


# Options


def parse_starting(text: str, option: str = "startingOffsets") -> Places:
    """Read where to begin: ``earliest``, ``latest``, or JSON as ``{"orders": {"0": 23, "1": -2}}``.

    Args:
        text: value of the option; the JSON of a checkpoint is understood, too.
        option: name of the option, for errors.

    Raises:
        InvalidSetting: it is none of these.
    """
    word = _WORDS.get(text.strip().lower())
    if word is not None:
        return Places(option, word)
    try:
        return Places(option, None, _named(orjson.loads(text)))
    except InvalidSetting:
        raise
    except (AttributeError, TypeError, ValueError, InvalidInput) as error:
        reason = "it is not JSON" if isinstance(error, orjson.JSONDecodeError) else str(error)
        raise InvalidSetting(
            f"{option}={text[:_SHOWN]!r} cannot be read: {reason}",
            hint='write earliest, latest, or JSON as {"topic": {"0": 23, "1": -2}}; -2 is earliest, -1 latest',
        ) from None


def _named(data: Any) -> Offsets:
    if not isinstance(data, Mapping):
        raise TypeError("it names no topics")
    if "v" in data and "topics" in data:
        return load(data)
    return {topic: dict(_pairs(topic, partitions, EARLIEST)) for topic, partitions in data.items()}


def parse_ending(text: str, option: str = "endingOffsets") -> Places:
    """Read where to end: ``latest``, or JSON as ``{"orders": {"0": 23, "1": -1}}``.

    Raises:
        InvalidSetting: it is none of these, or ``earliest``, where there is nothing to read.
    """
    places = parse_starting(text, option)
    if places.default == EARLIEST or any(EARLIEST in partitions.values() for partitions in places.named.values()):
        raise InvalidSetting(f"{option} cannot be earliest: nothing lies before that", hint="write latest, or a number")
    return places


# Sharing out


def split(ranges: Iterable[Range], min_partitions: int | None = None, max_records: int | None = None) -> list[Range]:
    """Cut ranges into pieces, in the order of the ranges; the same ranges are always cut in the same way.

    Args:
        ranges: the ranges; empty ones are dropped.
        min_partitions: so many pieces at least, as far as there are messages.
        max_records: so many messages in a piece at most.

    Raises:
        InvalidSetting: one of the numbers is below 1.
    """
    for name, number in (("minPartitions", min_partitions), ("maxRecordsPerPartition", max_records)):
        if number is not None and number < 1:
            raise InvalidSetting(f"{name}={number} is less than 1")
    wanted = [found for found in ranges if len(found)]
    parts = [1 if max_records is None else -(-len(found) // max_records) for found in wanted]
    if min_partitions is not None:
        _share(wanted, parts, min_partitions)
    return [piece for found, number in zip(wanted, parts, strict=True) for piece in _cut(found, number)]


def _share(ranges: list[Range], parts: list[int], wanted: int) -> None:
    """Raise the numbers of parts to so many in total, always where the pieces are largest."""
    missing = min(wanted, sum(map(len, ranges))) - sum(parts)
    heap = [(-len(found) / parts[place], place) for place, found in enumerate(ranges)]
    heapify(heap)
    for _ in range(missing):
        place = heap[0][1]
        parts[place] += 1
        heapreplace(heap, (-len(ranges[place]) / parts[place], place))


def _cut(found: Range, parts: int) -> Iterator[Range]:
    size = len(found)
    for part in range(parts):
        start, end = found.start + size * part // parts, found.start + size * (part + 1) // parts
        yield Range(found.topic, found.partition, start, end)
