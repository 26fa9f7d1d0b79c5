"""Result types of `nsqext.Admin`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen

if TYPE_CHECKING:
    from nsqext.types import Address, TopicMeta

Generation = Literal["ha", "nsq"]
"""``ha`` is the redesigned NSQ, ``nsq`` the original one."""


@frozen
class TopicInfo:
    """A topic as the lookup service describes it.

    Attributes:
        name: name of the topic.
        generation: generation of the cluster.
        meta: partitions, replicas, extend support and order; None on the original generation.
        leaders: TCP address of the leader by partition; a partition without a leader is missing. Empty on the classic
            generation.
        nodes: TCP addresses of the nodes that hold the topic.
        channels: names of its channels, sorted.
    """

    name: str
    generation: Generation
    meta: TopicMeta | None
    leaders: Mapping[int, Address]
    nodes: tuple[Address, ...]
    channels: tuple[str, ...]


@frozen
class NodeStatus:
    """An nsqd node as the lookup service describes it.

    Attributes:
        tcp: TCP address.
        http: HTTP address; None if lookup does not report one.
        version: version of nsqd.
        hostname: host name.
        generation: generation of nsqd.
        topics: partitions on the node by topic; an empty tuple on the original generation.
        tombstoned: topics that lookup hides on this node.
        reachable: whether the node responded to a ping.
    """

    tcp: Address
    http: Address | None
    version: str
    hostname: str
    generation: Generation
    topics: Mapping[str, tuple[int, ...]]
    tombstoned: tuple[str, ...]
    reachable: bool


@frozen
class ClientStats:
    """A consumer's connection as a node reports it.

    Attributes:
        client_id: client id that the consumer sent.
        hostname: host name that the consumer sent.
        address: ``host:port`` of the consumer.
        user_agent: library and version of the consumer.
        node: TCP address of the node.
        partition: the partition; None on the original generation.
        ready: RDY count.
        in_flight: number of messages in flight.
        messages: number of messages sent since the connection was opened.
        finished: number of finished messages.
        requeued: number of requeued messages.
        connected_at: time of the connection, in seconds since 1970.
        tag: tag of the subscription, or None.
        tls: whether the connection is encrypted.
    """

    client_id: str
    hostname: str
    address: str
    user_agent: str
    node: Address
    partition: int | None
    ready: int
    in_flight: int
    messages: int
    finished: int
    requeued: int
    connected_at: int
    tag: str | None
    tls: bool


@frozen
class KeyRange:
    """A range of key hashes of a ``key_failover`` channel on one partition.

    Attributes:
        low: start of the range, 0 to 1.
        high: end of the range.
        client: ``host:port`` of the consumer of these keys.
        tag: dispatch tag of the consumer, or None.
        rate: messages per second that were read for the consumer recently.
        waiting: number of messages that wait for this consumer.
    """

    low: float
    high: float
    client: str
    tag: str | None
    rate: float
    waiting: int


@frozen
class ChannelStats:
    """A channel over all partitions of its topic; counts are sums.

    Attributes:
        name: name of the channel.
        depth: messages that wait for delivery, as the server counts them: the redesigned NSQ includes messages in
            flight, the original generation does not.
        in_flight: messages in flight.
        deferred: messages that wait for a delay to pass, in memory and on disk.
        messages: messages that the channel has received.
        requeued: messages that consumers requeued.
        timed_out: messages that were not answered in time.
        paused: whether delivery is paused on every partition.
        skipped: whether every message is skipped on every partition (redesigned NSQ).
        lag: unfinished messages: waiting, in flight and deferred; counted in the same way on both generations.
        clients: connections of consumers, one for each partition that a consumer subscribes to.
    """

    name: str
    depth: int
    in_flight: int
    deferred: int
    messages: int
    requeued: int
    timed_out: int
    paused: bool
    skipped: bool
    lag: int
    clients: tuple[ClientStats, ...]


@frozen
class PartitionChannelStats(ChannelStats):
    """A channel on one partition.

    Attributes:
        lag_bytes: size of the unfinished messages in bytes; None if the server does not report it.
        dispatch: dispatch type, for example ``key_failover``; empty if the server does not report one.
        key_ranges: key ranges of the consumers, sorted by ``low``; only on ``key_failover`` channels.
        replay: number of messages that wait for the consumer of their key; only on ``key_failover`` channels.
        held_keys: number of keys with messages in flight; only on ``key_failover`` channels.
    """

    lag_bytes: int | None
    dispatch: str = ""
    key_ranges: tuple[KeyRange, ...] = ()
    replay: int = 0
    held_keys: int = 0


@frozen
class PartitionStats:
    """A partition on its leader; a node's share of the topic on the original generation.

    Attributes:
        partition: partition number; None on the original generation.
        node: TCP address of the leader, or of the node.
        replicas: ``host:port`` (TCP) of the in-sync replicas, the leader first; empty if unknown.
        messages: number of received messages.
        bytes: bytes on disk; on the original generation the received bytes, None if unknown.
        end: byte offset of the end of the last message; None on the original generation.
        depth: messages that wait for a first channel (original generation).
        paused: whether the topic passes no messages to its channels (original generation).
        channels: channels by name.
    """

    partition: int | None
    node: Address
    replicas: tuple[str, ...]
    messages: int
    bytes: int | None
    depth: int
    paused: bool
    channels: Mapping[str, PartitionChannelStats]
    end: int | None = None


@frozen
class TopicStats:
    """Statistics of a topic.

    Attributes:
        name: name of the topic.
        generation: generation of the cluster.
        partitions: partitions sorted by number; on the original generation nodes, sorted by address.
        channels: channels over all partitions, by name.
        unreachable: nodes that hold the topic but did not respond; the sums do not include them.
    """

    name: str
    generation: Generation
    partitions: tuple[PartitionStats, ...]
    channels: Mapping[str, ChannelStats] = field(factory=dict)
    unreachable: tuple[Address, ...] = ()

    @property
    def messages(self) -> int:
        """Messages that the topic has received, over all partitions."""
        return sum(partition.messages for partition in self.partitions)

    @property
    def paused(self) -> bool:
        """Whether the topic is paused on every node (original generation)."""
        return bool(self.partitions) and all(partition.paused for partition in self.partitions)


@frozen
class StoredMessage:
    """A message in the log of a partition, read without consuming it.

    Attributes:
        partition: partition number.
        id: internal id.
        offset: byte offset in the partition's queue.
        timestamp: time when the server stored it, in nanoseconds since 1970.
        trace_id: trace id; 0 without one.
        body: the body as text; the server replaces bytes that are not UTF-8 by U+FFFD.
        headers: extend headers without the reserved ones.
        key: key of the publish, or None.
        tag: tag of the publish, or None.
    """

    partition: int
    id: int
    offset: int
    timestamp: int
    trace_id: int
    body: str
    headers: Mapping[str, Any]
    key: str | None
    tag: str | None
