"""The nodes of a cluster, as the coordinator sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

if TYPE_CHECKING:
    from nsqext.broker.nsqd.node import Node
    from nsqext.types import Address

__all__ = ("Member",)


@define(eq=False)
class Member:
    """One node.

    Attributes:
        name: how the cluster calls it, ``n1`` for example.
        node: what it hosts; outlives a kill, as its disk would.
        tcp: where clients connect to.
        http: where its HTTP API is.
        number: its place among the nodes, from 1.
        alive: its process runs.
        present: it is alive, or its lease runs still.
        removing: it gives its partitions to others.
    """

    name: str
    node: Node
    tcp: Address
    http: Address
    number: int
    alive: bool = True
    present: bool = True
    removing: bool = False

    @property
    def reachable(self) -> bool:
        """Whether it answers other nodes."""
        return self.alive and not self.node.faults.frozen

    @property
    def peer_id(self) -> str:
        """``host:port`` that lookup nodes know its connection by."""
        return str(self.tcp)

    @property
    def distributed_id(self) -> str:
        """Its name among the nodes of the cluster, made of host, port of the cluster's calls, TCP port and number."""
        return f"{self.tcp.host}:{self.http.port}:{self.tcp.port}:{self.number}"

    @property
    def hostname(self) -> str:
        """Name of its host."""
        return self.node.options.hostname

    @property
    def version(self) -> str:
        """Version that it tells."""
        return self.node.limits.version
