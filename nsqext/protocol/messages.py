"""Layouts of delivered messages, and the names of their reserved headers.

::

    [8B time stamp ns][2B attempts][8B internal id][8B trace id]
    [1B version][2B length][header]       extend topics, consumer with extend_support; version 0 ends after its byte
    [8B queue offset][4B raw size]        SUB_ADVANCED and SUB_ORDERED
    [body]

Topic and subscription decide which parts a message has (captured: sub_plain, sub_ext, sub_advanced_ext,
sub_ordered_ext).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from struct import Struct
from struct import error as _StructError
from typing import Any, TypeGuard

from nsqext.arguments import is_whole
from nsqext.errors import ProtocolError
from nsqext.protocol.frames import LargeFrame, MessageData
from nsqext.types import RawJson

__all__ = (
    "COMPRESS_HEADER",
    "DUE_HEADER",
    "EXT_JSON",
    "EXT_NONE",
    "EXT_TAG",
    "IDENTITY_HEADER",
    "KEY_HEADER",
    "MESSAGE_HEAD_SIZE",
    "MESSAGE_ID_SIZE",
    "RESERVED_PREFIX",
    "TAG_HEADER",
    "TRACE_ID_HEADER",
    "RawMessage",
    "decode_into",
    "header_text",
    "message_id",
    "tag_of",
)

EXT_NONE = 0
EXT_TAG = 2
EXT_JSON = 4

RESERVED_PREFIX = "##"
TAG_HEADER = "##client_dispatch_tag"
TRACE_ID_HEADER = "##trace_id"
KEY_HEADER = "##key"
"""For consumers and key_failover channels."""
DUE_HEADER = "##due"
"""When a delayed message is due, in decimal milliseconds since 1970; consumers requeue it until then."""
COMPRESS_HEADER = "nsq.client.compress"
"""See `nsqext.protocol.client.body_compression`."""
IDENTITY_HEADER = "nsqext_id"
"""Identifies a message that an outbox, a relay of delayed messages or the Spark sink may store twice."""

_HEAD = Struct(">qH16s")
_IDS = Struct(">QQ")
_DETAIL = Struct(">QI")
MESSAGE_ID_SIZE = 16
MESSAGE_HEAD_SIZE = _HEAD.size
_U64 = Struct(">Q")
_U16 = Struct(">H")


class RawMessage:
    """A delivered message."""

    __slots__ = ("attempts", "body", "header", "id", "offset", "size", "timestamp", "version")

    timestamp: int  #: when the server stored it, in nanoseconds since 1970
    attempts: int  #: number of deliveries, this included
    id: bytes  #: 16 bytes for FIN, REQ and TOUCH
    version: int  #: of the extend part; 0 for no header, 2 for a tag, 4 for JSON
    header: bytes  #: as published; empty without a header
    offset: int  #: byte offset in the partition's queue; -1 if not reported
    size: int  #: bytes of its record in the queue; 0 if not reported
    body: bytes  #: as published

    @property
    def internal_id(self) -> int:
        """``partition << 50 | counter`` (captured in partition_ids)."""
        value: int = _U64.unpack_from(self.id)[0]
        return value

    @property
    def trace_id(self) -> int:
        """Trace id of the publish, or 0. Not for the original NSQ, which has no trace ids."""
        value: int = _U64.unpack_from(self.id, 8)[0]
        return value


def decode_into(message: RawMessage, data: MessageData, extend: bool = False, detail: bool = False) -> None:
    """Fill a message from the data of a message frame.

    Args:
        extend: topic and consumer have extend support.
        detail: the subscription was SUB_ADVANCED or SUB_ORDERED.

    Raises:
        ProtocolError: the data is too short for its parts.
    """
    if isinstance(data, LargeFrame):
        _decode_large(message, data, extend, detail)
        return
    if len(data) < MESSAGE_HEAD_SIZE:
        raise ProtocolError(f"received a message of {len(data)} bytes, expected at least {MESSAGE_HEAD_SIZE}")
    message.timestamp, message.attempts, message.id = _HEAD.unpack_from(data)
    message.version = EXT_NONE
    message.header = b""
    position = MESSAGE_HEAD_SIZE
    try:
        if extend:
            message.version = data[position]
            position += 1
            if message.version:
                stop = position + 2 + _U16.unpack_from(data, position)[0]
                if stop > len(data):
                    raise ProtocolError(f"extend header ends at byte {stop} of a message of {len(data)} bytes")
                message.header = data[position + 2 : stop]
                position = stop
        if detail:
            message.offset, message.size = _DETAIL.unpack_from(data, position)
            position += 12
        else:
            message.offset, message.size = -1, 0
    except (IndexError, ValueError, _StructError) as error:
        raise ProtocolError(
            f"message of {len(data)} bytes is too short for its parts (extend {extend}, queue position {detail})",
            hint="the topic may have been upgraded to extend; reconnect",
        ) from error
    message.body = data[position:]


def _decode_large(message: RawMessage, frame: LargeFrame, extend: bool, detail: bool) -> None:
    """Decode the start of a large frame, and copy the body once."""
    start = frame.start()
    try:
        decode_into(message, start, extend, detail)
    except ProtocolError:  # its header is longer than the start
        decode_into(message, frame.behind(0), extend, detail)
    else:
        message.body = frame.behind(len(start) - len(message.body))


def message_id(internal_id: int, trace_id: int = 0) -> bytes:
    """Return the 16 bytes of a message id."""
    return _IDS.pack(internal_id, trace_id)


# Values of extend headers, which `nsqext.protocol.headers` decodes


def header_text(headers: Mapping[str, Any], name: str) -> str | None:
    """Return a header as text; None unless it is non-empty text or a whole number."""
    value = headers.get(name)
    return str(value) if (_is_text(value) and value) or is_whole(value, -inf) else None


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and not isinstance(value, RawJson)


def tag_of(headers: Mapping[str, Any]) -> str | None:
    """Return the dispatch tag; only text counts as a tag (captured: tag_dispatch)."""
    tag = headers.get(TAG_HEADER)
    return tag if _is_text(tag) and tag else None
