"""Methods of the administration client that change channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nsqext.admin.base import AdminBase
from nsqext.admin.requests import http_of
from nsqext.admin.stats import topic_stats
from nsqext.errors import InvalidInput
from nsqext.protocol.names import check_channel

if TYPE_CHECKING:
    from nsqext.client.consumer.position import Position
    from nsqext.lookup.partition_map import PartitionMap
    from nsqext.types import Address

__all__ = ("ChannelAdmin",)


class ChannelAdmin(AdminBase):
    """Methods of `nsqext.Admin` for channels."""

    async def create_channel(self, topic: str, channel: str) -> None:
        """Create a channel on every partition, starting after the stored messages. An existing one is not changed.

        Raises:
            InvalidName: a name is not valid.
            TopicNotFound: lookup does not know the topic.
            PartitionUnavailable: a partition has no leader in time.
        """
        check_channel(channel)
        requests = self._open()
        where = await requests.find(topic)
        if where.meta.disable_channel_auto_create or not where.leaders:
            await requests.change_lookup("/channel/create", {"topic": topic, "channel": channel})
        if not where.meta.disable_channel_auto_create:
            await requests.change_channel("create", topic, channel)

    async def delete_channel(self, topic: str, channel: str, *, missing_ok: bool = False) -> None:
        """Delete a channel with its position and its waiting messages, on every partition.

        Args:
            topic: the topic.
            channel: the channel.
            missing_ok: a missing channel is not an error.

        Raises:
            InvalidInput: the channel does not exist.
            TopicNotFound: lookup does not know the topic.
            PartitionUnavailable: a partition has no leader in time.
        """
        check_channel(channel)
        requests = self._open()
        where = await requests.find(topic)
        if await self._lacks_channel(topic, channel):  # the redesigned nsqd accepts an unknown channel
            if missing_ok:
                return
            raise InvalidInput(f"the topic has no channel {channel}", topic=topic, hint="check its name")
        await requests.change_channel("delete", topic, channel)
        if where.meta.disable_channel_auto_create or where.nodes:
            await requests.change_lookup("/channel/delete", {"topic": topic, "channel": channel})

    async def _lacks_channel(self, topic: str, channel: str) -> bool:
        """Return whether neither lookup nor any node knows a channel; False if a node does not respond."""
        requests = self._open()
        where, channels = await requests.find_with_channels(topic)
        if channel in channels:
            return False
        stats = await topic_stats(requests, where, None)
        return not stats.unreachable and channel not in stats.channels

    async def pause_channel(self, topic: str, channel: str) -> None:
        """Stop delivery from a channel; published messages wait.

        Raises:
            InvalidInput: a name is not valid, or the channel does not exist.
            TopicNotFound: lookup does not know the topic.
            PartitionUnavailable: a partition has no leader in time.
        """
        await self._open().change_channel("pause", topic, channel)

    async def unpause_channel(self, topic: str, channel: str) -> None:
        """Resume delivery from a channel; raises the errors of `pause_channel`."""
        await self._open().change_channel("unpause", topic, channel)

    async def empty_channel(self, topic: str, channel: str) -> None:
        """Discard the messages that wait in a channel; raises the errors of `pause_channel`."""
        await self._open().change_channel("empty", topic, channel)

    async def skip_channel(self, topic: str, channel: str) -> None:
        """Make a channel of the redesigned NSQ finish every message without delivery, until `unskip_channel`.

        Raises:
            OperationNotSupported: the topic is on the original generation.
            InvalidInput, TopicNotFound, PartitionUnavailable: see `pause_channel`.
        """
        await self._open().change_channel("skip", topic, channel, ha_only=True)

    async def unskip_channel(self, topic: str, channel: str) -> None:
        """Make a channel deliver messages again; raises the errors of `skip_channel`."""
        await self._open().change_channel("unskip", topic, channel, ha_only=True)

    async def seek_channel(
        self, topic: str, channel: str, position: Position, *, partitions: Sequence[int] | None = None
    ) -> None:
        """Move a channel of the redesigned NSQ; the server drops messages in flight.

        Args:
            topic: the topic.
            channel: the channel; it must exist.
            position: position to continue at.
            partitions: partitions to move the channel on; None for all.

        Raises:
            OperationNotSupported: the topic is on the original generation.
            InvalidInput: the channel or a partition does not exist, or no position.
            PartitionUnavailable: a partition has no leader in time, or refused the position.
        """
        from nsqext.client.consumer.position import check_position
        from nsqext.lookup.node_channels import NodeChannels

        check_position(position)
        requests = self._open()
        channels = NodeChannels(requests.client.http)

        async def move(where: PartitionMap, number: int, node: Address) -> None:
            await channels.move(http_of(where, node), topic, number, channel, str(position))

        await requests.at_leaders(topic, channel, move, partitions=partitions, operation="seek_channel")
