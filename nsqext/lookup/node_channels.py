"""Channels of partitions, by HTTP requests to the nodes that lead them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from nsqext.errors import LookupFailed, NsqError, PartitionUnavailable
from nsqext.lookup.responses import unwrap

if TYPE_CHECKING:
    from nsqext.lookup.http import LookupHttp
    from nsqext.types import Address

__all__ = ("ChannelConnections", "NodeChannels")

_EMPTY = "commit log end of file"
_SHOWN = 200


@frozen
class ChannelConnections:
    """Who is subscribed to a channel at a partition, and what waits there.

    Attributes:
        clients: client id and dispatch tag of each connection; the tag is empty without one.
        depth: messages that are not finished.
        in_flight: messages in flight.
    """

    clients: tuple[tuple[str, str], ...] = ()
    depth: int = 0
    in_flight: int = 0


class NodeChannels:
    """Asks nodes about channels, and moves them.

    Args:
        http: sends the requests, with the timeouts and credentials of its options; not closed by this object.
    """

    def __init__(self, http: LookupHttp) -> None:
        self._http = http

    async def exists(self, node: Address, topic: str, partition: int, channel: str) -> bool:
        """Return whether a node has a channel at a partition that it leads.

        Args:
            node: HTTP address of the node.
            topic: name of the topic.
            partition: the partition.
            channel: name of the channel.

        Raises:
            PartitionUnavailable: the node does not respond.
        """
        return any(found.get("channel_name") == channel for found in await self._channels(node, topic, partition))

    async def _channels(self, node: Address, topic: str, partition: int) -> list[dict[str, Any]]:
        body = await self._ask("GET", node, "/stats", topic, partition, {"format": "json"})
        try:
            return [
                dict(found)
                for entry in unwrap(200, body, node).get("topics") or ()
                if entry.get("topic_name") == topic and str(entry.get("topic_partition", partition)) == str(partition)
                for found in entry.get("channels") or ()
            ]
        except (AttributeError, TypeError, ValueError, LookupFailed) as error:
            text = f"the node's statistics cannot be read: {body[:_SHOWN]!r}"
            raise PartitionUnavailable(text, topic=topic, partition=partition, node=str(node)) from error

    async def clients(self, node: Address, topic: str, partition: int, channel: str) -> int:
        """Return how many connections are subscribed to a channel at a partition; 0 where there is no such channel.

        Args:
            node: HTTP address of the node.
            topic: name of the topic.
            partition: the partition; negative at the original NSQ.
            channel: name of the channel.

        Raises:
            PartitionUnavailable: the node does not respond.
        """
        for found in await self._channels(node, topic, partition):
            if found.get("channel_name") == channel:
                return int(found.get("client_num") or found.get("client_count") or len(found.get("clients") or ()))
        return 0

    async def connections(self, node: Address, topic: str, partition: int, channel: str) -> ChannelConnections:
        """Return the connections of a channel; see `clients`."""
        for found in await self._channels(node, topic, partition):
            if found.get("channel_name") == channel:
                clients = found.get("clients") or ()
                return ChannelConnections(
                    tuple((str(client.get("client_id")), str(client.get("desired_tag") or "")) for client in clients),
                    int(found.get("depth") or 0),
                    int(found.get("in_flight_count") or 0),
                )
        return ChannelConnections()

    async def move(self, node: Address, topic: str, partition: int, channel: str, position: str) -> None:
        """Move a channel to a position; the server forgets its messages in flight.

        The start position that SUB_ADVANCED takes makes the server ignore the partition word (captured:
        sub_advanced_offset_partition), and SUB_ORDERED takes none. So a connection subscribes first, and the channel is
        moved before RDY is sent.

        Args:
            node: HTTP address of the partition's leader.
            topic: name of the topic.
            partition: the partition.
            channel: name of the channel; it has to exist.
            position: ``kind:number``, in the words of the protocol.

        Raises:
            PartitionUnavailable: the node cannot be reached, or refuses.
        """
        try:
            params, body = {"channel": channel}, position.encode()
            await self._ask("POST", node, "/channel/setoffset", topic, partition, params, body)
        except NsqError as error:
            # the real server refuses to move a channel of an empty queue, which has only one position
            if _EMPTY not in error.message:
                raise

    async def _ask(
        self,
        method: str,
        node: Address,
        path: str,
        topic: str,
        partition: int,
        params: dict[str, str],
        body: bytes = b"",
    ) -> bytes:
        params = {"topic": topic, **({"partition": str(partition)} if partition >= 0 else {}), **params}
        try:
            status, answer = await self._http.fetch(node, path, params, method, body)
        except LookupFailed as error:
            raise PartitionUnavailable(
                f"no response to {path}: {error.message}",
                topic=topic,
                partition=partition,
                node=error.node,
                hint="is the node's HTTP side up?",
            ) from error
        if status != 200:
            raise PartitionUnavailable(
                f"{path} was refused with {status}: {answer[:_SHOWN]!r}",
                topic=topic,
                partition=partition,
                node=str(node),
            )
        return answer
