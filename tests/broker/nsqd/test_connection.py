"""A connection on a socket with a limited send buffer."""

from __future__ import annotations

import socket
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, cast

import pytest

from nsqext.broker.fault_injection import NodeFaults
from nsqext.broker.nsqd.connection import ServerConnection
from nsqext.broker.nsqd.server import dialect_of
from nsqext.broker.nsqd.session import Session
from nsqext.protocol.client.client_protocol import FrameParser
from nsqext.protocol.frames import FrameType
from tests.support.nsqd_sessions import Client, host, make_node, sized

if TYPE_CHECKING:
    from nsqext.broker.nsqd.node import Node


class _Socket:
    """Fake socket that accepts ``room`` bytes per write, and returns the test's data on reads."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.given: list[bytes] = []
        self.taken = bytearray()

    def recv(self, size: int) -> bytes:
        return self.given.pop(0)

    def send(self, data: bytes) -> int:
        taken = bytes(data[: self.room])
        self.taken += taken
        return len(taken)


class _Loop:
    def __init__(self) -> None:
        self.readable: Callable[[], None] | None = None
        self.writable: Callable[[], None] | None = None
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def add_reader(self, fd: socket.socket, callback: Callable[[], None]) -> None:
        self.readable = callback

    def remove_reader(self, fd: socket.socket) -> bool:
        self.readable = None
        return True

    def add_writer(self, fd: socket.socket, callback: Callable[[], None]) -> None:
        self.writable = callback

    def remove_writer(self, fd: socket.socket) -> bool:
        self.writable = None
        return True


class _Host:
    def __init__(self, node: Node) -> None:
        self.busy = False
        self.connections: dict[Session, ServerConnection] = {}
        self._node = node

    def flush(self) -> None:
        while self._node.dirty:
            sessions = self._node.dirty[:]
            self._node.dirty.clear()
            for session in sessions:
                if session in self.connections:
                    self.connections[session].send()
        self.busy = False

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        raise AssertionError("nothing here waits")

    def gone(self, connection: ServerConnection) -> None:
        raise AssertionError("nothing here ends")


def _send(sock: _Socket, loop: _Loop, data: bytes) -> None:
    assert loop.readable is not None
    sock.given.append(data)
    loop.readable()


@pytest.mark.parametrize("room", [1 << 30, 1_500_000, 70_000], ids=["all at once", "some", "little"])
def test_a_client_that_keeps_reading_receives_more_than_one_send(room: int) -> None:
    node = make_node()
    host(node)
    sock, loop, server = _Socket(room), _Loop(), _Host(node)
    session = Session(node, "127.0.0.1:1000", dialect_of(node))
    connection = ServerConnection(cast("socket.socket", sock), session, NodeFaults(), loop, server)
    server.connections[session] = connection
    connection.read_on()
    _send(sock, loop, b"  V2SUB t ch 0\n")
    producer = Client(node)
    for _ in range(30):
        producer.ask(sized("PUB t 0", b"x" * 1_000_000))
    _send(sock, loop, b"RDY 30\n")
    writes = 0
    while loop.writable is not None:
        loop.writable()
        writes += 1
    frames = FrameParser().feed(bytes(sock.taken))
    assert [kind for kind, _ in frames] == [FrameType.RESPONSE] + [FrameType.MESSAGE] * 30
    assert (writes > 0) is (room < 1 << 30)


def _connect(node: Node, sock: _Socket, loop: _Loop, server: _Host) -> ServerConnection:
    session = Session(node, "127.0.0.1:1000", dialect_of(node))
    connection = ServerConnection(cast("socket.socket", sock), session, NodeFaults(), loop, server)
    server.connections[session] = connection
    connection.read_on()
    return connection


def test_a_socket_is_read_again_after_the_commands_of_a_full_read() -> None:
    node = make_node()
    sock, loop, server = _Socket(1 << 30), _Loop(), _Host(node)
    _connect(node, sock, loop, server)
    host(node)
    _send(sock, loop, b"  V2" + sized("PUB t", b"x") * 2000)
    turns = 1
    while loop.soon:
        assert loop.readable is None, "the socket is read only after its commands were run"
        assert len(sock.taken) <= turns * 256 * 10
        loop.soon.pop()()
        turns += 1
    assert (turns, len(sock.taken)) == (8, 2000 * 10)
    assert loop.readable is not None


def test_a_client_that_does_not_read_is_not_read_from() -> None:
    node = make_node(max_unsent=100_000)
    host(node)
    sock, loop, server = _Socket(1 << 30), _Loop(), _Host(node)
    connection = _connect(node, sock, loop, server)
    _send(sock, loop, b"  V2SUB t ch 0\n")
    sock.room = 0
    sent = 0
    while loop.readable is not None and sent < 10_000:
        _send(sock, loop, b"FIN 0123456789abcdef\n" * 200)
        sent += 200
        while loop.soon:
            loop.soon.pop()()
    assert 0 < sent < 10_000, "reading must stop"
    assert connection.session.output.size < 200_000
    sock.room = 1 << 30
    while loop.writable is not None or loop.soon:
        (loop.soon.pop() if loop.soon else loop.writable)()  # type: ignore[misc]
    assert len(FrameParser().feed(bytes(sock.taken))) == 1 + sent
    assert loop.readable is not None
