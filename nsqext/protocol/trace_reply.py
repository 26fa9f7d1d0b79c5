"""Responses to publish commands: ``OK``, or ``OK`` with 28 bytes of trace (smart client note, message tracing)."""

from __future__ import annotations

from struct import Struct

from nsqext.errors import ProtocolError

_TRACE = Struct(">2sQQQI")
TRACE_REPLY_SIZE = _TRACE.size


def encode_trace_reply(message_id: int, trace_id: int, offset: int, size: int) -> bytes:
    """Return the 30 bytes of a response with trace."""
    return _TRACE.pack(b"OK", message_id, trace_id, offset, size)


def decode_trace_reply(data: bytes, trace_id: int) -> tuple[int, int, int, int]:
    """Return message id, trace id, offset and size from a response with trace.

    The response to MPUB_TRACE has id and offset of the batch's first message, trace id 0, and the size of the batch.
    Raises `ProtocolError` if the response is none, or has another trace id: responses no longer match commands, and the
    message may have been stored.
    """
    if len(data) == TRACE_REPLY_SIZE:
        start, message_id, replied, offset, size = _TRACE.unpack(data)
        if start == b"OK":
            if replied != trace_id:
                raise ProtocolError(f"received the trace id {replied} in the response to a publish with {trace_id}")
            return message_id, replied, offset, size
    raise ProtocolError(f"expected OK and 28 bytes of trace in response to a publish, received {data[:40]!r}")
