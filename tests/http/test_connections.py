"""Connections that stay open between requests, over real sockets."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import httpcore
import pytest

from nsqext._version import __version__
from nsqext.http import connections
from nsqext.http.client import HttpClient, HttpRequestFailed, HttpResponse, without_certificates
from tests.support.fake_lookupd import eventually, http, serving
from tests.support.tables import table

if TYPE_CHECKING:
    from anyio.abc import SocketStream

pytestmark = pytest.mark.anyio


@table(
    ("url", "host", "target"),
    [
        ("http://n1:4161/lookup?topic=t", b"n1:4161", b"/lookup?topic=t"),
        ("http://n1", b"n1", b"/"),
        ("http://N1:80/nsq?", b"n1", b"/nsq"),
        ("https://n1:443/a%20b", b"n1", b"/a%20b"),
        ("https://n1:80?a=b", b"n1:80", b"/?a=b"),
        ("http://[::1]:4161/", b"[::1]:4161", b"/"),
        ("http://b\u00fccher:1/\u00fc b?c=\u00e9#d", b"xn--bcher-kva:1", b"/%C3%BC%20b?c=%C3%A9"),
        ("http://user:word@n1:4161/x", b"n1:4161", b"/x"),
    ],
)
def test_urls(url: str, host: bytes, target: bytes) -> None:
    found, named = connections.parse_url(url)
    assert (named, found.target) == (host, target)
    assert found.scheme == url.partition(":")[0].encode()


@table(
    "url",
    ["http:///x", "http://n1:port/", "http://n1:65536/", "http://[bad/", "http://" + "\u00fc" * 64, "ftp://n1/", "n1"],
)
def test_urls_that_cannot_be_requested(url: str) -> None:
    with pytest.raises((ValueError, httpcore.UnsupportedProtocol)):
        connections.parse_url(url)


async def test_a_request_as_the_server_receives_it() -> None:
    heads: list[bytes] = []

    async def handle(stream: SocketStream) -> None:
        for _ in range(4):
            received = await stream.receive()
            while received.startswith(b"POST /b") and not received.endswith(b"expected"):
                received += await stream.receive()
            heads.append(received)
            await stream.send(http(b"{}", "X-Name: one", "x-name: two"))

    async with serving(handle) as address:
        client = HttpClient(25.0)
        reply = await client.request("GET", f"http://{address}/a", headers={"X-Own": "1", "User-Agent": "own"})
        await client.request("POST", f"http://{address}/b", content=b"expected")
        await client.request("POST", f"http://{address}/c")
        await client.request("PUT", f"http://{address}/d")
        await client.aclose()
    common = "Accept-Encoding: identity\r\nUser-Agent: "
    assert [head.decode() for head in heads] == [
        f"GET /a HTTP/1.1\r\nHost: {address}\r\n{common}own\r\nX-Own: 1\r\n\r\n",
        f"POST /b HTTP/1.1\r\nHost: {address}\r\nContent-Length: 8\r\n{common}nsqext/{__version__}\r\n\r\nexpected",
        f"POST /c HTTP/1.1\r\nHost: {address}\r\nContent-Length: 0\r\n{common}nsqext/{__version__}\r\n\r\n",
        f"PUT /d HTTP/1.1\r\nHost: {address}\r\nContent-Length: 0\r\n{common}nsqext/{__version__}\r\n\r\n",
    ]
    assert reply.headers["x-name"] == "one, two"


class Server:
    """Answers each request with the number of its connection, from 1."""

    def __init__(self) -> None:
        self.accepted = 0
        self.open: dict[int, SocketStream] = {}
        self.held: dict[str, anyio.Event] = {}  # by path: the answers that wait

    async def handle(self, stream: SocketStream) -> None:
        self.accepted += 1
        number = self.accepted
        self.open[number] = stream
        try:
            while True:
                path = (await stream.receive()).split(b" ")[1].decode()
                if path in self.held:
                    await self.held[path].wait()
                await stream.send(http(str(number).encode()))
        finally:
            del self.open[number]

    async def accepts(self, count: int) -> None:
        """Wait until it has accepted ``count`` connections."""
        await eventually(lambda: self.accepted == count)


@asynccontextmanager
async def server_and_client() -> AsyncIterator[tuple[Server, HttpClient, Callable[[str], str]]]:
    server, client = Server(), HttpClient(25.0)
    async with serving(server.handle) as address:
        try:
            yield server, client, lambda path: f"http://{address}{path}"
        finally:
            await client.aclose()


async def ask(client: HttpClient, url: str) -> int:
    return int((await client.request("GET", url)).content)


async def ask_held(server: Server, client: HttpClient, url: Callable[[str], str], count: int) -> None:
    """Send ``count`` requests at a time, each of which needs a connection."""
    server.held = {f"/{number}": anyio.Event() for number in range(count)}
    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(ask, client, url(f"/{number}"))
        await server.accepts(count)
        for event in server.held.values():
            event.set()


async def test_a_request_uses_the_connection_that_became_idle_last() -> None:
    async with server_and_client() as (server, client, url):
        server.held = {"/first": anyio.Event(), "/second": anyio.Event()}
        numbers: list[int] = []

        async def hold(path: str) -> None:
            numbers.append(await ask(client, url(path)))

        async with anyio.create_task_group() as tasks:
            for count, path in enumerate(server.held, 1):
                tasks.start_soon(hold, path)
                await server.accepts(count)
            server.held["/second"].set()
            await eventually(lambda: numbers == [2])
            server.held["/first"].set()
        assert numbers == [2, 1]
        assert [await ask(client, url("/")) for _ in range(3)] == [1, 1, 1]
        assert server.accepted == 2


async def test_a_connection_belongs_to_one_server() -> None:
    async with server_and_client() as (one, client, url), server_and_client() as (other, _, url_of_other):
        for _ in range(2):
            assert await ask(client, url("/")) == await ask(client, url_of_other("/")) == 1
        assert one.accepted == other.accepted == 1


async def test_an_idle_connection_that_the_server_closed_is_not_used() -> None:
    async with server_and_client() as (server, client, url):
        await ask_held(server, client, url, 2)
        for stream in list(server.open.values()):
            await stream.send_eof()
        (transport,) = (client._transport,)
        assert isinstance(transport, connections.Connections)
        await eventually(lambda: all(connection.has_expired() for connection in transport._idle))
        assert await ask(client, url("/")) == 3
        await eventually(lambda: list(server.open) == [3])


async def test_only_so_many_connections_are_kept_and_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async with server_and_client() as (server, client, url):
        await ask_held(server, client, url, connections.KEPT_ALIVE + 4)
        await ask(client, url("/"))
        await eventually(lambda: len(server.open) == connections.KEPT_ALIVE)
        monkeypatch.setattr(connections, "IDLE", 0.0)
        assert await ask(client, url("/")) == server.accepted == connections.KEPT_ALIVE + 5
        await eventually(lambda: len(server.open) == 1)


@pytest.mark.parametrize("when", ["idle", "with a response", "before the request"])
async def test_the_end_closes_every_connection(when: str) -> None:
    async with server_and_client() as (server, _, url):
        made = connections.Connections(without_certificates())

        async def send() -> HttpResponse:
            return await made.send("GET", url("/"), {}, b"")

        async def read(response: HttpResponse) -> None:
            assert [part async for part in response.parts()]
            await response.aclose()

        if when == "before the request":  # which was about to be sent
            await made.aclose()
            await read(await send())
        else:
            response = await send()
            if when == "idle":
                await read(response)
            await made.aclose()
            await eventually(lambda: not server.open)
            if when == "with a response":
                await response.aclose()
        await eventually(lambda: server.accepted == 1 and not server.open)


def left_over(*kinds: type[object]) -> Counter[str]:
    """Return how many objects there are of some types."""
    gc.collect()
    return Counter(kind.__name__ for each in gc.get_objects() for kind in kinds if issubclass(type(each), kind))


async def test_a_client_keeps_nothing_of_requests_that_ended() -> None:
    async with server_and_client() as (server, client, url):

        async def ask_each() -> None:
            server.held = {"/held": anyio.Event()}
            assert await ask(client, url("/"))
            with anyio.move_on_after(0.001):
                await client.request("GET", url("/held"))
            with pytest.raises(HttpRequestFailed):
                await client.request("GET", "http://127.0.0.1:1/")
            server.held["/held"].set()
            await eventually(lambda: not server.open)

        await ask_each()
        kept = anyio.CancelScope, httpcore.AsyncHTTPConnection
        before = left_over(*kept)
        for _ in range(5):
            await ask_each()
        more = left_over(*kept) - before
        assert all(count < 5 for count in more.values()), f"each request leaves something: {more}"


async def test_a_cancelled_request_closes_its_connection() -> None:
    async with server_and_client() as (server, client, url):
        server.held = {"/held": anyio.Event()}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, client, url("/held"))
            await server.accepts(1)
            tasks.cancel_scope.cancel()
        assert await ask(client, url("/")) == 2
        server.held["/held"].set()
        await eventually(lambda: list(server.open) == [2])


async def test_a_request_that_cannot_be_sent_closes_its_connection() -> None:
    async with server_and_client() as (server, client, url):
        assert await ask(client, url("/")) == 1
        with pytest.raises(TypeError):
            await client.request("G\u00c9T", url("/"))
        await eventually(lambda: not server.open)
        assert await ask(client, url("/")) == 2


async def test_a_response_whose_body_is_not_read_closes_its_connection() -> None:
    closed = anyio.Event()

    async def handle(stream: SocketStream) -> None:
        await stream.receive()
        await stream.send(http(b"x" * 11))
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            await stream.receive()
        closed.set()

    async with serving(handle) as address:
        client = HttpClient(25.0, most=10)
        with pytest.raises(HttpRequestFailed, match="longer than 10 bytes"):
            await client.request("GET", f"http://{address}/")
        with anyio.fail_after(25):
            await closed.wait()
        await client.aclose()


async def test_closing_closes_idle_and_used_connections() -> None:
    async with server_and_client() as (server, client, url):
        server.held = {"/held": anyio.Event()}

        async def refused() -> None:
            with pytest.raises(HttpRequestFailed, match="closed before a response"):
                await ask(client, url("/held"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refused)
            await server.accepts(1)
            assert await ask(client, url("/")) == 2
            await client.aclose()
        server.held["/held"].set()
        await eventually(lambda: not server.open)


@pytest.mark.parametrize("turns", range(12))
async def test_a_request_that_the_end_of_the_client_interrupts_fails_as_others(turns: int) -> None:
    async with server_and_client() as (_, client, url):
        await ask(client, url("/"))

        async def ask_or_fail() -> None:
            with suppress(HttpRequestFailed):
                await client.request("GET", url("/"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask_or_fail)
            for _ in range(turns):
                await anyio.lowlevel.checkpoint()
            await client.aclose()
