"""What a query has to know of topics, and where its anchor channels stand: asked from the leaders, whoever they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from nsqext.errors import InvalidState, PartitionUnavailable
from nsqext.spark.cluster.bounds import Bounds, PartitionBounds
from nsqext.spark.cluster.ephemeral_channel import mark_of
from nsqext.spark.cluster.node_http import Leader

if TYPE_CHECKING:
    from nsqext.spark.cluster.client_config import Access
    from nsqext.spark.cluster.node_http import ChannelPlace

__all__ = ("Admin", "Bounds", "Leader")

_MOVE = 2.0
"""Seconds after which a move that has not happened is asked for again."""


class Admin(PartitionBounds):
    """Asks leaders; what all methods raise is told by `LeaderLocator`.

    Args:
        access: how the servers are reached.
    """

    def __init__(self, access: Access) -> None:
        super().__init__(access)
        self._standing: set[tuple[str, int, str]] = set()

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
            if await self.place(topic, partition, mark_of(channel)) is not None:
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
        mark = mark_of(channel)
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
        for name in (channel, mark_of(channel)):
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
