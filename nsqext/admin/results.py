"""Result types of `nsqext.Admin`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from attrs import field, frozen

if TYPE_CHECKING:
    from nsqext.lookup.node_stats import ChannelStats, PartitionStats
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

    @property
    def leaderless(self) -> tuple[int, ...]:
        """Partitions without a leader; empty on the original generation."""
        created = range(self.meta.partition_num) if self.meta is not None else ()
        return tuple(number for number in created if number not in self.leaders)


@frozen
class NodeStatus:
    """An nsqd in the view of the lookup service."""

    tcp: Address
    http: Address | None  #: None if lookup does not report it
    version: str  #: of nsqd
    hostname: str
    generation: Generation  #: of nsqd
    topics: Mapping[str, tuple[int, ...]]  #: partitions by topic; an empty tuple on the original generation
    tombstoned: tuple[str, ...]  #: topics that lookup hides on this node
    reachable: bool  #: whether it responded to a ping


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
    #: partitions that no node has reported, such as partitions without a leader; the sums exclude them. None if not
    #: known, see `nsqext.Admin.all_stats`
    missing: tuple[int, ...] | None = ()

    @property
    def complete(self) -> bool:
        """Whether the sums are known to cover the whole topic, of which lookup lists a node."""
        return bool(self.partitions) and not self.unreachable and self.missing == ()

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
    trace_id: int  #: 0 without trace id
    body: str  #: text; the server replaces bytes that are not UTF-8 by U+FFFD
    headers: Mapping[str, Any]  #: extend headers except reserved headers
    key: str | None  #: of the publish
    tag: str | None  #: of the publish
