"""Messages put into their places by byte offset, without I/O: whatever order they come in, out comes a dense run.

A server that moves a channel may first deliver what it had read ahead, and delivers again what it thinks was lost. Each
record begins where the one before it ends, so that a run of records without gaps holds every message between its ends,
and counting them gives their numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from nsqext.errors import ProtocolError, RangeIncomplete

if TYPE_CHECKING:
    from nsqext.protocol.messages import RawMessage

__all__ = ("Block", "Blocks", "Reassembler")


class Block:
    """Neighbouring messages of a partition.

    Attributes:
        first: number of the first one, counted from 0.
        messages: the messages.
    """

    __slots__ = ("first", "messages")

    def __init__(self, first: int, messages: list[RawMessage]) -> None:
        self.first: int = first
        self.messages: list[RawMessage] = messages

    def __len__(self) -> int:
        return len(self.messages)


class Reassembler:
    """The messages of one range, from any number of deliveries.

    Args:
        start: number of the first message.
        end: number behind the last one.
        window: messages that may wait for one that lies before them.

    Attributes:
        count: number of the first message that is missing.
        offset: its byte offset; None until `begin`.
    """

    __slots__ = ("_ahead", "_window", "count", "end", "offset")

    def __init__(self, start: int, end: int, window: int) -> None:
        self.count: int = start
        self.end: int = end
        self.offset: int | None = None
        self._window = window
        self._ahead: dict[int, RawMessage] = {}

    @property
    def done(self) -> bool:
        """Whether no message is missing."""
        return self.count >= self.end

    def begin(self, offset: int) -> bool:
        """Say where the first missing message begins; returns False when it is known to begin elsewhere."""
        if self.offset is None:
            self.offset = offset
        return self.offset == offset

    def take(self, messages: Iterable[RawMessage]) -> list[RawMessage]:
        """Take messages as they were delivered; returns those that follow on what was returned before.

        Messages from before the first missing one, and those that are here already, are dropped.

        Raises:
            RangeIncomplete: so many messages wait that the one before them has to be asked for again.
            ProtocolError: a message without a place.
        """
        expected, left, ahead = self.offset, self.end - self.count, self._ahead
        placed: list[RawMessage] = []
        if expected is None:
            return placed
        for message in messages:
            if len(placed) == left:
                break
            if message.offset != expected:
                if message.offset > expected:
                    self._keep(message)
                elif message.offset < 0:
                    raise ProtocolError("a message without its place in the queue")
                continue
            expected = _append(placed, message)
            while expected in ahead and len(placed) < left:
                expected = _append(placed, ahead.pop(expected))
        self.offset = expected
        self.count += len(placed)
        return placed

    def _keep(self, message: RawMessage) -> None:
        ahead = self._ahead
        ahead.setdefault(message.offset, message)
        if len(ahead) > self._window:
            waiting = len(ahead)
            ahead.clear()
            raise RangeIncomplete(
                f"a message was left out behind number {self.count}: {waiting} messages from behind it came",
                hint="something lets the channel skip messages, or the server lost one; it is asked for again",
            )


def _append(placed: list[RawMessage], message: RawMessage) -> int:
    """Append a message; returns where the next one begins."""
    if message.size <= 0:
        raise ProtocolError(f"a message at offset {message.offset} takes {message.size} bytes of the queue")
    placed.append(message)
    return message.offset + message.size


class Blocks:
    """Placed messages cut into blocks; a bounded number of blocks waits to be taken.

    Args:
        first: number of the first message.
        rows: messages of a block at most.
        size: bytes of a block, more or less.
        most: blocks that may wait before `full` says that there are enough.
    """

    __slots__ = ("_bytes", "_first", "_open", "_ready", "_rows", "_size", "most")

    def __init__(self, first: int, rows: int, size: int, most: int) -> None:
        self.most: int = most
        self._first = first
        self._rows = rows
        self._size = size
        self._open: list[RawMessage] = []
        self._bytes = 0
        self._ready: deque[Block] = deque()

    @property
    def full(self) -> bool:
        """Whether enough blocks wait."""
        return len(self._ready) >= self.most

    def add(self, messages: list[RawMessage]) -> None:
        """Append messages that follow on the ones before."""
        if len(self._open) + len(messages) < self._rows:
            self._bytes += sum([message.size for message in messages])
            if self._bytes < self._size:
                self._open += messages
                return
            self._bytes = sum([message.size for message in self._open])
        for message in messages:
            self._open.append(message)
            self._bytes += message.size
            if len(self._open) >= self._rows or self._bytes >= self._size:
                self.close()

    def close(self) -> None:
        """End the block that is being filled, at the end of the range."""
        if self._open:
            self._ready.append(Block(self._first, self._open))
            self._first += len(self._open)
            self._open = []
            self._bytes = 0

    def pop(self) -> Block | None:
        """Return the next block; None while there is none."""
        return self._ready.popleft() if self._ready else None
