"""A connection that threads share, and its peer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from nsqext.transport.connection import Connection
from nsqext.transport.thread_connections import ThreadConnections, ThreadRequest
from nsqext.types import Address
from tests.support.fake_nsqd import ok

if TYPE_CHECKING:
    from nsqext.protocol.client.client_protocol import Reply


class Command(ThreadRequest):
    """A command that a thread sends by itself."""

    def __init__(self, connection: Connection, data: bytes, deadline: float) -> None:
        self._connection = connection
        self._arguments = (data, deadline)

    def post(self) -> tuple[Connection, Reply]:
        return self._connection, self._connection.post(*self._arguments)

    def result(self) -> bytes:
        """Return the data of the response; raises its error."""
        reply = self.answer()
        assert reply is not None
        if reply.error is not None:
            raise reply.error
        return reply.data or b""


class Shared:
    """A connection that threads share."""

    def __init__(self, connection: Connection, socket: Socket) -> None:
        self.connection, self.socket = connection, socket
        self.connections = ThreadConnections()
        self.connections.add(connection)

    def request(self, data: bytes, deadline: float) -> bytes:
        """Send a command, and return the data of its response."""
        command = Command(self.connection, data, deadline)
        self.connections.run(command)
        return command.result()


class Sending(Command):
    """Holds up the requests of other threads, as a thread does while it sends, until `leave` is set."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection, b"", 0)
        self.entered, self.leave = threading.Event(), threading.Event()

    def post(self) -> None:  # type: ignore[override]
        self.entered.set()
        assert self.leave.wait(25)


@contextmanager
def sending(shared: Shared, executor: ThreadPoolExecutor) -> Iterator[None]:
    """Let a thread send within a block, so that further requests wait in the queue."""
    sender = Sending(shared.connection)
    done = executor.submit(shared.connections.run, sender)
    assert sender.entered.wait(25)
    try:
        yield
    finally:
        sender.leave.set()
        done.result(25)


class Socket(socket.socket):
    """A socket; an interrupt may end a call that has sent."""

    interrupts = False

    def sendmsg(self, parts: Any, *rest: Any) -> int:
        sent = super().sendmsg(parts, *rest)
        if self.interrupts:
            raise KeyboardInterrupt
        return sent


@contextmanager
def blocking(request_timeout: float = 10.0) -> Iterator[tuple[Shared, socket.socket]]:
    """A connection that threads use, and the socket of its peer."""
    ours, right = socket.socketpair()
    left = Socket(fileno=ours.detach())
    left.setblocking(False)
    connection = Connection(left, Address("127.0.0.1", 1), max_frame_size=1000, request_timeout=request_timeout)
    shared = Shared(connection, left)
    connection.protocol.read_ahead()
    with right:
        yield shared, right
        connection.close()
        assert shared.connections.close(25)


def answer(sock: socket.socket) -> None:
    """Respond to each PUB with its body, until the client closes the connection."""
    with sock, sock.makefile("rb") as file, suppress(OSError):
        while file.readline():
            sock.sendall(ok(file.read(int.from_bytes(file.read(4), "big"))))
