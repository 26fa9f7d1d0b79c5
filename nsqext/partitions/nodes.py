"""Requests to the nodes that lead partitions: statistics, positions of channels, single messages."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import orjson
from attrs import frozen

from nsqext.client.consumer.position import Position
from nsqext.errors import PartitionUnavailable
from nsqext.lookup.node_channels import NodeChannels, ask_node, ask_stats, unreadable

if TYPE_CHECKING:
    from nsqext.lookup.leaders import Leader
    from nsqext.lookup.node_stats import PartitionStats
    from nsqext.lookup.responses import LookupHttp

_POSITION = r"&\{\{\{\d+ \d+\} (\d+)\} (\d+)\}"
_POSITIONS = re.compile(rf"channel end : {_POSITION},current read:.*?, current confirm {_POSITION},", re.DOTALL)


@frozen
class ChannelPosition:
    """Position of a channel; counts are messages before a position."""

    end: int  #: at the end of the readable messages
    count: int  #: at the first unfinished message
    offset: int  #: byte offset of this message


@frozen
class MessagePosition:
    """Position of a single message."""

    count: int  #: messages before it
    id: int  #: internal id, the base of the server's message id
    offset: int
    timestamp: int  #: when stored, in nanoseconds since 1970


def read_position(text: str) -> ChannelPosition | None:
    """Parse the response of ``/message/stats`` for one channel; None if it does not exist."""
    if not text.strip():
        return None
    match = _POSITIONS.search(text)
    if match is None:
        raise ValueError("it contains no positions")
    end, offset, count = match[2], match[3], match[4]
    return ChannelPosition(int(end), int(count), int(offset))


class PartitionNodes:
    """Sends requests to the leaders of partitions; errors name topic, partition and node."""

    def __init__(self, http: LookupHttp) -> None:
        self._http = http
        self._channels = NodeChannels(http)

    async def stats(self, leader: Leader, topic: str, partition: int) -> PartitionStats:
        """Return the statistics of a partition, which the node must lead."""
        stats = (await self.led(leader, topic, partition)).get((topic, partition))
        if stats is None:
            raise PartitionUnavailable(
                "the node does not lead the partition", topic=topic, partition=partition, node=str(leader.http)
            )
        return stats

    async def led(
        self, leader: Leader, topic: str | None, partition: int | None = None
    ) -> dict[tuple[str, int], PartitionStats]:
        """Return the statistics of a node's led partitions of a topic, or of all topics, with one request."""
        found = await ask_stats(self._http, leader.http, topic, partition, tcp=leader.tcp, clients=False)
        return {(name, part.partition or 0): part for name, parts in found.items() for part in parts}

    async def position(self, leader: Leader, topic: str, partition: int, channel: str) -> ChannelPosition | None:
        """Return a channel's position; None if it does not exist."""
        body = await self._ask("GET", leader, "/message/stats", topic, partition, channel=channel)
        try:
            return read_position(body.decode("utf-8", "replace"))
        except ValueError as error:
            raise unreadable("the channel's positions", body, leader.http, topic, partition) from error

    async def message(self, leader: Leader, topic: str, partition: int, mode: str, number: int) -> MessagePosition:
        """Look a message up by ``count`` (from 1) or ``virtual_offset``, or the first retained message after it.

        Raises PartitionUnavailable without a usable response, also for a number after the last message.
        """
        body = await self._ask("GET", leader, "/message/get", topic, partition, search_mode=mode, search_pos=number)
        try:
            found = orjson.loads(body)
            return MessagePosition(
                int(found["queue_cnt_index"]) - 1, int(found["id"]), int(found["offset"]), int(found["timestamp"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise unreadable("a message's position", body, leader.http, topic, partition) from error

    async def change_channel(self, leader: Leader, topic: str, partition: int, action: str, channel: str) -> None:
        """``create`` a channel at the end of the partition if it is missing, or ``delete`` it."""
        await self._ask("POST", leader, f"/channel/{action}", topic, partition, channel=channel)

    async def move(self, leader: Leader, topic: str, partition: int, channel: str, count: int) -> None:
        """Move a channel behind ``count`` messages, soon after the node's response."""
        await self._channels.move(leader.http, topic, partition, channel, str(Position.message(count + 1)))

    async def _ask(
        self, method: str, leader: Leader, path: str, topic: str | None, partition: int | None, **params: str | int
    ) -> bytes:
        return await ask_node(self._http, method, leader.http, path, topic, partition, params)
