"""Server frames: ``[4B size][4B type][data]``, big-endian, where size counts type and data."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

__all__ = (
    "CLOSE_WAIT",
    "DEFAULT_MAX_FRAME_SIZE",
    "FRAME_HEAD",
    "HEARTBEAT",
    "MAGIC_V2",
    "OK",
    "Frame",
    "FrameType",
    "encode_frame",
)

MAGIC_V2 = b"  V2"
"""First bytes of a connection to nsqd; the version of the protocol."""
OK = b"OK"
HEARTBEAT = b"_heartbeat_"
CLOSE_WAIT = b"CLOSE_WAIT"

DEFAULT_MAX_FRAME_SIZE = 16 * 1024 * 1024
"""Largest frame that is accepted, in bytes; three times the largest body that servers accept by default."""

Frame = tuple[int, bytes]
"""Frame type and data."""

FRAME_HEAD: Struct = Struct(">Ii")
"""Size and type of a frame."""


class FrameType(IntEnum):
    """Type word of a frame."""

    RESPONSE = 0
    ERROR = 1
    MESSAGE = 2


def encode_frame(kind: int, data: bytes) -> bytes:
    """Return the bytes of one frame."""
    return FRAME_HEAD.pack(len(data) + 4, kind) + data
