"""Delivered messages in the order of the log, without I/O: sorted by byte offset, duplicates dropped, gaps detected.

After a channel was moved, the server may first deliver messages that it had read before the move, and it delivers
messages again that it considers lost. Each record begins where the previous one ends. A run of records without gaps
therefore contains every message between its ends, and counting the records gives their numbers.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from attrs import define, field

from nsqext.errors import ProtocolError, RangeIncomplete
from nsqext.spark.read.frames import MessageColumns


@define(eq=False)
class Block:
    """Consecutive messages of a partition; ``first`` is the number of the first one, counted from 0."""

    first: int
    columns: MessageColumns

    def __len__(self) -> int:
        return len(self.columns)


@define(eq=False)
class Reassembler:
    """Collects the messages of one range from any number of deliveries."""

    count: int  # number of the first missing message
    end: int  # number after the last message
    _window: int  # number of messages that are kept while an earlier one is missing
    # byte offset of the first missing message; None before `begin`
    offset: int | None = field(default=None, init=False)
    _ahead: dict[int, MessageColumns] = field(factory=dict, init=False)

    @property
    def done(self) -> bool:
        """Whether no message is missing."""
        return self.count >= self.end

    def begin(self, offset: int) -> bool:
        """Set the byte offset of the first missing message; returns False if another one is known."""
        if self.offset is None:
            self.offset = offset
        return self.offset == offset

    def take(self, delivery: MessageColumns) -> list[MessageColumns]:
        """Add a delivery; returns the messages that continue those returned before, in order.

        Messages before the first missing one and duplicates are dropped.
        """
        expected, left = self.offset, self.end - self.count
        if expected is None or not len(delivery):
            return []
        offsets = delivery.heads["offset"].astype(np.int64)
        sizes = delivery.heads["size"].astype(np.int64)
        if int(sizes.min()) <= 0 or int(offsets.min()) < 0:
            raise ProtocolError("a message has no queue position")
        ends = offsets + sizes
        if not self._ahead and offsets[0] == expected and np.array_equal(ends[:-1], offsets[1:]):
            run = delivery if len(delivery) <= left else delivery.part(0, left)
            self.offset = int(ends[len(run) - 1])
            self.count += len(run)
            return [run]
        return self._sort(delivery, offsets.tolist(), expected, left)

    def _sort(self, delivery: MessageColumns, offsets: list[int], expected: int, left: int) -> list[MessageColumns]:
        """Sort a delivery that is not a run of new messages."""
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
                hint="the channel skips messages, or the server lost one; it is requested again",
            )
        return [MessageColumns.joined(ordered)] if ordered else []


@define(eq=False)
class Blocks:
    """Ordered messages cut into blocks; a bounded number of blocks waits for the reader."""

    _first: int
    _rows: int
    _size: int
    most: int  # waiting blocks at which `full` becomes true
    _open: list[MessageColumns] = field(factory=list, init=False)
    _count: int = field(default=0, init=False)
    _bytes: int = field(default=0, init=False)
    _ready: deque[Block] = field(factory=deque, init=False)

    @property
    def full(self) -> bool:
        """Whether enough blocks wait."""
        return len(self._ready) >= self.most

    def add(self, columns: MessageColumns) -> None:
        """Append messages that follow the previous ones."""
        while len(columns):
            room = self._rows - self._count
            # the message that crosses the limit of bytes still belongs to the block
            sizes = np.cumsum(columns.heads["size"][:room].astype(np.int64))
            taken = min(len(sizes), int(np.searchsorted(sizes, self._size - self._bytes)) + 1)
            self._open.append(columns if taken == len(columns) else columns.part(0, taken))
            self._count += taken
            self._bytes += int(sizes[taken - 1])
            if self._count >= self._rows or self._bytes >= self._size:
                self.close()
            columns = columns.part(taken, len(columns))

    def close(self) -> None:
        """End the block that is being filled."""
        if self._open:
            self._ready.append(Block(self._first, MessageColumns.joined(self._open)))
            self._first += self._count
            self._open = []
            self._count = self._bytes = 0

    def pop(self) -> Block | None:
        """Return the next block; None if no block is complete."""
        return self._ready.popleft() if self._ready else None
