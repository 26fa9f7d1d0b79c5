"""A failed connection that is half closed shows when the server has executed what it received."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from nsqext.errors import ConnectionLost, NsqError
from nsqext.transport.connection import Connection
from nsqext.transport.half_closed import HalfClosed
from nsqext.types import Address
from tests.support.connections import pub

pytestmark = pytest.mark.anyio


@contextmanager
def _connected() -> Iterator[tuple[Connection, socket.socket]]:
    """Return a connection that half closes, and its server's end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
    client.setblocking(False)
    connection = Connection(client, Address("127.0.0.1", 1), max_frame_size=1000)
    connection.half_closes = True
    with peer:
        peer.settimeout(10.0)
        yield connection, peer
    connection.close()


def _wait_until_readable(connection: Connection) -> None:
    """Wait until the kernel has what the server did."""
    half_closed = connection._half_closed
    assert half_closed is not None
    half_closed._sock.settimeout(10.0)
    half_closed._sock.recv(1, socket.MSG_PEEK)
    half_closed._sock.setblocking(False)


def _everything(peer: socket.socket) -> bytes:
    received = b""
    while data := peer.recv(1000):
        received += data
    return received


async def test_an_open_connection_is_finished_while_no_response_is_missing() -> None:
    with _connected() as (connection, peer):
        assert connection.finished
        replies = [connection.post(pub(b"1")), connection.post(pub(b"2"))]
        connection.flush()
        for reply in replies:
            assert not connection.finished
            peer.sendall(b"\0\0\0\6\0\0\0\0OK")
            while not reply.done:
                connection.poll()
        assert connection.finished


async def test_it_is_finished_once_the_server_has_ended_it() -> None:
    with _connected() as (connection, peer):
        replies = [connection.post(pub(b"1")), connection.post(pub(b"2"))]
        connection.flush()
        connection.fail(ConnectionLost("no response"))
        assert [type(reply.error) for reply in replies] == [ConnectionLost, ConnectionLost]
        assert (connection.usable, connection.finished, connection.fileno()) == (False, False, -1)
        assert _everything(peer) == pub(b"1") + pub(b"2"), "the server executes what was sent"
        assert not connection.finished
        peer.sendall(b"\0\0\0\6\0\0\0\0OK" * 5000)
        _wait_until_readable(connection)
        assert not connection.finished, "a late response is not the end"
        peer.close()
        while not connection.finished:
            _wait_until_readable(connection)
        assert connection.finished, "it stays finished"


async def test_a_server_that_has_ended_or_reset_it_executes_nothing_more() -> None:
    for reset in (False, True):
        with _connected() as (connection, peer):
            connection.post(pub(b"1"))
            if reset:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                _ = peer.recv(1000)
            peer.close()
            while connection.usable:
                connection.poll()
            assert connection.finished


def test_a_server_that_resets_it_later_executes_nothing_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
    client.setblocking(False)
    half_closed = HalfClosed(client)
    assert not half_closed.poll()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    assert select.select([client], [], [], 25)[0]
    assert half_closed.poll()
    assert client.fileno() == -1


async def test_its_close_resets_it_and_tells_nothing_about_the_server() -> None:
    with _connected() as (connection, peer):
        connection.post(pub(b"1"))
        connection.fail(ConnectionLost("no response"))
        connection.close()
        connection.close()
        assert not connection.finished
        with pytest.raises(BrokenPipeError):
            peer.sendall(b"\0\0\0\6\0\0\0\0OK")


async def test_a_connection_that_the_client_closes_is_not_half_closed() -> None:
    with _connected() as (connection, peer):
        reply = connection.post(pub(b"1"))
        connection.close()
        assert connection.finished
        assert isinstance(reply.error, NsqError)
        assert _everything(peer) == pub(b"1")
