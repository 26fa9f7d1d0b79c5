"""Channels of partitions, by HTTP requests to their leaders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from attrs import frozen

from nsqext.errors import LookupFailed, NsqError, PartitionUnavailable
from nsqext.errors.server import ChannelNotRegistered
from nsqext.lookup.responses import unwrap

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nsqext.lookup.responses import LookupHttp
    from nsqext.types import Address

_EMPTY = "commit log end of file"
_SHOWN = 200


class ChannelClient(NamedTuple):
    """A connection that is subscribed to a channel."""

    client_id: str  # as it identified
    tag: str  # dispatch tag
    ready: int = 0  # RDY count
    delivered: int = 0  # messages sent to it
    in_flight: int = 0  # messages that it has not answered


@frozen
class ChannelConnections:
    """Who is subscribed to a channel at a partition, and what waits there."""

    clients: tuple[ChannelClient, ...] = ()
    depth: int = 0  # messages behind the last message up to which all are finished
    in_flight: int = 0  # messages in flight, and requeued messages that are not due
    paused: bool = False  # an administrator paused it: it delivers nothing
    unread: int = 0  # messages that the server has not read from the log for this channel
    read: int = 0  # messages read from the log's start; fewer after the channel moved back

    @property
    def unconfirmed(self) -> int:
        """Most messages that the server may redeliver, because it has read and not confirmed them."""
        return max(0, self.depth - self.unread)


class LogBounds(NamedTuple):
    """Byte offsets of the log of a partition."""

    begin: int  #: of the first retained record
    end: int  #: behind the last record, including records that replicas have not confirmed and may be undone
    channel: int | None = None  #: behind the records that a channel has finished without a gap; None if unknown


class NodeChannels:
    """Asks nodes about channels, and moves them."""

    def __init__(self, http: LookupHttp) -> None:
        # sends the requests, with its options' timeouts and credentials; not closed by this object
        self._http = http

    async def exists(self, node: Address, topic: str, partition: int, channel: str) -> bool:
        """Return whether a node has a channel at a partition that it leads; raises PartitionUnavailable."""
        return bool(await self._channel(node, topic, partition, channel))

    async def has_topic(self, node: Address, topic: str) -> bool:
        """Return whether a node of the original NSQ has a topic; raises PartitionUnavailable."""
        return bool(await self._partitions(node, topic, None))

    async def _channel(self, node: Address, topic: str, partition: int | None, channel: str) -> dict[str, Any]:
        """Return the statistics of a channel; empty if it does not exist."""
        entries = await self._partitions(node, topic, partition)
        found = (one for entry in entries for one in entry["channels"] if one.get("channel_name") == channel)
        return next(found, {})

    async def _partitions(self, node: Address, topic: str, partition: int | None) -> list[dict[str, Any]]:
        body = await ask_node(self._http, "GET", node, "/stats", topic, partition, {"format": "json"})
        try:
            return [
                {**entry, "channels": [dict(found) for found in entry.get("channels") or ()]}
                for entry in unwrap(200, body, node).get("topics") or ()
                if entry.get("topic_name") == topic and str(entry.get("topic_partition", partition)) == str(partition)
            ]
        except (AttributeError, TypeError, ValueError, LookupFailed) as error:
            text = f"the node's statistics cannot be read: {body[:_SHOWN]!r}"
            raise PartitionUnavailable(text, topic=topic, partition=partition, node=str(node)) from error

    async def clients(self, node: Address, topic: str, partition: int | None, channel: str) -> int:
        """Return how many connections are subscribed to a channel at a partition, None at the original NSQ.

        0 for an unknown channel. Raises PartitionUnavailable.
        """
        found = await self._channel(node, topic, partition, channel)
        return int(found.get("client_num") or found.get("client_count") or len(found.get("clients") or ()))

    async def connections(self, node: Address, topic: str, partition: int | None, channel: str) -> ChannelConnections:
        """Return the connections of a channel; see `clients`."""
        found = await self._channel(node, topic, partition, channel)
        deferred = int(found.get("deferred_count") or 0)
        unread = max(0, int(found.get("backlogs") or 0) - deferred)
        return ChannelConnections(
            tuple(map(_client, found.get("clients") or ())),
            int(found.get("depth") or 0),
            int(found.get("in_flight_count") or 0) + deferred,
            bool(found.get("paused")),
            unread,
            int(found.get("message_count") or 0) - unread,
        )

    async def log_bounds(self, node: Address, topic: str, partition: int, channel: str = "") -> LogBounds:
        """Return where a partition's log begins and ends, and where a channel is, if it exists.

        Raises PartitionUnavailable.
        """
        for found in await self._partitions(node, topic, partition):
            start, end = found.get("backend_start"), found.get("backend_depth")
            if found.get("is_leader") and isinstance(start, int) and isinstance(end, int):
                sizes = [one.get("depth_size") for one in found["channels"] if one.get("channel_name") == channel]
                return LogBounds(start, end, end - sizes[0] if sizes and isinstance(sizes[0], int) else None)
        text = "the node does not lead the partition"
        raise PartitionUnavailable(text, topic=topic, partition=partition, node=str(node))

    async def move(self, node: Address, topic: str, partition: int, channel: str, position: str) -> None:
        """Move an existing channel to ``kind:number``; the server forgets its messages in flight.

        SUB_ADVANCED with a start position makes the server ignore the partition word (captured:
        sub_advanced_offset_partition), and SUB_ORDERED takes no position. So a connection subscribes first, and the
        channel is moved before RDY is sent.

        Raises PartitionUnavailable.
        """
        try:
            params, body = {"channel": channel}, position.encode()
            await ask_node(self._http, "POST", node, "/channel/setoffset", topic, partition, params, body)
        except NsqError as error:
            # an empty queue has only one position, and the real server refuses the move
            if _EMPTY not in error.message:
                raise


def _client(found: Mapping[str, Any]) -> ChannelClient:
    tag = str(found.get("desired_tag") or "")
    ready, delivered = int(found.get("ready_count") or 0), int(found.get("message_count") or 0)
    return ChannelClient(str(found.get("client_id")), tag, ready, delivered, int(found.get("in_flight_count") or 0))


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
    """Send a request about a partition, a topic or the whole node; return the body of its response.

    None stands for all topics or all partitions.

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
