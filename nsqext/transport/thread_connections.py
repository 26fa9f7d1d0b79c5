"""Requests of threads over connections that the event loop does not read any more."""

from __future__ import annotations

import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from nsqext.errors import ConnectionLost
from nsqext.protocol.client.client_protocol import Reply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nsqext.transport.connection import Connection

    Posted = tuple[Connection, Reply]
    """A connection, and the response to a command on it, to be set later."""

_TICK = 0.25  # seconds after which the timeouts are enforced
NAP: float = 1.0
"""Seconds that a thread sleeps at most."""
_CLOSE_POLL = 0.005

_clock = time.monotonic


def thread_can_wait() -> bool:
    """Return whether this system has `select.poll`."""
    return hasattr(select, "poll")


class ThreadRequest(ABC):
    """A request of a thread, which any thread may send and whose response any thread may read."""

    reply: Reply | None = None
    ended: bool = False  #: not sent
    error: Exception | None = None  #: why it was not sent
    sleep: threading.Lock | None = None  #: held while its thread sleeps

    @abstractmethod
    def post(self) -> Posted | None:
        """Send the command by `Connection.post`; None if there is nothing to send. An exception becomes ``error``."""

    @property
    def done(self) -> bool:
        """Whether it has a response, an error, or was not sent."""
        reply = self.reply
        return self.ended if reply is None else reply.data is not None or reply.error is not None

    def answer(self) -> Reply | None:
        """Return the response; None if there was nothing to send. Raises the error of `post`."""
        if self.error is not None:
            raise self.error
        return self.reply

    def end(self, error: Exception | None = None) -> None:
        """End a request that was not sent."""
        self.error, self.ended = error, True
        self.wake()

    def wake(self) -> None:
        """Wake its thread, if it sleeps or is about to."""
        if self.sleep is not None:
            with suppress(RuntimeError):  # woken before
                self.sleep.release()


class ThreadConnections:
    """Connections on which threads wait for responses.

    A thread sends its request, and what other threads have queued meanwhile, in one piece. One of the threads that wait
    reads for all. Each has the connection's protocol and timeouts.

    An exception from a signal may end any statement of the main thread. So a lock is only entered by ``with``, the
    right to read has an owner, what is popped is referenced before, and a sleeping thread looks around once a second.
    """

    def __init__(self) -> None:
        self._queue: deque[ThreadRequest] = deque()
        self._sent: dict[ThreadRequest, None] = {}  # requests whose thread waits
        self._state = threading.Lock()  # held to send and to process what was received, never while waiting
        self._reader: dict[str, object] = {}  # who waits for the sockets: the request of its thread
        self._sleeping: dict[ThreadRequest, None] = {}
        self._connections: dict[int, Connection] = {}
        self._writing: set[int] = set()
        self._ticked = _clock()
        self._poll = select.poll()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._poll.register(self._woken, select.POLLIN)

    def __len__(self) -> int:
        return len(self._connections)

    @property
    def in_flight(self) -> int:
        """Requests without outcome."""
        return len(self._sent) + len(self._queue)

    def add(self, connection: Connection) -> None:
        """Take over a connection, in its event loop."""
        connection.detach()
        with self._state:
            self._connections[connection.fileno()] = connection
            self._poll.register(connection.fileno(), select.POLLIN)
        self._wake_reader()
        self._send_queued()

    def run(self, request: ThreadRequest) -> None:
        """Send a request, and wait for its outcome.

        An exception from a signal in this thread, such as KeyboardInterrupt, closes the connections if bytes may have
        been read and not processed: later responses would belong to other requests.
        """
        try:
            if self._queue or self._state.locked():
                self._queue.append(request)
                self._send_queued()
            else:
                self._send_alone(request)
            while not request.done:
                if self._may_read(request):
                    self._read()
                else:
                    self._sleep(request)
        finally:
            self._sent.pop(request, None)
            self._reads_no_more(request)
            if request.sleep is not None and request.reply is not None:
                request.reply.wake = None  # they would refer to each other
            if not request.done:
                # with the lock: no other thread is about to send it, or what is behind it
                with self._state, suppress(ValueError):  # it was sent
                    self._queue.remove(request)
                self._sent.pop(request, None)
            if self._sleeping:
                self._pass_on_reading()

    def tick(self) -> None:
        """Enforce timeouts and answer heartbeats, unless a thread does; call it a few times in a heartbeat interval."""
        owner = object()
        if not self._may_read(owner):
            return
        try:
            with self._state:
                self._tick()
                self._register()
        finally:
            self._reads_no_more(owner)
            self._send_queued()
            self._pass_on_reading()

    def close(self, timeout: float) -> bool:
        """Wait for the requests in flight, and close the connections; False if the time was too short."""
        deadline = _clock() + timeout
        while self.in_flight:
            if _clock() >= deadline:
                return False
            time.sleep(_CLOSE_POLL)  # their threads read
        with self._state:
            self._close_all()
            self._register()
        self.abandon()
        return True

    def abandon(self) -> None:
        """Leave the connections to another process."""
        self._waker.close()
        self._woken.close()

    def retire(self, connection: Connection) -> bool:
        """Close a connection without requests in flight; return whether it is closed."""
        with self._state:
            if not connection.in_flight:
                connection.close()
                self._register()
            closed = connection.closed
        self._send_queued()
        return closed

    def shut_down(self) -> None:
        """End the sockets: each request in flight fails. Thread-safe."""
        for connection in tuple(self._connections.values()):
            connection.shut_down()

    # Sending

    def _send_queued(self) -> None:
        # who holds the lock sends what was queued meanwhile: waiting for it would let threads run in lockstep
        while self._queue and not self._state.locked():
            with self._state:
                self._post_queued()

    def _send_alone(self, request: ThreadRequest) -> None:
        # as `_post_queued`, without a queue: a tenth of a lone thread's request
        with self._state:
            try:
                self._flush(self._post(request))
            except BaseException:
                self._recover()
                raise
        if self._queue:
            self._send_queued()

    def _post_queued(self) -> None:
        """Send what is queued; with the lock."""
        request: ThreadRequest | None = None
        posted: set[Connection | None] = set()
        try:
            while self._queue:
                request = self._queue[0]
                self._queue.popleft()
                posted.add(self._post(request))
            for connection in posted:
                self._flush(connection)
        except BaseException:
            if request is not None and not request.done:
                self._sent[request] = None
            self._recover()
            raise

    def _post(self, request: ThreadRequest) -> Connection | None:
        self._sent[request] = None
        try:
            sent = request.post()
        except Exception as error:  # of another thread's arguments
            request.end(error)
            return None
        if sent is None:
            request.end()
            return None
        connection, request.reply = sent
        # its thread may be about to sleep, and could not have known the response
        if request.sleep is not None:
            request.reply.wake = request.wake
        return connection

    def _flush(self, connection: Connection | None) -> None:
        if connection is not None:
            connection.flush()
            if connection.sending or connection.closed:
                self._register()

    def _recover(self) -> None:
        """End all requests after an exception from a signal: which bytes were processed is unknown. With the lock."""
        for connection in self._connections.values():
            connection.close()
        self._register()
        for request in tuple(self._sent):
            if not request.done:
                error = ConnectionLost("a thread that sent or read for others was interrupted")
                if request.reply is None:
                    request.reply = Reply()
                request.reply.error = error
            request.wake()

    # Reading

    def _may_read(self, owner: object) -> bool:
        """Return whether an owner has the right to read, which it gets if no other has it."""
        return self._reader.setdefault("", owner) is owner

    def _reads_no_more(self, owner: object) -> None:
        if self._reader.get("") is owner:
            self._reader.pop("", None)

    def _read(self) -> None:
        """Wait for responses or a short time, and process what was received; the thread has the right to read."""
        events = self._poll.poll(_TICK * 1000)
        with self._state:
            try:
                self._process(events)
            except BaseException:
                self._recover()
                raise
            if self._queue:
                self._post_queued()
        if self._queue:
            self._send_queued()

    def _process(self, events: Sequence[tuple[int, int]]) -> None:
        for number, _ in events:
            connection = self._connections.get(number)
            if connection is None:
                self._empty_waker(number)
                continue
            if connection.sending:
                connection.tick()
            else:
                connection.poll()
            if connection.closed or number in self._writing:
                self._register()
        if not events or _clock() - self._ticked > _TICK:
            self._tick()
            self._register()

    def _tick(self) -> None:
        self._ticked = _clock()
        for connection in self._connections.values():
            connection.tick()

    def _sleep(self, request: ThreadRequest) -> None:
        if request.sleep is None:
            lock = threading.Lock()
            lock.acquire()
            request.sleep = lock
            if request.reply is not None:
                request.reply.wake = request.wake
        self._sleeping[request] = None
        try:
            # otherwise it may have been settled, or the reader may have looked for its successor, just before
            reader = self._reader.get("")
            if reader is None or request.done or request.sleep.acquire(timeout=NAP):
                return
            if _clock() - self._ticked > NAP:
                self._reads_no_more(reader)  # signals interrupted it before it did
        finally:
            self._sleeping.pop(request, None)

    def _pass_on_reading(self) -> None:
        """Wake a thread that waits, if no thread reads."""
        while not self._reader:
            try:
                other, _ = self._sleeping.popitem()
            except KeyError:
                return
            if not other.done:
                other.wake()
                return

    # Connections

    def _register(self) -> None:
        """Let the reader wait for what the connections need; forget closed ones. With the lock."""
        for number, connection in tuple(self._connections.items()):
            if connection.closed:
                del self._connections[number]
                self._writing.discard(number)
                self._poll.unregister(number)
            elif connection.sending != (number in self._writing):
                self._writing ^= {number}
                self._poll.modify(number, select.POLLIN | (select.POLLOUT if connection.sending else 0))
                self._wake_reader()

    def _empty_waker(self, number: int) -> None:
        if number == self._woken.fileno():
            with suppress(BlockingIOError):
                self._woken.recv(1024)

    def _wake_reader(self) -> None:
        if self._reader:
            with suppress(OSError):  # full, or closed
                self._waker.send(b"\0")

    def _close_all(self) -> None:
        for connection in self._connections.values():
            connection.close()
