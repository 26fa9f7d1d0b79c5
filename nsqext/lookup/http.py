"""One question to one address, bounded in time and size; every way in which it can fail is a `LookupFailed`."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import anyio

from nsqext.errors import InvalidState, LookupFailed, LookupUnreachable, NotLookupd
from nsqext.lookup.responses import unwrap

if TYPE_CHECKING:
    import httpx

    from nsqext.lookup.options import LookupOptions
    from nsqext.types import Address

__all__ = ("LookupHttp",)

# the first member asks for bare answers with true status codes; the second keeps sizes what they seem
_HEADERS = {"Accept": "application/vnd.nsq; version=1.0", "Accept-Encoding": "identity"}
_CONCURRENT = 32
"""Questions that one address is asked at the same time; more of them wait."""


class LookupHttp:
    """Asks nsqlookupd and nsqd over HTTP.

    Args:
        options: time and size limits.
        client: the client to use, which its owner closes; None makes one of its own, without proxies.
    """

    def __init__(self, options: LookupOptions, client: httpx.AsyncClient | None = None) -> None:
        self._options = options
        self._headers = dict(_HEADERS)
        if options.auth_secret is not None:
            self._headers["Authorization"] = f"Bearer {options.auth_secret}"
        self._given = client is not None
        self._client = client
        self._closed = False
        self._asking: set[anyio.CancelScope] = set()
        self._slots: dict[Address, anyio.CapacityLimiter] = {}

    async def ask(self, address: Address, path: str, params: Mapping[str, str | int], method: str = "GET") -> Any:
        """Return the data of an answer.

        Raises:
            TopicNotFound: the node does not know the topic.
            LookupFailed: no answer, or one that cannot be used.
            InvalidState: it was closed.
        """
        status, body = await self.fetch(address, path, params, method)
        return unwrap(status, body, address)

    async def fetch(
        self, address: Address, path: str, params: Mapping[str, str | int], method: str = "GET", body: bytes = b""
    ) -> tuple[int, bytes]:
        """Return status and body of an answer.

        Args:
            address: who is asked.
            path: path of the URL.
            params: its query.
            method: method of the request.
            body: what is sent with it.

        Raises:
            LookupUnreachable: no answer.
            LookupFailed: an answer that is too long, or one that is not HTTP.
            InvalidState: it was closed.
        """
        import httpx  # it takes longer to load than all the rest of the package

        client = self._client = self._client or _make_client(httpx, self._options)
        if self._closed or client.is_closed:
            raise InvalidState("the lookup client is closed")
        slots = self._slots.setdefault(address, anyio.CapacityLimiter(_CONCURRENT))
        async with slots:  # the time limit begins behind it: a queue of this process is no fault of the node
            return await self._fetch(client, address, path, params, method, body)

    async def _fetch(
        self,
        client: httpx.AsyncClient,
        address: Address,
        path: str,
        params: Mapping[str, str | int],
        method: str,
        body: bytes,
    ) -> tuple[int, bytes]:
        import httpx

        if self._closed:
            raise InvalidState("the lookup client is closed")
        timeout = self._options.request_timeout
        node = str(address)
        try:
            with anyio.fail_after(timeout) as scope:
                self._asking.add(scope)
                try:
                    url = f"http://{address}{path}"
                    asked = client.stream(method, url, params=dict(params), headers=self._headers, content=body or None)
                    async with asked as response:
                        return response.status_code, await self._read(response, node)
                finally:
                    self._asking.discard(scope)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise LookupUnreachable(f"no answer within {timeout:g} s", node=node, hint="is the node up?") from error
        except httpx.RemoteProtocolError as error:
            if "disconnected" in str(error) or "closed" in str(error):  # the node stopped meanwhile
                raise LookupUnreachable(f"no answer: {error}", node=node, hint="is the node up?") from error
            raise NotLookupd(
                f"the server does not speak HTTP: {error}",
                node=node,
                hint="give the address of nsqlookupd's HTTP side (4161 by default)",
            ) from error
        except (httpx.InvalidURL, UnicodeError) as error:
            raise LookupFailed(f"no answer: {_reason(error)}", node=node) from error
        # AttributeError: of anyio on uvloop, when the peer resets a connection that is being made
        except (httpx.HTTPError, OSError, AttributeError) as error:
            raise LookupUnreachable(f"no answer: {_reason(error)}", node=node, hint="is the node up?") from error
        raise InvalidState("the lookup client was closed before an answer came", node=node)

    async def _read(self, response: httpx.Response, node: str) -> bytes:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise LookupFailed("the answer is compressed, which was not asked for", node=node)
        most = self._options.max_answer_size
        size = int(response.headers.get("Content-Length", 0))
        body = bytearray()
        if size <= most:
            async for chunk in response.aiter_bytes():
                size = max(size, len(body) + len(chunk))
                if size <= most:
                    # what is too long is read to its end, or to the end of the time: some event loops complain about
                    # iterators that are left in the middle
                    body += chunk
        if size > most:
            raise LookupFailed(f"the answer is longer than {most} bytes", node=node)
        return bytes(body)

    async def aclose(self) -> None:
        """End all questions, and close the connections if they are its own. Cancellation does not keep them open."""
        self._closed = True
        for scope in tuple(self._asking):
            scope.cancel()
        if self._client is not None and not self._given:
            with anyio.CancelScope(shield=True):
                await self._client.aclose()


def _make_client(module: Any, options: LookupOptions) -> httpx.AsyncClient:
    client: httpx.AsyncClient = module.AsyncClient(
        timeout=options.request_timeout,
        trust_env=False,
        limits=module.Limits(max_connections=None, max_keepalive_connections=20),
        # lookup speaks plain HTTP: a context without certificates spares loading those of the system
        verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
    )
    return client


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
