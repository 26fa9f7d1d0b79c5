"""Encoded commands and bodies that the client never sends."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

__all__ = ("ext_body", "internal_create_topic", "multi_body", "trace_body")

_U32 = Struct(">I")
_U64 = Struct(">Q")


def multi_body(items: Sequence[bytes]) -> bytes:
    """Return the body of a command of the MPUB family: the count, then every item with its size."""
    return _U32.pack(len(items)) + b"".join(_U32.pack(len(item)) + item for item in items)


def multi_items(body: bytes) -> list[bytes]:
    """Return the items of the body of a command of the MPUB family."""
    items, at = [], 4
    for _ in range(_U32.unpack_from(body)[0]):
        (size,) = _U32.unpack_from(body, at)
        items.append(body[at + 4 : at + 4 + size])
        at += 4 + size
    return items


def ext_body(header: bytes, body: bytes) -> bytes:
    """Return the body of PUB_EXT, or an item of MPUB_EXT."""
    return len(header).to_bytes(2, "big") + header + body


def trace_body(trace_id: int, body: bytes) -> bytes:
    """Return the body of PUB_TRACE, or an item of MPUB_TRACE."""
    return _U64.pack(trace_id) + body


def internal_create_topic(topic: str, partition: int, extend: bool = False) -> bytes:
    """Return INTERNAL_CREATE_TOPIC, for a standalone redesigned nsqd only (captured: standalone_create_topic)."""
    return f"INTERNAL_CREATE_TOPIC {topic} {partition} {'true' if extend else 'false'}\n".encode()
