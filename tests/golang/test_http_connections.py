"""Clients that send no more while their request is handled."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from nsqext import sync
from nsqext.broker import Cluster
from nsqext.golang.http_heads import BAD_REQUEST
from nsqext.http.uvicorn_server import HttpServer, listen
from nsqext.types import Address

if TYPE_CHECKING:
    from anyio.abc import SocketStream

DEADLINE = 20.0
_GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
_START = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]}


@pytest.fixture
def anyio_backend() -> str:
    """The servers run on asyncio, in a thread of their own where a test runs on another event loop."""
    return "asyncio"


@asynccontextmanager
async def connected(app: Any) -> AsyncIterator[SocketStream]:
    """Serve an application; yield a connection to it."""
    listener = listen(Address("127.0.0.1", 0))
    server = HttpServer(app)
    async with anyio.create_task_group() as tasks:
        await tasks.start(server.serve, listener)
        with anyio.fail_after(DEADLINE):
            async with await anyio.connect_tcp("127.0.0.1", listener.getsockname()[1]) as client:
                yield client
        server.stop()


async def received(client: SocketStream) -> bytes:
    found = b""
    with anyio.fail_after(DEADLINE):
        async for chunk in client:
            found += chunk
    return found


@pytest.mark.anyio
async def test_a_response_that_has_not_begun_is_sent_to_a_client_that_sends_no_more() -> None:
    ended = anyio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await ended.wait()
        await send(_START)
        await send({"type": "http.response.body", "body": b"late"})

    async with connected(app) as client:
        await client.send(_GET)
        await client.send_eof()
        await anyio.sleep(0.05)  # the end of the stream arrives
        ended.set()
        assert (await received(client)).endswith(b"\r\n\r\nlate")


@pytest.mark.anyio
async def test_a_stream_ends_when_its_reader_disconnects() -> None:
    left = anyio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(_START)
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async with connected(app) as client:
        await client.send(_GET)
        while not (await client.receive()).endswith(b"a"):
            pass
        await client.aclose()
        await left.wait()


@pytest.mark.parametrize(
    ("generation", "body", "answer", "stored", "closes"),
    [
        ("redesigned", b"Content-Length: 10\r\n\r\nabc", b"\r\n\r\nOK", 1, False),
        ("original", b"Content-Length: 10\r\n\r\nabc", b'{"message":"INTERNAL_ERROR"}', 0, False),
        ("original", b"Transfer-Encoding: chunked\r\n\r\n5\r\nabc", b'{"message":"INTERNAL_ERROR"}', 0, True),
    ],
)
def test_a_publish_whose_body_ends_early(
    generation: str, body: bytes, answer: bytes, stored: int, closes: bool
) -> None:
    with Cluster(nodes=1, generation=generation) as cluster:
        cluster.create_topic("half", channels=["ch"])
        (node,) = cluster.nodes.values()
        host, _, port = node.http.rpartition(":")
        with socket.create_connection((host, int(port)), DEADLINE) as client:
            client.sendall(f"POST /pub?topic=half HTTP/1.1\r\nHost: {node.http}\r\n".encode() + body)
            client.shutdown(socket.SHUT_WR)
            found = b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert found.endswith(answer)
        assert (b"\r\nconnection: close\r\n" in found) is closes
        with sync.Admin(cluster.lookupd) as admin:
            assert admin.stats("half").partitions[0].messages == stored


def test_a_head_that_arrives_byte_by_byte_is_read_as_a_whole_one_is() -> None:
    with Cluster(nodes=1) as cluster:
        (node,) = cluster.nodes.values()
        host, _, port = node.http.rpartition(":")
        with socket.create_connection((host, int(port)), DEADLINE) as client:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(2):  # on one connection
                for byte in b"GET http://x/ping HTTP/1.1\r\nHost: localhost\r\n\r\n":
                    client.sendall(bytes([byte]))
                found = b""
                while not found.endswith(b"\r\n\r\nOK"):
                    found += client.recv(1 << 16)
                assert found.startswith(b"HTTP/1.1 200 OK")
            for byte in b"GET ping HTTP/1.1\n":
                client.sendall(bytes([byte]))
            assert client.recv(1 << 16) == BAD_REQUEST
