"""The administration client."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from nsqext.admin.nodes import NodeAdmin
from nsqext.admin.requests import ask_all, ask_each, http_of, no_partition, unsupported
from nsqext.admin.results import StoredMessage
from nsqext.admin.stats import cluster_stats, in_sync_replicas, topic_stats
from nsqext.admin.topics import TopicAdmin
from nsqext.arguments import check_number
from nsqext.errors import InvalidInput, PartitionUnavailable, ProtocolError
from nsqext.lookup.responses import unwrap
from nsqext.protocol.headers import decode_headers
from nsqext.protocol.messages import KEY_HEADER, RESERVED_PREFIX, header_text, tag_of
from nsqext.protocol.names import check_channel

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from nsqext.admin.requests import ClusterRequests
    from nsqext.admin.results import TopicInfo, TopicStats
    from nsqext.lookup.node_stats import PartitionStats
    from nsqext.lookup.partition_map import PartitionMap
    from nsqext.types import Address


class Admin(TopicAdmin, NodeAdmin):
    """Lists and changes topics, channels and nodes of a cluster of either generation.

    Use it as an asynchronous context manager, or call `aclose`. One object serves any number of tasks. Changes are
    idempotent; cancellation does not undo a sent change. A change of a channel goes to the leader of every partition,
    and is repeated during elections.

    Errors of many methods: `InvalidName`, servers would refuse a name; `TopicNotFound`, lookup does not know the topic;
    `LookupFailed`, the lookup service refused or gave no usable response; `PartitionUnavailable`, a partition has no
    leader in time; `ConnectionFailed`, a node does not respond; `OperationNotSupported`, the original generation cannot
    do this.

    Args:
        lookupd: ``host:port`` of nsqlookupd's HTTP side: a list, or text with commas; or a URL with addresses and
            settings: ``nsq://lookupd:4161?timeout=60``.
        env: prefix of the environment variables with further settings; see `nsqext.Producer`.
        settings: see `AdminSettings`.

    Raises:
        InvalidSetting: no address, an invalid address, or an invalid value.
        UnknownSetting: unknown setting; the error suggests a known name.
    """

    async def replicas(self, topic: str) -> dict[int, tuple[str, ...]]:
        """Return the TCP addresses of the in-sync replicas by partition, the leader first.

        Only its leader knows them: a partition without a leader, or whose leader does not respond, has an empty tuple.

        Raises:
            ConnectionFailed: no leader responded.
            OperationNotSupported, TopicNotFound: see `Admin`.
        """
        requests = self._open()
        where, _ = await requests.find_redesigned(topic, "replicas", "the original NSQ has no replicas")
        found, failed = await ask_all(where.leaders, partial(in_sync_replicas, requests, where))
        if failed and not found:
            raise next(iter(failed.values()))
        return {number: found.get(number, ()) for number in sorted({*range(where.partition_num), *where.leaders})}

    async def stats(self, topic: str, channel: str | None = None) -> TopicStats:
        """Return the statistics of a topic: messages, depth and lag per partition and channel, clients.

        Args:
            channel: one channel; None for all.

        Raises:
            ConnectionFailed: no node that holds the topic responded.
            TopicNotFound, LookupFailed: see `Admin`.
        """
        requests = self._open()
        where = await requests.find(topic)
        if channel is not None:
            check_channel(channel)
        return await topic_stats(requests, where, channel)

    async def all_stats(self, topics: Mapping[str, TopicInfo] | None = None) -> dict[str, TopicStats]:
        """Return the statistics of every topic by name, with one request per node.

        The sums lack nodes without a response, see ``unreachable``, and partitions without a leader, see ``missing``.

        Args:
            topics: the result of `topics`, with the numbers of partitions; lookup is not asked for them. ``missing`` is
                None for other topics of the redesigned generation.

        Raises:
            LookupFailed: no lookup node returned a usable response.
        """
        return await cluster_stats(self._open(), topics or {})

    async def peek(self, topic: str, *, count: int = 20, partition: int | None = None) -> tuple[StoredMessage, ...]:
        """Return the newest messages of a topic of the redesigned NSQ, newest first, without a channel.

        Args:
            count: largest number of messages, 1 to 1000, over all read partitions.
            partition: one partition; None for all.

        Raises:
            InvalidInput: invalid number or partition.
            PartitionUnavailable: a partition to be read has no leader, or its leader does not respond.
            OperationNotSupported, TopicNotFound, ConnectionFailed: see `Admin`.
        """
        wanted = check_number("count", count, 1, 1000, InvalidInput)
        requests = self._open()
        where = await requests.find(topic)
        if where.nodes:
            raise unsupported("peek", "the original NSQ cannot read messages without consuming them", topic)
        if not where.leaders:
            raise PartitionUnavailable("no node leads a partition of the topic", topic=topic)
        if partition is not None and partition not in range(where.meta.partition_num):
            raise no_partition(topic, partition)
        parts = {part.partition: part for part in (await self.stats(topic)).partitions}
        chosen = range(where.meta.partition_num) if partition is None else (partition,)
        for number in chosen:
            if number not in where.leaders:
                raise PartitionUnavailable.without_leader(topic, number)
            if number not in parts:
                text, node = "the partition's leader does not report it", str(where.leaders[number])
                raise PartitionUnavailable(text, topic=topic, partition=number, node=node)
        return await _newest_messages(requests, where, [parts[number] for number in chosen], wanted)


async def _newest_messages(
    requests: ClusterRequests, where: PartitionMap, parts: Iterable[PartitionStats], count: int
) -> tuple[StoredMessage, ...]:
    async def read(at: tuple[int, Address, int]) -> StoredMessage | None:
        partition, node, number = at
        return await _message_at(requests, http_of(where, node), where.topic, partition, number)

    wanted = (
        (part.partition, part.node, number)
        for part in parts
        if part.partition is not None
        for number in range(part.messages, max(part.messages - count, 0), -1)
    )
    messages = await ask_each(wanted, read)
    # real servers return the first message for any message of a batch
    found = {(message.partition, message.offset): message for message in messages.values() if message is not None}
    newest = sorted(found.values(), key=lambda one: (one.timestamp, one.offset), reverse=True)
    return tuple(newest[:count])


async def _message_at(
    requests: ClusterRequests, http: Address, topic: str, partition: int, number: int
) -> StoredMessage | None:
    """Return a message by its number from 1; None if it is not in the log."""
    params: dict[str, str | int] = {
        "topic": topic,
        "partition": partition,
        "search_mode": "count",
        "search_pos": number,
        "needext": "true",
    }
    status, body = await requests.fetch(http, "/message/get", params)
    if status != 200:
        return None
    return read_message(unwrap(status, body, http), partition, http)


def read_message(data: Any, partition: int, node: Address) -> StoredMessage:
    """Read the data of ``/message/get``.

    Raises:
        ProtocolError: the data is invalid, or the header is not JSON.
    """
    try:
        ext = str(data.get("ext") or "")
        headers = decode_headers(ext.encode("utf-8", "surrogatepass")) if ext.lstrip().startswith("{") else {}
        return StoredMessage(
            partition=partition,
            id=int(data["id"]),
            offset=int(data["offset"]),
            timestamp=int(data["timestamp"]),
            trace_id=int(data["trace_id"]),
            body=str(data["body"]),
            headers={name: value for name, value in headers.items() if not name.startswith(RESERVED_PREFIX)},
            key=header_text(headers, KEY_HEADER),
            tag=tag_of(headers) if headers else (ext or None),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"/message/get cannot be read: {error!r}", node=str(node), partition=partition) from error
