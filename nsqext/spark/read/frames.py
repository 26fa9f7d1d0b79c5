"""Message frames as columns: the fields of all messages of a delivery at once, without an object for each message.

The layout is that of `nsqext.protocol.messages`, which decodes one message; it costs six times as much for each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nsqext.errors import ProtocolError
from nsqext.protocol.messages import EXT_NONE, MESSAGE_HEAD_SIZE

if TYPE_CHECKING:
    from nsqext.protocol.messages import RawMessage

__all__ = ("MessageColumns", "decode_frames", "finish_commands", "from_messages")

_HEAD = np.dtype([("timestamp", ">i8"), ("attempts", ">u2"), ("id", "V16"), ("offset", ">i8"), ("size", ">u4")])
_DETAIL_SIZE = 12
_FIN = np.dtype([("verb", "S4"), ("id", "V16"), ("end", "S1")])
_NO_HEADER = (EXT_NONE, b"")


class MessageColumns:
    """Messages of one partition, column by column.

    Attributes:
        heads: array with the fields timestamp, attempts, id, offset and size.
        bodies: the bodies; None if they were not decoded.
        headers: version and bytes of each extend header; None for topics without extend support.
    """

    __slots__ = ("bodies", "headers", "heads")

    def __init__(
        self, heads: np.ndarray[Any, Any], bodies: list[bytes] | None, headers: list[tuple[int, bytes]] | None
    ) -> None:
        self.heads: np.ndarray[Any, Any] = heads
        self.bodies: list[bytes] | None = bodies
        self.headers: list[tuple[int, bytes]] | None = headers

    def __len__(self) -> int:
        return len(self.heads)

    def part(self, start: int, stop: int) -> MessageColumns:
        """Return the messages from ``start`` to ``stop``."""
        return MessageColumns(
            self.heads[start:stop],
            None if self.bodies is None else self.bodies[start:stop],
            None if self.headers is None else self.headers[start:stop],
        )

    @classmethod
    def joined(cls, parts: Sequence[MessageColumns]) -> MessageColumns:
        """Return the messages of several deliveries in one object."""
        if len(parts) == 1:
            return parts[0]
        heads = np.concatenate([part.heads for part in parts])
        bodies = None if parts[0].bodies is None else [body for part in parts for body in part.bodies or ()]
        headers = None
        if any(part.headers is not None for part in parts):  # the topic may have been upgraded to extend in between
            headers = [header for part in parts for header in part.headers or [_NO_HEADER] * len(part)]
        return cls(heads, bodies, headers)


def decode_frames(frames: list[bytes], extend: bool, *, with_bodies: bool = True) -> MessageColumns:
    """Decode the message frames of a SUB_ADVANCED or SUB_ORDERED subscription.

    Args:
        frames: data of the frames.
        extend: the topic supports extend headers, and the connection negotiated them.
        with_bodies: also return the bodies.

    Raises:
        ProtocolError: a frame is too short for its parts.
    """
    head = MESSAGE_HEAD_SIZE
    if not extend:
        stop = head + _DETAIL_SIZE
        heads = [frame[:stop] for frame in frames]
        bodies = [frame[stop:] for frame in frames] if with_bodies else None
        return MessageColumns(_array(heads, frames), bodies, None)
    try:
        # one byte is the version; after version 0 neither length nor header follow
        ends = [head + 3 + (frame[head + 1] << 8 | frame[head + 2]) if frame[head] else head + 1 for frame in frames]
        headers = [
            (frame[head], frame[head + 3 : end]) if frame[head] else _NO_HEADER
            for frame, end in zip(frames, ends, strict=True)
        ]
    except IndexError:
        raise _too_short(frames) from None
    pairs = list(zip(frames, ends, strict=True))
    heads = [frame[:head] + frame[end : end + _DETAIL_SIZE] for frame, end in pairs]
    bodies = [frame[end + _DETAIL_SIZE :] for frame, end in pairs] if with_bodies else None
    return MessageColumns(_array(heads, frames), bodies, headers)


def _array(heads: list[bytes], frames: list[bytes]) -> np.ndarray[Any, Any]:
    joined = b"".join(heads)
    if len(joined) != len(heads) * _HEAD.itemsize:
        raise _too_short(frames)
    return np.frombuffer(joined, _HEAD)


def _too_short(frames: list[bytes]) -> ProtocolError:
    return ProtocolError(
        f"a message of {min(map(len, frames))} bytes is too short for its parts",
        hint="the topic may have been upgraded to extend; reconnect",
    )


def from_messages(messages: Iterable[RawMessage]) -> MessageColumns:
    """Return messages that are decoded already."""
    found = list(messages)
    heads = np.array(
        [(message.timestamp, message.attempts, message.id, message.offset, message.size) for message in found], _HEAD
    )
    return MessageColumns(
        heads, [message.body for message in found], [(message.version, message.header) for message in found]
    )


def finish_commands(columns: MessageColumns) -> bytes:
    """Return a FIN command for each message."""
    commands = np.empty(len(columns), _FIN)
    commands["verb"] = b"FIN "
    commands["id"] = columns.heads["id"]
    commands["end"] = b"\n"
    return commands.tobytes()
