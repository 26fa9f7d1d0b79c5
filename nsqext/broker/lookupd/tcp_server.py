"""nsqlookupd's TCP side on a socket."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import anyio

from nsqext.broker.lookupd.session import LookupSession

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

    from nsqext.broker.lookupd.classic import ClassicLookupd

__all__ = ("LookupTcpServer",)

_READ = 65536


class LookupTcpServer:
    """Accepts nodes and lets them register.

    Args:
        lookupd: whose TCP side this is.
        partitions: nodes name a partition behind the topic (redesigned generation).
    """

    def __init__(self, lookupd: ClassicLookupd, *, partitions: bool = False) -> None:
        self._lookupd = lookupd
        self._partitions = partitions
        self._scope = anyio.CancelScope()

    async def serve(
        self, listener: socket.socket, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until `kill` or cancellation.

        Args:
            listener: a listening socket; its ownership passes to the server.
            task_status: told when nodes are taken.
        """
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    task_status.started()
                    await self._accept(listener, tasks)
        finally:
            listener.close()

    def kill(self) -> None:
        """Close everything at once."""
        self._scope.cancel()

    async def _accept(self, listener: socket.socket, tasks: TaskGroup) -> None:
        while True:
            await anyio.wait_readable(listener)
            try:
                sock, peer = listener.accept()
            except OSError:
                continue
            sock.setblocking(False)
            tasks.start_soon(self._serve_node, sock, f"{peer[0]}:{peer[1]}")

    async def _serve_node(self, sock: socket.socket, remote: str) -> None:
        session = LookupSession(self._lookupd.registry, remote, self._lookupd.own(), partitions=self._partitions)
        try:
            while not session.closing:
                await anyio.wait_readable(sock)
                data = sock.recv(_READ)
                if not data:
                    break
                rest = session.receive(data)
                while rest:
                    await anyio.wait_writable(sock)
                    rest = rest[sock.send(rest) :]
        except OSError:
            return  # the node is gone, as every node will be
        finally:
            session.end()
            sock.close()
