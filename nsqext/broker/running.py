"""Servers of a cluster that can be started, killed and started again."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import anyio
from attrs import define, field

from nsqext.broker.lookupd.original import OriginalLookupd, original_app
from nsqext.broker.lookupd.routes import lookupd_app
from nsqext.broker.lookupd.tcp import LookupTcp
from nsqext.broker.nsqd.server import NsqdServer
from nsqext.broker.serving import HttpServer
from nsqext.broker.web import listen

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

    from nsqext.broker.coordinator.members import Member
    from nsqext.broker.lookupd.lookupd import Lookupd
    from nsqext.broker.lookupd.registrar import Registrar

__all__ = ("RunningLookupd", "RunningNode")

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
class RunningNode:
    """One nsqd of the cluster and, while it is alive, its server.

    Attributes:
        member: the node.
        registrar: what tells lookup nodes of it; the original generation has one.
        server: its server; None while it is down.
    """

    member: Member
    registrar: Registrar | None = None
    server: NsqdServer | None = None
    _jobs: _Jobs = field(factory=_Jobs, alias="jobs")
    _registering: anyio.CancelScope | None = field(default=None, alias="registering")

    async def start(self, tasks: TaskGroup) -> None:
        """Listen on the node's addresses; returns when connections are taken."""
        node = self.member.node
        node.exiting = False
        self.server = NsqdServer(node, str(self.member.tcp), str(self.member.http))
        await self._jobs.start(tasks, self.server.serve)
        if self.registrar is not None:
            await self._jobs.start(tasks, self._register, self.registrar)

    async def _register(self, registrar: Registrar, *, task_status: TaskStatus[None]) -> None:
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
class RunningLookupd:
    """One nsqlookupd of the cluster and, while it is alive, its servers."""

    lookupd: Lookupd | OriginalLookupd
    server: HttpServer | None = None
    tcp: LookupTcp | None = None
    _jobs: _Jobs = field(factory=_Jobs, alias="jobs")

    async def start(self, tasks: TaskGroup) -> None:
        """Listen; returns when requests are taken."""
        lookupd = self.lookupd
        if isinstance(lookupd, OriginalLookupd):
            self.server = HttpServer(original_app(lookupd))
            self.tcp = LookupTcp(lookupd)
            await self._jobs.start(tasks, self.tcp.serve, listen(str(lookupd.tcp)))
        else:
            self.server = HttpServer(lookupd_app(lookupd))
        await self._jobs.start(tasks, self.server.serve, listen(str(lookupd.http)))

    async def kill(self) -> None:
        """Close everything at once."""
        server, self.server = self.server, None
        if self.tcp is not None:
            self.tcp.kill()
        if server is not None:
            server.kill()
            await self._jobs.wait()
