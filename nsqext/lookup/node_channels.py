"""Channels of partitions, by HTTP requests to their leaders."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from nsqext.errors import LookupFailed, NsqError, PartitionUnavailable, ProtocolError
from nsqext.errors.server import ChannelNotRegistered
from nsqext.lookup.node_stats import read_stats
from nsqext.lookup.responses import unwrap

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nsqext.lookup.node_stats import PartitionChannelStats, PartitionStats
    from nsqext.lookup.responses import LookupHttp
    from nsqext.types import Address

_EMPTY = "commit log end of file"
_SHOWN = 200


class LogBounds(NamedTuple):
    """Byte offsets of a partition's log."""

    begin: int  #: of the first retained record
    end: int  #: behind the last record; records that replicas have not confirmed may be undone
    channel: int | None = None  #: behind the records that a channel has finished without a gap; None if unknown


class NodeChannels:
    """Asks nodes about channels, and moves channels."""

    def __init__(self, http: LookupHttp) -> None:
        self._http = http  # not closed by this object

    async def exists(self, node: Address, topic: str, partition: int, channel: str) -> bool:
        """Return whether a partition has a channel; raises PartitionUnavailable, also if the node does not lead it."""
        parts = await self._partitions(node, topic, partition)
        if not parts:
            raise _not_led(node, topic, partition)
        return any(channel in part.channels for part in parts)

    async def has_topic(self, node: Address, topic: str) -> bool:
        """Return whether a node of the original NSQ has a topic; raises PartitionUnavailable."""
        return bool(await self._partitions(node, topic, None))

    async def channel(
        self, node: Address, topic: str, partition: int | None, channel: str
    ) -> PartitionChannelStats | None:
        """Return a channel's statistics; None if unknown, or if the node does not lead the partition.

        ``partition`` is None for the original NSQ. Raises PartitionUnavailable.
        """
        found = (part.channels.get(channel) for part in await self._partitions(node, topic, partition))
        return next(found, None)

    async def _partitions(self, node: Address, topic: str, partition: int | None) -> list[PartitionStats]:
        found = await ask_stats(self._http, node, topic, partition)
        return [part for part in found.get(topic, ()) if part.partition == partition]

    async def clients(self, node: Address, topic: str, partition: int | None, channel: str) -> int:
        """Return the number of connections subscribed to a channel; see `channel`."""
        found = await self.channel(node, topic, partition, channel)
        return 0 if found is None else found.connections

    async def log_bounds(self, node: Address, topic: str, partition: int, channel: str = "") -> LogBounds:
        """Return the bounds of a partition's log; raises PartitionUnavailable."""
        for part in await self._partitions(node, topic, partition):
            if part.end is not None:
                return LogBounds(part.start, part.end, part.finished_to(channel))
        raise _not_led(node, topic, partition)

    async def move(self, node: Address, topic: str, partition: int, channel: str, position: str) -> None:
        """Move an existing channel to ``kind:number``; the server forgets its messages in flight.

        With a start position of SUB_ADVANCED the server ignores the partition (captured:
        sub_advanced_offset_partition), and SUB_ORDERED takes no position. So a connection subscribes first, and the
        channel is moved before RDY is sent.

        Raises PartitionUnavailable.
        """
        try:
            params, body = {"channel": channel}, position.encode()
            await ask_node(self._http, "POST", node, "/channel/setoffset", topic, partition, params, body)
        except NsqError as error:
            # the real server refuses to move a channel within an empty queue
            if _EMPTY not in error.message:
                raise


async def ask_node(
    http: LookupHttp,
    method: str,
    node: Address,
    path: str,
    topic: str | None,
    partition: int | None,
    params: Mapping[str, str | int],
    body: bytes = b"",
) -> bytes:
    """Send a request about a partition, or with None all partitions or topics; return the body of the response.

    Raises ChannelNotRegistered or PartitionUnavailable.
    """
    where: dict[str, str | int] = {} if topic is None else {"topic": topic}
    if partition is not None:
        where["partition"] = partition
    status, answer = await http.fetch_node(
        node, path, {**where, **params}, method, body, topic=topic, partition=partition
    )
    if status == 200:
        return answer
    shown = answer[:_SHOWN].decode("utf-8", "replace")
    raise (
        ChannelNotRegistered(
            "E_SUB_CHANNEL_NOT_REGISTERED",
            "the topic accepts registered channels only",
            hint="register the channel first",
        )
        if status == 403
        else PartitionUnavailable(f"{path} was refused with {status}: {shown}")
    ).at(topic=topic, partition=partition, node=str(node))


async def ask_stats(
    http: LookupHttp,
    node: Address,
    topic: str | None,
    partition: int | None,
    *,
    tcp: Address | None = None,
    clients: bool = True,
) -> dict[str, list[PartitionStats]]:
    """Request the statistics of partitions that a node leads, by topic; see `ask_node`.

    Args:
        node: its HTTP address.
        tcp: the node's address in the results; by default ``node``.
        clients: list consumers' connections.
    """
    params = {"format": "json"} if clients else {"format": "json", "needClients": "false"}
    body = await ask_node(http, "GET", node, "/stats", topic, partition, params)
    try:
        return read_stats(unwrap(200, body, node), tcp or node)
    except (LookupFailed, ProtocolError) as error:
        raise unreadable("the statistics", body, node, topic, partition) from error


def _not_led(node: Address, topic: str, partition: int) -> PartitionUnavailable:
    text = "the node does not lead the partition"
    return PartitionUnavailable(text, topic=topic, partition=partition, node=str(node))


def unreadable(what: str, body: bytes, node: Address, topic: str | None, partition: int | None) -> PartitionUnavailable:
    """Return the error for a response that cannot be parsed."""
    return PartitionUnavailable(
        f"{what} cannot be read: {body[:_SHOWN]!r}", topic=topic, partition=partition, node=str(node)
    )
