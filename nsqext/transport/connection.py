"""One connection to nsqd: requests and their answers, a reader that is whoever waits, and heartbeats.

A lone request is sent inline by its caller; those who write in the same turn of the event loop share one send. Where
the event loop keeps the socket registered (asyncio), it reads; elsewhere (trio) whoever waits for an answer reads for
all. Nothing here starts a task: somebody calls `Connection.tick` now and then, which answers heartbeats of an idle
connection, sees that it was closed, and gives up answers that take too long and servers that are silent.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio
from anyio.lowlevel import cancel_shielded_checkpoint

from nsqext.errors import ConnectionLost, HeartbeatMissed, InvalidState, NsqError
from nsqext.protocol.client.client_protocol import ClientProtocol, Reply
from nsqext.transport.event_loop import Waiter, watch_readable
from nsqext.transport.wire import Wire

if TYPE_CHECKING:
    from nsqext.protocol.layers import Layer
    from nsqext.types import Address

__all__ = ("Connection",)

_READ_SIZE = 16384
_FRESH = 0.02
"""Seconds after a read during which a connection is taken for alive; an older one is looked at before it is used."""
_NEVER = float("inf")

_clock = time.monotonic


class Connection(Wire):
    """A connection that was made; see `nsqext.transport.handshake.open_connection`.

    Args:
        sock: connected and non-blocking.
        address: of the node.
        max_frame_size: largest frame that is accepted, in bytes.
        request_timeout: seconds without any answer after which the connection is given up.
    """

    __slots__ = (
        "_crowded",
        "_ended",
        "_flush_due",
        "_oldest",
        "_reading",
        "_received",
        "_request_timeout",
        "heartbeat_interval",
        "on_messages",
        "protocol",
        "read_size",
    )

    def __init__(
        self, sock: socket.socket, address: Address, *, max_frame_size: int, request_timeout: float = 10.0
    ) -> None:
        super().__init__(sock, address)
        self.protocol: ClientProtocol = ClientProtocol(str(address), max_frame_size)
        self.protocol.read_ahead(False)
        self.heartbeat_interval: float = 0.0
        """Seconds between two heartbeats of the server; 0 when it sends none."""
        self.on_messages: Callable[[list[bytes]], None] | None = None
        """Takes the data of message frames, a list for each read."""
        self.read_size: int = _READ_SIZE
        """Bytes that one read takes at most."""
        self._flush_due = False
        self._crowded = False
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

    # Requests

    async def request(self, data: bytes, deadline: float = _NEVER, *, breaks: bool = False) -> bytes:
        """Send a command and return the data of its response.

        Args:
            data: the command.
            deadline: in seconds of the monotonic clock; looked at when the connection ticks.
            breaks: an error frame in answer to it leaves the stream out of step, so that the connection is given up.

        Raises:
            ServerError: the server answered with an error frame.
            NotSent: the connection was of no use any more before anything was sent, or the server did not look at it.
            ConnectionLost: the connection broke, or the deadline passed, before the answer came; the command may have
                had its effect.

        Cancellation leaves the connection in order: the late answer finds nobody.
        """
        protocol = self.protocol
        if protocol.error is not None or self.closed:
            raise protocol.lost()
        reply = Reply(deadline, breaks)
        if protocol.waiting or self._out or self._crowded:
            self._send_together(data, reply)
        else:
            self._send_alone(data, reply)
        watch = self._watch
        if watch is None:
            return await self._wait_reading(reply)
        if reply.error is None:
            waiter = Waiter(watch)
            reply.wake = waiter.set
            try:
                await waiter
            finally:
                reply.wake = None
        if reply.error is not None:
            raise reply.error
        return reply.data or b""

    def _send_alone(self, data: bytes, reply: Reply) -> None:
        now = _clock()
        if now - self._received > _FRESH:
            self.poll()
            if self.protocol.error is not None:
                raise self.protocol.lost()
        self._oldest = now
        self.protocol.expect(reply)
        self._out.append(data)
        self._kept += 1
        self.flush()

    def _send_together(self, data: bytes, reply: Reply) -> None:
        """Keep a command for the flush at the end of this turn of the event loop, which is started where it can be."""
        if not self.protocol.waiting:
            self._oldest = _clock()
        self.protocol.expect(reply)
        self._out.append(data)
        self._kept += 1
        if not self._flush_due and self._watch is not None:
            self._flush_due = True
            self._watch.call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._flush_due = False
        self.flush()

    async def _wait_reading(self, reply: Reply) -> bytes:
        """Wait for an answer where the event loop does not read: the first who waits does."""
        if self._out and not self._flush_due:
            self._flush_due = True
            try:
                await cancel_shielded_checkpoint()
            finally:
                self._flush_due = False
                self.flush()
        if self._rest:
            await self.drain()
        try:
            while reply.data is None:
                if reply.error is not None:
                    raise reply.error
                if self._reading:
                    event = anyio.Event()
                    reply.wake = event.set
                    await event.wait()
                else:
                    await self._read_for(reply)
        finally:
            reply.wake = None
            self._hand_over()
        return reply.data

    async def _read_for(self, reply: Reply) -> None:
        self._reading = True
        reply.wake = None
        try:
            while reply.data is None and reply.error is None:
                await self._read_once()
        finally:
            self._reading = False

    def _hand_over(self) -> None:
        if not self._reading:
            self.protocol.wake_next()

    # Reading

    async def read_forever(self) -> None:
        """Read until the connection ends, handing messages to ``on_messages``.

        Raises:
            NsqError: why it ended.
        """
        if self._watch is not None:
            self._ended = anyio.Event()
            await self._ended.wait()
        if self.protocol.error is not None:
            raise self.protocol.error
        if self._reading:
            raise InvalidState("somebody reads this connection already", node=str(self.address))
        self._reading = True
        try:
            while self.protocol.error is None:
                await self._read_once()
        finally:
            self._reading = False
            self._hand_over()
        raise self.protocol.error

    async def _read_once(self) -> None:
        try:
            await anyio.wait_readable(self._sock)
        except anyio.ClosedResourceError:
            return  # closed, or woken to see that an answer is not waited for any more
        except OSError as error:
            self._fail(ConnectionLost(f"the connection broke: {error.strerror or error}"))
            return
        self._receive()

    def poll(self) -> None:
        """Take what has arrived, without waiting; does nothing while a task waits for it."""
        if not self.closed and (self._watch is not None or not self._reading):
            self._receive()

    def _receive(self) -> None:
        try:
            data = self._sock.recv(self.read_size)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(ConnectionLost(f"the connection broke: {error.strerror or error}"))
            return
        if not data:
            self._fail(ConnectionLost("the server closed the connection"))
            return
        self._received = now = _clock()
        if self._layers:
            try:
                for layer in self._layers:
                    data = layer.decode(data)
            except NsqError as error:
                self._fail(error)
                return
        before = self.protocol.waiting
        self._take(data)
        after = self.protocol.waiting
        if after != before:
            self._oldest = now
            # many at once: they will all go on in the next turn, and share a send
            self._crowded = before - after > 1

    def _take(self, data: bytes) -> None:
        protocol = self.protocol
        messages = protocol.receive_data(data)
        if messages and self.on_messages is not None:
            self.on_messages(messages)
        if protocol.error is not None:
            self._end()
        elif protocol.out:
            self._out += protocol.out
            protocol.out.clear()
            self.flush()

    # Layers

    def add_layer(self, layer: Layer) -> None:
        """Put a layer between the socket and the layers above it; from now on everything passes through it."""
        self._layers += (layer,)

    async def exchange(self, data: bytes) -> bytes:
        """Send raw bytes and return the next ones that come, past the layers and the protocol: for a TLS handshake.

        Raises:
            ConnectionLost: the connection ended.
        """
        if data:
            self.write(data)
            await self.drain()
        while not self.closed:
            await anyio.wait_readable(self._sock)
            try:
                received = self._sock.recv(_READ_SIZE)
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:
                raise ConnectionLost(f"the connection broke: {error.strerror or error}") from error
            if not received:
                break
            return received
        raise ConnectionLost("the server closed the connection")

    async def receive_answer(self, data: bytes) -> bytes:
        """Return the next response, which nobody asked for, and of which ``data`` has arrived already.

        Raises:
            NsqError: an error frame came, or the connection ended.
        """
        reply = Reply()
        self.protocol.expect(reply)
        self._take(data)
        return await self._wait_reading(reply)

    def finish_handshake(self) -> None:
        """From now on frames are read as they come; until here one at a time, because a layer may begin behind each."""
        self.protocol.read_ahead()
        self._take(b"")
        if not self.closed:
            self._watch = watch_readable(self._sock, self._receive)
            self._reading = self._watch is not None

    # Upkeep

    def tick(self) -> None:
        """Look after the connection; call it a few times for each heartbeat interval, and a few times a second at best.

        Takes what has arrived (which answers heartbeats), goes on with what the kernel did not take, lets requests go
        whose deadline has passed, and gives the connection up when no answer came for longer than the request timeout,
        or nothing at all for more than two heartbeat intervals.
        """
        if self.closed:
            return
        self._catch_up()
        if self._rest and not self._draining:
            self._go_on()
        self.flush()
        now = _clock()
        if self.protocol.waiting:
            if self.protocol.expire(now) and self._watch is None:
                anyio.notify_closing(self._sock)
            if now - self._oldest > self._request_timeout:
                self._fail(ConnectionLost(f"no answer within {self._request_timeout:g} s"))
        silence = 2 * self.heartbeat_interval
        if silence and now - self._received > silence + 1:
            self._fail(HeartbeatMissed(f"nothing was heard of the server for {now - self._received:.1f} s"))

    def _catch_up(self) -> None:
        """Take what has arrived before anybody is called late, also in place of a task that waits to read it.

        After the event loop was blocked this may come before that task has its turn.
        """
        before = self._received
        self._receive()
        if self._received != before and self._reading and self._watch is None:
            anyio.notify_closing(self._sock)

    def fail(self, error: NsqError) -> None:
        """Give the connection up at once; whoever waits for an answer gets an error that tells why."""
        self._fail(error)

    def close(self) -> None:
        """Close the socket at once. Whoever waits for an answer gets an error. May be called again."""
        if not self.closed:
            self._fail(ConnectionLost("the connection was closed here"))

    def _fail(self, error: NsqError, unsent: int = 0) -> None:
        self.protocol.fail(error, unsent + self._kept)
        self._end()

    def _end(self) -> None:
        if not self.closed:
            self._shut()
            self._reading = False
            if self._ended is not None:
                self._ended.set()
