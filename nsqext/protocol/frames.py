"""Server frames: ``[4B size][4B type][data]``, big-endian, where size counts type and data.

The data of a response to a publish is ``OK``, maybe with 28 bytes of trace (smart client note, message tracing).
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import TypeAlias

from nsqext.errors import ProtocolError

__all__ = (
    "CLOSE_WAIT",
    "DEFAULT_MAX_FRAME_SIZE",
    "FRAME_HEAD",
    "HEARTBEAT",
    "MAGIC_V2",
    "OK",
    "Frame",
    "FrameType",
    "LargeFrame",
    "MessageData",
    "encode_frame",
)

MAGIC_V2 = b"  V2"
"""First bytes of a connection to nsqd."""
OK = b"OK"
HEARTBEAT = b"_heartbeat_"
CLOSE_WAIT = b"CLOSE_WAIT"

DEFAULT_MAX_FRAME_SIZE = 16 * 1024 * 1024
"""Bytes; three times the largest body of servers by default."""
MAX_DECODED = 4 * DEFAULT_MAX_FRAME_SIZE
"""Most bytes that a compression layer returns for a read, as many as 64 KiB of deflate can hold."""

Frame = tuple[int, bytes]
"""Frame type and data."""

FRAME_HEAD: Struct = Struct(">Ii")
"""Size and type."""

_START = 4096  # bytes of a large frame that are decoded first

_TRACE = Struct(">2sQQQI")
TRACE_REPLY_SIZE = _TRACE.size


class FrameType(IntEnum):
    """Type word of a frame."""

    RESPONSE = 0
    ERROR = 1
    MESSAGE = 2


class LargeFrame:
    """The data of a message frame in pieces, of which the body is copied once: joined, then cut, it would be twice."""

    __slots__ = ("_pieces", "_size")

    def __init__(self, pieces: list[memoryview], size: int) -> None:
        self._pieces = pieces
        self._size = size

    def __len__(self) -> int:
        return self._size

    def start(self) -> bytes:
        """Return the first bytes: all parts before the body, unless its header is long."""
        found = bytes(self._pieces[0][:_START])
        return found if len(found) == _START else self.behind(0)[:_START]

    def behind(self, position: int) -> bytes:
        """Return the bytes from a position on."""
        for number, piece in enumerate(self._pieces):
            if position < len(piece):
                return b"".join((piece[position:], *self._pieces[number + 1 :]))
            position -= len(piece)
        return b""


MessageData: TypeAlias = bytes | LargeFrame
"""The data of a message frame."""


def encode_frame(kind: int, data: bytes) -> bytes:
    """Return the bytes of a frame."""
    return FRAME_HEAD.pack(len(data) + 4, kind) + data


def encode_trace_reply(message_id: int, trace_id: int, offset: int, size: int) -> bytes:
    return _TRACE.pack(b"OK", message_id, trace_id, offset, size)


def decode_trace_reply(data: bytes, trace_id: int) -> tuple[int, int, int, int]:
    """Return message id, trace id, offset and size of a response with trace.

    The response to MPUB_TRACE has the first message's id and offset, trace id 0, and the batch's size. Raises
    `ProtocolError` without a trace or with another trace id: responses do not match commands, and the message may have
    been stored.
    """
    if len(data) == TRACE_REPLY_SIZE:
        start, message_id, replied, offset, size = _TRACE.unpack(data)
        if start == b"OK":
            if replied != trace_id:
                raise ProtocolError(f"received the trace id {replied} in the response to a publish with {trace_id}")
            return message_id, replied, offset, size
    raise ProtocolError(f"expected OK and 28 bytes of trace in response to a publish, received {data[:40]!r}")
