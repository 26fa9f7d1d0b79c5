"""One lookup node of the redesigned generation, without its sockets, and the group that it belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
from attrs import define, field

from nsqext.broker.lookupd.cluster_view import ClusterView, Live, Picture
from nsqext.types import Address

if TYPE_CHECKING:
    from nsqext.broker.coordinator.coordinator import Coordinator

__all__ = ("Lookupd", "LookupdGroup")

UNKNOWN = Address("127.0.0.1", 0)


@define(eq=False)
class Lookupd:
    """One lookup node.

    Attributes:
        name: how the cluster calls it, ``l1`` for example.
        coordinator: the cluster that it tells of.
        group: the lookup nodes of the cluster.
        sight: what it sees.
        delay: seconds that each answer takes longer.
        hidden: for each topic the nodes that access=w does not show (tombstones), as ``host:http_port``.
        write_disabled: ``all``, ``ordered`` or empty (`/disable/write`).
        alive: it runs.
    """

    name: str
    coordinator: Coordinator
    group: LookupdGroup
    sight: ClusterView = field()
    tcp: Address = UNKNOWN
    http: Address = UNKNOWN
    delay: float = 0.0
    hidden: dict[str, set[str]] = field(factory=dict)
    write_disabled: str = ""
    alive: bool = True

    @sight.default
    def _live(self) -> ClusterView:
        return Live(self.coordinator)

    @property
    def leads(self) -> bool:
        """Whether it is the leader of the group, which alone changes topics."""
        return self.group.leader is self

    @property
    def id(self) -> str:
        """Its name in `/listlookup`."""
        return f"{self.tcp.host}:{self.http.port}:{self.tcp.port}:nsqlookup"

    def entry(self) -> dict[str, Any]:
        """Return its entry in `/listlookup`; ports are text (captured: lookupd_basic)."""
        return {
            "ID": self.id,
            "NodeIP": self.tcp.host,
            "TcpPort": str(self.tcp.port),
            "HttpPort": str(self.http.port),
            "RpcPort": str(self.http.port),
            "Epoch": self.group.epoch if self.leads else 0,
        }

    def see_truth(self) -> None:
        """Tell the truth again."""
        self.sight, self.delay = Live(self.coordinator), 0.0

    def see_nothing(self) -> None:
        """Know of no node and no topic."""
        self.sight = Picture()

    def stand_still(self) -> None:
        """Go on telling what is true now, whatever changes."""
        self.sight = Picture(Live(self.coordinator))

    def slow_down(self, seconds: float) -> None:
        """Take so many seconds longer for each answer."""
        self.delay = seconds

    async def dawdle(self) -> None:
        """Wait as long as answers are to be late."""
        if self.delay:
            await anyio.sleep(self.delay)


@define(eq=False)
class LookupdGroup:
    """The lookup nodes of a cluster, one of them the leader.

    Attributes:
        nodes: all of them, in order.
        hidden: ids of those that `/listlookup` does not show (`/cluster/lookupd/tombstone`).
        epoch: grows with each change of the leader.
    """

    nodes: list[Lookupd] = field(factory=list)
    hidden: set[str] = field(factory=set)
    epoch: int = 0
    leader: Lookupd | None = None

    def elect(self) -> None:
        """Choose the first node that runs, unless the present leader does."""
        if self.leader is not None and self.leader.alive:
            return
        before = self.leader
        self.leader = next((node for node in self.nodes if node.alive), None)
        if before is not None and self.leader is not None:
            self.epoch += 1

    def shown(self) -> list[Lookupd]:
        """Return what `/listlookup` shows."""
        return [node for node in self.nodes if node.alive and node.id not in self.hidden]
