"""A session on a socket: how much is read and written at a time, and what happens to bytes that are left."""

from __future__ import annotations

import socket
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, cast

import pytest

from nsqext.broker.fault_injection import NodeFaults, Rule
from nsqext.broker.nsqd.connection import ServerConnection
from nsqext.broker.nsqd.server import dialect_of
from nsqext.broker.nsqd.session import Session
from nsqext.protocol.client.client_protocol import FrameParser
from nsqext.protocol.frames import FrameType
from tests.support.nsqd_sessions import Client, host, make_node, ready_client, sized

if TYPE_CHECKING:
    from nsqext.broker.nsqd.node import Node


class _Socket:
    """Fake socket that accepts ``room`` bytes per write, and returns the test's data on reads."""

    def __init__(self) -> None:
        self.room = 1 << 30
        self.given: list[bytes] = []
        self.taken = bytearray()
        self.closed = False

    def recv(self, size: int) -> bytes:
        return self.given.pop(0) if self.given else b""

    def send(self, data: bytes) -> int:
        taken = bytes(data[: self.room])
        self.taken += taken
        return len(taken)

    def shutdown(self, how: int) -> None: ...

    def close(self) -> None:
        self.closed = True


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


class _Served:
    """A connection to a node on a fake loop; also its server."""

    def __init__(self, node: Node, sock: Any = None) -> None:
        self.busy = False
        self.node, self.sock, self.loop = node, sock or _Socket(), _Loop()
        self.session = Session(node, "127.0.0.1:1000", dialect_of(node))
        self.faults = NodeFaults()
        self.connection = ServerConnection(cast("socket.socket", self.sock), self.session, self.faults, self.loop, self)
        self.ended = False
        self.connection.read_on()

    def flush(self) -> None:
        while self.node.dirty:
            sessions = self.node.dirty[:]
            self.node.dirty.clear()
            if self.session in sessions:
                self.connection.send()
        self.busy = False

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        raise AssertionError("nothing here waits")

    def gone(self, connection: ServerConnection) -> None:
        self.ended = True

    def receive(self, data: bytes) -> None:
        """Let the node read bytes of the client."""
        assert self.loop.readable is not None
        self.sock.given.append(data)
        self.loop.readable()

    def run(self) -> None:
        """Call back while the loop has something to do, except to read."""
        while self.loop.writable is not None or self.loop.soon:
            (self.loop.soon.pop() if self.loop.soon else self.loop.writable)()  # type: ignore[misc]

    @property
    def frames(self) -> list[tuple[int, bytes]]:
        return FrameParser().feed(bytes(self.sock.taken))


@pytest.mark.parametrize("room", [1 << 30, 1_500_000, 70_000], ids=["all at once", "some", "little"])
def test_a_client_that_keeps_reading_receives_more_than_one_send(room: int) -> None:
    node = make_node()
    host(node)
    served = _Served(node)
    served.sock.room = room
    served.receive(b"  V2SUB t ch 0\n")
    producer = Client(node)
    for _ in range(30):
        producer.ask(sized("PUB t 0", b"x" * 1_000_000))
    served.receive(b"RDY 30\n")
    assert (served.loop.writable is not None) is (room < 1 << 30)
    served.run()
    assert [kind for kind, _ in served.frames] == [FrameType.RESPONSE] + [FrameType.MESSAGE] * 30


def test_a_socket_is_read_again_after_the_commands_of_a_full_read() -> None:
    node = make_node()
    served = _Served(node)
    host(node)
    served.receive(b"  V2" + sized("PUB t", b"x") * 2000)
    turns = 1
    while served.loop.soon:
        assert served.loop.readable is None, "the socket is read only after its commands were run"
        assert len(served.sock.taken) <= turns * 256 * 10
        served.loop.soon.pop()()
        turns += 1
    assert (turns, len(served.sock.taken)) == (8, 2000 * 10)
    assert served.loop.readable is not None


def test_a_client_that_does_not_read_is_not_read_from() -> None:
    node = make_node(max_unsent=100_000)
    host(node)
    served = _Served(node)
    served.receive(b"  V2SUB t ch 0\n")
    served.sock.room = 0
    sent = 0
    while served.loop.readable is not None and sent < 10_000:
        served.receive(b"FIN 0123456789abcdef\n" * 200)
        sent += 200
        while served.loop.soon:
            served.loop.soon.pop()()
    assert 0 < sent < 10_000, "reading must stop"
    assert served.session.output.size < 200_000
    served.sock.room = 1 << 30
    served.run()
    assert len(served.frames) == 1 + sent
    assert served.loop.readable is not None


def test_messages_for_a_client_that_does_not_read_go_to_others() -> None:
    node = make_node()
    channel = host(node).partition.channel("ch")
    served = _Served(node)
    served.receive(b"  V2" + sized("IDENTIFY", b'{"output_buffer_size":-1}') + b"SUB t ch 0\nRDY 100\n")
    served.sock.room, producer = 0, Client(node)
    for _ in range(10):
        producer.ask(sized("PUB t 0", b"x"))
        served.flush()
    assert channel.stats().in_flight_count == 1
    assert len(ready_client(node, 9).messages()) == 9
    for _ in range(10):
        producer.ask(sized("PUB t 0", b"y"))
    served.sock.room = 1 << 30
    served.run()
    assert [data[-1:] for kind, data in served.frames if kind == FrameType.MESSAGE] == [b"x"] + [b"y"] * 10


def test_a_client_that_has_to_go_receives_everything_first_and_is_not_read_from() -> None:
    node = make_node()
    host(node)
    served = _Served(node)
    served.receive(b"  V2SUB t ch 0\n")
    served.sock.room = 0
    served.receive(b"NOP\n" * 300 + sized("PUB t 0", b"x") + b"BOGUS\n" + b"NOP\n" * 1000)
    while served.loop.soon:
        served.loop.soon.pop()()
    assert (served.session.closing, served.ended, served.loop.readable) == (True, False, None)
    served.sock.room = 5
    served.run()
    assert [data[:9] for _, data in served.frames] == [b"OK", b"OK", b"E_INVALID"]
    assert (served.ended, served.sock.closed) == (True, True)


def test_the_last_replies_arrive_although_bytes_of_the_client_are_not_read() -> None:
    """The kernel resets a connection that is closed with unread bytes, and drops what the client has no room for."""
    node = make_node()
    host(node)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.getsockname())
        sock, _ = server.accept()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 200_000)
        sock.setblocking(False)
        served = _Served(node, sock)
        client.sendall(b"  V2SUB t ch\nRDY 1\n")
        assert served.loop.readable is not None
        served.loop.readable()
        Client(node).ask(sized("PUB t", b"m" * 150_000))
        served.flush()
        assert served.loop.writable is None, "the kernel has accepted the message"
        client.sendall(b"BOGUS\n" + b"x" * 400_000)
        served.loop.readable()
        assert served.ended
        client.settimeout(25)
        received = b""
        while data := client.recv(100_000):
            received += data
    kinds = [kind for kind, _ in FrameParser().feed(received)]
    assert kinds == [FrameType.RESPONSE, FrameType.MESSAGE, FrameType.ERROR]


class _Faulty(_Served):
    """A connection whose faults run when the test says so."""

    def __init__(self, node: Node) -> None:
        self.works: list[Callable[[], Coroutine[Any, Any, None]]] = []
        super().__init__(node)

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.works.append(work)


@pytest.mark.anyio
async def test_replies_that_a_client_has_not_read_precede_replies_under_a_fault() -> None:
    served = _Faulty(make_node())
    served.receive(b"  V2")
    served.sock.room = 3
    served.faults.add(Rule("delay", "in", peer="10.0.0.1:1", seconds=1.0))
    for answer in (b"one", b"two"):
        served.session.answer(answer)
        served.flush()
        await served.works.pop()()
    served.sock.room = 1 << 30
    served.run()
    assert [data for _, data in served.frames] == [b"one", b"two"]
