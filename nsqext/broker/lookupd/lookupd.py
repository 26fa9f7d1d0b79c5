"""One lookup node of the redesigned generation, without its sockets, and its group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define, field

from nsqext.broker.lookupd.cluster_view import ClusterView, LiveView, Snapshot
from nsqext.broker.lookupd.lookup_node import LookupNode

if TYPE_CHECKING:
    from nsqext.broker.coordinator.coordinator import Coordinator


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
