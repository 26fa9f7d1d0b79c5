"""Create and delete topics and channels through the lookup service."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from nsqext.errors import InvalidInput, LookupFailed, TopicNotFound
from nsqext.lookup.client import LookupClient, failure
from nsqext.lookup.partition_map import PartitionMapMerger
from nsqext.protocol.names import MAX_PARTITIONS, check_channel, check_topic

if TYPE_CHECKING:
    from nsqext.errors import NsqError
    from nsqext.lookup.partition_map import PartitionMap
    from nsqext.types import Address

__all__ = ("DEFAULT_CHANNEL", "LookupAdmin")

DEFAULT_CHANNEL = "default"
"""Channel of a new topic if the caller names none: the redesigned NSQ refuses publishes to a topic without channels."""


class LookupAdmin:
    """Creates and deletes topics and channels; needs no further rights than a client of the lookup service.

    Args:
        client: of the lookup nodes; its owner closes it.
    """

    def __init__(self, client: LookupClient) -> None:
        self._client = client

    async def create_topic(
        self,
        topic: str,
        *,
        partitions: int = 1,
        replicas: int = 1,
        extend: bool = False,
        ordered: bool = False,
        multipart: bool = False,
    ) -> None:
        """Create a topic; nothing happens if it exists. Nodes may need some time until they accept messages for it.

        The original NSQ ignores all options.

        Args:
            topic: its name.
            partitions: number of its partitions.
            replicas: copies of each partition.
            extend: messages may have JSON extend headers.
            ordered: ordered consumption; implies ``multipart``.
            multipart: a node may hold several partitions.

        Raises:
            InvalidInput: the name or a number is invalid.
            LookupFailed: refused, or no lookup node responded.
        """
        params: dict[str, str | int] = {
            "topic": check_topic(topic),
            "partition_num": _within("partitions", partitions, MAX_PARTITIONS),
            "replicator": _within("replicas", replicas, 5),
        }
        flags = {"extend": extend, "orderedmulti": ordered, "multipart": multipart}
        await self._change("/topic/create", params | {name: "true" for name, value in flags.items() if value})

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic and its messages, at the lookup service and, for the original NSQ, at the nodes.

        Raises:
            InvalidName: the topic's name is invalid.
            TopicNotFound: the lookup service does not know the topic.
            LookupFailed: refused, or no lookup node responded.
        """
        found = await self._find(topic)
        await self._change("/topic/delete", {"topic": topic, "partition": "**"})
        for node in found.nodes:
            await self._post(_http(found, node), "/topic/delete", {"topic": topic})

    async def create_channel(self, topic: str, channel: str) -> None:
        """Create a channel on every partition; it starts at the end of the stored messages.

        Raises:
            InvalidName: a name is invalid.
            TopicNotFound: the lookup service does not know the topic.
            LookupFailed: refused, or a lookup node or leader did not respond.
        """
        check_channel(channel)
        found = await self._find(topic)
        params: dict[str, str | int] = {"topic": topic, "channel": channel}
        if found.meta.disable_channel_auto_create or not found.leaders:
            await self._change("/channel/create", params)
        for partition, leader in found.leaders.items():
            await self._post(_http(found, leader), "/channel/create", {**params, "partition": partition})
        for node in found.nodes:
            await self._post(_http(found, node), "/channel/create", params)

    async def _find(self, topic: str) -> PartitionMap:
        answers = await self._client.lookup(topic, "r")
        if not any(answer.found for answer in answers):
            raise failure([answer.error for answer in answers if answer.error is not None], topic)
        merger = PartitionMapMerger(topic, "r")
        merger.merge(answers)
        return merger.current

    async def _change(self, path: str, params: dict[str, str | int]) -> None:
        """Send a change to the leader of the lookup nodes; to all of them if there is no leader (the original NSQ)."""
        nodes = await self._client.lookup_nodes()
        leaders = [node.address for node in nodes if node.leader]
        if leaders:
            await self._post(leaders[0], path, params)
            return
        await self._post_all((node.address for node in nodes), path, params)

    async def _post_all(self, addresses: Iterable[Address], path: str, params: dict[str, str | int]) -> None:
        errors: list[NsqError] = []
        done = False
        for address in addresses:
            try:
                await self._post(address, path, params)
                done = True
            except (LookupFailed, TopicNotFound) as error:
                errors.append(error)
        if not done:
            raise failure(errors, str(params["topic"]))

    async def _post(self, address: Address, path: str, params: dict[str, str | int]) -> None:
        await self._client.http.ask(address, path, params, method="POST")


def _http(found: PartitionMap, node: Address) -> Address:
    address = found.http.get(node)
    if address is None:
        raise LookupFailed("the lookup service does not name its HTTP address", topic=found.topic, node=str(node))
    return address


def _within(name: str, value: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidInput(f"{name}={value!r} is not within 1..{most}")
    return value
