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
    """A topic as the lookup service describes it."""

    name: str  #: name of the topic
    generation: Generation  #: generation of the cluster
    meta: TopicMeta | None  #: partitions, replicas, extend support and order; None on the original generation
    #: TCP address of the leader by partition; a partition without a leader is missing. Empty on the original one
    leaders: Mapping[int, Address]
    nodes: tuple[Address, ...]  #: TCP addresses of the nodes that hold the topic
    channels: tuple[str, ...]  #: names of its channels, sorted


@frozen
class NodeStatus:
    """An nsqd node as the lookup service describes it."""

    tcp: Address  #: TCP address
    http: Address | None  #: HTTP address; None if lookup does not report one
    version: str  #: version of nsqd
    hostname: str  #: host name
    generation: Generation  #: generation of nsqd
    topics: Mapping[str, tuple[int, ...]]  #: partitions on the node by topic; an empty tuple on the original generation
    tombstoned: tuple[str, ...]  #: topics that lookup hides on this node
    reachable: bool  #: whether the node responded to a ping


@frozen
class ClientStats:
    """A consumer's connection as a node reports it."""

    client_id: str  #: client id that the consumer sent
    hostname: str  #: host name that the consumer sent
    address: str  #: ``host:port`` of the consumer
    user_agent: str  #: library and version of the consumer
    node: Address  #: TCP address of the node
    partition: int | None  #: the partition; None on the original generation
    ready: int  #: RDY count
    in_flight: int  #: number of messages in flight
    messages: int  #: number of messages sent since the connection was opened
    finished: int  #: number of finished messages
    requeued: int  #: number of requeued messages
    connected_at: int  #: time of the connection, in seconds since 1970
    tag: str | None  #: tag of the subscription, or None
    tls: bool  #: whether the connection is encrypted


@frozen
class KeyRange:
    """A range of key hashes of a ``key_failover`` channel on one partition."""

    low: float  #: start of the range, 0 to 1
    high: float  #: end of the range
    client: str  #: ``host:port`` of the consumer of these keys
    tag: str | None  #: dispatch tag of the consumer, or None
    rate: float  #: messages per second that were read for the consumer recently
    waiting: int  #: number of messages that wait for this consumer


@frozen
class ChannelStats:
    """A channel over all partitions of its topic; counts are sums."""

    name: str  #: name of the channel
    #: messages that wait for delivery, as the server counts them; the redesigned NSQ includes messages in flight, the
    #: original generation does not
    depth: int
    in_flight: int  #: messages in flight
    deferred: int  #: messages that wait for a delay to pass, in memory and on disk
    messages: int  #: messages that the channel has received
    requeued: int  #: messages that consumers requeued
    timed_out: int  #: messages that were not answered in time
    paused: bool  #: whether delivery is paused on every partition
    skipped: bool  #: whether every message is skipped on every partition (redesigned NSQ)
    lag: int  #: messages that wait, are in flight or deferred; counted in the same way on both generations
    clients: tuple[ClientStats, ...]  #: connections of consumers, one for each partition that a consumer subscribes to


@frozen
class PartitionChannelStats(ChannelStats):
    """A channel on one partition."""

    lag_bytes: int | None  #: size of the unfinished messages in bytes; None if the server does not report it
    dispatch: str = ""  #: dispatch type, for example ``key_failover``; empty if the server does not report one
    #: key ranges of the consumers, sorted by ``low``; only on ``key_failover`` channels
    key_ranges: tuple[KeyRange, ...] = ()
    replay: int = 0  #: number of messages that wait for the consumer of their key; only on ``key_failover`` channels
    held_keys: int = 0  #: number of keys with messages in flight; only on ``key_failover`` channels
    connections: int = 0  #: connections of consumers, also where the server does not list them
    finished: int = 0  #: messages that consumers finished since the leader opened the channel (redesigned NSQ)


@frozen
class PartitionStats:
    """A partition on its leader; a node's share of the topic on the original generation."""

    partition: int | None  #: partition number; None on the original generation
    node: Address  #: TCP address of the leader, or of the node
    replicas: tuple[str, ...]  #: ``host:port`` (TCP) of the in-sync replicas, the leader first; empty if unknown
    messages: int  #: number of received messages
    bytes: int | None  #: bytes on disk; on the original generation the received bytes, None if unknown
    depth: int  #: messages that wait for a first channel (original generation)
    paused: bool  #: whether the topic passes no messages to its channels (original generation)
    channels: Mapping[str, PartitionChannelStats]  #: channels by name
    start: int = 0  #: byte offset of the first retained message; 0 on the original generation
    end: int | None = None  #: byte offset of the end of the last message; None on the original generation

    @property
    def committed(self) -> int:
        """Messages that a channel may read, which are those that are known to be committed (redesigned NSQ)."""
        return max((channel.messages for channel in self.channels.values()), default=0)


@frozen
class TopicStats:
    """Statistics of a topic."""

    name: str  #: name of the topic
    generation: Generation  #: generation of the cluster
    #: partitions sorted by number; on the original generation nodes, sorted by address
    partitions: tuple[PartitionStats, ...]
    channels: Mapping[str, ChannelStats] = field(factory=dict)  #: channels over all partitions, by name
    #: nodes that hold the topic but did not respond; the sums do not include them
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
    """A message in the log of a partition, read without consuming it."""

    partition: int  #: partition number
    id: int  #: internal id
    offset: int  #: byte offset in the partition's queue
    timestamp: int  #: time when the server stored it, in nanoseconds since 1970
    trace_id: int  #: trace id; 0 without one
    body: str  #: the body as text; the server replaces bytes that are not UTF-8 by U+FFFD
    headers: Mapping[str, Any]  #: extend headers without the reserved ones
    key: str | None  #: key of the publish, or None
    tag: str | None  #: tag of the publish, or None
