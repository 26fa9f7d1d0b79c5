"""Server frames: ``[4B size][4B type][data]``, big-endian, where size counts type and data."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct

from nsqext.errors import ProtocolError

__all__ = (
    "CLOSE_WAIT",
    "DEFAULT_MAX_FRAME_SIZE",
    "HEARTBEAT",
    "MAGIC_V2",
    "OK",
    "Frame",
    "FrameParser",
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

_HEAD = Struct(">Ii")
_LARGE = 65536
"""Bytes of a frame that is read by itself: below, further frames of the same read save more than copies cost."""
_SMALL = 4096
"""Bytes of a piece that is appended to another one, because an object of its own would take more memory."""


class FrameType(IntEnum):
    """Type word of a frame."""

    RESPONSE = 0
    ERROR = 1
    MESSAGE = 2


def encode_frame(kind: int, data: bytes) -> bytes:
    """Return the bytes of one frame."""
    return _HEAD.pack(len(data) + 4, kind) + data


class FrameParser:
    """Split received bytes into frames.

    Memory grows with the bytes received, never with an announced size. A frame that is received in many pieces is
    joined once.

    Args:
        max_frame_size: largest size word that is accepted, in bytes.
    """

    __slots__ = ("_max", "_need", "_pieces", "buffered", "error", "single", "wanted")

    def __init__(self, max_frame_size: int = DEFAULT_MAX_FRAME_SIZE) -> None:
        self.buffered: int = 0
        """Bytes of an unfinished frame; `feed` changes it."""
        self.wanted: int = 0
        """Bytes that the next read should take at most, because they belong to one large frame; 0 for any number.

        At most twice the bytes that were received of it, so that an announced size allocates nothing.
        """
        self._pieces: list[bytes | bytearray] = []
        self._need = 8
        self._max = max_frame_size
        self.single: bool = False
        """Return one frame for each call of `feed`, because the bytes after it may be those of another layer."""
        self.error: ProtocolError | None = None
        """Why the stream cannot be parsed any further; frames before the error have been returned."""

    def feed(self, data: bytes, messages: list[bytes] | None = None) -> list[Frame]:
        """Add received bytes and return the frames that they complete.

        Never raises: on invalid bytes ``error`` is set, and all further bytes are discarded.

        Args:
            data: the bytes.
            messages: takes the data of message frames, which are not returned then: the garbage collector counts and
                visits tuples, but not bytes.
        """
        frames: list[Frame] = []
        if self.error is not None:
            return frames
        position, need = 0, 8
        if self.buffered:
            held = self.buffered + len(data)
            if held < self._need:
                self._keep(data, held)
                return frames
            if self.wanted and held == self._need:
                self._finish_large(data, frames, messages)
                return frames
            data = b"".join((*self._pieces, data))
            self._forget()
        end = len(data)
        while end - position >= 8:
            size, kind = _HEAD.unpack_from(data, position)
            if not (4 <= size <= self._max and 0 <= kind <= 2):
                self._fail(data[position : position + 16], size, kind)
                return frames
            stop = position + 4 + size
            if stop > end:
                need = stop - position
                break
            if kind == 2 and messages is not None:
                messages.append(data[position + 8 : stop])
            else:
                frames.append((kind, data[position + 8 : stop]))
            position = stop
            if self.single:
                break
        if position < end:
            self._need = need
            self._keep(data[position:] if position else data, end - position)
        return frames

    def _keep(self, data: bytes, held: int) -> None:
        """Keep the bytes of an unfinished frame, of which ``held`` were received."""
        pieces = self._pieces
        if len(data) < _SMALL and pieces and type(pieces[-1]) is bytearray:
            pieces[-1] += data
        else:
            pieces.append(bytearray(data) if len(data) < _SMALL and pieces else data)
        self.buffered = held
        if self._need > _LARGE:
            self.wanted = min(self._need - held, max(held, _LARGE))

    def _forget(self) -> None:
        self._pieces.clear()
        self.buffered = self.wanted = 0

    def _finish_large(self, data: bytes, frames: list[Frame], messages: list[bytes] | None) -> None:
        """Add the frame that ``data`` ends exactly; as `feed`, with one copy less."""
        pieces = self._pieces
        kind = _HEAD.unpack_from(pieces[0])[1]
        pieces[0] = pieces[0][8:]
        payload = b"".join((*pieces, data))
        self._forget()
        if kind == 2 and messages is not None:
            messages.append(payload)
        else:
            frames.append((kind, payload))

    def take_rest(self) -> bytes:
        """Return and forget the bytes after the last frame: they belong to a layer that was just negotiated."""
        rest = b"".join(self._pieces)
        self._forget()
        return rest

    def _fail(self, start: bytes, size: int, kind: int) -> None:
        if start.startswith(b"HTTP"):
            self.error = ProtocolError(
                "the peer responds with HTTP", hint="this is an HTTP port; give the TCP address of nsqd"
            )
        elif not 4 <= size <= self._max:
            self.error = ProtocolError(
                f"frame size {size} is not within 4..{self._max} (the next bytes are {start!r})",
                hint="the peer may not be nsqd; otherwise raise max_frame_size",
            )
        else:
            self.error = ProtocolError(f"frame type {kind} is unknown", hint="the peer may not be nsqd")
