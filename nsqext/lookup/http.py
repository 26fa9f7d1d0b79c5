"""One HTTP request to a lookup node or nsqd, bounded in time and size; every failure is a `LookupFailed`.

Requests use httpx's transport directly: its client would log a line for every request at INFO. The loggers of httpcore
are unchanged: they log at DEBUG only.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlencode

import anyio

from nsqext._version import __version__
from nsqext.errors import InvalidState, LookupFailed, LookupUnreachable, NotLookupd
from nsqext.lookup.options import LookupUrl, url_of
from nsqext.lookup.responses import unwrap

if TYPE_CHECKING:
    import ssl

    import httpx

    from nsqext.lookup.options import LookupOptions
    from nsqext.types import Address

__all__ = ("LookupHttp",)

_KEPT_ALIVE = 16
_ANSWERS = 4
"""Responses of the largest size that may be received at the same time."""
_MAX_REASON = 500
"""Characters that are quoted of a transport's error, which may contain the response."""
# Accept requests bare responses with true status codes; identity keeps Content-Length equal to the body's size
_HEADERS = {
    "Accept": "application/vnd.nsq; version=1.0",
    "Accept-Encoding": "identity",
    "User-Agent": f"nsqext/{__version__}",
}
_SOCKET_MEMBERS = ("family", "getpeername", "getsockname", "setsockopt")
_CERTIFICATE_HINT = "give the CA certificates of the lookup service: LookupOptions(ca=...) or NSQEXT_LOOKUP_CA"
_LOOKUPD_HINT = "give the address of nsqlookupd's HTTP side (4161 by default)"


class LookupHttp:
    """HTTP requests to nsqlookupd and nsqd.

    Args:
        options: limits, token and certificates.
        transport: httpx transport to use, closed by the caller; None to create one without proxies.
    """

    def __init__(self, options: LookupOptions, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._options = options
        self._own = transport is None
        self._transport = transport
        self._secure: httpx.AsyncBaseTransport | None = transport
        self._closed = False
        self._buffered = 0
        """Bytes of responses that are not complete."""
        self._pending: set[anyio.CancelScope] = set()

    async def ask(self, address: Address, path: str, params: Mapping[str, str | int], method: str = "GET") -> Any:
        """Return the data of a response.

        Raises:
            TopicNotFound: the node does not know the topic.
            LookupFailed: no response, or an unusable one.
            InvalidState: it was closed.
        """
        status, body = await self.fetch(address, path, params, method)
        return unwrap(status, body, address)

    async def fetch(
        self, address: Address, path: str, params: Mapping[str, str | int], method: str = "GET", body: bytes = b""
    ) -> tuple[int, bytes]:
        """Return status and body of a response.

        Args:
            address: address of the node.
            path: path of the URL.
            params: query of the URL.
            method: HTTP method.
            body: body of the request.

        Raises:
            LookupUnreachable: no response.
            LookupFailed: the response is too long or compressed.
            NotLookupd: the peer does not speak HTTP, or its certificate is not trusted.
            InvalidState: it was closed.
        """
        import httpx  # imported lazily: it takes longer to load than the rest of the package

        if self._closed:
            raise InvalidState("the lookup client is closed")
        timeout = self._options.request_timeout
        node = str(address)
        try:
            with anyio.fail_after(timeout) as scope:
                self._pending.add(scope)
                try:
                    url = f"{url_of(address)}{path}{'?' if params else ''}{urlencode(params)}"
                    request = _make_request(method, url, self._headers(address), body)
                    response = await self._transport_for(address).handle_async_request(request)
                    try:
                        return response.status_code, await self._read(response, node)
                    finally:
                        await response.aclose()
                finally:
                    self._pending.discard(scope)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise LookupUnreachable(f"no response within {timeout:g} s", node=node, hint="is the node up?") from error
        except httpx.RemoteProtocolError as error:
            if "disconnected" in str(error) or "closed" in str(error):  # the node stopped
                raise LookupUnreachable(f"no response: {error}", node=node, hint="is the node up?") from error
            raise NotLookupd(f"the response is not HTTP: {_reason(error)}", node=node, hint=_LOOKUPD_HINT) from error
        except (httpx.InvalidURL, UnicodeError) as error:
            raise LookupFailed(f"no response: {_reason(error)}", node=node) from error
        except (httpx.HTTPError, OSError) as error:
            if "CERTIFICATE_VERIFY_FAILED" in _reason(error):
                raise NotLookupd(
                    f"its certificate is not trusted: {_reason(error)}", node=node, hint=_CERTIFICATE_HINT
                ) from error
            raise LookupUnreachable(f"no response: {_reason(error)}", node=node, hint="is the node up?") from error
        except AttributeError as error:
            # anyio asks the socket of a uvloop transport for its peer; the socket is None if the peer reset the
            # connection while it was made
            if error.obj is not None or error.name not in _SOCKET_MEMBERS:
                raise
            raise LookupUnreachable("the connection was reset", node=node, hint="is the node up?") from error
        raise InvalidState("the lookup client was closed before a response was received", node=node)

    def _headers(self, address: Address) -> dict[str, str]:
        options = self._options
        if options.auth_secret is None or not options.may_authenticate(address):
            return _HEADERS
        return {**_HEADERS, "Authorization": f"Bearer {options.auth_secret}"}

    def _transport_for(self, address: Address) -> httpx.AsyncBaseTransport:
        import ssl  # as httpx

        if isinstance(address, LookupUrl) and address.scheme == "https":
            self._secure = self._secure or _make_transport(self._options.tls_context() or ssl.create_default_context())
            return self._secure
        self._transport = self._transport or _make_transport(_without_certificates())
        return self._transport

    async def _read(self, response: httpx.Response, node: str) -> bytes:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise LookupFailed("the response is compressed, which was not requested", node=node)
        most = self._options.max_answer_size
        size = int(response.headers.get("content-length", 0))
        body = bytearray()
        crowded = False
        try:
            if size <= most:
                async for chunk in cast("httpx.AsyncByteStream", response.stream):
                    size = max(size, len(body) + len(chunk))
                    crowded = crowded or self._buffered + len(chunk) > _ANSWERS * most
                    if size <= most and not crowded:
                        # the rest is read and discarded, until the timeout: some event loops warn about iterators
                        # that are not exhausted
                        self._buffered += len(chunk)
                        body += chunk
            if size > most:
                raise LookupFailed(f"the response is longer than {most} bytes", node=node, hint="raise max_answer_size")
            if crowded:
                raise LookupFailed(
                    f"responses received at the same time are longer than {_ANSWERS * most} bytes together",
                    node=node,
                    hint="raise max_answer_size",
                )
            return bytes(body)
        finally:
            self._buffered -= len(body)

    async def aclose(self) -> None:
        """Cancel pending requests and close the connections, also when it is cancelled."""
        self._closed = True
        for scope in tuple(self._pending):
            scope.cancel()
        if self._own:
            with anyio.CancelScope(shield=True):
                for transport in (self._transport, self._secure):
                    if transport is not None:
                        await transport.aclose()


def _reason(error: BaseException) -> str:
    """Return the text of an error, or of the first of its causes that has one."""
    cause: BaseException | None = error
    while cause is not None:
        if str(cause):
            return str(cause)[:_MAX_REASON]
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__


@cache
def _without_certificates() -> ssl.SSLContext:
    """Return a context for HTTP without TLS, which avoids the slow load of the system's certificates."""
    import ssl

    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _make_request(method: str, url: str, headers: Mapping[str, str], body: bytes) -> httpx.Request:
    import httpx

    return httpx.Request(method, url, headers=headers, content=body or None)


def _make_transport(context: ssl.SSLContext) -> httpx.AsyncHTTPTransport:
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=_KEPT_ALIVE)
    return httpx.AsyncHTTPTransport(verify=context, trust_env=False, limits=limits)
