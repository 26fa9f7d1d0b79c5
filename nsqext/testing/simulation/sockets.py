"""Sockets in memory that behave like the kernel's: partial writes, full buffers, resets, half-open peers."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

HOST = "127.0.0.1"


class Links(Protocol):
    """What sockets use of `nsqext.testing.simulation.network.Network`."""

    listeners: dict[int, SimulatedSocket]
    dead: set[str]
    stalled: set[str]

    def next_number(self) -> int: ...
    def take_fd(self, sock: SimulatedSocket, /) -> int: ...
    def take_port(self) -> int: ...
    def host_of(self, port: int, /) -> str: ...
    def draw_capacity(self) -> int: ...
    def dial(self, sock: SimulatedSocket, /) -> None: ...
    def send(self, sock: SimulatedSocket, data: bytes, /) -> int: ...
    def end(self, sock: SimulatedSocket, /) -> None: ...
    def received(self, sock: SimulatedSocket, data: bytes, /) -> None: ...
    def close(self, sock: SimulatedSocket, /) -> None: ...


class SimulatedSocket(socket.socket):
    """A TCP socket of a host, made by `Network.socket`."""

    def __init__(self, network: Links, host: str) -> None:
        # without socket.socket.__init__, which would open a file descriptor
        self.network: Links = network
        self.host: str = host
        self.number: int = network.next_number()
        self.fd: int = network.take_fd(self)
        self.address: tuple[str, int] = (HOST, 0)
        self.peer: SimulatedSocket | None = None
        self.remote: tuple[str, int] | None = None
        self.buffer: bytearray = bytearray()
        self.capacity: int = network.draw_capacity()
        self.connecting: bool = False
        self.listening: bool = False
        self.ended: bool = False
        self.eof: bool = False
        self.fin_sent: bool = False
        self.resets: bool = False
        self.error: int = 0
        self.backlog: deque[SimulatedSocket] = deque()
        self.segments: deque[tuple[float, int, bytes]] = deque()
        self.unread: int = 0
        self.last_arrival: float = 0.0

    # Methods of socket.socket

    family: int = socket.AF_INET  # type: ignore[assignment]
    type: int = socket.SOCK_STREAM  # type: ignore[assignment]
    proto: int = socket.IPPROTO_TCP
    timeout: float = 0.0

    def fileno(self) -> int:
        """Return a number beyond real file descriptors; -1 after `close`."""
        return -1 if self.ended else self.fd

    def setblocking(self, flag: bool, /) -> None: ...

    def settimeout(self, value: float | None, /) -> None: ...

    def gettimeout(self) -> float:
        return 0.0

    def setsockopt(self, level: int, option: int, value: Any = None, *_: Any) -> None:
        """Record whether `close` resets the connection; ignore all other options."""
        if (level, option) == (socket.SOL_SOCKET, socket.SO_LINGER):
            self.resets = value == struct.pack("ii", 1, 0)

    def getsockopt(self, level: int, option: int, size: int = 0, /) -> Any:
        """Return and clear the pending error; 0 for all other options."""
        if (level, option) == (socket.SOL_SOCKET, socket.SO_ERROR):
            found, self.error = self.error, 0
            return found
        return bytes(size) if size else 0

    def getsockname(self) -> tuple[str, int]:
        self._check()
        return self.address

    def getpeername(self) -> tuple[str, int]:
        self._check()
        if self.remote is None or self.connecting:
            raise _failure(errno.ENOTCONN)
        return self.remote

    def bind(self, address: Any, /) -> None:
        self._check()
        port = address[1] or self.network.take_port()
        if port in self.network.listeners:
            raise _failure(errno.EADDRINUSE)
        self.address = (HOST, port)

    def listen(self, backlog: int = 128, /) -> None:
        self._check()
        if self.address[1] in self.network.listeners:
            raise _failure(errno.EADDRINUSE)
        self.listening = True
        self.host = self.network.host_of(self.address[1])
        self.network.listeners[self.address[1]] = self

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        self._check()
        if not self.backlog:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        found = self.backlog.popleft()
        return found, found.remote or (HOST, 0)

    def connect(self, address: Any, /) -> None:
        """Begin to connect; the socket is writable at the end."""
        self._check()
        self.connecting = True
        self.address = (HOST, self.address[1] or self.network.take_port())
        self.remote = (address[0], address[1])
        self.network.dial(self)
        raise BlockingIOError(errno.EINPROGRESS, os.strerror(errno.EINPROGRESS))

    def send(self, data: Any, flags: int = 0, /) -> int:
        """Send as the network takes it, at most what the buffers hold."""
        self._check()
        self._raise_error()
        if self.peer is None or self.fin_sent:
            raise _failure(errno.EPIPE)
        if self.host in self.network.dead:
            return len(data)
        room = self.room
        if room <= 0 or self.host in self.network.stalled:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return self.network.send(self, bytes(data[:room]))

    def sendmsg(self, buffers: Iterable[Any], *args: Any) -> int:
        return self.send(b"".join(buffers))

    def sendall(self, data: Any, flags: int = 0, /) -> None:
        raise NotImplementedError("a simulated socket does not block")

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        self._check()
        if self.host in self.network.stalled:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if self.buffer:
            data = bytes(self.buffer[:size])
            del self.buffer[:size]
            self.network.received(self, data)
            return data
        self._raise_error()
        if self.eof or self.peer is None:
            return b""
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
        data = self.recv(size or len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def shutdown(self, how: int, /) -> None:
        self._check()
        if self.peer is None:
            raise _failure(errno.ENOTCONN)
        if how != socket.SHUT_RD and not self.fin_sent:
            self.fin_sent = True
            self.network.end(self)

    def close(self) -> None:
        """Close; the peer reads the end, or a reset if bytes are unread."""
        if not self.ended:
            self.network.close(self)

    def detach(self) -> int:
        raise NotImplementedError("a simulated socket has no file descriptor")

    def __enter__(self) -> SimulatedSocket:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SimulatedSocket {self.number} {self.host} {self.address} {self.remote}>"

    # State

    def _check(self) -> None:
        if self.ended:
            raise _failure(errno.EBADF)

    def _raise_error(self) -> None:
        if self.error:
            found, self.error = self.error, 0
            raise _failure(found)

    @property
    def room(self) -> int:
        """Free bytes in the buffers of both ends."""
        peer = self.peer
        return self.capacity - self.unread - (len(peer.buffer) if peer is not None else 0)

    @property
    def readable(self) -> bool:
        if self.listening:
            return bool(self.backlog)
        return not self.connecting and bool(self.buffer or self.eof or self.error)

    @property
    def writable(self) -> bool:
        """Whether `send` would take bytes or fail, or connecting has ended."""
        return not self.connecting and (bool(self.error) or self.eof_sent or self.room > self.capacity // 4)

    @property
    def eof_sent(self) -> bool:
        return self.fin_sent or self.peer is None


def _failure(number: int) -> OSError:
    return OSError(number, os.strerror(number))
