"""The links between simulated hosts: chunks, delays, lost and blocked segments, and arrival times.

A link is a direction between two hosts. Data on a blocked link waits, as in TCP's retransmission.
"""

from __future__ import annotations

import errno
import struct
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from hashlib import blake2b
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import Any

from attrs import frozen

from nsqext.arguments import check_number, check_times, is_number, is_whole
from nsqext.errors import InvalidSetting
from nsqext.testing.simulation.sockets import SimulatedSocket

current_host: ContextVar[str] = ContextVar("nsqext_simulated_host", default="client")
"""Simulated host of the current task."""

_FIRST_FD = 1_000_000  # beyond real file descriptors
_FIRST_PORT = 20_000
_RETRANSMIT = 0.2
_SYN_RETRY = 1.0
_DATA, _FIN, _RST = range(3)
_TRACE_LINES = 200


def check_range(name: str, value: object, *, whole: bool = False) -> None:
    """Check that a setting is a smallest and a largest number from 0, not infinite. Raises InvalidSetting."""
    valid = is_whole if whole else is_number
    pair = tuple(value) if isinstance(value, (tuple, list)) else ()
    if not (len(pair) == 2 and all(valid(one) and one < inf for one in pair) and pair[0] <= pair[1]):
        kind = "whole numbers" if whole else "numbers"
        raise InvalidSetting(
            f"{name}={value!r} is not a range", hint=f"give the smallest and the largest of its {kind}"
        )


@frozen
class NetworkOptions:
    """Properties of the network; times in seconds.

    Attributes:
        latency: shortest and longest delay of a segment.
        spike: share of segments delayed for up to ``spike_latency``.
        spike_latency: longest delay.
        split: share of sends that arrive in several pieces.
        partial: share of sends of which the kernel takes only a part.
        buffers: sizes of buffers in bytes, from which each direction of a connection draws.
        late: share of waits that end late, by up to ``late_seconds``.
        late_seconds: longest delay of a wait.
    """

    latency: tuple[float, float] = (0.00005, 0.0015)
    spike: float = 0.02
    spike_latency: float = 0.04
    split: float = 0.15
    partial: float = 0.05
    buffers: tuple[int, ...] = (4096, 65536, 262144)
    late: float = 0.05
    late_seconds: float = 0.005

    def __attrs_post_init__(self) -> None:
        check_range("latency", self.latency)
        check_times(self, "spike_latency", "late_seconds")
        for name in ("spike", "split", "partial", "late"):
            if not is_number(getattr(self, name), 0, 1):
                raise InvalidSetting(f"{name}={getattr(self, name)!r} is not a share", hint="give a number from 0 to 1")
        if not isinstance(self.buffers, tuple) or not self.buffers:
            raise InvalidSetting(f"buffers={self.buffers!r} is not a tuple of sizes")
        for size in self.buffers:
            check_number("a size in buffers", size, 1)


class Network:
    """Every socket, link and segment of a simulation, and its time.

    Args:
        keep_trace: keep the last events in ``lines``.

    Attributes:
        now: virtual time, in seconds.
        listeners: listening sockets by port.
        readable: file descriptors, maybe readable.
        blocked: links that transmit nothing, as pairs of hosts.
        slow: factors of the delay of links; missing for 1.
        dead: hosts whose processes were killed.
        stalled: hosts whose processes neither read nor write.
        on_sent: called with a socket and its sent bytes.
        on_received: called with a socket and the bytes read from it.
    """

    def __init__(self, random: Random, options: NetworkOptions | None = None, *, keep_trace: bool = False) -> None:
        self.random: Random = random
        self.options: NetworkOptions = options or NetworkOptions()
        self.now: float = 0.0
        self.sockets: dict[int, SimulatedSocket] = {}
        self.listeners: dict[int, SimulatedSocket] = {}
        self.readable: dict[int, None] = {}
        self.blocked: set[tuple[str, str]] = set()
        self.slow: dict[tuple[str, str], float] = {}
        self.dead: set[str] = set()
        self.stalled: set[str] = set()
        self.on_sent: Callable[[SimulatedSocket, bytes], None] | None = None
        self.on_received: Callable[[SimulatedSocket, bytes], None] | None = None
        self.events: list[tuple[float, int, Callable[..., None], Any]] = []
        self.lines: deque[str] | None = deque(maxlen=_TRACE_LINES) if keep_trace else None
        self._hosts: dict[int, str] = {}
        self._free_fds: list[int] = []
        self._numbers = 0
        self._sequence = 0
        self._ports = _FIRST_PORT
        self._digest = blake2b(digest_size=16)

    # Trace

    @property
    def trace(self) -> str:
        """Digest of all events so far (bytes, ends, times)."""
        return self._digest.hexdigest()

    def note(self, text: str, data: bytes = b"") -> None:
        self._digest.update(struct.pack("<d", self.now) + text.encode() + data)
        if self.lines is not None:
            self.lines.append(f"{self.now:10.6f} {text} {data[:60]!r}" if data else f"{self.now:10.6f} {text}")

    # Sockets

    def socket(self, *args: Any) -> SimulatedSocket:
        """Return a socket of the current host; ignore the arguments of `socket.socket`."""
        return SimulatedSocket(self, current_host.get())

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def draw_capacity(self) -> int:
        return self.random.choice(self.options.buffers)

    def take_fd(self, sock: SimulatedSocket) -> int:
        fd = heappop(self._free_fds) if self._free_fds else _FIRST_FD + len(self.sockets)
        self.sockets[fd] = sock
        return fd

    def take_port(self) -> int:
        self._ports += 1
        return self._ports

    def name_port(self, port: int, host: str) -> None:
        self._hosts[port] = host
        if port in self.listeners:
            self.listeners[port].host = host

    def host_of(self, port: int) -> str:
        return self._hosts.get(port, "server")

    def close(self, sock: SimulatedSocket) -> None:
        sock.ended = True
        del self.sockets[sock.fd]
        heappush(self._free_fds, sock.fd)
        self.readable.pop(sock.fd, None)
        if sock.listening:
            self.listeners.pop(sock.address[1], None)
            for waiting in sock.backlog:
                self._abort(waiting)
            sock.backlog.clear()
        elif sock.peer is not None and not sock.error and sock.host not in self.dead:
            if sock.resets:
                self._discard(sock, sock.peer)
            elif sock.buffer:
                self.transmit(sock, _RST)
            elif not sock.fin_sent:
                self.transmit(sock, _FIN)

    def _discard(self, sock: SimulatedSocket, peer: SimulatedSocket) -> None:
        """Reset a connection: queued data is not sent, and a lost reset is not repeated."""
        blocked = (sock.host, peer.host) in self.blocked
        on_its_way = -inf if blocked else self.now + self.options.latency[1]
        sock.segments = deque(segment for segment in sock.segments if segment[0] <= on_its_way)
        sock.unread = sum(len(data) for _, _, data in sock.segments)
        sock.last_arrival = max((arrival for arrival, _, _ in sock.segments), default=self.now)
        if not blocked:
            self.transmit(sock, _RST)

    def _abort(self, sock: SimulatedSocket) -> None:
        if not sock.ended:
            self.transmit(sock, _RST)
            sock.ended = True
            del self.sockets[sock.fd]
            heappush(self._free_fds, sock.fd)
            self.readable.pop(sock.fd, None)

    # Events

    def call_at(self, when: float, function: Callable[..., None], argument: Any) -> None:
        self._sequence += 1
        heappush(self.events, (when, self._sequence, function, argument))

    def run_due(self) -> None:
        events = self.events
        while events and events[0][0] <= self.now:
            _, _, function, argument = heappop(events)
            function(argument)

    def _delay(self, source: str, target: str) -> float:
        options, random = self.options, self.random
        longest = options.spike_latency if random.random() < options.spike else options.latency[1]
        return random.uniform(options.latency[0], longest) * self.slow.get((source, target), 1.0)

    # Connecting

    def dial(self, sock: SimulatedSocket) -> None:
        port = sock.remote[1] if sock.remote is not None else 0
        self.call_at(self.now + self._delay(sock.host, self.host_of(port)), self._syn, sock)

    def _syn(self, sock: SimulatedSocket) -> None:
        if sock.ended or sock.remote is None:
            return
        host = self.host_of(sock.remote[1])
        if (sock.host, host) in self.blocked or (host, sock.host) in self.blocked or sock.host in self.dead:
            self.call_at(self.now + _SYN_RETRY, self._syn, sock)
            return
        listener = self.listeners.get(sock.remote[1])
        sock.connecting = False
        if listener is None or listener.ended:
            sock.error = errno.ECONNREFUSED
            self.note(f"refused {sock.number} {host}")
            return
        accepted = SimulatedSocket(self, listener.host)
        accepted.address, accepted.remote = sock.remote, sock.address
        accepted.peer, sock.peer = sock, accepted
        listener.backlog.append(accepted)
        self.readable[listener.fd] = None
        self.note(f"connected {sock.number} {sock.host} {accepted.number} {accepted.host}")

    # Transmitting

    def send(self, sock: SimulatedSocket, data: bytes) -> int:
        """Send data or a part of it, in up to two pieces; return the number of bytes."""
        random, options = self.random, self.options
        size = len(data)
        if size > 1 and random.random() < options.partial:
            size = random.randint(1, size)
            data = data[:size]
        if self.on_sent is not None:
            self.on_sent(sock, data)
        if size > 1 and random.random() < options.split:
            cut = random.randint(1, size - 1)
            self.transmit(sock, _DATA, data[:cut])
            data = data[cut:]
        self.transmit(sock, _DATA, data)
        return size

    def received(self, sock: SimulatedSocket, data: bytes) -> None:
        if self.on_received is not None:
            self.on_received(sock, data)

    def end(self, sock: SimulatedSocket) -> None:
        self.transmit(sock, _FIN)

    def transmit(self, sock: SimulatedSocket, kind: int, data: bytes = b"") -> None:
        peer = sock.peer
        if peer is None:
            return
        arrival = max(sock.last_arrival, self.now + self._delay(sock.host, peer.host))
        sock.last_arrival = arrival
        sock.segments.append((arrival, kind, data))
        sock.unread += len(data)
        self.call_at(arrival, self._deliver, sock)

    def _deliver(self, sock: SimulatedSocket) -> None:
        peer = sock.peer
        if peer is None or (sock.host, peer.host) in self.blocked:
            return
        while sock.segments and sock.segments[0][0] <= self.now:
            _, kind, data = sock.segments.popleft()
            sock.unread -= len(data)
            if peer.host in self.dead:
                continue
            if kind == _RST:
                self._reset(peer)
            elif peer.ended:
                if kind == _DATA:
                    self.note(f"reset {sock.number}")
                    self._reset(sock)
            elif kind == _FIN:
                self.note(f"end {peer.number}")
                peer.eof = True
                self.readable[peer.fd] = None
            else:
                self.note(f"data {peer.number}", data)
                peer.buffer += data
                self.readable[peer.fd] = None

    def _reset(self, sock: SimulatedSocket) -> None:
        if sock.peer is not None:
            sock.peer = None
            sock.segments.clear()
            sock.unread = 0
            if not sock.ended:
                self.note(f"reset {sock.number}")
                sock.error, sock.eof = errno.ECONNRESET, True
                self.readable[sock.fd] = None

    # Faults

    def block(self, source: str, target: str) -> None:
        self.blocked.add((source, target))

    def unblock(self, source: str, target: str) -> None:
        """Transmit again, also data sent meanwhile."""
        self.blocked.discard((source, target))
        for sock in list(self.sockets.values()) + self._lingering:
            if sock.segments and sock.host == source and sock.peer is not None and sock.peer.host == target:
                self.call_at(self.now + self.random.uniform(0.0, _RETRANSMIT), self._deliver, sock)

    @property
    def _lingering(self) -> list[SimulatedSocket]:
        return [
            sock.peer
            for sock in self.sockets.values()
            if sock.peer is not None and sock.peer.ended and sock.peer.segments
        ]

    def connections(self, host: str | None = None) -> list[SimulatedSocket]:
        """Return the accepting ends of a host's open connections, or of all connections."""
        return [
            sock
            for sock in self.sockets.values()
            if sock.peer is not None and sock.address[1] in self._hosts and host in (None, sock.host, sock.peer.host)
        ]

    def cut(self, sock: SimulatedSocket) -> None:
        """Reset a connection at both ends; data in flight is lost."""
        peer = sock.peer
        self.note(f"cut {sock.number}")
        for end in (sock, peer):
            if end is not None:
                self._reset(end)

    def forget(self, sock: SimulatedSocket) -> None:
        """Lose an end of a connection silently: the other end notices when it sends (half-open)."""
        self.note(f"half-open {sock.number}")
        peer = sock.peer
        self._reset(sock)
        if peer is not None:
            gone = SimulatedSocket(self, sock.host)
            gone.peer, peer.peer = None, gone
            self._abort(gone)
            gone.ended = True

    def kill_host(self, host: str, *, silently: bool = False) -> None:
        """Kill a host's process: its sockets end, or silently vanish as at a loss of power."""
        self.note(f"killed {host}")
        for sock in [sock for sock in self.sockets.values() if sock.host == host]:
            if not silently and sock.peer is not None:
                self.transmit(sock, _RST if self.random.random() < 0.5 or sock.buffer else _FIN)
                self.call_at(sock.last_arrival, self._deliver, sock)
        self.dead.add(host)
