"""The servers as numbers: replaces `nsqext.spark.cluster.admin.SourceAdmin` in tests of planning."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, cast

from attrs import define, evolve, field

from nsqext.errors import InvalidState, PartitionUnavailable, TopicNotFound
from nsqext.partitions import MessagePosition
from nsqext.spark.cluster.admin import SourceAdmin

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping

    from nsqext.partitions.leaders import KnownLeaders
    from nsqext.spark.read.offsets import Key

__all__ = ("FakeAdmin", "Log")


@define
class Log:
    """A partition: retained messages, position of the anchor, messages that become readable later, bytes of a message.

    The reported end offset is ``unsure`` bytes after the end. A log that was truncated has other messages from
    ``regrown_from`` on.
    """

    start: int = 0
    end: int = 0
    anchor: int | None = None
    late: int = 0
    size: int = 0
    unsure: int = 0
    regrown_from: int | None = None

    @property
    def channels(self) -> dict[str, int]:
        """No channel but the anchor, whose name it does not know."""
        return {}

    @property
    def start_offset(self) -> int:
        """Byte offset of the first retained message."""
        return self.start * self.size

    def message(self, count: int) -> MessagePosition:
        """Return a message; those of a log that was truncated are newer from there on."""
        regrown = self.regrown_from is not None and count >= self.regrown_from
        return MessagePosition(count, count, count * self.size, count + (10**9 if regrown else 0))

    @property
    def end_offset(self) -> int:
        """Byte offset after the last message, or more."""
        return self.end * self.size + self.unsure


@define
class FakeAdmin:
    """Replaces `SourceAdmin`.

    Attributes:
        logs: the partitions.
        times: number of the first message of a time, in milliseconds.
        asked: number of requests for the state of a partition.
        moves: positions of anchors, in the order of the moves.
        move_requests: number of requests to move an anchor, also of those that move nothing.
        broken: partitions without a leader.
        incomplete: the anchors of a new query were not all created.
    """

    logs: dict[Key, Log]
    times: dict[int, int] = field(factory=dict)
    asked: int = 0
    moves: list[tuple[str, int, int]] = field(factory=list)
    move_requests: int = 0
    broken: set[Key] = field(factory=set)
    incomplete: bool = False
    closed: bool = False

    @property
    def leaders(self) -> FakeAdmin:
        return self

    @property
    def admin(self) -> SourceAdmin:
        """This object, typed as the real one."""
        return cast("SourceAdmin", self)

    def log(self, topic: str, partition: int) -> Log:
        """Return a partition; raises if it has no leader."""
        if (topic, partition) in self.broken:
            raise PartitionUnavailable("it has no leader", topic=topic, partition=partition)
        return self.logs[topic, partition]

    async def partitions(self, topic: str) -> dict[int, None]:
        found = {partition: None for name, partition in self.logs if name == topic}
        if not found:
            raise TopicNotFound("it does not exist", topic=topic)
        return found

    def known(self, keys: Iterable[Key]) -> KnownLeaders:
        return {}

    async def partitions_to_read(self, topic: str, wanted: Iterable[int] | None) -> list[int]:
        return await SourceAdmin.partitions_to_read(self.admin, topic, wanted)

    async def is_deleted(self, topic: str) -> bool:
        return not any(name == topic for name, _ in self.logs)

    async def bounds(self, topic: str, partition: int, patience: float = 8.0) -> Log:
        self.asked += 1
        log = self.log(topic, partition)
        return evolve(log, end=log.end - log.late) if patience < 1 else log

    async def survey(self, keys: Iterable[Key], patience: float = 8.0) -> dict[Key, Log]:
        return {key: await self.bounds(*key, patience) for key in keys}

    async def message(self, topic: str, partition: int, count: int) -> MessagePosition:
        log = self.log(topic, partition)
        assert log.start <= count < log.end
        return log.message(count)

    async def count_since(self, topic: str, partition: int, timestamp: int) -> int:
        log = self.log(topic, partition)
        return next(
            (count for count in range(log.start, log.end) if log.message(count).timestamp >= timestamp), log.end
        )

    async def count_before(self, topic: str, partition: int, offset: int) -> int:
        log = self.log(topic, partition)
        assert offset <= (log.end - 1) * log.size
        return offset // log.size

    async def count_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        return self.times[timestamp_ms]

    async def matching(self, pattern: re.Pattern[str]) -> list[str]:
        return sorted({topic for topic, _ in self.logs if pattern.fullmatch(topic)})

    async def anchor_count(
        self, topic: str, partition: int, channel: str, listed: Container[str] | None = None
    ) -> int | None:
        return self.log(topic, partition).anchor

    async def create_anchor(self, topic: str, partition: int, channel: str, count: int) -> None:
        log = self.log(topic, partition)
        assert log.anchor is None
        log.anchor = count
        self.moves.append((topic, partition, count))

    async def create_anchors(self, counts: Mapping[Key, int], channel: str) -> None:
        self.incomplete = True
        for key, count in counts.items():
            self.log(*key).anchor = None
            await self.create_anchor(*key, channel, count)
        self.incomplete = False

    def is_incomplete(self, found: Mapping[Key, Log], channel: str) -> bool:
        return self.incomplete

    async def move_anchor(
        self, topic: str, partition: int, channel: str, count: int, *, backwards: bool = False
    ) -> None:
        self.move_requests += 1
        log = self.log(topic, partition)
        if log.anchor is None:
            raise InvalidState("the channel is gone", topic=topic, partition=partition)
        assert count <= log.end
        if count > log.anchor or backwards:
            log.anchor = count
            self.moves.append((topic, partition, count))

    async def push_anchor(self, topic: str, partition: int, channel: str, count: int) -> None:
        await self.move_anchor(topic, partition, channel, count)

    async def aclose(self) -> None:
        self.closed = True
