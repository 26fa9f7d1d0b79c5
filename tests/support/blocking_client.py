"""A minimal blocking client, and requests to lookup nodes."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.support import plain_http

__all__ = ("BlockingClient", "eventually", "lookup", "partitions")

T = TypeVar("T")


class BlockingClient:
    """One connection to a node; frames are tuples (type, data)."""

    def __init__(self, address: str, timeout: float = 20.0) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout)
        self.socket.sendall(b"  V2")

    @property
    def peer(self) -> str:
        """Local address of the connection, as the node reports it."""
        host, port = self.socket.getsockname()
        return f"{host}:{port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def send(self, line: str, body: bytes | None = None) -> None:
        """Send a command."""
        data = line.encode() + b"\n"
        self.socket.sendall(data if body is None else data + struct.pack(">I", len(body)) + body)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                raise EOFError(data)
            data += more
        return data

    def frame(self, timeout: float = 20.0) -> tuple[int, bytes]:
        """Return the next frame except heartbeats; raise EOFError if the node closed the connection."""
        self.socket.settimeout(timeout)
        while True:
            (size,) = struct.unpack(">I", self._exactly(4))
            data = self._exactly(size)
            if data[4:] != b"_heartbeat_":
                return int.from_bytes(data[:4], "big"), data[4:]
            self.socket.sendall(b"NOP\n")

    def ask(self, line: str, body: bytes | None = None, timeout: float = 20.0) -> bytes:
        """Send a command and return the data of the response."""
        self.send(line, body)
        return self.frame(timeout)[1]

    def subscribe(self, topic: str, channel: str = "ch", partition: int = 0, ready: int = 10) -> bytes:
        """Subscribe and send RDY."""
        answer = self.ask(f"SUB {topic} {channel} {partition}")
        if answer == b"OK":
            self.send(f"RDY {ready}")
        return answer

    def message(self, timeout: float = 20.0) -> tuple[bytes, int, bytes]:
        """Return id, attempts and body of the next message."""
        kind, data = self.frame(timeout)
        assert kind == 2, data
        return data[10:26], int.from_bytes(data[8:10], "big"), data[26:]

    def finish(self, message_id: bytes) -> None:
        """Finish a message."""
        self.socket.sendall(b"FIN " + message_id + b"\n")


def lookup(address: str, path: str, **arguments: object) -> Any:
    """Return the data of a lookup node's response."""
    answer = plain_http.get(f"http://{address}{path}", params={key: str(value) for key, value in arguments.items()})
    found = answer.json()
    return found["data"] if isinstance(found, dict) and "status_code" in found else found


def partitions(address: str, topic: str, access: str = "w") -> dict[str, int]:
    """Return the TCP port of each partition's node."""
    found = lookup(address, "/lookup", topic=topic, access=access)
    return {number: node["tcp_port"] for number, node in (found or {}).get("partitions", {}).items()}


def eventually(ask: Callable[[], T], wanted: Callable[[T], bool] = bool, seconds: float = 20.0) -> T:
    """Call ``ask``, for a fifth of the time at most, until its result satisfies ``wanted``; return the result."""
    end = time.monotonic() + seconds
    while True:
        begun = time.monotonic()
        if wanted(answer := ask()):
            return answer
        now = time.monotonic()
        assert now < end, answer
        time.sleep(min(max(4 * (now - begun), 0.01), 0.2))
