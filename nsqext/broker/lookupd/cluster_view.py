"""What a lookup node shows of the cluster: its present state, a snapshot, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

if TYPE_CHECKING:
    from nsqext.broker.coordinator.coordinator import Coordinator
    from nsqext.broker.coordinator.members import Member
    from nsqext.broker.coordinator.topics import TopicSpec


@frozen
class Peer:
    """A node that is connected to the lookup node."""

    name: str  # its name in the cluster
    address: str  # ``host:http_port``, the name that tombstones use
    entry: Mapping[str, Any]  # its entry in the response to ``/lookup``


@frozen
class PartitionView:
    """One partition."""

    registered: str | None  # the connected node that registered as its leader; it accepts writes
    reader: str | None  # the node for consumers; it may accept no writes at the moment
    channels: tuple[str, ...]  # channels that the leader registered; empty while it accepts no writes


@frozen
class TopicView:
    """One topic."""

    name: str
    spec: TopicSpec
    partitions: Mapping[int, PartitionView] = field(factory=dict)


def _peer(member: Member) -> Peer:
    return Peer(
        member.name,
        f"{member.http.host}:{member.http.port}",
        {
            "id": str(member.tcp),
            "remote_address": str(member.tcp),
            "hostname": member.node.options.hostname,
            "broadcast_address": member.tcp.host,
            "tcp_port": member.tcp.port,
            "http_port": member.http.port,
            "version": member.node.limits.version,
            "distributed_id": member.distributed_id,
        },
    )


class LiveView:
    """The present state of the cluster: connected nodes and topics, by name."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator

    def peers(self) -> Mapping[str, Peer]:
        return {name: _peer(member) for name, member in self.coordinator.members.items() if member.alive}

    def names(self) -> list[str]:
        return list(self.coordinator.topics)

    def topic(self, name: str) -> TopicView | None:
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
        if not self.coordinator.writable(replicas):  # its leader withdraws its registrations, channels included
            return PartitionView(None, leader, ())
        return PartitionView(leader, leader, tuple(replicas.leader.channels))


class Snapshot:
    """A copy of a view, or an empty one; later changes are not shown."""

    def __init__(self, view: ClusterView | None = None) -> None:
        self._peers = dict(view.peers()) if view else {}
        self._topics: dict[str, TopicView | None] = {name: view.topic(name) for name in view.names()} if view else {}

    def peers(self) -> Mapping[str, Peer]:
        return self._peers

    def names(self) -> list[str]:
        return list(self._topics)

    def topic(self, name: str) -> TopicView | None:
        return self._topics.get(name)

    def put(self, topic: TopicView) -> None:
        self._topics[topic.name] = topic


ClusterView = LiveView | Snapshot
