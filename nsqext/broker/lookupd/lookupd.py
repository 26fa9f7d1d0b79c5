"""Lookup nodes without their sockets, and what they show: the cluster's present state, a snapshot, or nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import anyio
from attrs import define, field, frozen

from nsqext.types import Address

if TYPE_CHECKING:
    from nsqext.broker.coordinator.coordinator import Coordinator
    from nsqext.broker.coordinator.topics import Member, TopicSpec
    from nsqext.http.api import Call, Handler

_UNKNOWN = Address("127.0.0.1", 0)


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


class LiveView:
    """The present state of the cluster: connected nodes and topics, by name."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator

    def peers(self) -> Mapping[str, Member]:
        """Return the connected nodes."""
        return {name: member for name, member in self.coordinator.members.items() if member.alive}

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

    def peers(self) -> Mapping[str, Member]:
        return self._peers

    def names(self) -> list[str]:
        return list(self._topics)

    def topic(self, name: str) -> TopicView | None:
        return self._topics.get(name)

    def put(self, topic: TopicView) -> None:
        self._topics[topic.name] = topic


ClusterView = LiveView | Snapshot


@define(eq=False, kw_only=True)
class LookupNode(ABC):
    """One lookup node without its sockets."""

    name: str = "nsqlookupd"  # its name in the cluster, ``l1`` for example
    tcp: Address = _UNKNOWN  # address of its TCP side
    http: Address = _UNKNOWN  # address of its HTTP API
    delay: float = 0.0  # seconds by which each response is delayed
    alive: bool = True  # it runs

    @abstractmethod
    def show_current(self) -> None:
        """Show the present state of the cluster again, without delay."""

    @abstractmethod
    def show_nothing(self) -> None:
        """Show no node and no topic."""

    @abstractmethod
    def show_snapshot(self) -> None:
        """Show the state of this moment from now on; later changes are not shown."""

    def delayed(self, handler: Handler) -> Handler:
        """Wrap a handler so that its response is sent after `delay` seconds."""

        async def respond(call: Call) -> object:
            if self.delay:
                await anyio.sleep(self.delay)
            return handler(call)

        return respond


@define(eq=False)
class Lookupd(LookupNode):
    """One lookup node."""

    coordinator: Coordinator  # coordinator of its cluster
    group: LookupdGroup  # the lookup nodes of the cluster
    view: ClusterView = field(init=False)  # what it shows of the cluster
    # for each topic, the nodes that access=w does not show (tombstones), as ``host:http_port``
    hidden: dict[str, set[str]] = field(factory=dict, init=False)
    write_disabled: str = field(default="", init=False)  # ``all``, ``ordered`` or empty (`/disable/write`)

    @view.default
    def _live(self) -> ClusterView:
        return LiveView(self.coordinator)

    @property
    def is_leader(self) -> bool:
        """Whether it is the leader of the group; only the leader changes topics."""
        return self.group.leader is self

    @property
    def id(self) -> str:
        return f"{self.tcp.host}:{self.http.port}:{self.tcp.port}:nsqlookup"

    def entry(self) -> dict[str, Any]:
        """Return its entry in `/listlookup`; ports are strings (captured: lookupd_basic)."""
        return {
            "ID": self.id,
            "NodeIP": self.tcp.host,
            "TcpPort": str(self.tcp.port),
            "HttpPort": str(self.http.port),
            "RpcPort": str(self.http.port),
            "Epoch": self.group.epoch if self.is_leader else 0,
        }

    def show_current(self) -> None:
        self.view = LiveView(self.coordinator)
        self.delay: float = 0.0

    def show_nothing(self) -> None:
        self.view = Snapshot()

    def show_snapshot(self) -> None:
        self.view = Snapshot(LiveView(self.coordinator))


@define(eq=False)
class LookupdGroup:
    """The lookup nodes of a cluster, one of which is the leader."""

    nodes: list[Lookupd] = field(factory=list)  # all of them, in order
    hidden: set[str] = field(factory=set)  # ids that `/listlookup` does not show (`/cluster/lookupd/tombstone`)
    epoch: int = 0  # grows with each change of the leader
    leader: Lookupd | None = None  # the leader; None before the first election

    def elect(self) -> None:
        """Elect the first node that is alive, unless the present leader is."""
        if self.leader is not None and self.leader.alive:
            return
        before = self.leader
        self.leader = next((node for node in self.nodes if node.alive), None)
        if before is not None and self.leader is not None:
            self.epoch += 1

    def shown(self) -> list[Lookupd]:
        return [node for node in self.nodes if node.alive and node.id not in self.hidden]
