"""A session on a TCP socket: big reads, joined writes, and no more output than the client takes.

A connection is no task. The event loop keeps its socket registered and calls it when there is something to read;
whoever makes output for it writes inline. Only what has to wait (replicas, an auth server, faults) becomes a task.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from nsqext.errors import NsqError

if TYPE_CHECKING:
    from nsqext.broker.fault_injection import NodeFaults
    from nsqext.broker.nsqd.session import Session

__all__ = ("Connection", "Host", "Loop")

_READ = 256 * 1024
_LAST_READS = 64


class Loop(Protocol):
    """What a connection needs of the event loop."""

    def add_reader(self, fd: socket.socket, callback: Callable[[], None]) -> Any:
        """Call back whenever the socket can be read."""
        ...

    def remove_reader(self, fd: socket.socket) -> bool:
        """Stop that."""
        ...

    def add_writer(self, fd: socket.socket, callback: Callable[[], None]) -> Any:
        """Call back whenever the socket can be written."""
        ...

    def remove_writer(self, fd: socket.socket) -> bool:
        """Stop that."""
        ...


class Host(Protocol):
    """What a connection needs of its server."""

    busy: bool
    """Somebody is about to call `flush`, so nobody has to be woken for it."""

    def flush(self) -> None:
        """Send what all sessions of the node have, without waiting."""
        ...

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run something beside everything else."""
        ...

    def gone(self, connection: Connection) -> None:
        """Hear that a connection has ended."""
        ...


class Connection:
    """One client.

    Args:
        sock: a connected, non-blocking socket.
        session: the session.
        faults: what may go wrong on the way.
        loop: the event loop.
        host: the server.
    """

    def __init__(self, sock: socket.socket, session: Session, faults: NodeFaults, loop: Loop, host: Host) -> None:
        self._socket = sock
        self.session: Session = session
        self._faults = faults
        self._loop = loop
        self._host = host
        self._backlog: bytes | memoryview = b""
        self._reading = self._writing = self._carrying = self._ended = False

    def open(self) -> None:
        """Begin to read."""
        self._read_on()

    # --- reading --------------------------------------------------------------------------------------------------

    def _read_on(self) -> None:
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
            self.session.no_more()
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
        elif not self._ended and not self._take(data):
            # a command that waits reads on itself: the answers of those behind it must not overtake its own
            self._read_on()

    def _take(self, data: bytes) -> bool:
        """Run the commands that came; returns whether one of them waits."""
        host, session = self._host, self.session
        waiting: Awaitable[None] | None = None
        host.busy = True
        try:
            session.receive(data)
            waiting = session.step()
        except NsqError:
            session.fail()
        else:
            if waiting is not None:
                self._pause()
                host.start(lambda: self._wait(waiting))
        finally:
            host.flush()
        return waiting is not None

    async def _wait(self, waiting: Awaitable[None] | None) -> None:
        """Await what a command waits for, and go on with the commands behind it."""
        host, session = self._host, self.session
        while waiting is not None:
            try:
                await waiting
            finally:
                session.waited()
            host.busy = True
            try:
                waiting = None if self._ended else session.step()
            finally:
                host.flush()
        self._read_on()

    # --- writing --------------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Send what the session has; never waits."""
        session = self.session
        session.unmark()
        if self._ended:
            return
        if session.closed:
            self.close()
            return
        if self._faults.active:
            self._carry()
            return
        if session.urgent and not self._backlog and not self._carrying:
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
        if not self.session.urgent:
            # also when the socket took all at once: a session chokes itself when it has too much to send
            self.session.relieve()

    def _writable(self) -> None:
        self._host.busy = True
        self._write(self._backlog)
        if not self._backlog:
            self._stop_writing()
            self.send()
        self._host.flush()

    def _stop_writing(self) -> None:
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._socket)

    def _carry(self) -> None:
        if not self._carrying:
            self._carrying = True
            self._host.start(self._carry_out)

    async def _carry_out(self) -> None:
        """Write through the faults, in order."""
        session = self.session
        try:
            while session.urgent and not self._ended:
                data, cut = await self._faults.carry("out", session.peer, session.take())
                self._write(bytes(self._backlog) + data)
                if cut:
                    self.close()
        finally:
            self._carrying = False
        self._close_if_done()

    # --- the end --------------------------------------------------------------------------------------------------

    def _close_if_done(self) -> None:
        session = self.session
        if session.closing and not (self._backlog or session.urgent or self._carrying):
            self.close()
        elif session.closing:
            self._pause()

    def close(self) -> None:
        """Close the connection and give the client's messages back."""
        if self._ended:
            return
        self._ended = True
        self._pause()
        self._stop_writing()
        self._host.gone(self)
        self.session.end()
        # bytes that nobody read would make the kernel cut off what the client has not read yet
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            for _ in range(_LAST_READS):
                if not self._socket.recv(_READ):
                    break
        self._socket.close()
