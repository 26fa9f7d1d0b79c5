"""The nodes of a cluster as the coordinator knows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define

if TYPE_CHECKING:
    from nsqext.broker.nsqd.node import Node
    from nsqext.types import Address


@define(eq=False)
class Member:
    """One node."""

    name: str  # its name in the cluster, ``n1`` for example
    node: Node  # the nsqd; survives a kill, as its disk would
    tcp: Address  # address for clients
    http: Address  # address of its HTTP API
    number: int  # its position among the nodes, from 1
    alive: bool = True  # its process runs
    isolated: bool = False  # it serves clients, and neither the coordinator nor other nodes reach it
    present: bool = True  # it is alive, or its lease has not expired
    removing: bool = False  # its partitions are being moved to other nodes

    @property
    def reachable(self) -> bool:
        """Whether the node responds to other nodes."""
        return self.alive and not self.isolated and not self.node.faults.frozen

    @property
    def distributed_id(self) -> str:
        """Its id in the cluster, made of host, RPC port (the HTTP port), TCP port and number."""
        return f"{self.tcp.host}:{self.http.port}:{self.tcp.port}:{self.number}"
