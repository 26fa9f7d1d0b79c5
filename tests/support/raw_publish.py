"""Publish messages that the producer would not write: with the extend headers of other clients."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable

from attrs import field, frozen

_HEARTBEAT = b"_heartbeat_"
_SHOWN = 60  # bytes of a message in a failure


@frozen
class Stored:
    """A message as a server stores it: ``header`` is empty for no header, ``trace_id`` 0 without it."""

    header: bytes = field(repr=lambda data: repr(data[:_SHOWN]))
    body: bytes = field(repr=lambda data: repr(data[:_SHOWN]))
    trace_id: int = 0


class RawPublisher:
    """Sends publishes to a node, byte for byte, and returns the responses.

    Args:
        node: ``host:port`` of the leader.
        topic: the topic, with extend support.
        partition: the partition.
    """

    def __init__(self, node: str, topic: str, partition: int) -> None:
        host, _, port = node.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=20)
        self._file = self._socket.makefile("rb")
        self._place = f" {topic} {partition}\n".encode()
        self._socket.sendall(b"  V2")

    def publish(self, messages: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
        """Publish headers and bodies one after the other; return the responses, errors included."""
        responses = []
        for header, body in messages:
            size = struct.pack(">IH", 2 + len(header) + len(body), len(header))
            responses.append(self._request(b"PUB_EXT", size + header + body))
        return responses

    def publish_stored(self, messages: Iterable[Stored]) -> list[bytes]:
        """Publish messages one after the other, without header by PUB or PUB_TRACE; return the responses."""
        responses = []
        for message in messages:
            if message.header:
                responses += self.publish([(message.header, message.body)])
            elif message.trace_id:
                head = struct.pack(">IQ", 8 + len(message.body), message.trace_id)
                responses.append(self._request(b"PUB_TRACE", head + message.body))
            else:
                responses.append(self._request(b"PUB", struct.pack(">I", len(message.body)) + message.body))
        return responses

    def _request(self, verb: bytes, content: bytes) -> bytes:
        self._socket.sendall(verb + self._place + content)
        return self._response()

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
