"""Message frames as columns, and delivered messages in log order, without I/O.

Frames: the fields of all messages of a delivery at once, at a sixth of the cost per row of `nsqext.protocol.messages`,
which has the layout.

Order: messages are sorted by byte offset, duplicates dropped, gaps detected. After a channel's move, the server may
first deliver messages read before the move; it redelivers messages that it considers lost. Each record begins at the
end of the previous record: a run of records without gaps is complete, and counting gives the numbers of messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from attrs import define, field

from nsqext.errors import ProtocolError, RangeIncomplete
from nsqext.protocol.messages import EXT_NONE, MESSAGE_HEAD_SIZE

if TYPE_CHECKING:
    from nsqext.protocol.messages import RawMessage

Array = np.ndarray[Any, Any]

_HEAD = np.dtype([("timestamp", ">i8"), ("attempts", ">u2"), ("id", "V16"), ("offset", ">i8"), ("size", ">u4")])
_DETAIL_SIZE = 12
_EXTEND_HEAD = np.dtype(
    [("timestamp", ">i8"), ("attempts", ">u2"), ("id", "V16"), ("version", "u1"), ("length", ">u2")]
)
_DETAIL = np.dtype([("offset", ">i8"), ("size", ">u4")])
_FIN = np.dtype([("verb", "S4"), ("id", "V16"), ("end", "S1")])
_NO_HEADER = b"\0"
_MOST_INT32 = 2**31 - 1

_head_of = itemgetter(slice(_HEAD.itemsize))
_extend_head_of = itemgetter(slice(_EXTEND_HEAD.itemsize))


@define(eq=False)
class MessageColumns:
    heads: Array  #: timestamp, attempts, id, offset and size
    _frames: list[bytes] | None  # per message, bytes that end with a body; None if bodies are not needed
    _starts: Array  # where the body begins in each
    #: each message's extend part as received (version, and with a header its length and bytes); None without any header
    headers: list[bytes] | None = None
    _lengths: Array | None = field(default=None, init=False)  # of the frames, once they are counted

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def bodies(self) -> list[bytes]:
        if self._frames is None or not len(self):
            return []
        starts: list[int] = self._starts.tolist()
        if starts.count(starts[0]) == len(starts):
            return list(map(itemgetter(slice(starts[0], None)), self._frames))
        return [frame[start:] for frame, start in zip(self._frames, starts, strict=True)]

    def body_sizes(self) -> Array:
        return np.zeros(len(self), np.int64) if self._frames is None else self._frame_lengths() - self._starts

    def _frame_lengths(self) -> Array:
        if self._lengths is None:
            frames = self._frames or []
            self._lengths = np.fromiter(map(len, frames), np.int64, len(frames))
        return self._lengths

    def body_array(self) -> pa.Array:
        """Return the bodies as an Arrow column; less than 2 GiB."""
        frames = self._frames or []
        joined = b"".join(frames)
        kind, number = (pa.binary(), np.int32) if len(joined) <= _MOST_INT32 else (pa.large_binary(), np.int64)
        edges = np.zeros(2 * len(frames) + 1, number)
        np.cumsum(self._frame_lengths(), out=edges[2::2])
        edges[1::2] = edges[:-1:2] + self._starts
        # Arrow copies the bodies out of the joined frames faster than Python slices each frame
        halves = pa.Array.from_buffers(kind, 2 * len(frames), [None, pa.py_buffer(edges), pa.py_buffer(joined)])
        bodies = halves.take(pa.array(np.arange(1, len(halves), 2)))
        return bodies if kind == pa.binary() else bodies.cast(pa.binary())

    def part(self, start: int, stop: int) -> MessageColumns:
        if start == 0 and stop >= len(self):
            return self
        return MessageColumns(
            self.heads[start:stop],
            None if self._frames is None else self._frames[start:stop],
            self._starts[start:stop],
            None if self.headers is None else self.headers[start:stop],
        )

    @classmethod
    def joined(cls, parts: Sequence[MessageColumns]) -> MessageColumns:
        if len(parts) == 1:
            return parts[0]
        heads = np.concatenate([part.heads for part in parts])
        frames = None if parts[0]._frames is None else [*chain.from_iterable(part._frames or () for part in parts)]
        headers = None
        if any(part.headers is not None for part in parts):
            headers = [header for part in parts for header in part.headers or [_NO_HEADER] * len(part)]
        return cls(heads, frames, np.concatenate([part._starts for part in parts]), headers)


def decode_frames(frames: list[bytes], extend: bool, *, with_bodies: bool = True) -> MessageColumns:
    """Decode the frames of a SUB_ADVANCED or SUB_ORDERED subscription, with or without extend headers."""
    if extend:
        return _decode_extended(frames, with_bodies)
    heads = _array(map(_head_of, frames), _HEAD, frames)
    return MessageColumns(heads, frames if with_bodies else None, np.full(len(frames), _HEAD.itemsize))


def _decode_extended(frames: list[bytes], with_bodies: bool) -> MessageColumns:
    fronts = _array(map(_extend_head_of, frames), _EXTEND_HEAD, frames)
    versions = fronts["version"]
    # one byte is the version; after version 0 neither length nor header follow
    ends = np.where(versions == EXT_NONE, MESSAGE_HEAD_SIZE + 1, fronts["length"] + np.int64(_EXTEND_HEAD.itemsize))
    stops = ends.tolist()
    details = (frame[end : end + _DETAIL_SIZE] for frame, end in zip(frames, stops, strict=True))
    heads = np.empty(len(frames), _HEAD)
    for name in ("timestamp", "attempts", "id"):
        heads[name] = fronts[name]
    found = _array(details, _DETAIL, frames)
    for name in ("offset", "size"):
        heads[name] = found[name]
    headers = None
    if versions.any():
        headers = [frame[MESSAGE_HEAD_SIZE:end] for frame, end in zip(frames, stops, strict=True)]
    return MessageColumns(heads, frames if with_bodies else None, ends + _DETAIL_SIZE, headers)


def _array(parts: Iterable[bytes], kind: np.dtype[Any], frames: list[bytes]) -> Array:
    joined = b"".join(parts)
    if len(joined) != len(frames) * kind.itemsize:
        raise ProtocolError(
            f"a message of {min(map(len, frames))} bytes is too short for its parts",
            hint="the topic may have been upgraded to extend; reconnect",
        )
    return np.frombuffer(joined, kind)


def from_messages(messages: Iterable[RawMessage]) -> MessageColumns:
    found = list(messages)
    heads = np.array(
        [(message.timestamp, message.attempts, message.id, message.offset, message.size) for message in found], _HEAD
    )
    headers = [
        message.version.to_bytes() + len(message.header).to_bytes(2) + message.header if message.version else _NO_HEADER
        for message in found
    ]
    return MessageColumns(heads, [message.body for message in found], np.zeros(len(found), np.int64), headers)


def finish_commands(columns: MessageColumns) -> bytes:
    commands = np.empty(len(columns), _FIN)
    commands["verb"] = b"FIN "
    commands["id"] = columns.heads["id"]
    commands["end"] = b"\n"
    return commands.tobytes()


@define(eq=False)
class Block:
    """Consecutive messages of a partition; ``first`` is the first message's number, from 0."""

    first: int
    columns: MessageColumns

    def __len__(self) -> int:
        return len(self.columns)


@define(eq=False)
class Reassembler:
    """Collects the messages of one range from any number of deliveries."""

    count: int  #: first missing message
    end: int  #: behind the last message
    _window: int  # messages kept while an earlier message is missing
    #: byte offset of the first missing message; None before `begin`
    offset: int | None = field(default=None, init=False)
    _ahead: dict[int, MessageColumns] = field(factory=dict, init=False)

    @property
    def done(self) -> bool:
        return self.count >= self.end

    def begin(self, offset: int) -> bool:
        """Set the byte offset of the first missing message; return False if it differs from the known offset."""
        if self.offset is None:
            self.offset = offset
        return self.offset == offset

    def take(self, delivery: MessageColumns) -> list[MessageColumns]:
        """Add a delivery; return new messages in order, from the first missing message up to a gap."""
        expected, left = self.offset, self.end - self.count
        if expected is None or not len(delivery):
            return []
        offsets = delivery.heads["offset"].astype(np.int64)
        sizes = delivery.heads["size"].astype(np.int64)
        ends = offsets + sizes
        if not sizes.all():
            raise ProtocolError("a message has no queue position")
        if not self._ahead and offsets[0] == expected and (ends[:-1] == offsets[1:]).all():
            run = delivery if len(delivery) <= left else delivery.part(0, left)
            self.offset = int(ends[len(run) - 1])
            self.count += len(run)
            return [run]
        if offsets.min() < 0:
            raise ProtocolError("a message has no queue position")
        return self._sort(delivery, offsets.tolist(), expected, left)

    def _sort(self, delivery: MessageColumns, offsets: list[int], expected: int, left: int) -> list[MessageColumns]:
        """Sort a delivery that is no run of new messages."""
        ahead = self._ahead
        for index, offset in enumerate(offsets):
            if offset >= expected:
                ahead.setdefault(offset, delivery.part(index, index + 1))
        ordered: list[MessageColumns] = []
        while expected in ahead and len(ordered) < left:
            found = ahead.pop(expected)
            expected += int(found.heads["size"][0])
            ordered.append(found)
        self.offset = expected
        self.count += len(ordered)
        if self.done:
            ahead.clear()
        if len(ahead) > self._window and not ordered:
            waiting = len(ahead)
            ahead.clear()
            raise RangeIncomplete(
                f"message {self.count} was not received, but {waiting} messages after it",
                hint="the channel skips messages, or the server lost a message, which is requested again",
            )
        return [MessageColumns.joined(ordered)] if ordered else []


@define(eq=False)
class Blocks:
    """Ordered messages cut into blocks, of which a bounded number waits for the reader."""

    _first: int
    _rows: int
    _size: int
    most: int  #: waiting blocks from which on it is full
    _open: list[MessageColumns] = field(factory=list, init=False)
    _count: int = field(default=0, init=False)
    _bytes: int = field(default=0, init=False)
    _ready: deque[Block] = field(factory=deque, init=False)

    @property
    def full(self) -> bool:
        return len(self._ready) >= self.most

    def add(self, columns: MessageColumns) -> None:
        """Add consecutive messages."""
        while len(columns):
            room = self._rows - self._count
            last = columns.heads[-1]
            size = int(last["offset"]) + int(last["size"]) - int(columns.heads["offset"][0])
            taken = len(columns)
            if taken > room or size > self._size - self._bytes:
                # with the message that crosses the limit of bytes
                sizes = np.cumsum(columns.heads["size"][:room].astype(np.int64))
                taken = min(len(sizes), int(np.searchsorted(sizes, self._size - self._bytes)) + 1)
                size = int(sizes[taken - 1])
            self._open.append(columns if taken == len(columns) else columns.part(0, taken))
            self._count += taken
            self._bytes += size
            if self._count >= self._rows or self._bytes >= self._size:
                self.close()
            columns = columns.part(taken, len(columns))

    def close(self) -> None:
        if self._open:
            self._ready.append(Block(self._first, MessageColumns.joined(self._open)))
            self._first += self._count
            self._open = []
            self._count = self._bytes = 0

    def pop(self) -> Block | None:
        """Return the next block; None if no block is complete."""
        return self._ready.popleft() if self._ready else None
