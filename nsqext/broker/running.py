"""Servers of a cluster that can be started, killed and started again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
from attrs import define

from nsqext.broker.lookupd.routes import lookupd_app
from nsqext.broker.nsqd.server import NsqdServer
from nsqext.broker.serving import HttpServer
from nsqext.broker.web import listen

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from nsqext.broker.coordinator.members import Member
    from nsqext.broker.lookupd.lookupd import Lookupd

__all__ = ("RunningLookupd", "RunningNode")


@define(eq=False)
class RunningNode:
    """One nsqd of the cluster and, while it is alive, its server."""

    member: Member
    server: NsqdServer | None = None
    ended: anyio.Event | None = None

    async def start(self, tasks: TaskGroup) -> None:
        """Listen on the node's addresses; returns when connections are taken."""
        node = self.member.node
        node.exiting = False
        self.server = NsqdServer(node, str(self.member.tcp), str(self.member.http))
        self.ended = anyio.Event()
        await tasks.start(self._serve, self.server, self.ended)

    async def _serve(self, server: NsqdServer, ended: anyio.Event, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        try:
            await server.serve(task_status=task_status)
        finally:
            ended.set()

    async def kill(self) -> None:
        """Close everything at once; returns when the ports are free."""
        if self.server is not None and self.ended is not None:
            self.server.stop()
            await self.ended.wait()
            self.server = None

    async def drain(self) -> None:
        """End as on SIGTERM."""
        if self.server is not None and self.ended is not None:
            await self.server.drain()
            await self.ended.wait()
            self.server = None


@define(eq=False)
class RunningLookupd:
    """One nsqlookupd of the cluster and, while it is alive, its server."""

    lookupd: Lookupd
    server: HttpServer | None = None
    ended: anyio.Event | None = None

    async def start(self, tasks: TaskGroup) -> None:
        """Listen; returns when requests are taken."""
        self.server = HttpServer(lookupd_app(self.lookupd))
        self.ended = anyio.Event()
        await tasks.start(self._serve, self.server, self.ended)

    async def _serve(self, server: HttpServer, ended: anyio.Event, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        try:
            await server.serve(listen(str(self.lookupd.http)), task_status=task_status)
        finally:
            ended.set()

    async def kill(self) -> None:
        """Close everything at once."""
        if self.server is not None and self.ended is not None:
            self.server.kill()
            await self.ended.wait()
            self.server = None
