"""What `nsqext.Admin` returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen

if TYPE_CHECKING:
    from nsqext.types import Address, TopicMeta

__all__ = (
    "ChannelStats",
    "ClientStats",
    "Generation",
    "KeyRange",
    "NodeStatus",
    "PartitionChannelStats",
    "PartitionStats",
    "StoredMessage",
    "TopicInfo",
    "TopicStats",
)

Generation = Literal["ha", "classic"]
"""``ha`` is the redesigned NSQ, ``classic`` the original one."""


@frozen
class TopicInfo:
    """A topic as the lookup service describes it.

    Attributes:
        name: the topic.
        generation: which NSQ serves it.
        meta: partitions, replicas, extend support and order; None on the classic generation.
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
        tcp: its TCP address.
        http: its HTTP address; None where lookup does not report one.
        version: its version.
        hostname: its host name.
        generation: which NSQ it runs.
        topics: partitions that it holds by topic; an empty tuple on the classic generation.
        tombstoned: topics that lookup hides on this node.
        reachable: the node answered a ping.
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
        client_id: what the consumer calls itself.
        hostname: its host name.
        address: its ``host:port``.
        user_agent: its library and version.
        node: TCP address of the node that it is connected to.
        partition: the partition; None on the classic generation.
        ready: its RDY count.
        in_flight: messages in flight to it.
        messages: messages sent to it since it connected.
        finished: messages that it finished.
        requeued: messages that it requeued.
        connected_at: seconds since 1970.
        tag: the tag that it asked for; None for no tag.
        tls: the connection is encrypted.
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
        low: where it begins, 0 to 1.
        high: where it ends.
        client: ``host:port`` of the consumer that receives the keys in it.
        tag: the consumer's dispatch tag; None for no tag.
        rate: messages a second that the consumer received recently.
        waiting: messages that wait for this consumer.
    """

    low: float
    high: float
    client: str
    tag: str | None
    rate: float
    waiting: int


@frozen
class PartitionChannelStats:
    """A channel on one partition.

    Attributes:
        depth: messages that wait for delivery, as the server counts them: the redesigned NSQ includes messages in
            flight, the classic generation does not.
        in_flight: messages in flight.
        deferred: messages that wait for a delay to pass, in memory and on disk.
        messages: messages that the channel has received.
        requeued: messages that consumers requeued.
        timed_out: messages that were not answered in time.
        paused: it delivers nothing.
        skipped: it skips every message (redesigned NSQ).
        lag: messages that are not finished: waiting, in flight and deferred, counted alike on both generations.
        lag_bytes: bytes behind them; None where the server does not report them.
        clients: its consumers.
        dispatch: dispatch type, ``key_failover`` for example; empty where the server does not report one.
        key_ranges: which consumer receives which keys, by ``low``; only on ``key_failover`` channels.
        replay: messages that wait for the consumer of their key; only on ``key_failover`` channels.
        held_keys: keys that a consumer has messages of; only on ``key_failover`` channels.
    """

    depth: int
    in_flight: int
    deferred: int
    messages: int
    requeued: int
    timed_out: int
    paused: bool
    skipped: bool
    lag: int
    lag_bytes: int | None
    clients: tuple[ClientStats, ...]
    dispatch: str = ""
    key_ranges: tuple[KeyRange, ...] = ()
    replay: int = 0
    held_keys: int = 0


@frozen
class PartitionStats:
    """A partition on its leader; a node's share of the topic on the classic generation.

    Attributes:
        partition: its number; None on the classic generation.
        node: TCP address of the leader, or of the node.
        replicas: ``host:port`` (TCP) of the in-sync replicas, the leader first; empty where unknown.
        messages: messages that it has received.
        bytes: bytes that it holds on disk; received bytes on the classic generation, None where unknown.
        end: byte offset behind its last message; None on the classic generation.
        depth: messages that wait for a first channel (classic generation).
        paused: it passes nothing to its channels (classic generation).
        channels: its channels by name.
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
class ChannelStats:
    """A channel over all partitions of its topic; counts are sums.

    Attributes:
        name: the channel.
        depth: see `PartitionChannelStats`.
        in_flight: messages in flight.
        deferred: messages that wait for a delay to pass.
        messages: messages that the channel has received.
        requeued: messages that consumers requeued.
        timed_out: messages that were not answered in time.
        paused: it is paused on every partition.
        skipped: it skips every message on every partition.
        lag: messages that are not finished.
        clients: its consumers' connections, one per partition that a consumer subscribes to.
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
class TopicStats:
    """Statistics of a topic.

    Attributes:
        name: the topic.
        generation: which NSQ serves it.
        partitions: its partitions by number; nodes of the classic generation, by address.
        channels: its channels over all partitions, by name.
        unreachable: nodes that hold the topic and did not answer: the sums lack their share.
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
        """Whether the topic is paused on every node (classic generation)."""
        return bool(self.partitions) and all(partition.paused for partition in self.partitions)


@frozen
class StoredMessage:
    """A message in the log of a partition, read without consuming it.

    Attributes:
        partition: its partition.
        id: internal id.
        offset: byte offset in the partition's queue.
        timestamp: when the server stored it, in nanoseconds since 1970.
        trace_id: its trace id; 0 without one.
        body: the body as text; the server puts U+FFFD in place of bytes that are not UTF-8.
        headers: extend headers without the reserved ones.
        key: the key that it was published with; None without one.
        tag: the tag that it was published with; None without one.
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
