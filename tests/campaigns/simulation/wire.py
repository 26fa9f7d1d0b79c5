"""Watch the connections of consumers on the wire: RDY counts, and messages in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqext.testing.simulation.sockets import SimulatedSocket

__all__ = ("RdyWatch",)

_MESSAGE = 2
_WITH_BODY = (b"IDENTIFY", b"AUTH", b"PUB", b"MPUB")
_MAGIC = b"  V2"
_ANSWERS = (b"FIN ", b"REQ ")
_QUEUED = 10.0
"""Seconds for which a message may wait in a node's output.

A smaller RDY count of that time does not apply to it, and its timeout began when it was queued.
"""


class _Connection:
    """What a node has received and sent on one connection."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.sent = bytearray()
        self.body = 0
        self.counts: list[tuple[float, int]] = [(0.0, 0)]
        self.in_flight: dict[bytes, float] = {}
        self.answered: dict[bytes, float] = {}
        self.is_consumer = True


class RdyWatch:
    """Parses what nodes receive and send, and reports messages that exceed the RDY count.

    Args:
        ports: TCP ports of the nodes.
        now: returns virtual seconds.
        timeout: seconds after which a message in flight has timed out.
        report: called with a text for each violation.
    """

    def __init__(
        self, ports: set[int], now: Callable[[], float], timeout: float, report: Callable[[str], None]
    ) -> None:
        self._ports = ports
        self._now = now
        self._timeout = timeout
        self._report = report
        self._connections: dict[int, _Connection] = {}

    def _find(self, sock: SimulatedSocket) -> _Connection | None:
        if sock.address[1] not in self._ports or sock.remote is None:
            return None
        found = self._connections.get(sock.number)
        if found is None:
            found = self._connections[sock.number] = _Connection()
        return found if found.is_consumer else None

    def received(self, sock: SimulatedSocket, data: bytes) -> None:
        """Process bytes that a node has read."""
        connection = self._find(sock)
        if connection is None:
            return
        buffer = connection.received
        buffer += data
        if buffer.startswith(_MAGIC):
            del buffer[: len(_MAGIC)]
        while buffer:
            if connection.body:
                if len(buffer) < 4 or len(buffer) < 4 + int.from_bytes(buffer[:4], "big"):
                    return
                del buffer[: 4 + int.from_bytes(buffer[:4], "big")]
                connection.body = 0
                continue
            if buffer.startswith(_ANSWERS) and len(buffer) < 21:
                return
            end = buffer.find(b"\n", 20 if buffer.startswith(_ANSWERS) else 0)
            if end < 0:
                return
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            self._command(connection, line)

    def _command(self, connection: _Connection, line: bytes) -> None:
        name = line[:8].split(b" ")[0].split(b"\n")[0]
        if name == b"RDY" and line[4:].isdigit():
            connection.counts.append((self._now(), int(line[4:])))
        elif name in (b"FIN", b"REQ"):
            if connection.in_flight.pop(line[4:20], None) is None:
                connection.answered[line[4:20]] = self._now()
        elif name.startswith((b"PUB", b"MPUB")):
            connection.is_consumer = False
            connection.received.clear()
        elif name in _WITH_BODY:
            connection.body = 1

    def sent(self, sock: SimulatedSocket, data: bytes) -> None:
        """Process bytes that a node has sent."""
        connection = self._find(sock)
        if connection is None:
            return
        buffer = connection.sent
        buffer += data
        while len(buffer) >= 4:
            size = 4 + int.from_bytes(buffer[:4], "big")
            if len(buffer) < size:
                return
            if int.from_bytes(buffer[4:8], "big") == _MESSAGE:
                self._message(connection, sock, bytes(buffer[18:34]))
            del buffer[:size]

    def _message(self, connection: _Connection, sock: SimulatedSocket, message_id: bytes) -> None:
        now, in_flight = self._now(), connection.in_flight
        if connection.answered.pop(message_id, None) == now:
            return  # sent again between two commands of one read, the second of which answers its first delivery
        in_flight[message_id] = now
        counts = connection.counts
        while len(counts) > 1 and counts[1][0] < now - _QUEUED:
            del counts[0]
        ready = max(count for _, count in counts)
        if len(in_flight) > ready:
            late = now - self._timeout + _QUEUED
            for old in [found for found, since in in_flight.items() if since <= late]:
                del in_flight[old]
        if len(in_flight) > ready:
            self._report(
                f"{len(in_flight)} messages in flight at {now:.3f} s on the connection from {sock.remote}, RDY {ready}"
            )
