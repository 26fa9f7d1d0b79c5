"""Encode messages as servers do; see `nsqext.protocol.messages` for their layouts."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsqext.protocol.messages import RawMessage

_HEAD = Struct(">qH16s")
_DETAIL = Struct(">QI")
_U16 = Struct(">H")


def encode_message(message: RawMessage, extend: bool = False, detail: bool = False) -> bytes:
    """Return the data of a message frame for a subscription."""
    parts = [_HEAD.pack(message.timestamp, message.attempts, message.id)]
    if extend:
        parts.append(bytes((message.version,)))
        if message.version:
            parts += (_U16.pack(len(message.header)), message.header)
    if detail:
        parts.append(_DETAIL.pack(message.offset, message.size))
    parts.append(message.body)
    return b"".join(parts)
