"""What one node tells over HTTP about a partition that it leads: ends, positions of channels, single messages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson
from attrs import frozen

from nsqext.client.consumer.position import Position, move_channel
from nsqext.errors import LookupFailed, NsqError, PartitionUnavailable
from nsqext.errors.server import ChannelNotRegistered
from nsqext.lookup.responses import unwrap

if TYPE_CHECKING:
    from nsqext.lookup.http import LookupHttp
    from nsqext.types import Address

__all__ = ("ChannelPlace", "Leader", "Nodes", "PartitionStats", "StoredMessage", "read_place")

_SHOWN = 200
_POSITION = r"&\{\{\{\d+ \d+\} (\d+)\} (\d+)\}"
_PLACE = re.compile(rf"channel end : {_POSITION},current read:.*?, current confirm {_POSITION},", re.DOTALL)


@frozen
class Leader:
    """The node that leads a partition.

    Attributes:
        tcp: its address for clients.
        http: its HTTP side.
    """

    tcp: Address
    http: Address


@frozen
class PartitionStats:
    """A partition as its leader sees it.

    Attributes:
        leads: the node takes reads and writes for it.
        written: messages that were written; the last ones may be taken back while not all replicas have them.
        start_offset: byte offset of the first message that is kept.
        end_offset: byte offset behind the last one.
        channels: messages that each channel may read, which are stored for good.
    """

    leads: bool
    written: int
    start_offset: int
    end_offset: int
    channels: Mapping[str, int]

    @property
    def committed(self) -> int:
        """Messages that are known to be stored for good."""
        return max(self.channels.values(), default=0)


@frozen
class ChannelPlace:
    """Where a channel stands; counts are messages before that place.

    Attributes:
        end: count at the end of what it may read.
        count: count at the first message that is not finished.
        offset: byte offset of that message.
    """

    end: int
    count: int
    offset: int


@frozen
class StoredMessage:
    """Where a single message lies.

    Attributes:
        count: messages before it.
        offset: its byte offset.
        timestamp: when it was stored, in nanoseconds since 1970.
    """

    count: int
    offset: int
    timestamp: int


def read_place(text: str) -> ChannelPlace | None:
    """Read what ``/message/stats`` tells of one channel; None where there is no such channel.

    Raises:
        ValueError: the text is another one.
    """
    if not text.strip():
        return None
    match = _PLACE.search(text)
    if match is None:
        raise ValueError("no positions in it")
    end, offset, count = match[2], match[3], match[4]
    return ChannelPlace(int(end), int(count), int(offset))


class Nodes:
    """Asks nodes; every error names topic, partition and node.

    Args:
        http: asks; it stays its owner's.
    """

    def __init__(self, http: LookupHttp) -> None:
        self._http = http

    async def stats(self, leader: Leader, topic: str, partition: int) -> PartitionStats:
        """Return what a node tells about a partition.

        Raises:
            PartitionUnavailable: no usable answer, or the node does not lead the partition.
        """
        stats = (await self._stats(leader, topic, partition)).get(partition)
        if stats is None or not stats.leads:
            raise PartitionUnavailable(
                "the node does not lead the partition", topic=topic, partition=partition, node=str(leader.http)
            )
        return stats

    async def led(self, leader: Leader, topic: str) -> dict[int, PartitionStats]:
        """Return what a node tells about all partitions of a topic that it leads, with one question.

        Raises:
            PartitionUnavailable: no usable answer.
        """
        told = await self._stats(leader, topic, None)
        return {partition: stats for partition, stats in told.items() if stats.leads}

    async def _stats(self, leader: Leader, topic: str, partition: int | None) -> dict[int, PartitionStats]:
        body = await self._ask("GET", leader, "/stats", topic, partition, format="json", needClients="false")
        try:
            data = unwrap(200, body, leader.http)
            return {int(one["topic_partition"]): _read_stats(one) for one in data["topics"] or ()}
        except (AttributeError, KeyError, TypeError, ValueError, LookupFailed) as error:
            raise _unreadable("the statistics", body, leader, topic, partition) from error

    async def place(self, leader: Leader, topic: str, partition: int, channel: str) -> ChannelPlace | None:
        """Return where a channel stands; None where there is no such channel.

        Raises:
            PartitionUnavailable: no usable answer.
        """
        body = await self._ask("GET", leader, "/message/stats", topic, partition, channel=channel)
        try:
            return read_place(body.decode("utf-8", "replace"))
        except ValueError as error:
            raise _unreadable("the channel's positions", body, leader, topic, partition) from error

    async def message(self, leader: Leader, topic: str, partition: int, mode: str, number: int) -> StoredMessage:
        """Look a message up; one that is not kept any more gives the first one that is.

        Args:
            leader: the node.
            topic: the topic.
            partition: the partition.
            mode: ``count`` (from 1) or ``virtual_offset``.
            number: which message.

        Raises:
            PartitionUnavailable: no usable answer; so it is for what lies behind the last message.
        """
        body = await self._ask("GET", leader, "/message/get", topic, partition, search_mode=mode, search_pos=number)
        try:
            found = orjson.loads(body)
            return StoredMessage(int(found["queue_cnt_index"]) - 1, int(found["offset"]), int(found["timestamp"]))
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable("a message's position", body, leader, topic, partition) from error

    async def create_channel(self, leader: Leader, topic: str, partition: int, channel: str) -> None:
        """Make a channel, which begins at the end; nothing happens when it is there.

        Raises:
            ChannelNotRegistered: the topic takes registered channels only.
            PartitionUnavailable: no usable answer, or a refusal.
        """
        await self._ask("POST", leader, "/channel/create", topic, partition, channel=channel)

    async def delete_channel(self, leader: Leader, topic: str, partition: int, channel: str) -> None:
        """Delete a channel.

        Raises:
            PartitionUnavailable: no usable answer, or a refusal.
        """
        await self._ask("POST", leader, "/channel/delete", topic, partition, channel=channel)

    async def move(self, leader: Leader, topic: str, partition: int, channel: str, count: int) -> None:
        """Let a channel go on behind so many messages; the node does it soon after it has answered.

        Raises:
            PartitionUnavailable: no usable answer, or a refusal.
        """
        await move_channel(leader.http, topic, partition, channel, Position.message(count + 1))

    async def _ask(
        self, method: str, leader: Leader, path: str, topic: str, partition: int | None, **further: str | int
    ) -> bytes:
        params = {"topic": topic, **({} if partition is None else {"partition": partition}), **further}
        try:
            status, body = await self._http.fetch(leader.http, path, params, method)
        except LookupFailed as error:
            raise PartitionUnavailable(
                f"{path}: {error.message}", topic=topic, partition=partition, node=error.node, hint=error.hint
            ) from error.__cause__
        if status != 200:
            raise _refusal(status, path, body).at(topic=topic, partition=partition, node=str(leader.http))
        return body


def _read_stats(found: Any) -> PartitionStats:
    return PartitionStats(
        leads=bool(found["is_leader"]),
        written=int(found["message_count"]),
        start_offset=int(found["backend_start"]),
        end_offset=int(found["backend_depth"]),
        channels={str(one["channel_name"]): int(one["message_count"]) for one in found["channels"] or ()},
    )


def _refusal(status: int, path: str, body: bytes) -> NsqError:
    shown = body[:_SHOWN].decode("utf-8", "replace")
    if status == 403:
        return ChannelNotRegistered(
            "E_SUB_CHANNEL_NOT_REGISTERED",
            "the topic takes registered channels only",
            hint="register the channel first",
        )
    return PartitionUnavailable(f"{path} was refused with {status}: {shown}")


def _unreadable(what: str, body: bytes, leader: Leader, topic: str, partition: int | None) -> PartitionUnavailable:
    return PartitionUnavailable(
        f"{what} cannot be read: {body[:_SHOWN]!r}", topic=topic, partition=partition, node=str(leader.http)
    )
