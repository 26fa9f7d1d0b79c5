"""A session on a TCP socket: large reads, joined writes, bounds for clients that send much or read little.

The event loop calls a connection when its socket is readable, the server calls `ServerConnection.send` when its session
has output. Only commands that wait and injected faults run in a task. A client that does not read its replies is not
read from.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from anyio.lowlevel import checkpoint

from nsqext.errors import NsqError

if TYPE_CHECKING:
    from nsqext.broker.fault_injection import NodeFaults
    from nsqext.broker.nsqd.session import Session

_READ = 256 * 1024
_LAST_READS = 64
_COMMANDS_AWAITED = 64  # replicas of this process answer without suspending the task


class Host(Protocol):
    """What connections use of `nsqext.broker.nsqd.server.NsqdServer`."""

    busy: bool

    def flush(self) -> None: ...
    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None: ...
    def gone(self, connection: ServerConnection) -> None: ...


class ServerConnection:
    """A client."""

    def __init__(self, sock: socket.socket, session: Session, faults: NodeFaults, loop: Any, host: Host) -> None:
        self._socket = sock
        self.session: Session = session
        self._faults = faults
        self._loop = loop  # of asyncio
        self._host = host
        self._backlog: bytes | memoryview = b""
        self._reading = self._writing = self._carrying = self._running = self._ended = False

    # Reading

    def read_on(self) -> None:
        if not (self._reading or self._ended or self.session.closing):
            self._reading = True
            self._loop.add_reader(self._socket, self._readable)

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._socket)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.session.eof_received()
            self.send()
            self.close()
        elif self._faults.active:
            self._pause()
            self._host.start(lambda: self._take_faulty(data))
        else:
            self._take(data)

    async def _take_faulty(self, data: bytes) -> None:
        data, cut = await self._faults.carry("in", self.session.peer, data)
        if cut:
            self.close()
        elif not self._ended:
            self._take(data)
            self._continue()

    def _take(self, data: bytes) -> None:
        host = self._host
        host.busy = True
        try:
            self.session.receive(data)
            self._step()
        except NsqError:
            self.session.fail()
        finally:
            host.flush()
        if self.session.pending:
            self._continue()

    def _step(self) -> None:
        waiting = self.session.step()
        if waiting is not None:
            self._running = True
            self._pause()
            self._host.start(lambda: self._wait(waiting))

    def _continue(self) -> None:
        """Run received commands in a later iteration of the event loop, or read on."""
        if self._running or self._ended:
            return
        if not self.session.pending:
            self.read_on()
            return
        self._pause()
        if not self._is_full:
            self._running = True
            self._loop.call_soon(self._next_turn)

    @property
    def _is_full(self) -> bool:
        """Whether the client must read first; `_writable` then continues."""
        return bool(self._backlog or self._carrying) and not self.session.has_room

    def _next_turn(self) -> None:
        self._running = False
        if self._ended:
            return
        self._host.busy = True
        try:
            self._step()
        finally:
            self._host.flush()
        self._continue()

    async def _wait(self, waiting: Awaitable[None] | None) -> None:
        host, session = self._host, self.session
        awaited = 0
        while waiting is not None:
            try:
                await waiting
            finally:
                session.command_done()
            awaited += 1
            if awaited % _COMMANDS_AWAITED == 0:
                await checkpoint()
            host.busy = True
            try:
                waiting = None if self._ended else session.step()
            finally:
                host.flush()
        self._running = False
        self._continue()

    # Writing

    def send(self) -> None:
        session = self.session
        session.unmark()
        if self._ended:
            return
        if session.closed:
            self.close()
            return
        if self._faults.active:
            if not self._carrying:
                self._carrying = True
                self._host.start(self._carry_out)
            return
        while session.output.urgent and not (self._backlog or self._carrying or self._ended):
            self._write(session.take())
        self._close_if_done()

    def _write(self, data: bytes | memoryview) -> None:
        try:
            sent = self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close()
            return
        if sent < len(data):
            self._backlog = memoryview(data)[sent:]
            self.session.choke()
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._socket, self._writable)
            return
        self._backlog = b""
        if not self.session.output.urgent:
            # a session with much to send has choked itself
            self.session.relieve()

    def _writable(self) -> None:
        self._host.busy = True
        self._write(self._backlog)
        if not self._backlog:
            self._stop_writing()
            self.send()
        self._host.flush()
        if self.session.pending:
            self._continue()

    def _stop_writing(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._socket)

    async def _carry_out(self) -> None:
        session = self.session
        try:
            while session.output.urgent and not self._ended:
                data, cut = await self._faults.carry("out", session.peer, session.take())
                self._write(bytes(self._backlog) + data)
                if cut:
                    self.close()
        finally:
            self._carrying = False
        self._close_if_done()
        if session.pending:
            self._continue()

    # Closing

    def _close_if_done(self) -> None:
        session = self.session
        if session.closing and not (self._backlog or session.output.urgent or self._carrying):
            self.close()
        elif session.closing:
            self._pause()

    def close(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._pause()
        self._stop_writing()
        self._host.gone(self)
        self.session.end()
        # with unread bytes, the kernel resets the connection before the client has read its replies
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            for _ in range(_LAST_READS):
                if not self._socket.recv(_READ):
                    break
        self._socket.close()
