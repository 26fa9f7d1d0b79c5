"""Layouts of delivered messages.

::

    [8B time stamp ns][2B attempts][8B internal id][8B trace id]
    [1B version][2B length][header]       extend topics, consumer with extend_support; version 0 ends after its byte
    [8B queue offset][4B raw size]        SUB_ADVANCED and SUB_ORDERED
    [body]

Topic and subscription decide which parts a message has (captured: sub_plain, sub_ext, sub_advanced_ext,
sub_ordered_ext).
"""

from __future__ import annotations

from struct import Struct
from struct import error as _StructError

from nsqext.errors import ProtocolError

__all__ = (
    "EXT_JSON",
    "EXT_NONE",
    "EXT_TAG",
    "MESSAGE_HEAD_SIZE",
    "MESSAGE_ID_SIZE",
    "RawMessage",
    "decode_into",
    "message_id",
)

EXT_NONE = 0
EXT_TAG = 2
EXT_JSON = 4

_HEAD = Struct(">qH16s")
_IDS = Struct(">QQ")
_DETAIL = Struct(">QI")
MESSAGE_ID_SIZE = 16
MESSAGE_HEAD_SIZE = _HEAD.size
_U64 = Struct(">Q")
_U16 = Struct(">H")


class RawMessage:
    """A delivered message in its fields."""

    __slots__ = ("attempts", "body", "header", "id", "offset", "size", "timestamp", "version")

    timestamp: int  #: when the server stored it, in nanoseconds since 1970
    attempts: int  #: number of deliveries, this included
    id: bytes  #: 16 bytes for FIN, REQ and TOUCH
    version: int  #: version of the extend part, 0 for no header, 2 for a tag, 4 for JSON
    header: bytes  #: the extend part as published; empty without a header
    offset: int  #: byte offset in the partition's queue; -1 if not reported
    size: int  #: bytes of its record in the queue; 0 if not reported
    body: bytes  #: the body as published

    @property
    def internal_id(self) -> int:
        """Number that the server gave the message, ``partition << 50 | counter`` (captured in partition_ids)."""
        value: int = _U64.unpack_from(self.id)[0]
        return value

    @property
    def trace_id(self) -> int:
        """Trace id of the publish; 0 without one. Not for messages of the original NSQ, which has no trace ids."""
        value: int = _U64.unpack_from(self.id, 8)[0]
        return value


def decode_into(message: RawMessage, data: bytes, extend: bool = False, detail: bool = False) -> None:
    """Fill a message from the data of a message frame.

    Args:
        extend: topic and consumer have extend support.
        detail: the subscription was SUB_ADVANCED or SUB_ORDERED.

    Raises:
        ProtocolError: the data is too short for its parts.
    """
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


def message_id(internal_id: int, trace_id: int = 0) -> bytes:
    """Return the 16 bytes of a message id."""
    return _IDS.pack(internal_id, trace_id)
