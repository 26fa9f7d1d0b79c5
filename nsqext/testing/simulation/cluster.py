"""The embedded cluster within a simulation, in the same event loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from attrs import evolve

from nsqext.broker.cluster import channel_names, new_topic
from nsqext.broker.engine.storage.segments import DiskOptions
from nsqext.broker.options import ClusterOptions, ClusterShape
from nsqext.broker.runtimes import RuntimeRedesigned
from nsqext.errors import InvalidInput, InvalidState, NsqError
from nsqext.testing.simulation.forgotten_await import NotedCalls, awaited
from nsqext.testing.simulation.network import Network, current_host
from nsqext.testing.simulation.private_parts import run_by_anyio

if TYPE_CHECKING:
    from nsqext.broker.coordinator.topics import TopicSpec
    from nsqext.broker.engine.options import NodeOptions
    from nsqext.testing.simulation.disk import SimulatedDisk

COORDINATOR = "coordinator"
"""For `SimulatedCluster.separate`."""


@contextmanager
def as_server() -> Iterator[None]:
    """Run a part of a task as the servers' process, which owns its sockets and tasks."""
    host = current_host.set("server")
    try:
        with run_by_anyio():
            yield
    finally:
        current_host.reset(host)


class _Runtime(RuntimeRedesigned):
    files: DiskOptions

    def _node_options(self, name: str) -> NodeOptions:
        return evolve(super()._node_options(name), disk=self.files)


class SimulatedCluster(NotedCalls):
    """A cluster of the redesigned generation.

    Args:
        seed: see `ClusterOptions`.
        disk: where messages are stored; None for memory.
        files: use of the disk; by default each publish is synced and survives a loss of power.

    Attributes:
        topics: number of partitions of each topic made by `create_topic`.
        down: names of the killed servers.
        recreated: topics that the fault ``recreate`` may delete and create again.
        upgraded: topics that the fault ``upgrade`` may turn into extend topics.
    """

    def __init__(
        self, nodes: int, lookupds: int, seed: int, disk: SimulatedDisk | None = None, files: DiskOptions | None = None
    ) -> None:
        super().__init__([])
        shape = ClusterShape(nodes, lookupds, "redesigned", disk.root if disk is not None else None)
        runtime = _Runtime(shape, ClusterOptions(seed=seed))
        runtime.files = files or DiskOptions(fsync="always")
        self.runtime: RuntimeRedesigned = runtime
        self.disk: SimulatedDisk | None = disk
        self.topics: dict[str, int] = {}
        self.down: set[str] = set()
        self.recreated: list[str] = []
        self.upgraded: list[str] = []
        self._specs: dict[str, tuple[TopicSpec, tuple[str, ...], str]] = {}
        self._without_power: set[str] = set()

    @property
    def lookupd(self) -> list[str]:
        return [str(running.lookupd.http) for running in self.runtime.lookupds.values()]

    @property
    def nodes(self) -> list[str]:
        return list(self.runtime.nodes)

    @property
    def lookupds(self) -> list[str]:
        return list(self.runtime.lookupds)

    def name_ports(self, network: Network) -> None:
        """Name the servers' ports, so that links can be blocked."""
        for name, node in self.runtime.nodes.items():
            network.name_port(node.tcp.port, name)
            network.name_port(node.http.port, name)
        for name, lookupd in self.runtime.lookupds.items():
            network.name_port(lookupd.http.port, name)
            network.name_port(lookupd.tcp.port, name)

    @awaited
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
        """See `nsqext.broker.Cluster.create_topic`."""
        spec = new_topic(name, partitions, replicas, len(self.nodes), extend=extend, ordered=ordered)
        self._specs[name] = spec, channel_names(channels, dispatch), dispatch
        await self._create(name)
        self.topics[name] = partitions

    async def _create(self, name: str) -> None:
        with as_server():
            await self.runtime.create_topic(name, *self._specs[name])

    @awaited
    async def recreate_topic(self, name: str) -> bool:
        """Delete a topic and create it again; return False while a node or disk cannot."""
        if not all(running.member.reachable for running in self.runtime.nodes.values()):
            return False
        if self.disk is not None and (self.disk.full or self.disk.failing):
            return False
        with as_server():
            self.runtime.delete_topic(name)
        await self._create(name)
        return True

    @awaited
    async def upgrade_topic(self, name: str) -> bool:
        """Make a topic an extend topic; return whether it exists and was none before."""
        found = self.runtime.coordinator.topics.get(name)
        if found is None or found.spec.extend:
            return False
        with suppress(NsqError), as_server():
            self.runtime.upgrade_topic(name)
            return True
        return False

    def _check_name(self, name: str) -> None:
        known = (*self.nodes, *self.lookupds)
        if name not in known:
            raise InvalidInput(f"unknown node {name!r}", hint=f"the cluster has {', '.join(known)}")

    def leader(self, topic: str, partition: int = 0) -> str:
        return self.runtime.replicas(topic, partition).state.leader

    @awaited
    async def kill(self, name: str) -> None:
        self._check_name(name)
        if name not in self.down:
            self.down.add(name)
            with as_server():
                await self.runtime.kill(name)

    @awaited
    async def restart(self, name: str) -> None:
        self._check_name(name)
        if name in self.down:
            with as_server():
                if name in self._without_power:
                    self._without_power.discard(name)
                    self._open_files(name)
                await self.runtime.restart(name)
            self.down.discard(name)

    @awaited
    async def cut_power(self, name: str) -> None:
        """Kill a server as a loss of power does: unsynced data is lost."""
        if name not in self.down:
            await self.kill(name)
            if self.disk is not None and name in self.runtime.nodes:
                self.disk.lose_power(name)
                self._without_power.add(name)

    def _open_files(self, name: str) -> None:
        if self.disk is not None:
            self.disk.heal(name)
        node, coordinator = self.runtime.node(name).member.node, self.runtime.coordinator
        for replicas in coordinator.replica_sets_on(name):
            hosted = node.hosted.pop((replicas.topic, replicas.partition), None)
            if hosted is not None:
                hosted.partition.close(save=False)
            coordinator.host(replicas, name)

    @as_server()
    def separate(self, first: str, second: str) -> None:
        """Cut the link between two nodes, or between a node and the coordinator.

        Raises:
            InvalidInput: unknown node.
        """
        self._check_link(first, second)
        if COORDINATOR in (first, second):
            self.runtime.isolate(second if first == COORDINATOR else first)
        else:
            self.runtime.coordinator.separate(first, second)

    def _check_link(self, first: str, second: str) -> None:
        for name in (first, second):
            if name != COORDINATOR:
                self.runtime.node(name)
        if first == second:
            raise InvalidInput(f"{first!r} has no link to itself")

    @as_server()
    def connect(self, first: str, second: str) -> None:
        self._check_link(first, second)
        if COORDINATOR in (first, second):
            self.runtime.rejoin(second if first == COORDINATOR else first)
        else:
            self.runtime.coordinator.connect(first, second)

    @awaited
    async def terminate(self, name: str) -> None:
        """End a server as SIGTERM does."""
        self._check_name(name)
        if name not in self.down:
            self.down.add(name)
            with as_server():
                await self.runtime.terminate(name)

    @as_server()
    def freeze(self, name: str) -> None:
        """See `nsqext.broker.ClusterFaults.freeze`."""
        if name in self.down:
            raise InvalidState(f"{name!r} is down, and cannot be frozen", hint="restart it first")
        self.runtime.freeze(name)

    @as_server()
    def thaw(self, name: str) -> None:
        self.runtime.thaw(name)

    @awaited
    async def move_leader(self, topic: str, partition: int, name: str) -> bool:
        """Make another node the leader; return whether the cluster accepted.

        Raises:
            InvalidInput: unknown node.
            TopicNotFound: unknown partition.
        """
        self.runtime.node(name)
        if partition >= self.topics.get(topic, 0):
            self.runtime.replicas(topic, partition)  # raises, unless another client has created it
        with suppress(NsqError), as_server():
            await self.runtime.move_leader(topic, partition, name)
            return True
        return False

    @awaited
    async def heal(self) -> None:
        """Start all servers, remove all faults; return when every partition accepts writes."""
        if self.disk is not None:
            for name in self.nodes:
                self.disk.heal(name)
        for name in sorted(self.down):
            await self.restart(name)
        with as_server():
            self.runtime.heal()
        for name in self.nodes:
            self.connect(name, COORDINATOR)
            for other in self.nodes:
                if other > name:
                    self.connect(name, other)
        for topic, partitions in self.topics.items():
            for partition in range(partitions):
                await self.runtime.wait_writable(topic, partition, 30.0)
