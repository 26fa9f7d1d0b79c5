"""Where partitions begin and end: messages that are kept, and stored for good; by count, byte offset and time."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
from attrs import frozen

from nsqext.errors import NsqError
from nsqext.spark.cluster.ephemeral_channel import open_scratch, scratch_name
from nsqext.spark.cluster.gather import together
from nsqext.spark.cluster.leader_locator import LeaderLocator

if TYPE_CHECKING:
    from nsqext.spark.cluster.client_config import Access
    from nsqext.spark.cluster.node_http import Leader, PartitionStats

__all__ = ("Bounds", "PartitionBounds")

_SETTLE = 8.0
"""Seconds that messages which were written when somebody asked for the end may take to be seen.

The real server shows messages to channels when its write buffer is written out. One that is larger than the buffer and
comes last is shown by a timer only: up to 6.0 s later with bodies of 200,000 bytes (measured), to consumers as well.
"""
_SOON = 0.005
"""Seconds after which a channel of our own has to make the server write out what it has buffered."""


@frozen
class Bounds:
    """What of a partition can be read: counts of messages.

    Attributes:
        start: number of the first message that is kept, counted from 0.
        end: number behind the last one that is stored for good.
        end_offset: byte offset behind it; more where a leader has written what is not stored for good.
    """

    start: int
    end: int
    end_offset: int


class PartitionBounds(LeaderLocator):
    """Asks leaders where partitions begin and end; what all methods raise is told by `LeaderLocator`.

    Args:
        access: how the servers are reached.
    """

    def __init__(self, access: Access) -> None:
        super().__init__(access)
        self._starts: dict[tuple[str, int, int], int] = {}

    async def bounds(self, topic: str, partition: int, patience: float = _SETTLE) -> Bounds:
        """Return which messages can be read.

        The end holds everything whose publishing was acknowledged before the call, and nothing that a change of leader
        could take back: what channels may read. The count that a leader gives for the partition itself holds messages
        that are on their way to the replicas, too.

        Args:
            topic: the topic.
            partition: the partition.
            patience: seconds after which the end may be without messages that a leader has written and shows to no
                channel: those whose publishing hangs, and, for some seconds, large ones.
        """

        async def ask(leader: Leader) -> Bounds:
            stats = await self.nodes.stats(leader, topic, partition)
            if stats.committed < stats.written:
                stats = await self._settled(leader, topic, partition, stats.written, patience)
            return await self._bounds(leader, topic, partition, stats)

        return await self.on_leader(topic, partition, ask)

    async def survey(self, keys: Iterable[tuple[str, int]], patience: float = _SETTLE) -> dict[tuple[str, int], Bounds]:
        """Return which messages of several partitions can be read; see `bounds`.

        Each node is asked once about all partitions of a topic that it leads. Only those of which that does not tell
        enough are asked for one by one.

        Args:
            keys: topics and partitions.
            patience: see `bounds`.
        """
        wanted = list(keys)
        led: dict[tuple[str, Leader], list[int]] = {}
        for topic, partition in wanted:
            with suppress(NsqError):  # who does not find the leader at once looks for it below
                leader, _ = await self.leader(topic, partition)
                led.setdefault((topic, leader), []).append(partition)
        found: dict[tuple[str, int], Bounds] = {}

        async def ask(key: tuple[str, Leader]) -> None:
            topic, leader = key
            with suppress(NsqError):
                told = await self.nodes.led(leader, topic)
                for partition in led[key]:
                    stats = told.get(partition)
                    if stats is not None and stats.committed >= stats.written:
                        found[topic, partition] = await self._bounds(leader, topic, partition, stats)

        await together(led, ask)
        missing = [key for key in wanted if key not in found]
        found |= await together(missing, lambda key: self.bounds(*key, patience))
        return {key: found[key] for key in wanted}

    async def _bounds(self, leader: Leader, topic: str, partition: int, stats: PartitionStats) -> Bounds:
        end = stats.committed
        start = await self._start(leader, topic, partition, stats, end)
        return Bounds(min(start, end), end, stats.end_offset)

    async def _settled(
        self, leader: Leader, topic: str, partition: int, wanted: int, patience: float
    ) -> PartitionStats:
        """Wait until what is written is stored for good, or taken back.

        A channel with a consumer that waits makes the server write out what it has buffered; others see that later, and
        without any channel nothing tells what is stored.
        """
        stats = await self._poll(leader, topic, partition, wanted, _SOON)
        if stats.committed >= min(wanted, stats.written):
            return stats
        _, meta = await self.leader(topic, partition)
        connection, _ = await open_scratch(self.options, leader, topic, partition, meta, scratch_name())
        try:
            return await self._poll(leader, topic, partition, wanted, patience)
        finally:
            connection.close()

    async def _poll(self, leader: Leader, topic: str, partition: int, wanted: int, seconds: float) -> PartitionStats:
        """Ask for so long at most until so much is stored for good, or less is written."""
        pause, deadline = 0.001, anyio.current_time() + seconds
        while True:
            stats = await self.nodes.stats(leader, topic, partition)
            if stats.committed >= min(wanted, stats.written) or anyio.current_time() >= deadline:
                return stats
            await anyio.sleep(pause)
            pause = min(2 * pause, 0.1)

    async def _start(self, leader: Leader, topic: str, partition: int, stats: PartitionStats, end: int) -> int:
        if not stats.start_offset:
            return 0
        if stats.start_offset >= stats.end_offset:
            return end
        key = topic, partition, stats.start_offset
        if key not in self._starts:
            found = await self.nodes.message(leader, topic, partition, "virtual_offset", stats.start_offset)
            self._starts[key] = found.count
        return self._starts[key]

    async def start(self, leader: Leader, topic: str, partition: int) -> int:
        """Return the number of the first message that a leader keeps; asks once.

        Raises:
            PartitionUnavailable: no usable answer.
        """
        stats = await self.nodes.stats(leader, topic, partition)
        return await self._start(leader, topic, partition, stats, stats.committed)

    async def count_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """Return how many messages lie before the first one of this time or later; the end where there is none.

        Args:
            topic: the topic.
            partition: the partition.
            timestamp_ms: milliseconds since 1970.
        """
        bounds = await self.bounds(topic, partition)
        wanted = timestamp_ms * 1_000_000

        async def ask(leader: Leader) -> int:
            low, high = bounds.start, bounds.end
            while low < high:
                middle = (low + high) // 2
                found = await self.nodes.message(leader, topic, partition, "count", middle + 1)
                if found.timestamp < wanted:
                    low = max(middle, found.count) + 1
                else:
                    high = middle
            return low

        return await self.on_leader(topic, partition, ask)

    async def offset_of(self, topic: str, partition: int, count: int) -> int:
        """Return the byte offset of a message that is there for good.

        Args:
            topic: the topic.
            partition: the partition.
            count: number of the message, counted from 0.
        """

        async def ask(leader: Leader) -> int:
            return (await self.nodes.message(leader, topic, partition, "count", count + 1)).offset

        return await self.on_leader(topic, partition, ask)

    async def count_before(self, topic: str, partition: int, offset: int) -> int:
        """Return how many messages end at a byte offset or before it.

        Args:
            topic: the topic.
            partition: the partition.
            offset: not behind the beginning of the last message.
        """

        async def ask(leader: Leader) -> int:
            # the first message that begins there or behind it
            found = await self.nodes.message(leader, topic, partition, "virtual_offset", offset)
            return found.count if found.offset == offset else found.count - 1

        return await self.on_leader(topic, partition, ask)
