"""The administration client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.admin.nodes import NodeAdmin
from nsqext.admin.peek import newest_messages
from nsqext.admin.requests import http_of, unsupported
from nsqext.admin.stats import cluster_stats, in_sync_replicas, topic_stats
from nsqext.admin.topics import TopicAdmin
from nsqext.arguments import check_number
from nsqext.errors import InvalidInput
from nsqext.protocol.names import check_channel

if TYPE_CHECKING:
    from nsqext.admin.results import StoredMessage, TopicStats


class Admin(TopicAdmin, NodeAdmin):
    """Lists and changes topics, channels and nodes of a cluster of either generation.

    Use it as an asynchronous context manager, or call `aclose`. One object serves any number of tasks. Cancellation
    does not undo a change that was sent.

    A change of a channel is sent to the leader of every partition, and repeated while a leader is being elected. All
    changes are idempotent.

    Errors of many methods: `InvalidName`, servers would refuse a name; `TopicNotFound`, lookup does not know the topic;
    `LookupFailed`, the lookup service refused, or no node of it gave a usable response; `PartitionUnavailable`, a
    partition has no leader in time; `ConnectionFailed`, a node does not respond; `OperationNotSupported`, the topic or
    the cluster is of the original generation, which cannot do this.

    Args:
        lookupd: lookup addresses, ``host:port`` of nsqlookupd's HTTP side: a list, or text with commas. Or a URL with
            addresses and settings: ``nsq://lookupd:4161?timeout=60``.
        env: prefix of the environment variables with further settings; see `nsqext.Producer`.
        settings: see `AdminSettings`.

    Raises:
        InvalidSetting: no address, or an invalid one; an invalid value.
        UnknownSetting: an unknown setting; the error suggests the right one.
    """

    async def replicas(self, topic: str) -> dict[int, tuple[str, ...]]:
        """Return the TCP addresses of the in-sync replicas by partition, the leader first.

        Raises:
            OperationNotSupported, TopicNotFound, PartitionUnavailable, ConnectionFailed: see `Admin`.
        """
        requests = self._open()
        where = await requests.led(topic)
        if where.nodes:
            raise unsupported("replicas", "the original NSQ has no replicas", topic)
        return await in_sync_replicas(requests, where)

    async def stats(self, topic: str, channel: str | None = None) -> TopicStats:
        """Return the statistics of a topic: messages, depth and lag per partition and channel, clients.

        Args:
            topic: the topic.
            channel: only this channel; None for all.

        Raises:
            ConnectionFailed: no node that holds the topic responded.
            TopicNotFound, LookupFailed: see `Admin`.
        """
        requests = self._open()
        where = await requests.find(topic)
        if channel is not None:
            check_channel(channel)
        return await topic_stats(requests, where, channel)

    async def all_stats(self) -> dict[str, TopicStats]:
        """Return the statistics of every topic by name, with one request per node.

        A node that does not respond is missing from the sums; see ``unreachable``.

        Raises:
            LookupFailed: no lookup node returned a usable response.
        """
        return await cluster_stats(self._open())

    async def peek(self, topic: str, *, count: int = 20, partition: int | None = None) -> tuple[StoredMessage, ...]:
        """Return the newest messages of a topic of the redesigned NSQ, newest first, without consuming them.

        They are read from the log of the partitions, without using a channel.

        Args:
            topic: the topic.
            count: largest number of messages, 1 to 1000, over all partitions that are read.
            partition: only this partition; None for all.

        Raises:
            InvalidInput: the number or the partition is not valid.
            OperationNotSupported, TopicNotFound, PartitionUnavailable, ConnectionFailed: see `Admin`.
        """
        wanted = check_number("count", count, 1, 1000, InvalidInput)
        requests = self._open()
        where = await requests.led(topic)
        if where.nodes:
            raise unsupported("peek", "the original NSQ cannot read messages without consuming them", topic)
        if partition is not None and partition not in where.leaders:
            raise InvalidInput(f"the topic has no partition {partition}", topic=topic, partition=partition)
        chosen = [
            (part.partition, http_of(where, part.node), part.messages)
            for part in (await self.stats(topic)).partitions
            if part.partition is not None and partition in (None, part.partition)
        ]
        return await newest_messages(requests, topic, chosen, wanted)
