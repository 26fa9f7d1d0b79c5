"""A transport of httpx, as of a test or a simulation, in place of own connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import httpcore
import httpx


class GivenTransport:
    """A `nsqext.http.client.HttpTransport` that sends through a transport of httpx, whose owner closes it."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport

    async def send(self, method: str, url: str, headers: Mapping[str, str], content: bytes) -> GivenResponse:
        """Send a request. Raises the errors of httpcore, and ValueError for an invalid URL."""
        try:
            request = httpx.Request(method, url, headers=dict(headers), content=content or None)
        except httpx.InvalidURL as error:
            raise ValueError(str(error)) from error
        with _errors_of_httpcore():
            return GivenResponse(await self._transport.handle_async_request(request))

    async def aclose(self) -> None:
        """Do nothing."""


class GivenResponse:
    """A response of a transport of httpx."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.status: int = response.status_code
        self.headers: Mapping[str, str] = response.headers

    async def parts(self) -> AsyncIterator[bytes]:
        """Return the parts of its body."""
        with _errors_of_httpcore():
            async for part in cast("httpx.AsyncByteStream", self._response.stream):
                yield part

    async def aclose(self) -> None:
        """Close it."""
        await self._response.aclose()


@contextmanager
def _errors_of_httpcore() -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        kind = getattr(httpcore, type(error).__name__, httpcore.NetworkError)  # most have the same names
        raise kind(str(error)) from error
