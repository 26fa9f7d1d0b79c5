"""What a lookup node sees of the cluster: the truth, an old picture of it, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from attrs import field, frozen

if TYPE_CHECKING:
    from nsqext.broker.coordinator.coordinator import Coordinator
    from nsqext.broker.coordinator.members import Member
    from nsqext.broker.coordinator.topics import TopicSpec

__all__ = ("ClusterView", "Live", "PartitionView", "Peer", "Picture", "TopicView")


@frozen
class Peer:
    """A node that is connected to lookup.

    Attributes:
        name: how the cluster calls it.
        address: ``host:http_port``, as tombstones name it.
        entry: its entry in the answer of ``/lookup``.
    """

    name: str
    address: str
    entry: Mapping[str, Any]


@frozen
class PartitionView:
    """One partition.

    Attributes:
        registered: the node that told lookup that it leads it, and is connected; it takes writes.
        reader: the node that consumers are sent to; it may take no writes at the moment.
        channels: its channels, as its leader told; none while it takes no writes.
    """

    registered: str | None
    reader: str | None
    channels: tuple[str, ...]


@frozen
class TopicView:
    """One topic."""

    name: str
    spec: TopicSpec
    partitions: Mapping[int, PartitionView] = field(factory=dict)


class ClusterView(Protocol):
    """What a lookup node may ask."""

    def peers(self) -> Mapping[str, Peer]:
        """Return the connected nodes by name."""

    def names(self) -> list[str]:
        """Return the names of the topics."""

    def topic(self, name: str) -> TopicView | None:
        """Return a topic."""


def _peer(member: Member) -> Peer:
    return Peer(
        member.name,
        f"{member.http.host}:{member.http.port}",
        {
            "id": member.peer_id,
            "remote_address": member.peer_id,
            "hostname": member.hostname,
            "broadcast_address": member.tcp.host,
            "tcp_port": member.tcp.port,
            "http_port": member.http.port,
            "version": member.version,
            "distributed_id": member.distributed_id,
        },
    )


class Live:
    """The truth of this moment."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator

    def peers(self) -> Mapping[str, Peer]:
        """Return the connected nodes by name."""
        return {name: _peer(member) for name, member in self.coordinator.members.items() if member.alive}

    def names(self) -> list[str]:
        """Return the names of the topics."""
        return list(self.coordinator.topics)

    def topic(self, name: str) -> TopicView | None:
        """Return a topic."""
        topic = self.coordinator.topics.get(name)
        if topic is None:
            return None
        partitions = {number: self._partition(name, number) for number in topic.partitions}
        return TopicView(name, topic.spec, partitions)

    def _partition(self, topic: str, number: int) -> PartitionView:
        replicas = self.coordinator.replica_sets[topic, number]
        leader = replicas.state.leader
        if not self.coordinator.members[leader].alive:
            return PartitionView(None, None, ())
        if not self.coordinator.writable(replicas):  # its leader takes back what it told, the channels too
            return PartitionView(None, leader, ())
        return PartitionView(leader, leader, tuple(replicas.leader.channels))


class Picture:
    """An old picture of the cluster, or an empty one; later changes do not show."""

    def __init__(self, sight: ClusterView | None = None) -> None:
        self._peers = dict(sight.peers()) if sight else {}
        self._topics = {name: sight.topic(name) for name in sight.names()} if sight else {}

    def peers(self) -> Mapping[str, Peer]:
        """Return the nodes that were connected then."""
        return self._peers

    def names(self) -> list[str]:
        """Return the topics of then."""
        return list(self._topics)

    def topic(self, name: str) -> TopicView | None:
        """Return a topic as it was then."""
        return self._topics.get(name)
