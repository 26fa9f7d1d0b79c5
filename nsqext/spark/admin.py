"""What a query has to know of topics, and where its anchor channels stand: asked from the leaders, whoever they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
from attrs import frozen

from nsqext.errors import InvalidState, PartitionUnavailable
from nsqext.protocol.names import MAX_NAME_LENGTH
from nsqext.spark.leaders import Leaders
from nsqext.spark.nodes import Leader
from nsqext.spark.scratch import open_scratch, scratch_name

if TYPE_CHECKING:
    from nsqext.spark.access import Access
    from nsqext.spark.nodes import ChannelPlace, PartitionStats

__all__ = ("Admin", "Bounds", "Leader")

_SETTLE = 8.0
"""Seconds that messages which were written when somebody asked for the end may take to be seen.

The real server shows messages to channels when its write buffer is written out. One that is larger than the buffer and
comes last is shown by a timer only: up to 6.0 s later with bodies of 200,000 bytes (measured), to consumers as well.
"""
_SOON = 0.005
"""Seconds after which a channel of our own has to make the server write out what it has buffered."""
_MOVE = 2.0
"""Seconds after which a move that has not happened is asked for again."""
_MARK = ".setup"


@frozen
class Bounds:
    """What of a partition can be read: counts of messages.

    Attributes:
        start: number of the first message that is kept, counted from 0.
        end: number behind the last one that is stored for good.
    """

    start: int
    end: int


class Admin(Leaders):
    """Asks leaders; what all methods raise is told by `Leaders`.

    Args:
        access: how the servers are reached.
    """

    def __init__(self, access: Access) -> None:
        super().__init__(access)
        self._starts: dict[tuple[str, int, int], int] = {}
        self._standing: set[tuple[str, int, str]] = set()

    # Where partitions begin and end

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
            end = stats.committed
            if end < stats.written:
                end = await self._settled(leader, topic, partition, stats.written, patience)
            start = await self._start(leader, topic, partition, stats, end)
            return Bounds(min(start, end), end)

        return await self.on_leader(topic, partition, ask)

    async def _settled(self, leader: Leader, topic: str, partition: int, wanted: int, patience: float) -> int:
        """Wait until what is written is stored for good, or taken back.

        A channel with a consumer that waits makes the server write out what it has buffered; others see that later, and
        without any channel nothing tells what is stored.
        """
        stats = await self._poll(leader, topic, partition, wanted, _SOON)
        if stats.committed >= min(wanted, stats.written):
            return stats.committed
        _, meta = await self.leader(topic, partition)
        connection, _ = await open_scratch(self.options, leader, topic, partition, meta, scratch_name())
        try:
            return (await self._poll(leader, topic, partition, wanted, patience)).committed
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

    # Channels

    async def place(self, topic: str, partition: int, channel: str) -> ChannelPlace | None:
        """Return where a channel stands; None where there is no such channel."""
        return await self.on_leader(
            topic, partition, lambda leader: self.nodes.place(leader, topic, partition, channel)
        )

    async def anchor_count(self, topic: str, partition: int, channel: str) -> int | None:
        """Return how many messages a channel has behind it; None where there is no such channel, or no finished one."""
        place = await self.place(topic, partition, channel)
        key = topic, partition, channel
        if place is None:
            self._standing.discard(key)
            return None
        if key not in self._standing:
            if await self.place(topic, partition, _mark(channel)) is not None:
                return None
            self._standing.add(key)
        return place.count

    async def create_anchor(self, topic: str, partition: int, channel: str, count: int) -> None:
        """Make a durable channel behind so many messages; one that exists stays where it is.

        A second channel marks the time between making and moving it: a process that ends in that time leaves an anchor
        that `anchor_count` does not know, and that is put to its place by the next call.

        Raises:
            ChannelNotRegistered: the topic takes registered channels only.
        """
        mark = _mark(channel)
        if await self.anchor_count(topic, partition, channel) is not None:
            return
        for name in (mark, channel):
            await self.on_leader(
                topic,
                partition,
                lambda leader, name=name: self.nodes.create_channel(leader, topic, partition, name),  # type: ignore[misc]
            )
        await self._move(topic, partition, channel, count)
        await self.on_leader(topic, partition, lambda leader: self.nodes.delete_channel(leader, topic, partition, mark))

    async def move_anchor(
        self, topic: str, partition: int, channel: str, count: int, *, backwards: bool = False
    ) -> None:
        """Let a channel stand behind so many messages; returns when it does.

        Args:
            topic: the topic.
            partition: the partition.
            channel: the channel.
            count: messages before its place.
            backwards: move it back, too; otherwise one that is further on stays.

        Raises:
            InvalidState: there is no such channel.
        """
        place = await self.place(topic, partition, channel)
        if place is None:
            raise InvalidState(
                f"the channel {channel} is gone",
                topic=topic,
                partition=partition,
                hint="somebody has deleted it; messages may have been cleaned away since",
            )
        if place.count < count or (backwards and place.count != count):
            await self._move(topic, partition, channel, count)

    async def delete_anchor(self, topic: str, partition: int, channel: str) -> None:
        """Delete a channel; nothing happens where there is none."""
        for name in (channel, _mark(channel)):
            if await self.place(topic, partition, name) is not None:
                await self.on_leader(
                    topic,
                    partition,
                    lambda leader, name=name: self.nodes.delete_channel(leader, topic, partition, name),  # type: ignore[misc]
                )

    async def _move(self, topic: str, partition: int, channel: str, count: int) -> None:
        async def ask(leader: Leader) -> None:
            await self.nodes.move(leader, topic, partition, channel, count)
            await self.arrive(leader, topic, partition, channel, count)

        await self.on_leader(topic, partition, ask)

    async def arrive(
        self, leader: Leader, topic: str, partition: int, channel: str, count: int, patience: float = _MOVE
    ) -> ChannelPlace:
        """Wait until a channel that was moved stands where it was moved to, for so many seconds.

        Raises:
            PartitionUnavailable: it does not, soon.
        """
        place, pause = None, 0.001
        with anyio.move_on_after(patience):
            while True:
                place = await self.nodes.place(leader, topic, partition, channel)
                if place is not None and place.count == count:
                    return place
                await anyio.sleep(pause)
                pause = min(2 * pause, 0.1)
        stands = "is gone" if place is None else f"stands at {place.count}, and the partition ends at {place.end}"
        raise PartitionUnavailable(
            f"the channel {channel} was moved to {count}, and {stands}",
            topic=topic,
            partition=partition,
            node=str(leader.http),
        )


def _mark(channel: str) -> str:
    return f"{channel[: MAX_NAME_LENGTH - len(_MARK)]}{_MARK}"
