"""The servers as the planner of a query uses them: leaders, bounds of partitions, and anchor channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import anyio

from nsqext.errors import InvalidState, PartitionUnavailable
from nsqext.spark.cluster.bounds import PartitionBounds
from nsqext.spark.cluster.ephemeral_channel import setup_mark
from nsqext.spark.cluster.leader_locator import LeaderLocator
from nsqext.waits import Doubling

if TYPE_CHECKING:
    from nsqext.spark.cluster.client_config import ClientConfig
    from nsqext.spark.cluster.node_http import ChannelPosition, Leader

_MOVE = 2.0  # seconds after which a move that has not happened is requested again


class Admin:
    """Creates, moves and deletes anchor channels; an async context manager.

    Every method raises what `LeaderLocator` raises.
    """

    def __init__(self, config: ClientConfig, *, first_contact: float | None = None) -> None:
        self.leaders: LeaderLocator = LeaderLocator(config, first_contact=first_contact)
        self.bounds: PartitionBounds = PartitionBounds(self.leaders)
        self._set_up: set[tuple[str, int, str]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self.leaders.aclose()

    async def position(self, topic: str, partition: int, channel: str) -> ChannelPosition | None:
        """Return the position of a channel; None if the channel does not exist."""
        return await self.leaders.ask(topic, partition, self.leaders.nodes.position, channel)

    async def anchor_count(self, topic: str, partition: int, channel: str) -> int | None:
        """Return the number of messages before an anchor; None if it does not exist or its creation did not finish."""
        position = await self.position(topic, partition, channel)
        key = topic, partition, channel
        if position is None:
            self._set_up.discard(key)
            return None
        if key not in self._set_up:
            if await self.position(topic, partition, setup_mark(channel)) is not None:
                return None
            self._set_up.add(key)
        return position.count

    async def create_anchor(self, topic: str, partition: int, channel: str, count: int) -> None:
        """Create a durable channel behind ``count`` messages; an existing one keeps its position.

        A second channel exists between the creation and the move. If the process ends in between, `anchor_count`
        returns None, and the next call completes the creation.
        """
        mark = setup_mark(channel)
        if await self.anchor_count(topic, partition, channel) is not None:
            return
        nodes = self.leaders.nodes
        for name in (mark, channel):
            await self.leaders.ask(topic, partition, nodes.change_channel, "create", name)
        await self._move(topic, partition, channel, count)
        await self.leaders.ask(topic, partition, nodes.change_channel, "delete", mark)

    async def move_anchor(
        self, topic: str, partition: int, channel: str, count: int, *, backwards: bool = False
    ) -> None:
        """Move an anchor behind ``count`` messages and wait until it is there.

        One that is further ahead keeps its position, unless it may be moved ``backwards``.
        """
        position = await self.position(topic, partition, channel)
        if position is None:
            raise InvalidState(
                f"the anchor channel {channel} does not exist any more",
                topic=topic,
                partition=partition,
                hint="it was deleted on the server; messages may have been removed since then",
            )
        if position.count < count or (backwards and position.count != count):
            await self._move(topic, partition, channel, count)

    async def delete_anchor(self, topic: str, partition: int, channel: str) -> None:
        """Delete an anchor if it exists."""
        for name in (channel, setup_mark(channel)):
            if await self.position(topic, partition, name) is not None:
                await self.leaders.ask(topic, partition, self.leaders.nodes.change_channel, "delete", name)

    async def _move(self, topic: str, partition: int, channel: str, count: int) -> None:
        async def move(leader: Leader, topic: str, partition: int) -> None:
            await self.leaders.nodes.move(leader, topic, partition, channel, count)
            await self.wait_for_move(leader, topic, partition, channel, count)

        await self.leaders.ask(topic, partition, move)

    async def wait_for_move(
        self, leader: Leader, topic: str, partition: int, channel: str, count: int, timeout: float = _MOVE
    ) -> ChannelPosition:
        """Wait until a leader has moved a channel behind ``count`` messages; returns the channel's position."""
        position, pauses = None, Doubling(0.001, 0.1)
        with anyio.move_on_after(timeout):
            while True:
                position = await self.leaders.nodes.position(leader, topic, partition, channel)
                if position is not None and position.count == count:
                    return position
                await anyio.sleep(pauses.next())
        found = (
            "does not exist" if position is None else f"is at {position.count}; the partition ends at {position.end}"
        )
        raise PartitionUnavailable(
            f"the channel {channel} was moved to {count}, but {found}",
            topic=topic,
            partition=partition,
            node=str(leader.http),
        )
