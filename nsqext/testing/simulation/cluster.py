"""The embedded cluster within a simulation: its methods are awaited, because it shares the simulation's event loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from anyio._core._eventloop import reset_current_async_library, set_current_async_library

from nsqext.broker.coordinator.topics import TopicSpec
from nsqext.broker.options import ClusterOptions, ClusterShape
from nsqext.broker.runtime_ha import RuntimeHa
from nsqext.errors import NsqError
from nsqext.testing.simulation.network import current_host

if TYPE_CHECKING:
    from nsqext.testing.simulation.network import Network

__all__ = ("SimulatedCluster", "as_server")


@contextmanager
def as_server() -> Iterator[None]:
    """Run a part of a task as the servers' process: sockets and tasks that it makes are the servers'."""
    host = current_host.set("server")
    # as in a process that `anyio.run` started; clients run as under `asyncio.run`, which does not set it
    library = set_current_async_library("asyncio")
    try:
        yield
    finally:
        current_host.reset(host)
        reset_current_async_library(library)


class SimulatedCluster:
    """A cluster of the redesigned generation, in memory.

    Args:
        nodes: number of nsqd, named n1, n2 and so on.
        lookupds: number of nsqlookupd, named l1, l2 and so on.
        seed: of what is random at the real server.

    Attributes:
        runtime: the servers.
        topics: number of partitions of each topic that `create_topic` created.
        down: names of the killed servers.
    """

    def __init__(self, nodes: int, lookupds: int, seed: int) -> None:
        shape = ClusterShape(nodes, lookupds, "ha", None)
        self.runtime: RuntimeHa = RuntimeHa(shape, ClusterOptions(seed=seed))
        self.topics: dict[str, int] = {}
        self.down: set[str] = set()

    @property
    def lookupd(self) -> list[str]:
        """``host:port`` of the lookup nodes' HTTP, the addresses for clients."""
        return [str(running.lookupd.http) for running in self.runtime.lookupds.values()]

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes."""
        return list(self.runtime.nodes)

    @property
    def lookupds(self) -> list[str]:
        """Names of the lookup nodes."""
        return list(self.runtime.lookupds)

    def name_ports(self, network: Network) -> None:
        """Give the servers' ports their names, so that links can be blocked."""
        for name, node in self.runtime.nodes.items():
            network.name_port(node.tcp.port, name)
            network.name_port(node.http.port, name)
        for name, lookupd in self.runtime.lookupds.items():
            network.name_port(lookupd.http.port, name)
            network.name_port(lookupd.tcp.port, name)

    async def create_topic(
        self,
        name: str,
        partitions: int = 1,
        *,
        replicas: int = 1,
        extend: bool = False,
        ordered: bool = False,
        channels: Iterable[str] = (),
        dispatch: str = "",
    ) -> None:
        """Create a topic; see `nsqext.broker.Cluster.create_topic`."""
        spec = TopicSpec(
            partition_num=partitions,
            replica=replicas,
            ordered=ordered,
            multi_part=not ordered and partitions * replicas > len(self.nodes),
            extend=extend,
        )
        with as_server():
            await self.runtime.create_topic(name, spec, tuple(channels), dispatch)
        self.topics[name] = partitions

    def leader(self, topic: str, partition: int = 0) -> str:
        """Return the name of the node that leads a partition, or led it last."""
        return self.runtime.replicas(topic, partition).state.leader

    async def kill(self, name: str) -> None:
        """Kill a server; does nothing if it is down."""
        if name not in self.down:
            self.down.add(name)
            await self.runtime.kill(name)

    async def restart(self, name: str) -> None:
        """Start a killed server again; does nothing if it runs."""
        if name in self.down:
            with as_server():
                await self.runtime.restart(name)
            self.down.discard(name)

    async def terminate(self, name: str) -> None:
        """End a server as SIGTERM does; does nothing if it is down."""
        if name not in self.down:
            self.down.add(name)
            await self.runtime.terminate(name)

    def freeze(self, name: str) -> None:
        """Freeze a node, as SIGSTOP does."""
        if name not in self.down:
            self.runtime.freeze(name)

    def thaw(self, name: str) -> None:
        """Thaw a frozen node."""
        self.runtime.thaw(name)

    async def move_leader(self, topic: str, partition: int, name: str) -> bool:
        """Make another node the leader; returns whether the cluster did it."""
        try:
            with as_server():
                await self.runtime.move_leader(topic, partition, name)
        except NsqError:
            return False
        return True

    async def heal(self) -> None:
        """Start every server, remove every injected fault; returns when every partition accepts writes.

        Raises:
            PartitionUnavailable: a partition accepts no writes for 30 s.
        """
        for name in sorted(self.down):
            await self.restart(name)
        self.runtime.heal()
        for topic, partitions in self.topics.items():
            for partition in range(partitions):
                await self.runtime.wait_writable(topic, partition, 30.0)
