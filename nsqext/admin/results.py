"""Result types of `nsqext.Admin`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen

if TYPE_CHECKING:
    from nsqext.types import Address, TopicMeta

Generation = Literal["redesigned", "original"]
"""The redesigned NSQ (youzan/nsq) or the original (nsqio/nsq)."""


@frozen
class TopicInfo:
    """A topic in the view of the lookup service."""

    name: str
    generation: Generation
    meta: TopicMeta | None  #: partitions, replicas, extend support and order; None on the original generation
    #: TCP address of the leader by partition, without leaderless partitions; empty on the original generation
    leaders: Mapping[int, Address]
    nodes: tuple[Address, ...]  #: TCP addresses of nodes with the topic
    channels: tuple[str, ...]  #: sorted names of its channels


@frozen
class NodeStatus:
    """An nsqd in the view of the lookup service."""

    tcp: Address  #: TCP address
    http: Address | None  #: None if lookup does not report it
    version: str  #: of nsqd
    hostname: str
    generation: Generation  #: of nsqd
    topics: Mapping[str, tuple[int, ...]]  #: partitions by topic; an empty tuple on the original generation
    tombstoned: tuple[str, ...]  #: topics that lookup hides on this node
    reachable: bool  #: whether it responded to a ping


@frozen
class ClientStats:
    """A consumer's connection as a node reports it."""

    client_id: str  #: sent by the consumer
    hostname: str  #: sent by the consumer
    address: str  #: ``host:port`` of the consumer
    user_agent: str  #: library and version of the consumer
    node: Address  #: TCP address of the node
    partition: int | None  #: None on the original generation
    ready: int
    in_flight: int  #: messages in flight
    messages: int  #: messages sent on this connection
    finished: int  #: finished messages
    requeued: int  #: requeued messages
    connected_at: int  #: in seconds since 1970
    tag: str | None  #: of the subscription
    tls: bool  #: whether the connection is encrypted


@frozen
class KeyRange:
    """A range of key hashes of a ``key_failover`` channel on one partition."""

    low: float  #: 0 to 1
    high: float  #: 0 to 1
    client: str  #: ``host:port`` of the consumer of these keys
    tag: str | None  #: dispatch tag of the consumer
    rate: float  #: messages per second read for the consumer recently
    waiting: int  #: messages that wait for this consumer


@frozen
class ChannelStats:
    """A channel over all partitions of its topic; counts are sums."""

    name: str
    #: waiting messages as the server counts them; only the redesigned NSQ includes messages in flight
    depth: int
    in_flight: int
    deferred: int  #: messages whose delay runs, in memory and on disk
    messages: int  #: received messages
    requeued: int  #: requeued messages
    timed_out: int  #: messages not answered in time
    paused: bool  #: whether delivery is paused on every partition
    skipped: bool  #: whether every message is skipped on every partition (redesigned NSQ)
    lag: int  #: messages that wait, are in flight or deferred; counted equally on both generations
    clients: tuple[ClientStats, ...]  #: consumers' connections, one per subscribed partition


@frozen
class PartitionChannelStats(ChannelStats):
    """A channel on one partition."""

    lag_bytes: int | None  #: bytes of unfinished messages; None if not reported
    dispatch: str = ""  #: dispatch type, for example ``key_failover``; empty if not reported
    #: of the consumers, sorted by ``low``; only on ``key_failover`` channels
    key_ranges: tuple[KeyRange, ...] = ()
    replay: int = 0  #: messages that wait for the consumer of their key; only on ``key_failover`` channels
    held_keys: int = 0  #: keys with messages in flight; only on ``key_failover`` channels
    connections: int = 0  #: connections of consumers, even if not listed
    finished: int = 0  #: messages finished since the leader opened the channel (redesigned NSQ)


@frozen
class PartitionStats:
    """A partition on its leader; on the original generation, a node's share of the topic."""

    partition: int | None  #: None on the original generation
    node: Address  #: TCP address of the leader, or of the node
    replicas: tuple[str, ...]  #: ``host:port`` (TCP) of the in-sync replicas, the leader first; empty if unknown
    messages: int  #: received messages
    bytes: int | None  #: bytes on disk; on the original generation received bytes, None if unknown
    depth: int  #: messages that wait for a first channel (original generation)
    paused: bool  #: whether the topic passes no messages to channels (original generation)
    channels: Mapping[str, PartitionChannelStats]  #: by name
    start: int = 0  #: byte offset of the first retained message; 0 on the original generation
    end: int | None = None  #: byte offset behind the last message; None on the original generation

    @property
    def committed(self) -> int:
        """Messages that a channel may read, known to be committed (redesigned NSQ)."""
        return max((channel.messages for channel in self.channels.values()), default=0)


@frozen
class TopicStats:
    """Statistics of a topic."""

    name: str
    generation: Generation
    #: sorted by number; on the original generation nodes, sorted by address
    partitions: tuple[PartitionStats, ...]
    channels: Mapping[str, ChannelStats] = field(factory=dict)  #: over all partitions, by name
    #: nodes with the topic, but without a response; the sums exclude them
    unreachable: tuple[Address, ...] = ()

    @property
    def messages(self) -> int:
        """Messages that the topic has received."""
        return sum(partition.messages for partition in self.partitions)

    @property
    def paused(self) -> bool:
        """Whether the topic is paused on every node (original generation)."""
        return bool(self.partitions) and all(partition.paused for partition in self.partitions)


@frozen
class StoredMessage:
    """A message in the log of a partition, read without consuming it."""

    partition: int
    id: int  #: internal id
    offset: int  #: byte offset in the partition's queue
    timestamp: int  #: when stored, in nanoseconds since 1970
    trace_id: int  #: 0 for none
    body: str  #: text; the server replaces bytes that are not UTF-8 by U+FFFD
    headers: Mapping[str, Any]  #: extend headers except reserved headers
    key: str | None  #: of the publish
    tag: str | None  #: of the publish
