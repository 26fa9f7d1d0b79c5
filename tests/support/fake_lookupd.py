"""Small servers on real sockets, and lookup nodes without any, for the tests of this room."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import httpx
import respx
from anyio import TypedAttributeProvider
from anyio.abc import SocketAttribute, SocketStream

from nsqext.types import Address
from tests.support.lookup_responses import list_json

Handler = Callable[[SocketStream], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[Address]:
    """Run a server whose connections are handled so; gives its address. Connections are cut at the end."""

    async def handle(stream: SocketStream) -> None:
        async with stream:
            with suppress(anyio.BrokenResourceError, anyio.EndOfStream):
                await handler(stream)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, handle)
        yield _address(listener)
        tasks.cancel_scope.cancel()


def answering(payload: bytes) -> Handler:
    """Return a handler that answers a request with these bytes and closes."""

    async def handle(stream: SocketStream) -> None:
        await stream.receive()
        await stream.send(payload)

    return handle


def http(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    """Return the bytes of an HTTP answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def _address(listener: TypedAttributeProvider) -> Address:
    return Address("127.0.0.1", int(listener.extra(SocketAttribute.local_port)))  # noqa: S610 - no Django here


class LookupNodes:
    """Lookup nodes that answer through respx: set what they say, see what they were asked."""

    def __init__(self) -> None:
        self.router = respx.MockRouter(assert_all_called=False)
        self.client = httpx.AsyncClient(transport=httpx.MockTransport(self.router.async_handler))

    def lists(self, name: str, *listed: str, **options: Any) -> respx.Route:
        """Let a node answer listlookup; without any listed it is one of the original NSQ."""
        answer = httpx.Response(200, json=list_json(*listed, **options)) if listed else not_found()
        return self.route(name, "/listlookup", answer)

    def finds(self, name: str, answer: Any) -> respx.Route:
        """Let a node answer lookup with data, a response, an exception or a function."""
        return self.route(name, "/lookup", answer)

    def route(self, name: str, path: str, answer: Any, method: str = "GET") -> respx.Route:
        """Let a node answer a path."""
        route = self.router.route(
            method=method, host=name.partition(":")[0], port=int(name.partition(":")[2]), path=path
        )
        if isinstance(answer, (httpx.Response, dict)):
            response = answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)
            return route.mock(side_effect=lambda request: _again(response))
        return route.mock(side_effect=answer)


def _again(response: httpx.Response) -> httpx.Response:
    return httpx.Response(response.status_code, headers=response.headers, content=response.content)


def not_found(text: str = "NOT_FOUND") -> httpx.Response:
    """Return a 404 as NSQ gives it."""
    return httpx.Response(404, json={"message": text})


async def eventually(condition: Callable[[], bool], within: float = 5.0) -> None:
    """Wait until a condition holds; fail after so many seconds."""
    with anyio.fail_after(within):
        while not condition():  # noqa: ASYNC110 - conditions here have no event
            await anyio.sleep(0.001)
