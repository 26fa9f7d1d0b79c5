"""HTTP connections that stay open between requests.

httpcore's pool asks the system about each idle connection at the start and at the end of each request, which is most of
the cost of a small one; here a request asks only about the connection that it uses.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import cast

import anyio
import httpcore
import httpx

_KEPT_ALIVE = 16  # idle connections
_IDLE = 5.0  # seconds for which an idle connection is kept


class Connections(httpx.AsyncBaseTransport):
    """A transport whose next request to a server uses the connection that became idle last.

    Args:
        context: of ``https``.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self._used: set[httpcore.AsyncHTTPConnection] = set()
        self._idle: dict[httpcore.AsyncHTTPConnection, float] = {}  # since when, the earliest first
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; the connection is used until the response is closed. Raises the errors of httpx."""
        url = request.url
        target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        if target.scheme not in (b"http", b"https"):
            raise httpx.UnsupportedProtocol(f"requests to {url.scheme!r} are not supported")
        await self._close_unneeded()
        connection = await self._take(target.origin)
        sent = httpcore.Request(request.method, target, headers=request.headers.raw, content=request.stream)
        self._used.add(connection)
        try:
            with _errors_of_httpx():
                response = await connection.handle_async_request(sent)
        except BaseException:
            self._used.discard(connection)
            await _close(connection)
            raise
        body = _Body(response, lambda: self._release(connection))
        return httpx.Response(response.status, headers=response.headers, stream=body)

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
        until = anyio.current_time() - _IDLE
        while self._idle:
            connection, since = next(iter(self._idle.items()))
            if since > until and len(self._idle) <= _KEPT_ALIVE:
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


class _Body(httpx.AsyncByteStream):
    def __init__(self, response: httpcore.Response, released: Callable[[], Awaitable[None]]) -> None:
        self._response = response
        self._released = released

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _errors_of_httpx():
            async for part in self._response.aiter_stream():
                yield part

    async def aclose(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._response.aclose()
            await self._released()


@contextmanager
def _errors_of_httpx() -> Iterator[None]:
    try:
        yield
    except httpcore.ConnectionNotAvailable as error:  # `Connections.aclose` closed it before the request was sent
        raise httpx.ConnectError("the client was closed before the request was sent") from error
    except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as error:
        kind = cast("type[httpx.TransportError]", getattr(httpx, type(error).__name__))
        raise kind(str(error)) from error
