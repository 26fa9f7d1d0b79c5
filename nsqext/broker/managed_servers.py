"""Servers of a cluster that can be started, killed and started again."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import anyio
from attrs import define, field

from nsqext.broker.listeners import listen
from nsqext.broker.lookupd.classic import ClassicLookupd
from nsqext.broker.lookupd.tcp_server import LookupTcpServer
from nsqext.broker.nsqd.server import NsqdServer
from nsqext.http.uvicorn_server import HttpServer

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus
    from starlette.applications import Starlette

    from nsqext.broker.coordinator.topics import Member
    from nsqext.broker.lookupd.lookupd import LookupNode
    from nsqext.broker.lookupd.registration_client import RegistrationClient
    from nsqext.http.guard import HttpGuard
    from nsqext.types import Address

_Job = Callable[..., Coroutine[Any, Any, None]]


@define(eq=False)
class _ServerTasks:
    """Tasks of one server, and an event for the end of each."""

    ended: list[anyio.Event] = field(factory=list)

    async def start(self, group: TaskGroup, job: _Job, *args: object) -> None:
        """Start a task; return when it has called ``task_status.started()``."""
        done = anyio.Event()
        await group.start(self._run, done, job, args)
        self.ended.append(done)

    async def _run(
        self, done: anyio.Event, job: _Job, args: tuple[object, ...], *, task_status: TaskStatus[None]
    ) -> None:
        try:
            await job(*args, task_status=task_status)
        finally:
            done.set()

    async def wait(self) -> None:
        while self.ended:
            await self.ended.pop().wait()


@define(eq=False)
class ManagedNode:
    """One nsqd of the cluster and, while it is alive, its server."""

    member: Member
    tcp: Address  # address that it listens on
    http: Address  # address that its HTTP API listens on
    registration: RegistrationClient | None = None  # registers it at lookup nodes; original generation only
    server: NsqdServer | None = field(default=None, init=False)  # its server; None while it is down
    _tasks: _ServerTasks = field(factory=_ServerTasks, init=False)
    _registering: anyio.CancelScope | None = field(default=None, init=False)

    async def start(self, group: TaskGroup) -> None:
        """Listen on the node's addresses; return when connections are accepted."""
        node = self.member.node
        node.exiting = False
        self.server = NsqdServer(node, str(self.tcp), str(self.http))
        await self._tasks.start(group, self.server.serve)
        if self.registration is not None:
            await self._tasks.start(group, self._register, self.registration)

    async def _register(self, client: RegistrationClient, *, task_status: TaskStatus[None]) -> None:
        with anyio.CancelScope() as self._registering:
            task_status.started()
            await client.run()

    async def kill(self) -> None:
        """Close everything at once; return when the ports are free."""
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
    """One nsqlookupd of the cluster and, while it is alive, its servers."""

    lookupd: LookupNode
    app: Starlette  # its HTTP API
    tcp: Address  # address that it listens on for nsqd
    http: Address  # address that its HTTP API listens on
    guard: HttpGuard | None = None  # refuses HTTP requests that a foreign web page caused
    server: HttpServer | None = field(default=None, init=False)  # its HTTP server; None while it is down
    _tcp_server: LookupTcpServer | None = field(default=None, init=False)
    _tasks: _ServerTasks = field(factory=_ServerTasks, init=False)

    async def start(self, group: TaskGroup) -> None:
        """Listen; return when requests are accepted."""
        if isinstance(self.lookupd, ClassicLookupd):  # nsqd register at it over TCP
            self._tcp_server = LookupTcpServer(self.lookupd)
            await self._tasks.start(group, self._tcp_server.serve, listen(str(self.tcp)))
        self.server = HttpServer(self.app, guard=self.guard)
        await self._tasks.start(group, self.server.serve, listen(str(self.http)))

    async def kill(self) -> None:
        """Close everything at once; return when the ports are free."""
        server, self.server = self.server, None
        if self._tcp_server is not None:
            self._tcp_server.kill()
        if server is not None:
            server.kill()
            await self._tasks.wait()
