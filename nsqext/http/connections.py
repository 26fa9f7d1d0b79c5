"""HTTP connections that stay open between requests.

httpcore's pool asks the system about each idle connection at the start and at the end of each request, which is most of
the cost of a small one; here a request asks only about the connection that it uses.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from urllib.parse import quote, urlsplit

import anyio
import httpcore

KEPT_ALIVE: int = 16
"""Idle connections that are kept."""
IDLE: float = 5.0
"""Seconds for which an idle connection is kept."""
_PORTS = {"http": 80, "https": 443}
_UNQUOTED = "!#$%&'()*+,/:;=?@[]~"  # besides letters and digits
_WITH_BODY = ("POST", "PUT", "PATCH")


class Connections:
    """A `nsqext.http.client.HttpTransport` whose next request to a server uses the connection that became idle last.

    Args:
        context: of ``https``.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self._used: set[httpcore.AsyncHTTPConnection] = set()
        self._idle: dict[httpcore.AsyncHTTPConnection, float] = {}  # since when, the earliest first
        self._closed = False

    async def send(self, method: str, url: str, headers: Mapping[str, str], content: bytes) -> ServerResponse:
        """Send a request; the connection is used until the response is closed.

        Raises the errors of httpcore, and ValueError for a URL or header that cannot be sent.
        """
        target, host = parse_url(url)
        lines = [(b"Host", host)]
        if content or method in _WITH_BODY:
            lines.append((b"Content-Length", b"%d" % len(content)))
        lines += [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()]
        await self._close_unneeded()
        connection = await self._take(target.origin)
        self._used.add(connection)
        try:
            request = httpcore.Request(method, target, headers=lines, content=_Body(content))
            response = await connection.handle_async_request(request)
        except BaseException:
            self._used.discard(connection)
            await _close(connection)
            raise
        return ServerResponse(response, lambda: self._release(connection))

    async def _take(self, origin: httpcore.Origin) -> httpcore.AsyncHTTPConnection:
        while found := [connection for connection in self._idle if connection.can_handle_request(origin)]:
            connection = found[-1]
            del self._idle[connection]
            if not connection.has_expired():
                return connection
            await _close(connection)
        return httpcore.AsyncHTTPConnection(origin, ssl_context=self._context)

    async def _release(self, connection: httpcore.AsyncHTTPConnection) -> None:
        self._used.discard(connection)
        if connection.is_idle() and not self._closed:
            self._idle[connection] = anyio.current_time()
        else:
            await connection.aclose()

    async def _close_unneeded(self) -> None:
        until = anyio.current_time() - IDLE
        while self._idle:
            connection, since = next(iter(self._idle.items()))
            if since > until and len(self._idle) <= KEPT_ALIVE:
                break
            del self._idle[connection]
            await _close(connection)

    async def aclose(self) -> None:
        """Close all connections, also those with a request."""
        self._closed = True
        for connection in (*self._idle, *self._used):
            await _close(connection)
        self._idle.clear()


async def _close(connection: httpcore.AsyncHTTPConnection) -> None:
    with anyio.CancelScope(shield=True):
        await connection.aclose()


class ServerResponse:
    """A response whose body has not been read yet.

    Attributes:
        status: its code.
        headers: their names are in lower case; several of a name are joined.
    """

    def __init__(self, response: httpcore.Response, released: Callable[[], Awaitable[None]]) -> None:
        self._response = response
        self._released = released
        self.status: int = response.status
        self.headers: dict[str, str] = {}
        for name, value in response.headers:
            known, text = name.decode("latin-1").lower(), value.decode("latin-1")
            self.headers[known] = f"{self.headers[known]}, {text}" if known in self.headers else text

    def parts(self) -> AsyncIterator[bytes]:
        """Return the parts of its body, which are received meanwhile."""
        return self._response.aiter_stream()

    async def aclose(self) -> None:
        """Let other requests use the connection, or close it if the body was not read."""
        with anyio.CancelScope(shield=True):
            await self._response.aclose()
            await self._released()


class _Body:
    """The body of a request: trio warns about httpcore's generator if a connection ends meanwhile."""

    def __init__(self, body: bytes) -> None:
        self._left = [body] if body else []

    def __aiter__(self) -> _Body:
        return self

    async def __anext__(self) -> bytes:
        if not self._left:
            raise StopAsyncIteration
        return self._left.pop()


def parse_url(url: str) -> tuple[httpcore.URL, bytes]:
    """Return a URL for httpcore, and the value of the header Host.

    Raises ValueError or `httpcore.UnsupportedProtocol`.
    """
    parts = urlsplit(url)
    usual = _PORTS.get(parts.scheme)
    if usual is None:
        raise httpcore.UnsupportedProtocol(f"requests to {parts.scheme!r} are not supported")
    name, port = parts.hostname, parts.port
    if not name:
        raise ValueError("the URL has no host")
    host = name.encode("ascii" if name.isascii() else "idna")
    path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
    named = b"[%b]" % host if b":" in host else host
    if port is not None and port != usual:
        named += b":%d" % port
    target = quote(path, safe=_UNQUOTED).encode("ascii")
    return httpcore.URL(scheme=parts.scheme.encode(), host=host, port=port, target=target), named
