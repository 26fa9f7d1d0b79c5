"""Servers of a cluster that can be started, killed and started again."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import anyio
from attrs import define, field

from nsqext.broker.listeners import listen
from nsqext.broker.lookupd.api import lookupd_app
from nsqext.broker.lookupd.classic import ClassicLookupd, classic_app
from nsqext.broker.lookupd.tcp_server import LookupTcpServer
from nsqext.broker.nsqd.server import NsqdServer
from nsqext.broker.uvicorn_server import HttpServer

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

    from nsqext.broker.coordinator.members import Member
    from nsqext.broker.lookupd.lookupd import Lookupd
    from nsqext.broker.lookupd.registration_client import RegistrationClient
    from nsqext.types import Address

__all__ = ("ManagedLookupd", "ManagedNode")

_Job = Callable[..., Coroutine[Any, Any, None]]


@define(eq=False)
class _Jobs:
    """Tasks of one server, and the end of each."""

    ended: list[anyio.Event] = field(factory=list)

    async def start(self, tasks: TaskGroup, job: _Job, *args: object) -> None:
        """Start a task that says when it is ready."""
        done = anyio.Event()
        await tasks.start(self._run, done, job, args)
        self.ended.append(done)

    async def _run(
        self, done: anyio.Event, job: _Job, args: tuple[object, ...], *, task_status: TaskStatus[None]
    ) -> None:
        try:
            await job(*args, task_status=task_status)
        finally:
            done.set()

    async def wait(self) -> None:
        """Return when all have ended."""
        while self.ended:
            await self.ended.pop().wait()


@define(eq=False)
class ManagedNode:
    """One nsqd of the cluster and, while it is alive, its server.

    Attributes:
        member: the node.
        tcp: where it listens.
        http: where its HTTP API listens.
        registrar: what tells lookup nodes of it; the original generation has one.
        server: its server; None while it is down.
    """

    member: Member
    tcp: Address
    http: Address
    registrar: RegistrationClient | None = None
    server: NsqdServer | None = None
    _jobs: _Jobs = field(factory=_Jobs, alias="jobs")
    _registering: anyio.CancelScope | None = field(default=None, alias="registering")

    async def start(self, tasks: TaskGroup) -> None:
        """Listen on the node's addresses; returns when connections are taken."""
        node = self.member.node
        node.exiting = False
        self.server = NsqdServer(node, str(self.tcp), str(self.http))
        await self._jobs.start(tasks, self.server.serve)
        if self.registrar is not None:
            await self._jobs.start(tasks, self._register, self.registrar)

    async def _register(self, registrar: RegistrationClient, *, task_status: TaskStatus[None]) -> None:
        with anyio.CancelScope() as self._registering:
            task_status.started()
            await registrar.run()

    async def kill(self) -> None:
        """Close everything at once; returns when the ports are free."""
        server, self.server = self.server, None
        if self._registering is not None:
            self._registering.cancel()
        if server is not None:
            server.stop()
            await self._jobs.wait()

    async def drain(self) -> None:
        """End as on SIGTERM."""
        if self.server is not None:
            await self.server.drain()
            await self.kill()


@define(eq=False)
class ManagedLookupd:
    """One nsqlookupd of the cluster and, while it is alive, its servers.

    Attributes:
        lookupd: the lookup node.
        tcp: where it listens for nodes; only the original generation does.
        http: where it listens for everybody else.
        server: its HTTP server; None while it is down.
    """

    lookupd: Lookupd | ClassicLookupd
    tcp: Address
    http: Address
    server: HttpServer | None = None
    _tcp_server: LookupTcpServer | None = field(default=None, alias="tcp_server")
    _jobs: _Jobs = field(factory=_Jobs, alias="jobs")

    async def start(self, tasks: TaskGroup) -> None:
        """Listen; returns when requests are taken."""
        lookupd = self.lookupd
        if isinstance(lookupd, ClassicLookupd):
            self.server = HttpServer(classic_app(lookupd))
            self._tcp_server = LookupTcpServer(lookupd)
            await self._jobs.start(tasks, self._tcp_server.serve, listen(str(self.tcp)))
        else:
            self.server = HttpServer(lookupd_app(lookupd))
        await self._jobs.start(tasks, self.server.serve, listen(str(self.http)))

    async def kill(self) -> None:
        """Close everything at once."""
        server, self.server = self.server, None
        if self._tcp_server is not None:
            self._tcp_server.kill()
        if server is not None:
            server.kill()
            await self._jobs.wait()
