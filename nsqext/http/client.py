"""HTTP requests bounded in time and size.

They use httpcore: httpx takes twice as long to import, and its client logs every URL at INFO, while the URL of an auth
request contains a secret.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import anyio
from anyio import to_thread

from nsqext._version import __version__
from nsqext.errors import outside_text

if TYPE_CHECKING:
    import ssl

    import httpx

Reason = Literal["closed", "invalid", "not HTTP", "too long", "unreachable", "untrusted", "compressed"]

_REPLIES = 4  # responses of the largest size that may be received concurrently
_MOST_BYTES = 16 << 20
_MAX_TEXT = 500  # quoted characters of a transport's error, which may contain the response
# with identity, Content-Length is the body's size
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": f"nsqext/{__version__}"}
_SOCKET_MEMBERS = ("family", "getpeername", "getsockname", "setsockopt")


class HttpRequestFailed(Exception):
    """No usable response.

    Attributes:
        reason: why.
        text: in words, without URL and body.
        sent: whether the server may have received the request.
    """

    def __init__(self, reason: Reason, text: str, *, sent: bool = True) -> None:
        super().__init__(reason, text)
        self.reason: Reason = reason
        self.text: str = text
        self.sent: bool = sent


class HttpReply(NamedTuple):
    status: int
    content: bytes
    headers: Mapping[str, str]  #: names are in lower case


class HttpResponse(Protocol):
    """A response whose body has not been read yet; its headers have names in lower case."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    def parts(self) -> AsyncIterator[bytes]: ...

    async def aclose(self) -> None: ...


class HttpTransport(Protocol):
    """Sends requests; raises the errors of httpcore, and ValueError for a URL or header that cannot be sent."""

    async def send(self, method: str, url: str, headers: Mapping[str, str], content: bytes) -> HttpResponse: ...

    async def aclose(self) -> None: ...


def load_httpcore(*, only_asyncio: bool = False) -> None:
    """Import httpcore.

    Args:
        only_asyncio: the process never runs trio, which httpcore imports if installed.
    """
    if not only_asyncio or "trio" in sys.modules:
        import_module("httpcore")
        return
    absent: dict[str, Any] = {"trio": None}  # an import of this name raises ImportError
    sys.modules.update(absent)
    try:
        import_module("httpcore")
    finally:
        del sys.modules["trio"]


class HttpClient:
    """Connections to servers. Environment variables for proxies are ignored, and redirects are not followed.

    Args:
        timeout: seconds for connection, request and response.
        most: largest body of a response, in bytes; concurrent responses together may have four times as many.
        tls: makes the context for ``https``; None from it means the system's certificates.
        transport: httpx transport to use, closed by the caller.
    """

    def __init__(
        self,
        timeout: float,
        *,
        most: int = _MOST_BYTES,
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._timeout = timeout
        self._most = most
        self._tls = tls
        self._transport: HttpTransport | None = None
        self._secure: HttpTransport | None = None
        if transport is not None:
            from nsqext.http.given_transport import GivenTransport

            self._transport = self._secure = GivenTransport(transport)
        self._closed = False
        self._buffered = 0  # bytes of incomplete responses
        self._pending: set[anyio.CancelScope] = set()

    async def request(
        self, method: str, url: str, *, headers: Mapping[str, str] | None = None, content: bytes = b""
    ) -> HttpReply:
        """Send a request; return the response, or raise HttpRequestFailed.

        Cancellation waits for the first request's import of httpcore.
        """
        if "httpcore" not in sys.modules:
            await to_thread.run_sync(load_httpcore)  # takes 40 ms, in which the client may be closed
        if self._closed:
            raise HttpRequestFailed("closed", "the client is closed", sent=False)
        import httpcore

        try:
            with anyio.fail_after(self._timeout) as scope:
                self._pending.add(scope)
                try:
                    transport = await self._transport_for(url)
                    response = await transport.send(method, url, {**_HEADERS, **(headers or {})}, content)
                    try:
                        return HttpReply(response.status, await self._read(response), response.headers)
                    finally:
                        await response.aclose()
                finally:
                    self._pending.discard(scope)
        except (TimeoutError, httpcore.TimeoutException) as error:
            raise HttpRequestFailed("unreachable", f"no response within {self._timeout:g} s") from error
        except httpcore.RemoteProtocolError as error:
            if "disconnected" in str(error) or "closed" in str(error):  # the server stopped
                raise HttpRequestFailed("unreachable", f"no response: {error}") from error
            raise HttpRequestFailed("not HTTP", f"the response is not HTTP: {_text(error)}") from error
        except (ValueError, httpcore.UnsupportedProtocol) as error:
            raise HttpRequestFailed("invalid", f"no response: {type(error).__name__}", sent=False) from None
        except httpcore.ConnectionNotAvailable as error:
            text = "no response: the client was closed before the request was sent"
            raise HttpRequestFailed("unreachable", text, sent=False) from error
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            if "CERTIFICATE_VERIFY_FAILED" in _text(error):
                text = f"its certificate is not trusted: {_text(error)}"
                raise HttpRequestFailed("untrusted", text, sent=False) from error
            sent = not isinstance(error, httpcore.ConnectError)
            raise HttpRequestFailed("unreachable", f"no response: {_text(error)}", sent=sent) from error
        except AttributeError as error:
            # anyio uses the socket of a uvloop transport, which is None if the peer reset the connection meanwhile
            if error.obj is not None or error.name not in _SOCKET_MEMBERS:
                raise
            raise HttpRequestFailed("unreachable", "the connection was reset", sent=False) from error
        raise HttpRequestFailed("closed", "the client was closed before a response was received")

    async def _transport_for(self, url: str) -> HttpTransport:
        if url.startswith("https:"):
            if self._secure is None:
                given = self._tls()
                context = await to_thread.run_sync(system_certificates) if given is None else given  # takes 0.1 s
                self._secure = self._secure or _make_transport(context)
            return self._secure
        self._transport = self._transport or _make_transport(without_certificates())
        return self._transport

    async def _read(self, response: HttpResponse) -> bytes:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise HttpRequestFailed("compressed", "the response is compressed, which was not requested")
        most = self._most
        size = int(response.headers.get("content-length", 0))
        body = bytearray()
        crowded = False
        try:
            if size <= most:
                async for chunk in response.parts():
                    size = max(size, len(body) + len(chunk))
                    crowded = crowded or self._buffered + len(chunk) > _REPLIES * most
                    if size <= most and not crowded:
                        # else read and discarded: some event loops warn about unexhausted iterators
                        self._buffered += len(chunk)
                        body += chunk
            if size > most:
                raise HttpRequestFailed("too long", f"the response is longer than {most} bytes")
            if crowded:
                text = f"responses received at the same time are longer than {_REPLIES * most} bytes together"
                raise HttpRequestFailed("too long", text)
            return bytes(body)
        finally:
            self._buffered -= len(body)

    async def aclose(self) -> None:
        """Cancel pending requests; close the connections, even when cancelled."""
        self._closed = True
        for scope in tuple(self._pending):
            scope.cancel()
        with anyio.CancelScope(shield=True):
            for transport in (self._transport, self._secure):
                if transport is not None:
                    await transport.aclose()


def _text(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:
        if str(cause):
            return outside_text(str(cause), _MAX_TEXT)
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__


@cache
def without_certificates() -> ssl.SSLContext:
    """Return a context for plain HTTP: the system's certificates load slowly."""
    import ssl

    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@cache
def system_certificates() -> ssl.SSLContext:
    """Return a context with the certificates of the system, which load in 0.1 s."""
    import ssl

    return ssl.create_default_context()


def _make_transport(context: ssl.SSLContext) -> HttpTransport:
    from nsqext.http.connections import Connections

    return Connections(context)
