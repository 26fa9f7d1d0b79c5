"""Replies to publish commands: ``OK``, or ``OK`` with 28 bytes of trace (smart client note, message tracing)."""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from nsqext.errors import ProtocolError

__all__ = ("TRACE_REPLY_SIZE", "TraceReply", "decode_trace_reply", "encode_trace_reply")

_TRACE = Struct(">2sQQQI")
TRACE_REPLY_SIZE = _TRACE.size


class TraceReply(NamedTuple):
    """Where a publish was stored.

    MPUB_TRACE gives id and offset of the batch's first message, trace id 0, and the size of the whole batch.
    """

    message_id: int
    trace_id: int
    offset: int
    size: int


def encode_trace_reply(message_id: int, trace_id: int, offset: int, size: int) -> bytes:
    """Return the 30 bytes of a reply with trace."""
    return _TRACE.pack(b"OK", message_id, trace_id, offset, size)


def decode_trace_reply(data: bytes) -> TraceReply:
    """Read a reply with trace.

    Raises:
        ProtocolError: it is not 30 bytes long or does not begin with OK; the message was stored all the same.
    """
    if len(data) == TRACE_REPLY_SIZE:
        start, message_id, trace_id, offset, size = _TRACE.unpack(data)
        if start == b"OK":
            return TraceReply(message_id, trace_id, offset, size)
    raise ProtocolError(f"a reply with trace is OK and 28 bytes, this one is {data[:40]!r}")
