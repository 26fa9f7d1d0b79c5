"""HTTP/1.1 on simulated sockets, in place of httpx's pool and uvicorn's parser, which cost most of a simulation's time.

Requests of the lookup client and applications of the servers run unmodified on both. `simulate` with ``real_http``
runs httpx and uvicorn instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httpx

if TYPE_CHECKING:
    from nsqext.testing.simulation.sockets import SimulatedSocket

_END = b"\r\n\r\n"
_REASONS = {status.value: status.phrase for status in HTTPStatus}


class _Received:
    """A request or response: its first line, headers and body, parsed once all bytes are received."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        self._data += data

    def take(self) -> tuple[bytes, list[tuple[bytes, bytes]], bytes] | None:
        """Return the next whole message; None until it is received."""
        end = self._data.find(_END)
        if end < 0:
            if self._data and not self._data[:1].isalpha():
                raise ValueError(f"illegal status line: {bytes(self._data[:40])!r}")
            return None
        first, *lines = bytes(self._data[:end]).split(b"\r\n")
        headers = []
        size = 0
        for line in lines:
            name, _, value = line.partition(b":")
            headers.append((name.strip().lower(), value.strip()))
            if headers[-1][0] == b"content-length":
                size = int(headers[-1][1])
        if b"HTTP/1." not in first:
            raise ValueError(f"illegal status line: {first[:40]!r}")
        begin = end + len(_END)
        if len(self._data) < begin + size:
            return None
        body = bytes(self._data[begin : begin + size])
        del self._data[: begin + size]
        return first, headers, body


class _ClientConnection(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.answer: asyncio.Future[Any] | None = None
        self.closed = False
        self._received = _Received()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received.feed(data)
        try:
            found = self._received.take()
        except ValueError as error:
            self._fail(httpx.RemoteProtocolError(str(error)))
            return
        if found is not None and self.answer is not None and not self.answer.done():
            self.answer.set_result(found)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        self._fail(
            httpx.ReadError(str(error))
            if error is not None
            else httpx.RemoteProtocolError("Server disconnected without sending a response.")
        )

    def abort(self) -> None:
        """Close without sending what is buffered."""
        if not self.closed:  # asyncio raises AttributeError if its write buffer was empty at last
            self.transport.abort()

    def _fail(self, error: Exception) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error)

    async def exchange(self, data: bytes) -> Any:
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        try:
            return await self.answer
        finally:
            self.answer = None


class SimulatedRequest:
    """What the lookup client uses of `httpx.Request`, with the same bytes.

    Args:
        url: URL with a path and without a fragment.
        headers: headers besides those of the host and the size.
    """

    def __init__(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> None:
        _, _, host, target = url.split("/", 3)
        self.address: tuple[str, int] = host.partition(":")[0], int(host.partition(":")[2] or 80)
        lines = [f"{method} /{target} HTTP/1.1", f"Host: {host}"]
        if not body and method in {"POST", "PUT", "PATCH"}:
            lines.append("Content-Length: 0")
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body:
            lines.append(f"Content-Length: {len(body)}")
        self.data: bytes = "\r\n".join(lines).encode() + _END + body


class SimulatedResponse:
    """What the lookup client uses of `httpx.Response`; names of headers are lower-case."""

    def __init__(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        self.status_code: int = status
        self.headers: dict[str, str] = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        self.stream: httpx.AsyncByteStream = httpx.ByteStream(body)

    async def aclose(self) -> None:
        """Do nothing: the whole response was received."""


class SimulatedHttpTransport:
    """Sends requests on connections that are kept, as httpx's transport does."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int], list[_ClientConnection]] = {}

    async def handle_async_request(self, request: SimulatedRequest) -> SimulatedResponse:
        """Send a request; the body of the response was received when it returns."""
        connection = await self._connect(request.address)
        try:
            first, headers, body = await connection.exchange(request.data)
        except BaseException:
            connection.abort()
            raise
        self._idle.setdefault(request.address, []).append(connection)
        return SimulatedResponse(int(first.split(b" ", 2)[1]), headers, body)

    async def _connect(self, address: tuple[str, int]) -> _ClientConnection:
        idle = self._idle.get(address, [])
        while idle:
            connection = idle.pop()
            if not (connection.closed or connection.transport.is_closing() or _readable(connection)):
                return connection
            connection.abort()
        try:
            _, protocol = await asyncio.get_running_loop().create_connection(_ClientConnection, *address)
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        return protocol

    async def aclose(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.transport.close()
        self._idle.clear()


def _readable(connection: _ClientConnection) -> bool:
    """Return whether an idle connection has ended, as httpcore looks at its socket before it is used again."""
    sock: SimulatedSocket | None = getattr(connection.transport, "_sock", None)
    return sock is None or sock.readable


class SimulatedHttpServer(asyncio.Protocol):
    """One connection of a server, with the interface of uvicorn's protocols."""

    def __init__(self, config: Any, server_state: Any, app_state: Any) -> None:
        self.transport: Any = None
        self._app = config.loaded_app
        self._state = server_state
        self._received = _Received()
        self._running: asyncio.Task[None] | None = None
        self._closing = False
        self._port = 0  # of the client; the order of uvicorn's set of connections depends on it, not on an address
        self._lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._port = transport.get_extra_info("peername")[1]
        self._state.connections.add(self)

    def __hash__(self) -> int:
        return self._port

    def connection_lost(self, error: Exception | None) -> None:
        self._state.connections.discard(self)
        self._lost.set()

    def data_received(self, data: bytes) -> None:
        self._received.feed(data)
        self._next()

    def shutdown(self) -> None:
        """Close after the response that is being made."""
        self._closing = True
        if self._running is None:
            self.transport.close()

    def _next(self) -> None:
        if self._running is not None or self.transport.is_closing():
            return
        try:
            found = self._received.take()
        except ValueError:
            self.transport.close()
            return
        if found is not None:
            self._running = asyncio.get_running_loop().create_task(self._run(*found))
            self._state.tasks.add(self._running)
            self._running.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._state.tasks.discard(task)
        self._running = None
        if task.cancelled() or task.exception() is not None:
            self.transport.abort()
        elif self._closing:
            self.transport.close()
        else:
            self._next()

    async def _run(self, first: bytes, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        method, target, _ = first.split(b" ", 2)
        path, _, query = target.partition(b"?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method.decode("ascii"),
            "scheme": "http",
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": headers,
            "client": self.transport.get_extra_info("peername"),
            "server": self.transport.get_extra_info("sockname"),
        }
        pending: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
        started: dict[str, Any] = {}
        parts: list[bytes] = []

        async def receive() -> dict[str, Any]:
            if pending:
                return pending.pop()
            await self._lost.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                started.update(message)
                return
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                self._answer(started, b"" if method == b"HEAD" else b"".join(parts))

        await self._app(scope, receive, send)

    def _answer(self, started: dict[str, Any], body: bytes) -> None:
        status = started["status"]
        lines = [b"HTTP/1.1 %d %s" % (status, _REASONS.get(status, "").encode())]
        lines += [b"%s: %s" % pair for pair in started["headers"] if pair[0].lower() != b"content-length"]
        lines.append(b"content-length: %d" % len(body))
        self.transport.write(b"\r\n".join(lines) + _END + body)
