"""Where reading begins and ends according to the options: at offsets, or at times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Self

from attrs import frozen

from nsqext.errors import DataLoss, InvalidSetting
from nsqext.spark.read.offsets import EARLIEST, LATEST, Key, OffsetSpec, parse_ending, parse_starting, parse_times

if TYPE_CHECKING:
    from nsqext.spark.cluster.bounds import Bounds
    from nsqext.spark.options import SourceOptions


@frozen
class RangeLimit:
    """Where partitions begin or end."""

    offsets: OffsetSpec | None  # offsets; None where times determine it
    timestamp: int | None = None  # a time for all partitions, in milliseconds since 1970
    times: OffsetSpec | None = None  # times by partition

    @classmethod
    def starting(cls, options: SourceOptions, default: str) -> Self:
        """Return where reading begins."""
        times = options.starting_offsets_by_timestamp
        timed = times is not None or options.starting_timestamp is not None
        return cls(
            None if timed else parse_starting(options.starting_offsets or default),
            options.starting_timestamp,
            None if times is None else parse_times(times, "startingOffsetsByTimestamp"),
        )

    @classmethod
    def ending(cls, options: SourceOptions) -> Self:
        """Return where reading ends."""
        times = options.ending_offsets_by_timestamp
        timed = times is not None or options.ending_timestamp is not None
        return cls(
            None if timed else parse_ending(options.ending_offsets or "latest"),
            options.ending_timestamp,
            None if times is None else parse_times(times, "endingOffsetsByTimestamp"),
        )

    def check(self, read: Mapping[str, Iterable[int]]) -> None:
        """Check that offsets and times name only partitions that are read, which are given by topic."""
        for spec in (self.offsets, self.times):
            if spec is not None:
                spec.check(read)

    def is_latest(self) -> bool:
        """Return whether a partition begins at its end."""
        return self.offsets is not None and self.offsets.has(LATEST)

    def time_of(self, key: Key) -> int | None:
        """Return the time of a partition, in milliseconds since 1970; None without one."""
        return self.timestamp if self.times is None else self.times.of(*key)

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
        if self.offsets is None:
            return default
        found = self.offsets.of(*key)
        asked = {EARLIEST: bounds.start, LATEST: bounds.end}.get(found, found)
        if asked > bounds.end:
            raise InvalidSetting(
                f"{self.offsets.option} is {asked}, but the partition ends at {bounds.end}",
                topic=key[0],
                partition=key[1],
            )
        return asked


@frozen
class RangeLimits:
    """Where the partitions of a batch begin and end."""

    start: RangeLimit
    end: RangeLimit

    @classmethod
    def of(cls, options: SourceOptions) -> Self:
        """Return the limits that the options of a batch ask for."""
        start = RangeLimit.starting(options, "earliest")
        if start.is_latest():
            raise InvalidSetting(
                "startingOffsets cannot be latest in a batch: the batch would be empty",
                hint="write earliest, or numbers",
            )
        return cls(start, RangeLimit.ending(options))

    @property
    def timed(self) -> bool:
        """Whether messages are chosen by their time."""
        return any(limit.timestamp is not None or limit.times is not None for limit in (self.start, self.end))

    def check(self, read: Mapping[str, Iterable[int]]) -> None:
        """Check that offsets and times name exactly the partitions that are read."""
        for spec in (self.start.offsets, self.end.offsets, self.start.times, self.end.times):
            if spec is not None:
                spec.check(read)
                for topic, partitions in read.items():
                    for partition in partitions:
                        spec.of(topic, partition)
