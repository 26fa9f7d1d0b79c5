"""A connection to nsqd: requests and responses, messages, joined writes, heartbeats and timeouts.

A lone request is sent at once; requests of the same turn of the event loop share a send. On asyncio the event loop
calls back when the socket is readable; on trio, the first task that awaits a response reads for all. A connection
starts no task: its owner calls `Connection.tick`.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING
from weakref import WeakSet

import anyio
from anyio.lowlevel import cancel_shielded_checkpoint

from nsqext.errors import ConnectionLost, HeartbeatMissed, InvalidState, NsqError, ProtocolError, RequestTimeout
from nsqext.protocol.client.client_protocol import ClientProtocol, Reply
from nsqext.protocol.client.commands import LARGE, Command, SendQueue
from nsqext.transport.event_loop import ResponseWaiter, Watch, watch_readable
from nsqext.types import Address

if TYPE_CHECKING:
    from nsqext.protocol.frames import MessageData
    from nsqext.protocol.layers import Layer
    from nsqext.transport.half_closed import HalfClosed

_READ_SIZE = 16384
_LARGEST_READ = 1 << 20  # a body of 20 kB costs half of what it costs with reads of 64 KiB
_FRESH = 0.02  # seconds after a read for which a connection counts as alive; later, a check precedes each request
# bytes of commands without response (FIN, RDY, NOP, …) kept while the server does not read
_MAX_UNSENT = 16 * 1024 * 1024
# parts of a system call; every system allows this number (IOV_MAX)
_MOST_PARTS = 64 if hasattr(socket.socket, "sendmsg") else 1
_NEVER = float("inf")
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time

_clock = time.monotonic


@cache
def _reuse_memory_of_reads() -> None:
    """Let the C library keep the memory of large reads; once in a process.

    glibc returns a freed block to the system unless a block of its size was freed before. A read that is not full
    frees a smaller block than it took, so that each read took new pages (100 kB a message: 235 → 70 µs).
    """
    bytes(2 * _LARGEST_READ)


class Connection:
    """A connection to nsqd, made by `nsqext.transport.handshake.open_connection`."""

    def __init__(
        self, sock: socket.socket, address: Address, *, max_frame_size: int, request_timeout: float = 10.0
    ) -> None:
        self.address: Address = address
        self.closed: bool = False
        #: with the error that ended the connection
        self.protocol: ClientProtocol = ClientProtocol(str(address), max_frame_size)
        self.protocol.read_ahead(False)
        self.heartbeat_interval: float = 0.0  #: seconds between heartbeats of the server; 0 for none
        #: called with the data of the message frames of each read; without it, messages end the connection
        self.on_messages: Callable[[list[MessageData]], None] | None = None
        self.on_request: Callable[[], None] | None = None  #: called before each request
        #: whether it is half closed after an error, until the server has executed the received commands; see `finished`
        self.half_closes: bool = False
        self._half_closed: HalfClosed | None = None
        self._sock = sock  # connected and non-blocking
        self._layers: tuple[Layer, ...] = ()
        self._watch: Watch | None = None
        # seconds without a response, or without progress of a send, after which the connection closes
        self._request_timeout = request_timeout
        # writing
        self._out: list[Command] = []
        self._queued = 0  # requests in ``_out`` and ``_rest``
        self._rest = SendQueue()  # of the last flush, not accepted by the kernel
        self._unsent = 0  # bytes queued by `write` while ``_rest`` was not empty
        self._sent = 0.0
        self._flush_due = False
        self._burst = False  # several responses arrived at once: their callers share the next send
        self._draining = False
        self._drained: anyio.Event | None = None
        # reading
        self._least_read = self._read_size = _READ_SIZE  # bytes of a read, at most
        self._reading = False
        self.received_at: float = _clock()  #: clock time of the last received bytes
        self._oldest = 0.0
        self._ended: anyio.Event | None = None
        self._detached = False
        _of_this_process.add(self)

    @property
    def usable(self) -> bool:
        return self.protocol.error is None and not self.closed

    @property
    def error(self) -> NsqError | None:
        return self.protocol.error

    @property
    def in_flight(self) -> int:
        return self.protocol.waiting

    @property
    def busy(self) -> bool:
        """Whether `tick` has timeouts to enforce, for a response or unsent bytes."""
        return bool(self.protocol.pending or self._rest or self._out)

    @property
    def finished(self) -> bool:
        """Whether the server executes no further command of this connection.

        All are answered, or the connection has ended; with ``half_closes``, the server must have ended it.
        """
        if not self.closed:
            return not self.protocol.pending
        return self._half_closed is None or self._half_closed.poll()

    @property
    def local_address(self) -> str:
        """``host:port`` of this end; empty after the close."""
        try:
            host, port = self._sock.getsockname()[:2]
        except OSError:
            return ""
        return str(Address(host, port))

    # Requests

    def request(self, data: Command, deadline: float = _NEVER, *, breaks: bool = False) -> Awaitable[bytes]:
        """Send a command, and return an awaitable for the data of its response.

        Args:
            deadline: in seconds of the monotonic clock; enforced by `tick`.
            breaks: see `Reply`; an error response closes the connection.

        Raises:
            ServerError: the response is an error frame.
            NotSent: the command was not sent, or not read by the server.
            RequestTimeout: no response before the deadline or within the request timeout.
            ConnectionLost: the connection failed before the response.

        After a timeout or a lost connection, the command may have had its effect. Cancellation leaves the connection
        usable: the late response is discarded.
        """
        reply = self.post(data, deadline, breaks=breaks)
        watch = self._watch
        return self._read_until(reply) if watch is None else ResponseWaiter(watch.turns, reply)

    def post(self, data: Command, deadline: float = _NEVER, *, breaks: bool = False) -> Reply:
        """Send a command as `request`; return its response, to be set later. Raises NotSent.

        After `detach`, the command is sent by the next `flush` if others wait for their responses.
        """
        protocol = self.protocol
        if protocol.error is not None or self.closed:
            raise protocol.loss()
        if self.on_request is not None:
            self.on_request()
        reply = Reply(deadline, breaks)
        if not (protocol.pending or self._out or self._burst):
            self._send_alone(data, reply)
        else:
            self._send_with_others(data, reply)
        return reply

    def _send_alone(self, data: Command, reply: Reply) -> None:
        now = _clock()
        if now - self.received_at > _FRESH:
            self.poll()
            if self.protocol.error is not None:
                raise self.protocol.loss()
        self._oldest = now
        self.protocol.pending.append(reply)
        if self._rest or type(data) is not bytes:
            self._out.append(data)
            self._queued += 1
            self.flush()
        else:
            self._send(data, 1)

    def _send_with_others(self, data: Command, reply: Reply) -> None:
        """Queue a command for the end of this turn of the event loop."""
        pending = self.protocol.pending
        if not pending:
            self._oldest = _clock()
        pending.append(reply)
        self._out.append(data)
        self._queued += 1
        if not self._flush_due and self._watch is not None:
            self._flush_due = True
            self._watch.turns.call_soon(self._flush_turn)

    def _flush_turn(self) -> None:
        self._flush_due = False
        self.flush()

    async def _read_until(self, reply: Reply) -> bytes:
        """Wait for a response where the event loop does not read."""
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
            self._pass_on_reading()
        return reply.data

    async def _read_for(self, reply: Reply) -> None:
        self._reading = True
        reply.wake = None
        try:
            while reply.data is None and reply.error is None:
                await self._read_once()
        finally:
            self._reading = False

    def _pass_on_reading(self) -> None:
        if not self._reading:
            self.protocol.wake_next()

    # Reading

    async def read_forever(self) -> None:
        """Pass messages to ``on_messages`` until the connection ends; raises the reason of the end."""
        if self._watch is not None:
            self._ended = anyio.Event()
            await self._ended.wait()
        if self.protocol.error is not None:
            raise self.protocol.error
        if self._reading:
            raise InvalidState("another task reads this connection", node=str(self.address))
        self._reading = True
        try:
            while self.protocol.error is None:
                await self._read_once()
        finally:
            self._reading = False
            self._pass_on_reading()
        raise self.protocol.error

    async def _read_once(self) -> None:
        try:
            await anyio.wait_readable(self._sock)
        except anyio.ClosedResourceError:
            return  # closed, or woken by an expired request
        except OSError as error:
            self.fail(_broken(error))
            return
        self._receive()

    def detach(self) -> None:
        """Hand the connection over to a thread; call it in the event loop, which stops reading."""
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        self._reading = False
        self._detached = True

    def read_at_least(self, size: int) -> None:
        """Read up to ``size`` bytes at once, more while reads are full."""
        self._least_read = self._read_size = size

    def fileno(self) -> int:
        """Return the file descriptor; -1 after the close."""
        return -1 if self.closed else self._sock.fileno()

    @property
    def sending(self) -> bool:
        """Whether bytes of commands wait for the kernel."""
        return bool(self._rest)

    def shut_down(self) -> None:
        """End both directions: a thread that waits for a response receives an error. Thread-safe."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def poll(self) -> None:
        """Process received bytes, without waiting; without effect while a task reads."""
        if not self.closed and (self._watch is not None or not self._reading):
            self._receive()

    def _receive(self) -> None:
        size = self.protocol.wanted or self._read_size
        try:
            data = self._sock.recv(size)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.fail(_broken(error))
            return
        if not data:
            self.fail(ConnectionLost("the server closed the connection"))
            return
        self.received_at = now = _clock()
        if len(data) >= size or self._read_size > self._least_read:
            self._fit_read(len(data), size)
        if self._layers:
            try:
                for layer in self._layers:
                    data = layer.decode(data)
            except NsqError as error:
                self.fail(error)
                return
        pending = self.protocol.pending
        before = len(pending)
        self._process(data)
        answered = before - len(pending)
        if answered:
            self._oldest = now
            self._burst = answered > 1

    def _fit_read(self, received: int, size: int) -> None:
        """Read more at once while reads are full, and less when they are not: a large buffer takes time to allocate.

        So memory grows with received bytes, never with an announced size. A layer bounds what a small read becomes.
        """
        if received >= size and not self._layers:
            _reuse_memory_of_reads()
            self._read_size = min(2 * self._read_size, max(_LARGEST_READ, self._least_read))
        elif received < size // 4:
            self._read_size = max(self._read_size // 2, self._least_read)

    def _process(self, data: bytes) -> None:
        protocol = self.protocol
        messages = protocol.receive_data(data)
        if messages:
            if self.on_messages is not None:
                self.on_messages(messages)
            else:
                protocol.fail(ProtocolError("received a message on a connection that is not subscribed"))
        if protocol.error is not None:
            self._end()
        elif protocol.out:
            for command in protocol.out:
                self.write(command)
            protocol.out.clear()
            self.flush()

    # Writing

    def write(self, data: bytes) -> None:
        """Queue commands without response for the next `flush`."""
        self._out.append(data)
        if self._rest:
            self._unsent += len(data)
            if self._unsent > _MAX_UNSENT:
                self.fail(ConnectionLost(f"the server does not read: {self._unsent} bytes of commands are unsent"))

    def flush(self) -> None:
        """Send queued commands, as far as the kernel accepts them."""
        out = self._out
        if not out or self._rest or self.closed:
            return
        # layers encode a part at a time
        if (sum(map(len, out)) if self._layers else max(map(len, out))) < LARGE:
            data: bytes = b"".join(out)  # type: ignore[arg-type]  # a `LargeCommand` is not so small
            out.clear()
            requests, self._queued = self._queued, 0
            self._send(data, requests)
        else:
            self._rest.put(out)
            out.clear()
            self._sent = _clock()
            self._send_rest()

    def _send(self, data: bytes, requests: int) -> None:
        """Send bytes of ``requests`` requests; keep what the kernel does not accept."""
        try:
            for layer in reversed(self._layers):
                data = layer.encode(data)
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except (OSError, NsqError) as error:
            self.fail(_broken(error) if isinstance(error, OSError) else error, requests)
            return
        if sent < len(data):
            self._sent = _clock()
            self._rest.append(data, requests)
            self._rest.sent(sent)
            self._queued += requests
            self._continue_when_writable()

    def _send_rest(self) -> None:
        rest = self._rest
        while rest and not self.closed:
            # none counts as unsent if an exception from a signal hides how much was sent
            queued, self._queued = self._queued, 0
            try:
                if self._layers:
                    rest.encode(self._layers)
                parts = rest.first(1 if self._layers else _MOST_PARTS)
                sent = self._sock.send(parts[0]) if len(parts) == 1 else self._sock.sendmsg(parts)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except (OSError, NsqError) as error:
                self._queued = queued
                self.fail(_broken(error) if isinstance(error, OSError) else error)
                return
            if sent:
                self._sent = _clock()
            self._queued = max(0, queued - rest.sent(sent))
            if sent < sum(map(len, parts)):
                self._continue_when_writable()
                return
        self._unsent = 0

    def _continue_when_writable(self) -> None:
        if self._watch is not None:
            self._watch.start_writing(self._continue_sending)

    def _continue_sending(self) -> None:
        """Send the rest, then what was queued behind it."""
        self._send_rest()
        self.flush()
        if not self._rest:
            if self._watch is not None:
                self._watch.stop_writing()
            self._wake_drainers()

    def leave_to_parent(self) -> None:
        """Close the descriptor of a forked process, which would keep the connection open when its parent closes it."""
        self.closed = True  # the event loop, which the parent uses, keeps the socket
        self._sock.close()

    def _wake_drainers(self) -> None:
        if self._drained is not None:
            self._drained.set()
            self._drained = None

    async def drain(self) -> None:
        """Send everything queued; return early when the connection ends.

        Cancellation leaves the rest to the event loop, or to the next task that drains.
        """
        self.flush()
        while self._rest and not self.closed:
            if self._watch is not None or self._draining:
                self._drained = self._drained or anyio.Event()
                await self._drained.wait()
            else:
                await self._drain_by_waiting()

    async def _drain_by_waiting(self) -> None:
        self._draining = True
        try:
            while self._rest and not self.closed:
                try:
                    await anyio.wait_writable(self._sock)
                except anyio.ClosedResourceError:
                    continue
                self._continue_sending()
        finally:
            self._draining = False
            self._wake_drainers()

    # Layers

    def add_layer(self, layer: Layer) -> None:
        """Put a layer above the layers and the socket, for all further bytes."""
        self._layers += (layer,)

    async def exchange(self, data: bytes) -> bytes:
        """Send raw bytes, return the next received bytes, for a TLS handshake; raises ConnectionLost."""
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
                raise _broken(error) from error
            if not received:
                break
            return received
        raise ConnectionLost("the server closed the connection")

    async def receive_unsolicited(self, data: bytes) -> bytes:
        """Wait for a response that belongs to no command; ``data`` was received before.

        Raises its error, or the connection's.
        """
        reply = Reply()
        self.protocol.expect(reply)
        self._process(data)
        return await self._read_until(reply)

    def finish_handshake(self) -> None:
        """Parse all received frames from now on, and let the event loop read the socket."""
        self.protocol.read_ahead()
        self._process(b"")
        if not self.closed:
            self._watch = watch_readable(self._sock, self._receive)
            self._reading = self._watch is not None

    # Timeouts and the end

    def tick(self) -> None:
        """Process received bytes, retry to send, and enforce timeouts; call it a few times a second.

        Fails expired requests. Closes the connection after the request timeout without a response or progress of a
        send, or more than two heartbeat intervals of silence. Forgets earlier rejections of FIN, REQ and TOUCH.
        """
        if self.closed:
            return
        self.protocol.notices.clear()
        self._receive_overdue()
        if self._rest and not self._draining:
            self._continue_sending()
        self.flush()
        now = _clock()
        timeout = self._request_timeout
        if self.protocol.waiting:
            if self.protocol.expire(now) and self._watch is None and not self._detached:
                anyio.notify_closing(self._sock)
            if now - self._oldest > timeout:
                self.fail(RequestTimeout(f"no response within {timeout:g} s"))
        if self._rest and now - self._sent > timeout:
            self.fail(ConnectionLost(f"the server did not read for {timeout:g} s"))
        silence = 2 * self.heartbeat_interval
        if silence and now - self.received_at > silence + 1:
            self.fail(HeartbeatMissed(f"received nothing from the server for {now - self.received_at:.1f} s"))

    def _receive_overdue(self) -> None:
        """Process received bytes before timeouts are judged: a reading task may run later than `tick`."""
        before = self.received_at
        self._receive()
        if self.received_at != before and self._reading and self._watch is None:
            anyio.notify_closing(self._sock)

    def fail(self, error: NsqError, unsent: int = 0) -> None:
        """Close the connection because of an error, the cause of all pending requests' errors.

        ``unsent``: number of last requests of which nothing was sent, besides queued requests.
        """
        self._fail_requests(error, unsent)
        self._end()

    def close(self) -> None:
        """Close at once, also a half closed connection; pending requests fail. Idempotent."""
        if not self.closed:
            self._fail_requests(ConnectionLost("the client closed the connection"))
            self._release()
            self._sock.close()
        elif self._half_closed is not None and not self._half_closed.ended:
            _reset(self._sock)

    def _fail_requests(self, error: NsqError, unsent: int = 0) -> None:
        self.protocol.fail(error, unsent + max(0, self._queued - self._rest.begun))

    def _end(self) -> None:
        """Close after an error."""
        if self.closed:
            return
        self._release()
        if self.half_closes:
            from nsqext.transport.half_closed import HalfClosed  # few connections fail, few producers settle

            self._half_closed = HalfClosed(self._sock)
        else:
            _reset(self._sock)  # else the kernel may send a publish for minutes, which is published again meanwhile

    def _release(self) -> None:
        self.closed = True
        self._reading = False
        if self._watch is not None:
            # no task waits for the socket, and in a callback anyio may not know the event loop
            self._watch.end()
            self._watch = None
        elif not self._detached:
            anyio.notify_closing(self._sock)
        self._wake_drainers()
        if self._ended is not None:
            self._ended.set()


def _reset(sock: socket.socket) -> None:
    """Close a socket; the kernel drops what it has not transmitted."""
    with suppress(OSError):  # some systems refuse after the server's reset
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()


def _broken(error: OSError) -> ConnectionLost:
    return ConnectionLost(f"the connection broke: {error.strerror or error}")


_of_this_process: WeakSet[Connection] = WeakSet()


def _leave_all_to_parent() -> None:
    for connection in _of_this_process:
        connection.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_to_parent)
