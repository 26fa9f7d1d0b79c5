"""Where reading begins and ends according to the options: at offsets, or at times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import orjson
from attrs import field, frozen

from nsqext.errors import DataLoss, InvalidInput, InvalidSetting
from nsqext.spark.option_values import read_number
from nsqext.spark.read.offsets import EARLIEST, LATEST, Key, Offsets, load, read_pairs

if TYPE_CHECKING:
    from nsqext.spark.cluster.admin import Bounds

_WORDS = {"earliest": EARLIEST, "latest": LATEST}


@frozen
class RangeLimit:
    """Where partitions begin or end."""

    number: int | None  # an offset, `EARLIEST`, `LATEST` or a time, for all partitions; None if the value is JSON
    # offsets of partitions, which may be `EARLIEST` or `LATEST`; or times in milliseconds since 1970
    named: Mapping[Key, int] = field(factory=dict)
    timed: bool = False  # whether the numbers are times
    option: str = ""  # name of the option, for errors; empty for a default

    def of(self, topic: str, partition: int) -> int:
        """Return the number of a partition: a count, `EARLIEST` or `LATEST`, or a time."""
        if self.number is not None:
            return self.number
        found = self.named.get((topic, partition))
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
        """Check that the query reads every partition that has a number."""
        for topic, partition in self.named:
            if partition not in read.get(topic, ()):
                raise InvalidSetting(
                    f"{self.option} names a partition that is not read", topic=topic, partition=partition
                )

    @property
    def is_latest(self) -> bool:
        """Whether a partition begins at its end."""
        return not self.timed and LATEST in (self.number, *self.named.values())

    def time_of(self, key: Key) -> int | None:
        """Return the time of a partition, in milliseconds since 1970; None without one."""
        return self.of(*key) if self.timed else None

    def first_count(self, key: Key, bounds: Bounds, *, strict: bool) -> int:
        """Return the number of the first message of a partition; where times determine it, of the first retained one.

        If it is not retained any more, raises `DataLoss` with ``strict``; otherwise the first retained one is meant.
        """
        asked = self._count(key, bounds, bounds.start)
        if asked < bounds.start and strict:
            raise DataLoss(
                f"startingOffsets is {asked}, but the first retained message is {bounds.start}",
                topic=key[0],
                partition=key[1],
                hint="start at earliest (-2), or use failOnDataLoss=false",
            )
        return max(asked, bounds.start)

    def last_count(self, key: Key, bounds: Bounds) -> int:
        """Return the number after the last message of a partition; where times determine it, its end."""
        return max(self._count(key, bounds, bounds.end), bounds.start)

    def _count(self, key: Key, bounds: Bounds, default: int) -> int:
        if self.timed:
            return default
        found = self.of(*key)
        asked = {EARLIEST: bounds.start, LATEST: bounds.end}.get(found, found)
        if asked > bounds.end:
            text = f"{self.option} is {asked}, but the partition ends at {bounds.end}"
            raise InvalidSetting(text, topic=key[0], partition=key[1])
        return asked


def parse_starting(text: str) -> RangeLimit:
    """Parse ``earliest``, ``latest``, or JSON as ``{"orders": {"0": 23, "1": -2}}``, or the JSON of a checkpoint."""
    word = _WORDS.get(text.lower())
    if word is not None:
        return RangeLimit(word)
    hint = 'write earliest, latest, or JSON as {"topic": {"0": 23, "1": -2}}; -2 is earliest, -1 latest'
    return RangeLimit(None, _named(text, EARLIEST, hint))


def parse_ending(text: str) -> RangeLimit:
    """Parse ``latest``, or JSON as ``{"orders": {"0": 23, "1": -1}}``."""
    found = parse_starting(text)
    if EARLIEST in (found.number, *found.named.values()):
        raise InvalidSetting("it cannot be earliest: the batch would be empty", hint="write latest, or a number")
    return found


def parse_time(text: str) -> RangeLimit:
    """Parse a time in milliseconds since 1970."""
    return RangeLimit(read_number(0)(text), timed=True)


def parse_times(text: str) -> RangeLimit:
    """Parse times in milliseconds since 1970 by topic and partition: ``{"orders": {"0": 1700000000000}}``."""
    hint = 'write JSON as {"topic": {"0": 1700000000000}}: milliseconds since 1970 by partition'
    return RangeLimit(None, _named(text, 0, hint), timed=True)


def _named(text: str, lowest: int, hint: str) -> Offsets:
    try:
        data: Any = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise InvalidSetting("it is not JSON", hint=hint) from None
    try:
        if lowest == EARLIEST and isinstance(data, Mapping) and "v" in data and "topics" in data:
            return load(data)
        return read_pairs(data, lowest)
    except (TypeError, ValueError, InvalidInput) as error:
        raise InvalidSetting(str(error), hint=hint) from None
