"""HTTP requests from a server to another one: the auth server, and nsqlookupd.

The first request imports httpx and loads the certificates of authorities in a thread: both take 0.2 s, in which the
event loop has to serve. Requests bypass `httpx.AsyncClient`, which logs each URL at INFO: the URL of an auth request
contains the client's secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from anyio import to_thread

if TYPE_CHECKING:
    import ssl

    import httpx

__all__ = ("HttpClient", "HttpReply", "HttpRequestFailed")

_contexts: list[ssl.SSLContext] = []


def _load() -> ssl.SSLContext:
    import httpx

    return httpx.create_ssl_context(trust_env=False)


class HttpRequestFailed(Exception):
    """No answer to a request. The text names neither the URL nor the body."""


class HttpReply(NamedTuple):
    """An answer; the location is where a redirect leads to."""

    status: int
    content: bytes
    location: str = ""


class HttpClient:
    """Connections to other servers. Environment variables for proxies are ignored.

    Args:
        timeout: seconds for each of connecting, sending and receiving.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._transport: httpx.AsyncHTTPTransport | None = None

    async def request(
        self, method: str, url: str, *, headers: Mapping[str, str] | None = None, content: bytes = b""
    ) -> HttpReply:
        """Send a request and return the answer. Redirects are not followed. Cancellation waits for the import.

        Raises:
            HttpRequestFailed: the URL is invalid, the server cannot be reached, or its answer is not HTTP.
        """
        if not _contexts:
            _contexts.append(await to_thread.run_sync(_load))
        import httpx

        if self._transport is None:
            self._transport = httpx.AsyncHTTPTransport(verify=_contexts[0])
        try:
            limits = {"timeout": httpx.Timeout(self._timeout).as_dict()}
            request = httpx.Request(method, url, headers=headers, content=content, extensions=limits)
            response = await self._transport.handle_async_request(request)
            try:
                return HttpReply(response.status_code, await response.aread(), response.headers.get("location", ""))
            finally:
                await response.aclose()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise HttpRequestFailed(type(error).__name__) from None

    async def aclose(self) -> None:
        """Close the connections."""
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.aclose()
