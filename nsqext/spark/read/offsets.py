"""Offsets of queries as JSON, where reading begins and ends, ranges of tasks; without I/O.

An offset is the number of messages read from a partition: the number, from 0, of the next message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from attrs import field, frozen

from nsqext.arguments import is_whole
from nsqext.errors import DataLoss, InvalidInput, InvalidName, InvalidSetting
from nsqext.protocol.names import MAX_PARTITION, check_topic
from nsqext.spark.option_values import read_number

if TYPE_CHECKING:
    from nsqext.spark.cluster.admin import Bounds

T = TypeVar("T")

Key = tuple[str, int]
"""Topic and partition."""
Offsets = dict[Key, int]
"""Messages read from each partition."""

VERSION = 1
"""Version of the JSON in Spark's checkpoints."""

EARLIEST = -2
"""The first retained message, as an option's value."""
LATEST = -1
"""The end of a partition, as an option's value."""

_SHOWN = 120


@frozen
class Range:
    topic: str
    partition: int
    start: int  #: first message, counted from 0
    end: int  #: behind the last message

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise InvalidInput(
                f"{self.start}..{self.end} is not a range of messages", topic=self.topic, partition=self.partition
            )

    def __len__(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}] {self.start}..{self.end}"


def by_topic(found: Mapping[Key, T]) -> dict[str, dict[str, T]]:
    """Return values of partitions for JSON: by topic and partition, in a fixed order."""
    topics: dict[str, dict[str, T]] = {}
    for (topic, partition), value in sorted(found.items(), key=itemgetter(0)):
        topics.setdefault(topic, {})[str(partition)] = value
    return topics


def dump(offsets: Mapping[Key, int]) -> dict[str, Any]:
    """Return offsets in the form of a checkpoint: ``{"v": 1, "topics": {"orders": {"0": 5}}}``."""
    return {"v": VERSION, "topics": by_topic(offsets)}


def load(data: Mapping[str, Any] | str | bytes) -> Offsets:
    """Return the offsets from the result of `dump` or its JSON text."""
    if isinstance(data, str | bytes):
        try:
            data = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise _not_offsets(data, str(error)) from None
    if not isinstance(data, Mapping) or not isinstance(data.get("topics"), Mapping) or "v" not in data:
        raise _not_offsets(data, "the members v and topics are missing")
    version = data["v"]
    if version != VERSION:
        raise InvalidInput(
            f"the offsets have version {version!r}; this package reads version {VERSION}",
            hint="another version of nsqext wrote the checkpoint: use that version, or a new checkpoint",
        )
    try:
        return read_pairs(data["topics"], 0)
    except (AttributeError, TypeError, ValueError, InvalidName) as error:
        raise _not_offsets(data, str(error)) from None


def by_partition(data: Mapping[str, Any], name: str, members: Iterable[str]) -> dict[Key, dict[str, int]]:
    """Return an optional member of a checkpoint's offsets: named whole numbers by partition."""
    try:
        return {
            (topic, _partition(key)): {member: _count(found[member], 0) for member in members}
            for topic, partitions in data.get(name, {}).items()
            for key, found in partitions.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _not_offsets(data, f"the member {name} is invalid: {error}") from None


def _not_offsets(data: object, reason: str) -> InvalidInput:
    return InvalidInput(
        f"{repr(data)[:_SHOWN]} are not offsets of this source: {reason}",
        hint="the checkpoint belongs to a query of another source: use a new checkpoint",
    )


def read_pairs(topics: Any, lowest: int) -> Offsets:
    """Return numbers from JSON by topic and partition; raises TypeError, ValueError or InvalidName."""
    found: Offsets = {}
    if not isinstance(topics, Mapping):
        raise TypeError("it is not an object of topics")
    for topic, partitions in topics.items():
        check_topic(topic)
        if not isinstance(partitions, Mapping):
            raise TypeError(f"topic {topic!r} has no offsets by partition")
        for key, count in partitions.items():
            found[topic, _partition(key)] = _count(count, lowest)
    return found


def _partition(key: str | int) -> int:
    if not str(key).isdecimal() or int(key) > MAX_PARTITION:
        raise ValueError(f"{key!r} is not a partition")
    return int(key)


def _count(count: object, lowest: int) -> int:
    if not is_whole(count, lowest):
        raise ValueError(f"{count!r} is not a valid number")
    return count


def plan_tasks(
    ranges: Iterable[Range],
    *,
    min_messages: int = 1,
    max_tasks: int | None = None,
    min_tasks: int | None = None,
    max_records: int | None = None,
) -> list[list[Range]]:
    """Distribute ranges over tasks of equal size, deterministically and in order, without empty ranges.

    Args:
        ranges: the ranges.
        min_messages: messages that justify a separate task.
        max_tasks: largest number of tasks, unless another argument needs more.
        min_tasks: smallest number of tasks, if there are as many messages.
    """
    wanted = [found for found in ranges if len(found)]
    total = sum(map(len, wanted))
    if not total:
        return []
    tasks = -(-total // min_messages)
    if max_tasks is not None:
        tasks = min(tasks, max_tasks)
    if min_tasks is not None:
        tasks = max(tasks, min(min_tasks, total))
    if max_records is not None:
        tasks = max(tasks, -(-total // max_records))
    edges = [total * (number + 1) // tasks for number in range(tasks)]
    planned: list[list[Range]] = [[]]
    position = 0
    for found in wanted:
        start = found.start
        while start < found.end:
            taken = min(found.end - start, edges[len(planned) - 1] - position)
            planned[-1].append(Range(found.topic, found.partition, start, start + taken))
            start += taken
            position += taken
            if position == edges[len(planned) - 1] and position < total:
                planned.append([])
    return planned


_WORDS = {"earliest": EARLIEST, "latest": LATEST}


@frozen
class RangeLimit:
    number: int | None  #: an offset, `EARLIEST`, `LATEST` or a time, for all partitions; None for JSON
    #: offsets of partitions, maybe `EARLIEST` or `LATEST`; or times in milliseconds since 1970
    named: Mapping[Key, int] = field(factory=dict)
    topics: Mapping[str, int] = field(factory=dict)  #: `EARLIEST` or `LATEST` for all partitions of a topic
    timed: bool = False
    option: str = ""  #: for errors; empty for a default

    def covers(self, key: Key) -> bool:
        """Return whether a partition has a number."""
        return self.number is not None or key in self.named or key[0] in self.topics

    def of(self, topic: str, partition: int) -> int:
        """Return a partition's number: a count, `EARLIEST`, `LATEST`, or a time."""
        if self.number is not None:
            return self.number
        found = self.named.get((topic, partition), self.topics.get(topic))
        if found is None:
            special = "" if self.timed else "; -2 is the earliest message, -1 the latest"
            raise InvalidSetting(
                f"{self.option} has no {'time' if self.timed else 'offset'} for this partition",
                topic=topic,
                partition=partition,
                hint=f"add every partition that is read{special}",
            )
        return found

    def check(self, read: Mapping[str, Iterable[int]]) -> None:
        """Check that every partition of the query has a number."""
        for topic, partition in self.named:
            if partition not in read.get(topic, ()):
                raise InvalidSetting(
                    f"{self.option} names a partition that is not read", topic=topic, partition=partition
                )
        for topic in self.topics:
            if topic not in read:
                raise InvalidSetting(f"{self.option} names a topic that is not read", topic=topic)

    @property
    def is_latest(self) -> bool:
        return not self.timed and LATEST in self._numbers

    @property
    def _numbers(self) -> tuple[int | None, ...]:
        return self.number, *self.named.values(), *self.topics.values()

    @property
    def is_earliest(self) -> bool:
        return not self.timed and EARLIEST in self._numbers

    def time_of(self, key: Key) -> int | None:
        """Return a partition's time, in milliseconds since 1970."""
        return self.of(*key) if self.timed else None

    def first_count(self, key: Key, bounds: Bounds, *, strict: bool) -> int:
        """Return a partition's first message; where times determine it, the first retained message.

        With ``strict``, raises `DataLoss` before the first retained message, InvalidSetting after the end; otherwise
        returns the first retained message or the end there.
        """
        asked = self._count(key, bounds, bounds.start, strict=strict)
        if asked < bounds.start and strict:
            raise DataLoss(
                f"startingOffsets is {asked}, but the first retained message is {bounds.start}",
                topic=key[0],
                partition=key[1],
                hint="start at earliest (-2), or use failOnDataLoss=false",
            )
        return max(asked, bounds.start)

    def last_count(self, key: Key, bounds: Bounds) -> int:
        """Return the number behind a partition's last message; where times determine it, its end."""
        return max(self._count(key, bounds, bounds.end), bounds.start)

    def since(self, key: Key, count: int, bounds: Bounds, *, strategy: str) -> int:
        """Return the number of the first message since the time of a partition.

        Without such a message, returns its end, or raises InvalidInput with the strategy ``error``.
        """
        if strategy == "error" and count >= bounds.end:
            raise InvalidInput(
                f"no message was published since {self.option}={self.of(*key)}",
                topic=key[0],
                partition=key[1],
                hint="startingOffsetsByTimestampStrategy=latest begins at the end",
            )
        return max(count, bounds.start)

    def _count(self, key: Key, bounds: Bounds, default: int, *, strict: bool = True) -> int:
        if self.timed:
            return default
        found = self.of(*key)
        asked = {EARLIEST: bounds.start, LATEST: bounds.end}.get(found, found)
        if asked > bounds.end and strict:
            text = f"{self.option} is {asked}, but the partition ends at {bounds.end}"
            raise InvalidSetting(text, topic=key[0], partition=key[1])
        return min(asked, bounds.end)


def parse_starting(text: str) -> RangeLimit:
    """Parse ``earliest``, ``latest``, JSON as ``{"orders": {"0": 23}, "bills": "latest"}``, or a checkpoint."""
    word = _WORDS.get(text.lower())
    if word is not None:
        return RangeLimit(word)
    hint = 'write earliest, latest, or JSON as {"topic": {"0": 23, "1": -2}}; -2 is earliest, -1 latest'
    data = _json(text, hint)
    words: dict[str, int] = {}
    if isinstance(data, Mapping) and not _is_checkpoint(data):
        words = {topic: _WORDS[word.lower()] for topic, word in data.items() if str(word).lower() in _WORDS}
        data = {topic: found for topic, found in data.items() if topic not in words}
    return RangeLimit(None, _named(data, EARLIEST, hint), words)


def parse_ending(text: str) -> RangeLimit:
    """Parse ``latest``, or JSON as ``{"orders": {"0": 23, "1": -1}}``."""
    found = parse_starting(text)
    if found.is_earliest:
        raise InvalidSetting("it cannot be earliest: the batch would be empty", hint="write latest, or a number")
    return found


def parse_time(text: str) -> RangeLimit:
    return RangeLimit(read_number(0)(text), timed=True)


def parse_times(text: str) -> RangeLimit:
    """Parse times in milliseconds since 1970 by topic and partition: ``{"orders": {"0": 1700000000000}}``."""
    hint = 'write JSON as {"topic": {"0": 1700000000000}}: milliseconds since 1970 by partition'
    return RangeLimit(None, _named(_json(text, hint), 0, hint), timed=True)


def _json(text: str, hint: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        raise InvalidSetting("it is not JSON", hint=hint) from None


def _is_checkpoint(data: Mapping[str, Any]) -> bool:
    return "v" in data and "topics" in data


def _named(data: Any, lowest: int, hint: str) -> Offsets:
    try:
        if lowest == EARLIEST and isinstance(data, Mapping) and _is_checkpoint(data):
            return load(data)
        return read_pairs(data, lowest)
    except (TypeError, ValueError, InvalidInput) as error:
        raise InvalidSetting(str(error), hint=hint) from None
