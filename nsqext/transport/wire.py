"""The writing half of a connection: what is written in one turn of the event loop leaves as one piece.

The socket is our own and non-blocking. A piece that the kernel does not take at once is kept; where the event loop
watches the socket it goes on by itself, elsewhere whoever waits in `Wire.drain` does it.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import anyio

from nsqext.errors import ConnectionLost, NsqError
from nsqext.types import Address

if TYPE_CHECKING:
    from nsqext.protocol.layers import Layer
    from nsqext.transport.event_loop import Watch

__all__ = ("Wire",)


class Wire:
    """Bytes out through layers and a socket.

    Args:
        sock: connected and non-blocking.
        address: of the node.

    Attributes:
        closed: the socket is closed.
    """

    __slots__ = ("_drained", "_draining", "_kept", "_layers", "_out", "_rest", "_sock", "_watch", "address", "closed")

    def __init__(self, sock: socket.socket, address: Address) -> None:
        self.address: Address = address
        self.closed: bool = False
        self._sock = sock
        self._layers: tuple[Layer, ...] = ()
        self._watch: Watch | None = None
        self._out: list[bytes] = []
        self._kept = 0
        """Number of requests in ``_out``, of which nothing was sent yet."""
        self._rest = b""
        self._draining = False
        self._drained: anyio.Event | None = None

    @property
    def local_address(self) -> str:
        """``host:port`` of this end; empty after the end."""
        try:
            host, port = self._sock.getsockname()[:2]
        except OSError:
            return ""
        return str(Address(host, port))

    def write(self, data: bytes) -> None:
        """Keep bytes for the next `flush`."""
        self._out.append(data)

    def flush(self) -> None:
        """Send what is kept, as one piece, as far as the kernel takes it."""
        out = self._out
        if self._rest or not out or self.closed:
            return
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        requests, self._kept = self._kept, 0
        if self._layers:
            try:
                for layer in reversed(self._layers):
                    data = layer.encode(data)
            except NsqError as error:
                self._fail(error, requests)
                return
        self._send(data, requests)

    def _send(self, data: bytes, requests: int = 0) -> None:
        """Send, and keep what the kernel does not take; ``requests`` begin in this piece."""
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._fail(ConnectionLost(f"the connection broke: {error.strerror or error}"), requests)
            return
        if sent < len(data):
            self._rest = data[sent:]
            if self._watch is not None:
                self._watch.start_writing(self._go_on)
        elif self._rest:
            self._rest = b""

    def _go_on(self) -> None:
        """Send the rest, and what was kept behind it."""
        if self._rest and not self.closed:
            self._send(self._rest)
        self.flush()
        if not self._rest:
            if self._watch is not None:
                self._watch.stop_writing()
            self._tell_drained()

    def _tell_drained(self) -> None:
        if self._drained is not None:
            self._drained.set()
            self._drained = None

    async def drain(self) -> None:
        """Send everything that is kept, waiting for the kernel where it has to be, until the end at worst.

        Cancellation leaves the rest to the event loop, or to whoever drains next.
        """
        self.flush()
        while self._rest and not self.closed:
            if self._watch is not None or self._draining:
                self._drained = self._drained or anyio.Event()
                await self._drained.wait()
            else:
                await self._drain_here()

    async def _drain_here(self) -> None:
        self._draining = True
        try:
            while self._rest and not self.closed:
                try:
                    await anyio.wait_writable(self._sock)
                except anyio.ClosedResourceError:
                    continue
                self._go_on()
        finally:
            self._draining = False
            self._tell_drained()

    def _fail(self, error: NsqError, unsent: int = 0) -> None:
        """End the connection because of an error; ``unsent`` of the last requests never left."""
        raise error

    def _shut(self) -> None:
        """Close the socket; who waits for it is woken."""
        if self.closed:
            return
        self.closed = True
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        anyio.notify_closing(self._sock)
        self._sock.close()
        self._tell_drained()
