"""uvicorn on a given socket, within a task group."""

from __future__ import annotations

import errno
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext, suppress
from functools import partial
from ipaddress import ip_address
from socket import AF_INET, AF_INET6, create_server
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio
import uvicorn
from anyio.lowlevel import current_token
from starlette.responses import Response

from nsqext.errors import InvalidSetting
from nsqext.golang.http_heads import MAX_HEAD, GoProtocol, closing_after_unread_body

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

    from nsqext.types import Address

_HOST = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::[0-9]+)?")
_READING = frozenset(("GET", "HEAD", "OPTIONS"))
_OWN_SITES = frozenset(("", "same-origin", "none"))


def _host_of(authority: str) -> str:
    found = _HOST.fullmatch(authority)
    return found["host"].strip("[]").lower() if found else ""


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


class HttpGuard:
    """Refuses requests that a foreign web page made a browser send.

    After a DNS rebinding a page's ``Host`` is its own: only addresses, ``localhost``, this machine's name and the given
    names are accepted. A page of another origin cannot hide its ``Origin`` from a request that changes something.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in names)}

    def refusal(self, method: str, host: str, origin: str, site: str) -> str:
        """Return why a request is refused; empty when accepted.

        Args:
            host: header ``Host``; empty without it (HTTP/1.0, which no browser speaks).
            origin: header ``Origin``, or empty.
            site: header ``Sec-Fetch-Site``, or empty.
        """
        name = _host_of(host)
        if host and not (name in self._names or name.endswith(".localhost") or _is_address(name)):
            return f"host {host!r} is not allowed: give the name with --http-host"
        if origin and _authority(origin) != host.lower():
            return f"cross-site request refused: origin {origin!r} is not {host!r}"
        if method not in _READING and site.lower() not in _OWN_SITES:
            return "cross-site request refused: Sec-Fetch-Site"
        return ""


_GRACE = 1.0
_ACCEPT_AGAIN = 0.1  # seconds, after lack of file descriptors
_NO_DESCRIPTOR = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_KEEP_ALIVE = 3600


class _Server(uvicorn.Server):
    """uvicorn without signal handlers and its ten wake-ups a second.

    It accepts connections itself: asyncio's server leaks a connection that it accepts while it is closed.
    """

    def __init__(self, config: uvicorn.Config, stopping: anyio.Event) -> None:
        super().__init__(config)
        self.stopping = stopping
        self.grace = _GRACE
        self._listener: socket.socket | None = None
        self._loop: Any = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        [self._listener] = sockets or []
        self._loop = current_token().native_token
        self._loop.add_reader(self._listener, self._accept, self._listener)
        self.servers = []
        self.started = True

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if error.errno in _NO_DESCRIPTOR:  # the connection waits in the backlog
                self._loop.remove_reader(listener)
                self._loop.call_later(_ACCEPT_AGAIN, self._accept_again, listener)
            return
        sock.setblocking(False)
        task = self._loop.create_task(self._loop.connect_accepted_socket(self._protocol, sock, ssl=self.config.ssl))
        self.server_state.tasks.add(task)
        task.add_done_callback(partial(self._accepted, sock))

    def _accept_again(self, listener: socket.socket) -> None:
        if self._listener is listener:
            self._loop.add_reader(listener, self._accept, listener)

    def _accepted(self, sock: socket.socket, task: Any) -> None:
        self.server_state.tasks.discard(task)
        if task.cancelled() or task.exception() is not None:
            sock.close()

    def _protocol(self) -> GoProtocol:
        return GoProtocol(self.config, self.server_state, self.lifespan.state)

    def capture_signals(self) -> Any:
        return nullcontext()

    async def main_loop(self) -> None:
        await self.stopping.wait()

    def close_listener(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def abort(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for task in self.server_state.tasks:
            task.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state = self.server_state
        self.close_listener()
        for connection in list(state.connections):
            connection.shutdown()
        with anyio.move_on_after(self.grace):
            while state.connections or state.tasks:  # noqa: ASYNC110 - uvicorn has no event for empty sets
                await anyio.sleep(0.005)
        while state.connections or state.tasks:
            self.abort()
            await anyio.sleep(0.005)


def _refusal(guard: HttpGuard, scope: Any) -> str:
    headers: dict[bytes, bytes] = dict(scope["headers"])
    wanted = (headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin", b"sec-fetch-site"))
    return guard.refusal(scope["method"], *wanted)


class HttpServer:
    """An HTTP server.

    Args:
        gate: awaited before each request; a frozen node waits in it.
        guard: None accepts all requests, as the real servers.
    """

    def __init__(
        self,
        app: Any,
        *,
        tls: ssl.SSLContext | None = None,
        gate: Callable[[], Awaitable[None]] | None = None,
        guard: HttpGuard | None = None,
    ) -> None:
        async def guarded(scope: Any, receive: Any, send: Any) -> None:
            try:
                if gate is not None:
                    await gate()
                if guard is None or not (refusal := _refusal(guard, scope)):
                    await app(scope, *closing_after_unread_body(scope, receive, send))
                else:
                    await Response(refusal + "\n", 403, media_type="text/plain")(scope, receive, send)
            except anyio.get_cancelled_exc_class():
                if not self._stopping.is_set():
                    raise
                # uvicorn learns in the next turn of the loop that the connection was aborted, and would log the
                # cancellation with a traceback; a later turn may cancel the task again
                with anyio.CancelScope(shield=True), suppress(anyio.get_cancelled_exc_class()):
                    await anyio.lowlevel.checkpoint()

        config = uvicorn.Config(
            guarded,
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
            h11_max_incomplete_event_size=MAX_HEAD,
        )
        config.load()
        if tls is not None:
            config.ssl = tls
        self._stopping = anyio.Event()
        self._server = _Server(config, self._stopping)

    async def serve(
        self, listener: socket.socket, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until `stop`, `kill` or cancellation; then close the socket and all connections."""
        task_status.started()
        try:
            await self._server.serve([listener])
        finally:
            if self._server.started:  # it has closed everything, unless it was cancelled
                self._server.grace = 0
                self._stopping.set()
                with anyio.CancelScope(shield=True):
                    await self._server.shutdown([listener])

    def stop(self) -> None:
        """Accept no further requests, answer running requests within a second, and end."""
        self._stopping.set()

    def kill(self) -> None:
        """Close everything at once; unsent answers are lost."""
        self._stopping.set()
        self._server.grace = 0
        if self._server.started:
            self._server.close_listener()
            self._server.abort()


def listen(address: Address) -> socket.socket:
    """Return a non-blocking listening socket, for port 0 on a free port; raises InvalidSetting."""
    family = AF_INET6 if ":" in address.host else AF_INET
    try:
        listener = create_server((address.host, address.port), family=family)
    except OSError as error:
        raise InvalidSetting(
            f"cannot listen on {address}: {error.strerror}", hint="choose another port, or 0 for a free port"
        ) from error
    listener.setblocking(False)
    return listener
