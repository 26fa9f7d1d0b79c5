"""A connection to a scripted node, and requests in tasks of their own."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio

from nsqext.errors import NsqError
from nsqext.transport.connection import Connection
from nsqext.transport.handshake import open_connection
from nsqext.transport.options import ConnectionOptions
from nsqext.types import Address
from tests.support.fake_nsqd import Peer, scripted_node

__all__ = ("Caller", "connected_peer", "paired_connection", "pub", "until")


@asynccontextmanager
async def connected_peer(request_timeout: float = 10.0) -> AsyncIterator[tuple[Connection, Peer]]:
    """Open a connection to a scripted node; both ends are given."""
    options = ConnectionOptions(request_timeout=request_timeout)
    with anyio.fail_after(30):
        async with scripted_node() as node:
            connection, _ = await open_connection(node.address, options)
            try:
                yield connection, await node.accept()
            finally:
                connection.close()


def pub(body: bytes) -> bytes:
    """Return a PUB command."""
    return b"PUB t\n" + len(body).to_bytes(4, "big") + body


class Caller:
    """A request in a task of its own."""

    def __init__(
        self, connection: Connection, data: bytes, deadline: float = float("inf"), breaks: bool = False
    ) -> None:
        self.scope = anyio.CancelScope()
        self.outcome: bytes | NsqError | None = None
        self.ended = anyio.Event()
        self._request = (connection, data, deadline, breaks)

    async def __call__(self) -> None:
        connection, data, deadline, breaks = self._request
        try:
            with self.scope:
                try:
                    self.outcome = await connection.request(data, deadline, breaks=breaks)
                except NsqError as failure:
                    self.outcome = failure
        finally:
            self.ended.set()


async def until(condition: object, connection: Connection | None = None) -> None:
    """Wait for a condition; the connection ticks meanwhile."""
    assert callable(condition)
    with anyio.fail_after(25):
        while not condition():
            if connection is not None:
                connection.tick()
            await anyio.sleep(0.005)


@contextmanager
def paired_connection(request_timeout: float = 10.0) -> Iterator[tuple[Connection, socket.socket]]:
    """A connection and the socket of its peer, to write to without an await."""
    left, right = socket.socketpair()
    left.setblocking(False)
    connection = Connection(left, Address("127.0.0.1", 1), max_frame_size=1000, request_timeout=request_timeout)
    connection.finish_handshake()
    with right:
        yield connection, right
        connection.close()
