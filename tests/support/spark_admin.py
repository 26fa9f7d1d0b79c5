"""Servers as numbers: what the planner of a query is told by `nsqext.spark.cluster.admin.Admin`, without servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from attrs import define, evolve, field

from nsqext.errors import InvalidState, PartitionUnavailable, TopicNotFound

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nsqext.spark.cluster.admin import Admin
    from nsqext.spark.read.planning import Key

__all__ = ("Log", "Pretended")


@define
class Log:
    """A partition: what is kept, where the anchor stands, how many messages are shown with patience only, their bytes.

    What is said to end it may lie ``unsure`` bytes behind its end.
    """

    start: int = 0
    end: int = 0
    anchor: int | None = None
    late: int = 0
    size: int = 0
    unsure: int = 0

    @property
    def end_offset(self) -> int:
        """Byte offset behind the last message, or more."""
        return self.end * self.size + self.unsure


@define
class Pretended:
    """Stands in for `Admin`.

    Attributes:
        logs: the partitions.
        times: number of the first message of a time, in milliseconds.
        asked: how often it was asked for the state of a partition.
        moves: where anchors were put, in this order.
        broken: partitions that cannot be reached.
    """

    logs: dict[Key, Log]
    times: dict[int, int] = field(factory=dict)
    asked: int = 0
    moves: list[tuple[str, int, int]] = field(factory=list)
    broken: set[Key] = field(factory=set)
    closed: bool = False

    @property
    def admin(self) -> Admin:
        """Itself, as those take it who know only the real one."""
        return cast("Admin", self)

    def log(self, topic: str, partition: int) -> Log:
        """Return a partition, if it can be reached."""
        if (topic, partition) in self.broken:
            raise PartitionUnavailable("nobody leads it", topic=topic, partition=partition)
        return self.logs[topic, partition]

    async def partitions(self, topic: str) -> dict[int, None]:
        found = {partition: None for name, partition in self.logs if name == topic}
        if not found:
            raise TopicNotFound("nobody knows it", topic=topic)
        return found

    async def bounds(self, topic: str, partition: int, patience: float = 8.0) -> Log:
        self.asked += 1
        log = self.log(topic, partition)
        return evolve(log, end=log.end - log.late) if patience < 1 else log

    async def survey(self, keys: Iterable[Key], patience: float = 8.0) -> dict[Key, Log]:
        return {key: await self.bounds(*key, patience) for key in keys}

    async def offset_of(self, topic: str, partition: int, count: int) -> int:
        log = self.log(topic, partition)
        assert log.start <= count < log.end
        return count * log.size

    async def count_before(self, topic: str, partition: int, offset: int) -> int:
        log = self.log(topic, partition)
        assert offset <= (log.end - 1) * log.size
        return offset // log.size

    async def count_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        return self.times[timestamp_ms]

    async def anchor_count(self, topic: str, partition: int, channel: str) -> int | None:
        return self.log(topic, partition).anchor

    async def create_anchor(self, topic: str, partition: int, channel: str, count: int) -> None:
        log = self.log(topic, partition)
        assert log.anchor is None
        log.anchor = count
        self.moves.append((topic, partition, count))

    async def move_anchor(
        self, topic: str, partition: int, channel: str, count: int, *, backwards: bool = False
    ) -> None:
        log = self.log(topic, partition)
        if log.anchor is None:
            raise InvalidState("the channel is gone", topic=topic, partition=partition)
        assert count <= log.end
        if count > log.anchor or backwards:
            log.anchor = count
            self.moves.append((topic, partition, count))

    async def aclose(self) -> None:
        self.closed = True
