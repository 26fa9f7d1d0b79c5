"""Runtime of an embedded cluster of either generation, in its event loop."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from attrs import define, evolve, field

from nsqext.broker.coordinator.topics import ClusterMember, TopicSpec
from nsqext.broker.engine.options import NodeOptions
from nsqext.broker.engine.storage.files import locked
from nsqext.broker.fault_injection import NodeFaults
from nsqext.broker.listeners import Ports, listen, split_address
from nsqext.broker.lookupd.original import OriginalLookupd
from nsqext.broker.lookupd.registry import LookupTcpServer
from nsqext.broker.nsqd.node import Node
from nsqext.broker.nsqd.server import NsqdServer
from nsqext.errors import InvalidInput, InvalidSetting, InvalidState
from nsqext.http.uvicorn_server import HttpGuard, HttpServer
from nsqext.types import Address

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus
    from starlette.applications import Starlette

    from nsqext.broker.lookupd.lookupd import LookupServer
    from nsqext.broker.lookupd.registration_client import RegistrationClient
    from nsqext.broker.options import ClusterOptions, ClusterShape
    from nsqext.protocol.server.negotiate import ServerLimits

_Job = Callable[..., Coroutine[Any, Any, None]]


@define(eq=False)
class _ServerTasks:
    """Tasks of a server, each with an event for its end."""

    ended: list[anyio.Event] = field(factory=list)

    async def start(self, group: TaskGroup, job: _Job) -> None:
        """Start a task; return after its ``task_status.started()``."""
        done = anyio.Event()
        await group.start(self._run, done, job)
        self.ended.append(done)

    async def _run(self, done: anyio.Event, job: _Job, *, task_status: TaskStatus[None]) -> None:
        try:
            await job(task_status=task_status)
        finally:
            done.set()

    async def wait(self) -> None:
        while self.ended:
            await self.ended.pop().wait()


@define(eq=False)
class ManagedNode:
    """An nsqd of the cluster."""

    member: ClusterMember
    tcp: Address  #: listening, not advertised
    http: Address
    registration: RegistrationClient | None = None  #: original generation only
    server: NsqdServer | None = field(default=None, init=False)  #: None while it is down
    _tasks: _ServerTasks = field(factory=_ServerTasks, init=False)
    _registering: anyio.CancelScope | None = field(default=None, init=False)

    async def start(self, group: TaskGroup) -> None:
        node = self.member.node
        node.exiting = False
        server = NsqdServer(node, str(self.tcp), str(self.http))
        await self._tasks.start(group, server.serve)
        self.server = server
        if self.registration is not None:
            await self._tasks.start(group, partial(self._register, self.registration))

    async def _register(self, client: RegistrationClient, *, task_status: TaskStatus[None]) -> None:
        with anyio.CancelScope() as self._registering:
            task_status.started()
            await client.run()

    async def kill(self) -> None:
        """Close everything; return when the ports are free."""
        server, self.server = self.server, None
        if self._registering is not None:
            self._registering.cancel()
        if server is not None:
            server.stop()
            await self._tasks.wait()

    async def drain(self) -> None:
        if self.server is not None:
            await self.server.drain()
            await self.kill()


@define(eq=False)
class ManagedLookupd:
    """An nsqlookupd of the cluster."""

    lookupd: LookupServer
    app: Starlette
    tcp: Address  #: for nsqd
    http: Address
    guard: HttpGuard | None = None
    server: HttpServer | None = field(default=None, init=False)  #: None while it is down
    _tcp_server: LookupTcpServer | None = field(default=None, init=False)
    _tasks: _ServerTasks = field(factory=_ServerTasks, init=False)

    async def start(self, group: TaskGroup) -> None:
        if isinstance(self.lookupd, OriginalLookupd):
            self._tcp_server = LookupTcpServer(self.lookupd.session)
            await self._tasks.start(group, partial(self._tcp_server.serve, listen(str(self.tcp))))
        self.server = HttpServer(self.app, guard=self.guard)
        await self._tasks.start(group, partial(self.server.serve, listen(str(self.http))))

    async def kill(self) -> None:
        server, self.server = self.server, None
        if self._tcp_server is not None:
            self._tcp_server.kill()
        if server is not None:
            server.kill()
            await self._tasks.wait()


class Clock:
    """Time for timeouts, heartbeats and time stamps: the machine's clock until a test moves or stops it.

    Leases of silent nodes follow the machine's clock.
    """

    def __init__(self) -> None:
        self._ahead = 0.0
        self._held: tuple[float, int] | None = None

    def now(self) -> float:
        return (self._held[0] if self._held else time.monotonic()) + self._ahead

    def wall(self) -> int:
        return (self._held[1] if self._held else time.time_ns()) + round(self._ahead * 1e9)

    @property
    def stopped(self) -> bool:
        return self._held is not None

    def advance(self, seconds: float) -> None:
        self._ahead += seconds

    def stop(self) -> None:
        if self._held is None:
            self._held = time.monotonic(), time.time_ns()

    def run(self) -> None:
        """Start a stopped clock, from where it stopped."""
        if self._held is not None:
            self._ahead -= time.monotonic() - self._held[0]
            self._held = None


class NodeChange(Enum):
    """What happened to an nsqd."""

    SILENT = "killed or frozen"
    LEAVING = "about to end"
    THAWED = "running again after a freeze"
    RETURNED = "started again"


class Runtime(ABC):
    """Nodes and lookup nodes; all methods except `__init__` run in the event loop."""

    def __init__(self, shape: ClusterShape, options: ClusterOptions, limits: ServerLimits) -> None:
        if limits.generation != shape.generation:
            raise InvalidSetting(
                f"the limits are for the generation {limits.generation!r}, the nodes run {shape.generation!r}",
                hint="use ServerLimits.original() for the original NSQ, ServerLimits() for the redesigned",
            )
        self.shape = shape
        self.options = options
        self.limits: ServerLimits = evolve(
            limits, tls=limits.tls or options.tls is not None, auth=limits.auth or bool(options.auth_addresses)
        )
        self.clock: Clock = Clock()
        self.ports: Ports = Ports()
        names = filter(None, (self.options.host, self.options.broadcast_address, *self.options.http_hosts))
        self.http_guard: HttpGuard | None = HttpGuard(names) if self.options.http_guard else None
        self.nodes: dict[str, ManagedNode] = {}
        self.lookupds: dict[str, ManagedLookupd] = {}
        self._stopping = anyio.Event()
        self._tasks: TaskGroup | None = None
        # a lock per server: kill, terminate and restart exclude each other
        self._changes: dict[str, anyio.Lock] = {}

    # Running

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run until `stop`, then close all sockets and release all ports.

        Raises `InvalidSetting` if an address or the data path is in use or unusable.
        """
        with locked(self.shape.data_path, make=True):
            try:
                self.create_servers()
                async with anyio.create_task_group() as self._tasks:
                    for job in self.background_jobs():
                        await self._tasks.start(job)
                    for lookupd in self.lookupds.values():
                        await lookupd.start(self._tasks)
                    for node in self.nodes.values():
                        await node.start(self._tasks)
                    await self.wait_registered()
                    task_status.started()
                    await self._stopping.wait()
                    await self._end()
            finally:
                self.ports.release()

    def create_servers(self) -> None:
        for number in range(self.shape.lookupds):
            name = f"l{number + 1}"
            http = self._address(self.options.lookupd_http, number)
            tcp = self._address(self.options.lookupd_tcp, number)
            self.lookupds[name] = self.create_lookupd(name, tcp, http)
        for number in range(self.shape.nodes):
            name = f"n{number + 1}"
            tcp, http = self._address(self.options.nsqd_tcp, number), self._address(self.options.nsqd_http, number)
            node = Node(name, self._node_options(name), NodeFaults())
            member = ClusterMember(name, node, self.advertised(tcp), self.advertised(http), number + 1)
            self.nodes[name] = ManagedNode(member, tcp, http, self.add_member(member))

    def _address(self, given: tuple[str, ...], number: int) -> Address:
        wanted = given[number] if number < len(given) else ":0"
        return self.ports.take(split_address(wanted, self.options.host))

    def advertised(self, address: Address) -> Address:
        """Return the address that clients get."""
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
            http_guard=self.http_guard,
            data_path=self.shape.data_path / name if self.shape.data_path else None,
            memory_bound=options.memory_bound,
            node_memory_bound=options.node_memory_bound,
            seed=options.seed,
        )

    def stop(self) -> None:
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

    # What the generations do differently

    @abstractmethod
    def create_lookupd(self, name: str, tcp: Address, http: Address) -> ManagedLookupd: ...

    @abstractmethod
    def add_member(self, member: ClusterMember) -> RegistrationClient | None:
        """Add a node; return the client that registers it, if any."""

    def background_jobs(self) -> list[Callable[..., Coroutine[Any, Any, None]]]:
        """Return functions to run beside the servers; each calls ``task_status.started()``."""
        return []

    async def wait_registered(self) -> None:  # noqa: B027 - lookup nodes show the coordinator's members at once
        """Return when lookup nodes show all nodes; called when all servers listen."""

    @abstractmethod
    async def create_topic(self, name: str, spec: TopicSpec, channels: tuple[str, ...], dispatch: str = "") -> None:
        """See `nsqext.broker.Cluster.create_topic`."""

    @abstractmethod
    def delete_topic(self, name: str) -> None: ...

    def node_changed(self, member: ClusterMember, change: NodeChange) -> None:  # noqa: B027 - lookup nodes notice it themselves
        ...

    @abstractmethod
    def lookupd_changed(self, lookupd: LookupServer) -> None:
        """React to the kill or start of a lookup node."""

    # Nodes

    def _server(self, name: str) -> ManagedNode | ManagedLookupd:
        found = self.nodes.get(name) or self.lookupds.get(name)
        if found is None:
            known = ", ".join([*self.nodes, *self.lookupds])
            raise InvalidInput(f"unknown node {name!r}", hint=f"the cluster has {known}")
        return found

    def node(self, name: str) -> ManagedNode:
        running = self._server(name)
        if not isinstance(running, ManagedNode):
            raise InvalidInput(f"{name!r} is a lookup node", hint=f"use one of {', '.join(self.nodes)}")
        return running

    def topics(self) -> dict[str, list[str]]:
        found: dict[str, set[str]] = {}
        for running in self.nodes.values():
            for (topic, _), hosted in running.member.node.hosted.items():
                found.setdefault(topic, set()).update(hosted.partition.channels)
        return {topic: sorted(found[topic]) for topic in sorted(found)}

    def lookupds_named(self, name: str | None) -> list[LookupServer]:
        """Return one lookup node, or all without a name."""
        if name is None:
            return [running.lookupd for running in self.lookupds.values()]
        running = self._server(name)
        if not isinstance(running, ManagedLookupd):
            raise InvalidInput(f"{name!r} is not a lookup node", hint=f"use one of {', '.join(self.lookupds)}")
        return [running.lookupd]

    def _change(self, name: str) -> anyio.Lock:
        return self._changes.setdefault(name, anyio.Lock(fast_acquire=True))

    async def kill(self, name: str) -> None:
        running = self._server(name)
        async with self._change(name):
            await self._kill(running)

    async def _kill(self, running: ManagedNode | ManagedLookupd) -> None:
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
        running = self._server(name)
        async with self._change(name):
            if isinstance(running, ManagedLookupd):
                await self._kill(running)
                return
            self.node_changed(running.member, NodeChange.LEAVING)
            await running.drain()

    async def restart(self, name: str) -> None:
        """Start a node; kill a running node first."""
        running = self._server(name)
        if self._tasks is None:
            raise InvalidState("the cluster is not running")
        async with self._change(name):
            if running.server is not None:
                await self._kill(running)
            if isinstance(running, ManagedNode):
                running.member.node.faults.thaw()  # a new process is not frozen
                running.member.node.restart()
                running.member.node.faults.hold_flush(False)  # a new process reads all that is stored
                running.member.isolated = False
            await running.start(self._tasks)
            if isinstance(running, ManagedLookupd):
                running.lookupd.alive = True
                self.lookupd_changed(running.lookupd)
            else:
                running.member.alive = True
                self.node_changed(running.member, NodeChange.RETURNED)

    # Faults

    def freeze(self, name: str) -> None:
        member = self.node(name).member
        member.node.faults.freeze()
        self.node_changed(member, NodeChange.SILENT)

    def thaw(self, name: str) -> None:
        member = self.node(name).member
        member.node.faults.thaw()
        if member.reachable:
            self.node_changed(member, NodeChange.THAWED)

    def heal(self) -> None:
        for name, running in self.nodes.items():
            if running.member.node.faults.frozen:
                self.thaw(name)
            running.member.node.faults.heal()
        for lookupd in self.lookupds_named(None):
            lookupd.show_current()

    def pending(self) -> dict[str, list[str]]:
        """Return the faults in effect by server, killed servers and a stopped clock included."""
        servers: dict[str, tuple[object, list[str]]] = {
            name: (running.server, running.member.node.faults.pending()) for name, running in self.nodes.items()
        }
        servers |= {name: (running.server, running.lookupd.pending()) for name, running in self.lookupds.items()}
        found = {name: [*(["down"] if server is None else []), *faults] for name, (server, faults) in servers.items()}
        found["clock"] = ["stopped"] if self.clock.stopped else []
        return {name: faults for name, faults in found.items() if faults}

    async def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for running in self.nodes.values():
            if running.server is not None:
                running.server.busy = True
                running.member.node.tick()
                running.server.flush()
