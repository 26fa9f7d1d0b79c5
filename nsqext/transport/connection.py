"""One connection to nsqd: a coalescing writer, a reader that is whoever waits, and heartbeats.

The socket is our own and non-blocking. A lone request is sent inline by its caller. Where the event loop keeps the socket
registered (asyncio), it reads; elsewhere (trio) whoever waits for an answer reads for all. Those who write in the same turn of
the event loop share one send. Nothing here starts a task: somebody calls `Connection.tick` now and then, which answers heartbeats of an idle
connection, sees that it was closed, and gives up one whose server is silent.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import anyio
from anyio.lowlevel import cancel_shielded_checkpoint

from nsqext.errors import ConnectionLost, HeartbeatMissed, InvalidState, NsqError
from nsqext.protocol.client import ClientProtocol, Reply
from nsqext.protocol.layers import Layer, TlsLayer
from nsqext.transport.watch import watch_readable
from nsqext.types import Address

__all__ = ("Connection",)

_READ_SIZE = 16384
_FRESH = 0.02
"""Seconds after a read during which a connection is taken for alive; an older one is looked at before it is used."""

_clock = time.monotonic


class Connection:
    """A connection that was made; see `nsqext.transport.handshake.open_connection`.

    Args:
        sock: connected and non-blocking.
        address: of the node.
        max_frame_size: largest frame that is accepted, in bytes.
        request_timeout: seconds that an answer may take.
    """

    __slots__ = (
        "_draining",
        "_ended",
        "_flush_due",
        "_layers",
        "_out",
        "_oldest",
        "_reading",
        "_received",
        "_request_timeout",
        "_rest",
        "_sock",
        "_unwatch",
        "address",
        "closed",
        "heartbeat_interval",
        "on_messages",
        "protocol",
        "read_size",
    )

    def __init__(
        self, sock: socket.socket, address: Address, *, max_frame_size: int, request_timeout: float = 10.0
    ) -> None:
        self.address = address
        self.protocol = ClientProtocol(str(address), max_frame_size)
        self.protocol.read_ahead(False)
        self.heartbeat_interval = 0.0
        """Seconds between two heartbeats of the server; 0 when it sends none."""
        self.on_messages: Callable[[list[bytes]], None] | None = None
        """Takes the data of message frames, a list for each read."""
        self.closed = False
        self.read_size = _READ_SIZE
        """Bytes that one read takes at most."""
        self._sock = sock
        self._layers: tuple[Layer, ...] = ()
        self._out: list[bytes] = []
        self._rest = b""
        self._flush_due = False
        self._draining: anyio.Event | None = None
        self._unwatch: Callable[[], None] | None = None
        self._ended: anyio.Event | None = None
        self._reading = False
        self._request_timeout = request_timeout
        self._received = _clock()
        self._oldest = 0.0

    @property
    def usable(self) -> bool:
        """Whether nothing has gone wrong yet."""
        return self.protocol.error is None and not self.closed

    @property
    def in_flight(self) -> int:
        """Number of requests whose answer is awaited."""
        return self.protocol.waiting

    @property
    def local_address(self) -> str:
        """``host:port`` of this end; empty after the end."""
        try:
            host, port = self._sock.getsockname()[:2]
        except OSError:
            return ""
        return str(Address(host, port))

    # Requests

    async def request(self, data: bytes) -> bytes:
        """Send a command and return the data of its response.

        Raises:
            ServerError: the server answered with an error frame.
            NotSent: the connection was of no use any more before anything was sent, or the server did not look at it.
            ConnectionLost: the connection broke before the answer came; the command may have had its effect.

        Cancellation leaves the connection in order: the late answer finds nobody.
        """
        protocol = self.protocol
        if protocol.error is not None or self.closed:
            raise protocol.lost()
        reply = Reply()
        if protocol.waiting or self._out:
            await self._send_together(data, reply)
        else:
            now = _clock()
            if now - self._received > _FRESH:
                self.poll()
                if protocol.error is not None:
                    raise protocol.lost()
            self._oldest = now
            protocol.expect(reply)
            self._out.append(data)
            self.flush()
            if self._rest:
                await self.drain()
        while reply.data is None:
            if reply.error is not None:
                raise reply.error
            if self._reading:
                await self._wait_turn(reply)
            else:
                await self._read_for(reply)
        return reply.data

    async def _send_together(self, data: bytes, reply: Reply) -> None:
        self.protocol.expect(reply)
        self._out.append(data)
        if self._flush_due or self._rest:
            return
        self._flush_due = True
        try:
            await cancel_shielded_checkpoint()
        finally:
            self._flush_due = False
        await self.drain()

    async def _wait_turn(self, reply: Reply) -> None:
        event = anyio.Event()
        reply.wake = event.set
        try:
            await event.wait()
        except BaseException:
            reply.wake = None
            self._hand_over()
            raise

    async def _read_for(self, reply: Reply) -> None:
        self._reading = True
        reply.wake = None
        try:
            while reply.data is None and reply.error is None:
                await self._read_once(self.read_size)
        finally:
            self._reading = False
            self._hand_over()

    def _hand_over(self) -> None:
        if not self._reading:
            self.protocol.wake_next()

    # Reading

    async def read_forever(self) -> None:
        """Read until the connection ends, handing messages to ``on_messages``.

        Raises:
            NsqError: why it ended.
        """
        if self._unwatch is not None:
            self._ended = anyio.Event()
            await self._ended.wait()
        if self.protocol.error is not None:
            raise self.protocol.error
        if self._reading:
            raise InvalidState("somebody reads this connection already", node=str(self.address))
        self._reading = True
        try:
            while self.protocol.error is None:
                await self._read_once(self.read_size)
        finally:
            self._reading = False
            self._hand_over()
        raise self.protocol.error

    async def _read_once(self, size: int) -> None:
        try:
            await anyio.wait_readable(self._sock)
        except (anyio.ClosedResourceError, OSError):
            self._fail(ConnectionLost("the connection was closed here"))
            return
        self._receive(size)

    def poll(self) -> None:
        """Take what has arrived, without waiting; does nothing while somebody waits for it."""
        if not self.closed and (self._unwatch is not None or not self._reading):
            self._receive(_READ_SIZE)

    def _receive(self, size: int) -> None:
        try:
            data = self._sock.recv(size)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(ConnectionLost(f"the connection broke: {error.strerror or error}"))
            return
        if not data:
            self._fail(ConnectionLost("the server closed the connection"))
            return
        self._received = now = _clock()
        try:
            for layer in self._layers:
                data = layer.decode(data)
        except NsqError as error:
            self._fail(error)
            return
        waiting = self.protocol.waiting
        self._take(data)
        if self.protocol.waiting != waiting:
            self._oldest = now

    def _take(self, data: bytes) -> None:
        protocol = self.protocol
        messages = protocol.receive_data(data)
        if protocol.error is not None:
            self._stop_watching()
        if messages and self.on_messages is not None:
            self.on_messages(messages)
        if protocol.out:
            self._out += protocol.out
            protocol.out.clear()
            self.flush()

    def _fail(self, error: NsqError) -> None:
        self.protocol.fail(error)
        self._stop_watching()

    def _stop_watching(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
            self._reading = False
        if self._ended is not None:
            self._ended.set()

    # Writing

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
        for layer in reversed(self._layers):
            data = layer.encode(data)
        self._send(data)

    def _send(self, data: bytes) -> None:
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self._fail(ConnectionLost(f"the connection broke: {error.strerror or error}"))
            return
        self._rest = data[sent:] if sent < len(data) else b""

    async def drain(self) -> None:
        """Send everything that is kept, waiting for the kernel where it has to be."""
        self.flush()
        while self._rest and self.usable:
            if self._draining is not None:
                await self._draining.wait()
                continue
            await self._drain_rest()

    async def _drain_rest(self) -> None:
        self._draining = done = anyio.Event()
        try:
            while self._rest and self.usable:
                try:
                    await anyio.wait_writable(self._sock)
                except (anyio.ClosedResourceError, OSError):
                    self._fail(ConnectionLost("the connection was closed here"))
                    return
                self._send(self._rest)
                self.flush()
        finally:
            self._draining = None
            done.set()

    # Upkeep

    async def start_layer(self, layer: Layer) -> None:
        """Put a layer between frames and socket, and wait for the OK that the server sends inside it.

        Raises:
            ConnectionFailed: the TLS handshake failed.
            NsqError: the connection broke, or what came is not of this layer.
        """
        rest = self.protocol.take_rest()
        if isinstance(layer, TlsLayer):
            rest = await self._shake_hands(layer, rest)
            self._layers += (layer,)
        else:
            self._layers += (layer,)
            rest = layer.decode(rest)
        reply = Reply()
        self.protocol.expect(reply)
        self._take(rest)
        while not reply.done:
            await self._read_for(reply)
        if reply.error is not None:
            raise reply.error

    async def _shake_hands(self, layer: TlsLayer, data: bytes) -> bytes:
        """Go through the TLS handshake; returns what came behind it, decoded."""
        decoded = layer.decode(data) if data else b""
        while not layer.ready:
            self.write(layer.pending())
            await self.drain()
            await anyio.wait_readable(self._sock)
            try:
                data = self._sock.recv(_READ_SIZE)
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:
                raise ConnectionLost(f"the connection broke in the TLS handshake: {error.strerror or error}") from error
            if not data:
                raise ConnectionLost("the server closed the connection in the TLS handshake")
            decoded += layer.decode(data)
        self.write(layer.pending())
        await self.drain()
        return decoded

    def finish_handshake(self) -> None:
        """From now on frames are read as they come; until here one at a time, because a layer may begin behind each."""
        self.protocol.read_ahead()
        self._take(b"")
        if self.protocol.error is None:
            self._unwatch = watch_readable(self._sock, self._readable)
            self._reading = self._unwatch is not None

    def _readable(self) -> None:
        self._receive(self.read_size)

    def tick(self) -> None:
        """Look after an idle connection; call it a few times for each heartbeat interval, and a few times a second at best.

        Takes what has arrived (which answers heartbeats), goes on with what the kernel did not take, and gives the connection up
        when an answer takes longer than the request timeout or the server was silent for more than two heartbeat intervals.
        """
        if self.closed:
            return
        self.poll()
        if self._rest and self._draining is None:
            self._send(self._rest)
        self.flush()
        now = _clock()
        if self.protocol.waiting and now - self._oldest > self._request_timeout:
            self._fail(ConnectionLost(f"no answer within {self._request_timeout:g} s"))
        silence = 2 * self.heartbeat_interval
        if silence and now - self._received > silence + 1:
            self._fail(HeartbeatMissed(f"nothing was heard of the server for {now - self._received:.1f} s"))

    def close(self) -> None:
        """Close the socket at once. Whoever waits for an answer gets an error. May be called again."""
        if self.closed:
            return
        self._fail(ConnectionLost("the connection was closed here"))
        self.closed = True
        anyio.notify_closing(self._sock)
        self._sock.close()
