"""Publish extend headers that the producer would not write: those of other clients."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable

_HEARTBEAT = b"_heartbeat_"


class RawPublisher:
    """Sends PUB_EXT to a node, byte for byte, and returns the responses.

    Args:
        node: ``host:port`` of the leader.
        topic: the topic, with extend support.
        partition: the partition.
    """

    def __init__(self, node: str, topic: str, partition: int) -> None:
        host, _, port = node.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=20)
        self._file = self._socket.makefile("rb")
        self._line = f"PUB_EXT {topic} {partition}\n".encode()
        self._socket.sendall(b"  V2")

    def publish(self, messages: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
        """Publish headers and bodies one after the other; return the responses, errors included."""
        responses = []
        for header, body in messages:
            size = struct.pack(">IH", 2 + len(header) + len(body), len(header))
            self._socket.sendall(self._line + size + header + body)
            responses.append(self._response())
        return responses

    def _response(self) -> bytes:
        while True:
            (size,) = struct.unpack(">I", self._file.read(4))
            data = self._file.read(size)[4:]
            if data != _HEARTBEAT:
                return data
            self._socket.sendall(b"NOP\n")

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()
