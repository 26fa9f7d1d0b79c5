"""uvicorn on a given socket, started, stopped and killed from within a task group."""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from socket import socket
from typing import TYPE_CHECKING, Any

import anyio
import uvicorn

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

__all__ = ("HttpServer",)

_GRACE = 1.0
_KEEP_ALIVE = 3600
_MAX_HEAD = 1024 * 1024  # a request line with a long extend header; the real servers take as much


class _Server(uvicorn.Server):
    """uvicorn without signal handlers and without its ten wake-ups a second."""

    def __init__(self, config: uvicorn.Config, stopping: anyio.Event) -> None:
        super().__init__(config)
        self.stopping = stopping
        self.grace = _GRACE

    def capture_signals(self) -> Any:
        return nullcontext()

    async def main_loop(self) -> None:
        await self.stopping.wait()

    def close_listeners(self) -> None:
        for server in self.servers:
            server.close()

    def abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for task in self.server_state.tasks:
            task.cancel()

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        state = self.server_state
        self.close_listeners()
        for listener in sockets or []:
            listener.close()
        for connection in list(state.connections):
            connection.shutdown()
        with anyio.move_on_after(self.grace):
            while state.connections or state.tasks:  # noqa: ASYNC110 - uvicorn's own sets tell nobody when they are empty
                await anyio.sleep(0.005)
        while state.connections or state.tasks:
            self.abort()
            await anyio.sleep(0.005)


class HttpServer:
    """One HTTP server.

    Args:
        app: the application.
        tls: serve HTTPS with this context.
        gate: awaited before each request; a frozen node waits in it.
    """

    def __init__(
        self, app: Any, *, tls: ssl.SSLContext | None = None, gate: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        async def gated(scope: Any, receive: Any, send: Any) -> None:
            if gate is not None:
                await gate()
            await app(scope, receive, send)

        config = uvicorn.Config(
            gated,
            loop="none",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE,
            h11_max_incomplete_event_size=_MAX_HEAD,
        )
        config.load()
        if tls is not None:
            config.ssl = tls
        self._stopping = anyio.Event()
        self._server = _Server(config, self._stopping)

    async def serve(self, listener: socket, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop`, `kill` or cancellation; the socket and every connection are closed then.

        Args:
            listener: a listening socket; its ownership passes to the server.
            task_status: told when requests are taken, which is at once, as the socket listens already.
        """
        task_status.started()
        try:
            await self._server.serve([listener])
        finally:
            if not self._stopping.is_set() and self._server.started:
                self._server.grace = 0
                with anyio.CancelScope(shield=True):
                    await self._server.shutdown([listener])

    def stop(self) -> None:
        """Take no more requests, answer those that run (for one second at most), and end."""
        self._stopping.set()

    def kill(self) -> None:
        """Close everything at once; answers that are not written yet are lost."""
        self._server.grace = 0
        if self._server.started:
            self._server.close_listeners()
            self._server.abort()
        self._stopping.set()
