"""The inside of a cluster: everything that runs in its loop, whatever the generation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import TYPE_CHECKING, Any

import anyio
from attrs import evolve

from nsqext.broker.clock import Clock
from nsqext.broker.coordinator.members import Member
from nsqext.broker.data_lock import locked
from nsqext.broker.fault_injection import NodeFaults
from nsqext.broker.listeners import Ports, split_address
from nsqext.broker.managed_servers import ManagedLookupd, ManagedNode
from nsqext.broker.nsqd.node import Node
from nsqext.broker.nsqd.options import NodeOptions
from nsqext.errors import InvalidInput, InvalidState
from nsqext.types import Address

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

    from nsqext.broker.coordinator.topics import TopicSpec
    from nsqext.broker.lookupd.classic import ClassicLookupd
    from nsqext.broker.lookupd.lookupd import Lookupd
    from nsqext.broker.lookupd.registration_client import RegistrationClient
    from nsqext.broker.options import ClusterOptions, ClusterShape
    from nsqext.protocol.server.negotiate import ServerLimits

__all__ = ("NodeChange", "Runtime")


class NodeChange(Enum):
    """What happened to a node."""

    SILENT = "it was killed or frozen"
    LEAVING = "it is about to end"
    THAWED = "it was frozen and goes on"
    RETURNED = "it was started again"


class Runtime(ABC):
    """Nodes and lookup nodes; every method but `__init__` runs in the loop.

    Args:
        shape: what there is to be.
        options: the rest.
        limits: what the nodes allow.
    """

    def __init__(self, shape: ClusterShape, options: ClusterOptions, limits: ServerLimits) -> None:
        self.shape = shape
        self.options = options
        self.limits: ServerLimits = evolve(
            limits, tls=limits.tls or options.tls is not None, auth=limits.auth or bool(options.auth_addresses)
        )
        self.clock: Clock = Clock()
        self.ports: Ports = Ports()
        self.nodes: dict[str, ManagedNode] = {}
        self.lookupds: dict[str, ManagedLookupd] = {}
        self._stopping = anyio.Event()
        self._tasks: TaskGroup | None = None

    # --- life -----------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run until `stop`; every socket is closed and every port given back then.

        Raises:
            InvalidSetting: an address or the data path cannot be had.
        """
        with locked(self.shape.data_path, make=True):
            await self._run(task_status)

    async def _run(self, task_status: TaskStatus[None]) -> None:
        try:
            self.make()
            async with anyio.create_task_group() as self._tasks:
                for job in self.jobs():
                    await self._tasks.start(job)
                for lookupd in self.lookupds.values():
                    await lookupd.start(self._tasks)
                for node in self.nodes.values():
                    await node.start(self._tasks)
                await self.settle()
                task_status.started()
                await self._stopping.wait()
                await self._end()
        finally:
            self.ports.release()

    def make(self) -> None:
        """Make the lookup nodes and the nodes, with their addresses."""
        for number in range(self.shape.lookupds):
            name = f"l{number + 1}"
            http = self._address(self.options.lookupd_http, number)
            tcp = self._address(self.options.lookupd_tcp, number)
            lookupd = self.make_lookupd(name, self._shown(tcp), self._shown(http))
            self.lookupds[name] = ManagedLookupd(lookupd, tcp, http)
        for number in range(self.shape.nodes):
            name = f"n{number + 1}"
            tcp, http = self._address(self.options.nsqd_tcp, number), self._address(self.options.nsqd_http, number)
            node = Node(name, self._node_options(name), NodeFaults())
            member = Member(name, node, self._shown(tcp), self._shown(http), number + 1)
            self.nodes[name] = ManagedNode(member, tcp, http, self.make_registrar(member))

    def _address(self, given: tuple[str, ...], number: int) -> Address:
        wanted = given[number] if number < len(given) else ":0"
        return self.ports.take(split_address(wanted, self.options.host))

    def _shown(self, address: Address) -> Address:
        """Return an address as clients are told it."""
        return Address(self.options.broadcast_address or address.host, address.port)

    def _node_options(self, name: str) -> NodeOptions:
        options = self.options
        return NodeOptions(
            limits=self.limits,
            clock=self.clock.now,
            wall=self.clock.wall,
            broadcast_address=options.broadcast_address or options.host,
            tls=options.tls,
            auth_addresses=options.auth_addresses,
            data_path=self.shape.data_path / name if self.shape.data_path else None,
            memory_bound=options.memory_bound,
            seed=options.seed,
        )

    def stop(self) -> None:
        """End the cluster."""
        self._stopping.set()

    async def _end(self) -> None:
        for lookupd in self.lookupds.values():
            await lookupd.kill()
        for running in self.nodes.values():
            running.member.node.faults.heal()
            await running.kill()
            for topic, partition in list(running.member.node.hosted):
                running.member.node.unhost(topic, partition)
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()

    # --- what the generations do differently ------------------------------------------------------------------------

    @abstractmethod
    def make_lookupd(self, name: str, tcp: Address, http: Address) -> Lookupd | ClassicLookupd:
        """Make a lookup node."""

    @abstractmethod
    def make_registrar(self, member: Member) -> RegistrationClient | None:
        """Get to know a node; returns what tells lookup of it, where something has to."""

    @abstractmethod
    def jobs(self) -> list[Callable[..., Coroutine[Any, Any, None]]]:
        """Return what has to run beside the servers; each tells when it is ready."""

    @abstractmethod
    async def settle(self) -> None:
        """Wait, after everything listens, until lookup knows the nodes."""

    @abstractmethod
    async def create_topic(self, name: str, spec: TopicSpec, channels: tuple[str, ...], dispatch: str = "") -> None:
        """Create a topic with channels; returns when it takes writes."""

    @abstractmethod
    def delete_topic(self, name: str) -> None:
        """Delete a topic."""

    @abstractmethod
    def node_changed(self, member: Member, change: NodeChange) -> None:
        """Hear of a change of a node."""

    @abstractmethod
    def lookupd_changed(self, lookupd: Lookupd | ClassicLookupd) -> None:
        """Hear that a lookup node was killed or started."""

    # --- nodes ----------------------------------------------------------------------------------------------------

    def _server(self, name: str) -> ManagedNode | ManagedLookupd:
        found = self.nodes.get(name) or self.lookupds.get(name)
        if found is None:
            known = ", ".join([*self.nodes, *self.lookupds])
            raise InvalidInput(f"there is no node {name!r}", hint=f"the cluster has {known}")
        return found

    def node(self, name: str) -> ManagedNode:
        """Return an nsqd."""
        running = self._server(name)
        if not isinstance(running, ManagedNode):
            raise InvalidInput(f"{name!r} is a lookup node")
        return running

    def lookupds_named(self, name: str | None) -> list[Lookupd | ClassicLookupd]:
        """Return one lookup node, or all of them."""
        if name is None:
            return [running.lookupd for running in self.lookupds.values()]
        running = self._server(name)
        if not isinstance(running, ManagedLookupd):
            raise InvalidInput(f"{name!r} is not a lookup node")
        return [running.lookupd]

    async def kill(self, name: str) -> None:
        """Kill a node as ``kill -9`` does."""
        running = self._server(name)
        if isinstance(running, ManagedLookupd):
            running.lookupd.alive = False
            self.lookupd_changed(running.lookupd)
            await running.kill()
            return
        running.member.alive = False
        await running.kill()
        running.member.node.faults.thaw()
        self.node_changed(running.member, NodeChange.SILENT)

    async def terminate(self, name: str) -> None:
        """End a node as SIGTERM does: its partitions pass to others first."""
        running = self._server(name)
        if isinstance(running, ManagedLookupd):
            await self.kill(name)
            return
        self.node_changed(running.member, NodeChange.LEAVING)
        await running.drain()

    async def restart(self, name: str) -> None:
        """Start a node that was killed; one that runs is killed first. It has what it had."""
        running = self._server(name)
        if self._tasks is None:
            raise InvalidState("the cluster is not running")
        if running.server is not None:
            await self.kill(name)
        if isinstance(running, ManagedNode):
            running.member.node.faults.thaw()  # a process that was just started is not stopped
        await running.start(self._tasks)
        if isinstance(running, ManagedLookupd):
            running.lookupd.alive = True
            self.lookupd_changed(running.lookupd)
        else:
            running.member.alive = True
            self.node_changed(running.member, NodeChange.RETURNED)

    # --- faults ---------------------------------------------------------------------------------------------------

    def freeze(self, name: str) -> None:
        """Stop a node where it stands."""
        member = self.node(name).member
        member.node.faults.freeze()
        self.node_changed(member, NodeChange.SILENT)

    def thaw(self, name: str) -> None:
        """Let a frozen node go on."""
        member = self.node(name).member
        member.node.faults.thaw()
        if member.alive:
            self.node_changed(member, NodeChange.THAWED)

    def heal(self) -> None:
        """Take every fault away but kills."""
        for name, running in self.nodes.items():
            if running.member.node.faults.frozen:
                self.thaw(name)
            running.member.node.faults.heal()
        for lookupd in self.lookupds_named(None):
            lookupd.see_truth()

    async def advance(self, seconds: float) -> None:
        """Let time pass at once, and have every node see it."""
        self.clock.advance(seconds)
        for running in self.nodes.values():
            if running.server is not None:
                running.server.busy = True
                running.member.node.tick()
                running.server.flush()
