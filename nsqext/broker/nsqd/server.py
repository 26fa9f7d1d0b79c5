"""A node on its sockets: TCP, HTTP, and its timers."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from anyio.lowlevel import current_token

from nsqext.broker.listeners import listen, peer_name
from nsqext.broker.nsqd.commands import REDESIGNED
from nsqext.broker.nsqd.connection import ServerConnection
from nsqext.broker.nsqd.http.admin import AdminRoutes
from nsqext.broker.nsqd.http.common import CommonRoutes
from nsqext.broker.nsqd.http.publish import PublishRoutes
from nsqext.broker.nsqd.http.stats import StatsRoutes
from nsqext.broker.nsqd.node import SHORTEST_TICK
from nsqext.broker.nsqd.original.commands import ORIGINAL
from nsqext.broker.nsqd.original.http_routes import OriginalRoutes, refusing_route
from nsqext.broker.nsqd.session import Dialect, Session
from nsqext.http import api as web
from nsqext.http.api import at_first_request
from nsqext.http.uvicorn_server import HttpServer
from nsqext.waits import Wakeup

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus
    from starlette.applications import Starlette

    from nsqext.broker.nsqd.node import Node

logger: logging.Logger = logging.getLogger("nsqext.broker.nsqd")

_ORIGINAL = (OriginalRoutes, CommonRoutes)
_REDESIGNED = (AdminRoutes, PublishRoutes, StatsRoutes, CommonRoutes)
_DRAIN = 1.0  # seconds for which publishers are refused before a node ends
_ACCEPTS = 64  # connections accepted before others are served
_ACCEPT_AGAIN = 0.1  # seconds, after lack of file descriptors
_ANY = "127.0.0.1:0"


def application(node: Node, addresses: Mapping[str, str], *, secure: bool = False) -> Starlette:
    """Return a node's web application; ``secure`` for HTTPS."""
    original = node.options.original
    if original and node.options.https_only and not secure:
        return web.application([refusing_route(addresses)], original=True)
    kinds = _ORIGINAL if original else _REDESIGNED
    return web.application([found for kind in kinds for found in kind(node, addresses).table()], original=original)


def dialect_of(node: Node) -> Dialect:
    """Return the commands and checks of the node's generation."""
    return ORIGINAL if node.options.original else REDESIGNED


class NsqdServer:
    """An nsqd with its servers on ``host:port``; port 0 for a free port."""

    def __init__(
        self,
        node: Node,
        tcp: str = _ANY,
        http: str = _ANY,
        *,
        https: str | None = None,
        https_context: ssl.SSLContext | None = None,
    ) -> None:
        self.node: Node = node
        self.busy: bool = False  #: output needs no wake-up, because `flush` follows
        self._wanted = {"tcp": tcp, "http": http, "https": https}
        self._https_context = https_context
        self.addresses: dict[str, str] = {}  #: ``host:port`` of ``tcp``, ``http`` and ``https``, once it listens
        self._dialect = dialect_of(node)
        self._connections: dict[int, ServerConnection] = {}
        self._https: list[HttpServer] = []  # of HTTP and HTTPS
        self._scope = anyio.CancelScope()
        self._flushing = Wakeup()
        self._tasks: TaskGroup | None = None
        self._loop: Any = None
        self._output_timer: Any = None
        self._tick_timer: Any = None
        self._tick_due = 0.0
        self._output_due = 0.0

    async def serve(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop`, `drain` or cancellation."""
        listeners = self._listen()
        self.node.wake, self.node.wake_at = self._wake, self._wake_at
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    self._tasks = tasks
                    self._loop = current_token().native_token
                    self._loop.add_reader(listeners["tcp"], partial(self._accept, listeners["tcp"]))
                    self.node.schedule.on_change = self._tick_soon
                    self._plan_tick(SHORTEST_TICK)
                    tasks.start_soon(self._flush_late)
                    for name in self.addresses.keys() - {"tcp"}:
                        await self._start_http(name, listeners[name], tasks)
                    task_status.started()
        finally:
            if self._loop is not None:
                self._loop.remove_reader(listeners["tcp"])
            for timer in (self._output_timer, self._tick_timer):
                if timer is not None:
                    timer.cancel()
            self._tick_timer = None
            for connection in list(self._connections.values()):
                connection.close()
            for listener in listeners.values():
                listener.close()

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._tasks is not None and not self._scope.cancel_called:
            self._tasks.start_soon(work)

    def gone(self, connection: ServerConnection) -> None:
        self._connections.pop(connection.session.id, None)

    def _listen(self) -> dict[str, socket.socket]:
        listeners: dict[str, socket.socket] = {}
        try:
            for name, address in self._wanted.items():
                if address is not None:
                    listeners[name] = listen(address)
                    self.addresses[name] = peer_name(listeners[name].getsockname())
        except OSError:
            for listener in listeners.values():
                listener.close()
            raise
        return listeners

    async def _start_http(self, name: str, listener: socket.socket, tasks: TaskGroup) -> None:
        app = at_first_request(partial(application, self.node, self.addresses, secure=name == "https"))
        tls = self._https_context if name == "https" else None
        server = HttpServer(app, tls=tls, gate=self.node.faults.gate, guard=self.node.options.http_guard)
        self._https.append(server)
        await tasks.start(server.serve, listener)

    def stop(self) -> None:
        """Close everything as a kill does; unsent output is lost."""
        for server in self._https:
            server.kill()
        self._scope.cancel()

    async def drain(self) -> None:
        """End as on SIGTERM: the original server at once.

        The redesigned server disconnects consumers, refuses publishes, and closes the other connections a second later.
        """
        if self.node.options.original:
            self.stop()
            return
        self.node.exiting = True
        for connection in list(self._connections.values()):
            if connection.session.subscriber is not None:
                connection.session.close()
        self.flush()
        for server in self._https:
            server.stop()
        if any(connection.session.published for connection in self._connections.values()):
            await anyio.sleep(_DRAIN)
        self.stop()

    def flush(self) -> None:
        dirty = self.node.dirty
        while dirty:
            sessions = dirty[:]
            dirty.clear()
            for session in sessions:
                connection = self._connections.get(session.id)
                if connection is not None:
                    connection.send()
        self.busy = False

    def _wake(self) -> None:
        if not self.busy:
            self._flushing.wake()

    async def _flush_late(self) -> None:
        """Send output that HTTP, replicas or the coordinator caused."""
        while True:
            await self._flushing.wait()
            self.flush()

    def _wake_at(self, due: float) -> None:
        """Call `Node.expire_output` at this time; ticks are too coarse."""
        if self._output_timer is not None:
            if due >= self._output_due:
                return
            self._output_timer.cancel()
        self._output_due = due
        delay = max(due - self.node.options.machine_clock(), 0.0)
        self._output_timer = self._loop.call_later(delay, self._expire_output)

    def _expire_output(self) -> None:
        self._output_timer = None
        self.busy = True
        self.node.expire_output()
        self.flush()

    def _plan_tick(self, delay: float) -> None:
        self._tick_due = self._loop.time() + delay
        self._tick_timer = self._loop.call_at(self._tick_due, self._tick)

    def _tick_soon(self) -> None:
        if self._tick_timer is not None and self._tick_due > self._loop.time() + SHORTEST_TICK:
            self._tick_timer.cancel()
            self._plan_tick(SHORTEST_TICK)

    def _tick(self) -> None:
        self._tick_timer = None
        self.busy = True
        try:
            self.node.tick()
        finally:
            self.flush()
            self._plan_tick(self.node.seconds_to_tick())

    def _accept(self, listener: socket.socket) -> None:
        faults = self.node.faults
        if faults.frozen:
            self._loop.remove_reader(listener)
            self.start(partial(self._accept_after, faults.gate, listener))
            return
        for _ in range(_ACCEPTS):
            try:
                sock, peer = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:
                # no free file descriptor: the connection waits in the backlog
                self._loop.remove_reader(listener)
                self.start(partial(self._accept_after, partial(anyio.sleep, _ACCEPT_AGAIN), listener))
                return
            if faults.refusing:
                sock.close()
            else:
                self._serve_client(sock, peer)

    async def _accept_after(self, wait: Callable[[], Awaitable[None]], listener: socket.socket) -> None:
        await wait()
        self._loop.add_reader(listener, partial(self._accept, listener))

    def _serve_client(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = peer_name(peer)
        logger.info("TCP: new client(%s)", name)
        session = Session(self.node, name, self._dialect)
        connection = ServerConnection(sock, session, self.node.faults, self._loop, self)
        self._connections[session.id] = connection
        connection.read_on()
