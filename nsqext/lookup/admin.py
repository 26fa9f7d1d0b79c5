"""Making topics and channels through the lookup service, for the command line and for tests."""

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
    """Changes topics and channels; needs no more rights than any client of the lookup service has.

    Args:
        client: asks the lookup nodes; it stays its owner's.
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
        """Create a topic; the same topic twice is no error. Nodes may need a while until they take messages for it.

        The original NSQ knows none of the options and ignores them.

        Args:
            topic: its name.
            partitions: number of its partitions.
            replicas: copies of each partition.
            extend: messages may carry JSON extend headers.
            ordered: ordered consumption; implies that several partitions may live on one node.
            multipart: several partitions may live on one node.

        Raises:
            InvalidInput: the name or a number cannot be right.
            LookupFailed: refused, or no lookup node answers.
        """
        params: dict[str, str | int] = {
            "topic": check_topic(topic),
            "partition_num": _within("partitions", partitions, MAX_PARTITIONS),
            "replicator": _within("replicas", replicas, 5),
        }
        flags = {"extend": extend, "orderedmulti": ordered, "multipart": multipart}
        await self._change("/topic/create", params | {name: "true" for name, value in flags.items() if value})

    async def delete_topic(self, topic: str) -> None:
        """Delete a topic with everything in it, at the lookup service and, for the original NSQ, at the nodes.

        Raises:
            InvalidName: no topic can be called so.
            TopicNotFound: lookup does not know the topic.
            LookupFailed: refused, or no lookup node answers.
        """
        view = await self._find(topic)
        await self._change("/topic/delete", {"topic": topic, "partition": "**"})
        for node in view.nodes:
            await self._post(_http(view, node), "/topic/delete", {"topic": topic})

    async def create_channel(self, topic: str, channel: str) -> None:
        """Create a channel on every partition; it begins at the end of what is stored.

        Raises:
            InvalidName: no topic or channel can be called so.
            TopicNotFound: lookup does not know the topic.
            LookupFailed: refused, or a lookup node or nsqd that is needed does not answer.
        """
        check_channel(channel)
        view = await self._find(topic)
        params: dict[str, str | int] = {"topic": topic, "channel": channel}
        if view.meta.disable_channel_auto_create or not view.leaders:
            await self._change("/channel/create", params)
        for partition, leader in view.leaders.items():
            await self._post(_http(view, leader), "/channel/create", {**params, "partition": partition})
        for node in view.nodes:
            await self._post(_http(view, node), "/channel/create", params)

    async def _find(self, topic: str) -> PartitionMap:
        answers = await self._client.lookup(topic, "r")
        if not any(answer.found for answer in answers):
            raise failure([answer.error for answer in answers if answer.error is not None], topic)
        table = PartitionMapMerger(topic, "r")
        table.merge(answers)
        return table.view

    async def _change(self, path: str, params: dict[str, str | int]) -> None:
        """Send a change to the lookup node that leads the others; to all of them where none does (the original NSQ)."""
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


def _http(view: PartitionMap, node: Address) -> Address:
    address = view.http.get(node)
    if address is None:
        raise LookupFailed("lookup does not tell the node's HTTP address", topic=view.topic, node=str(node))
    return address


def _within(name: str, value: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidInput(f"{name}={value!r} is not within 1..{most}")
    return value
