"""The delayed queue of a channel: messages requeued with a long delay (captured: delayed_req_to_queue).

On disk, a partition's queues share a file with a line per change, compacted when opened.
"""

from __future__ import annotations

import logging
import os
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import msgspec
from attrs import define, field

from nsqext.broker.engine.storage.files import Number, decode_checked, keep_aside, with_checksum, write_atomically
from nsqext.broker.engine.storage.log import LogEntry, Refusal
from nsqext.errors import ProtocolError
from nsqext.protocol.record import decode_record, encode_record

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_OVERGROWN = 16 * 1024 * 1024
logger: logging.Logger = logging.getLogger(__name__)


@define(eq=False)
class Delayed:
    """A message in the delayed queue."""

    entry: LogEntry  #: the partition's queue may have removed it
    attempts: int
    due: int  #: nanoseconds since 1970


@define(eq=False)
class DelayedQueue:
    """Messages by due time; they stay until finished."""

    _channel: str
    _journal: DelayedJournal | None = None  # records every change
    messages: dict[int, Delayed] = field(factory=dict, init=False)
    _order: list[tuple[int, int]] = field(factory=list, init=False)

    def put(self, delayed: Delayed) -> None:
        if self._journal is not None:
            self._journal.put(self._channel, delayed)
        self.restore(delayed)

    def restore(self, delayed: Delayed) -> None:
        internal_id = delayed.entry.record.internal_id
        self.messages[internal_id] = delayed
        heappush(self._order, (delayed.due, internal_id))

    def remove(self, internal_id: int) -> None:
        if self.messages.pop(internal_id, None) is not None and self._journal is not None:
            self._journal.removed(self._channel, internal_id)

    def clear(self) -> None:
        if self.messages and self._journal is not None:
            self._journal.removed(self._channel)
        self.messages.clear()
        self._order.clear()

    @property
    def first_due(self) -> int:
        """Nanoseconds since 1970; 0 if empty."""
        order = self._order
        while order and (order[0][1] not in self.messages or self.messages[order[0][1]].due != order[0][0]):
            heappop(order)
        return order[0][0] if order else 0

    def due(self, now: int, most: int) -> list[Delayed]:
        """Return at most ``most`` messages due at ``now`` (nanoseconds since 1970), without removing them."""
        if not 0 < self.first_due <= now:
            return []
        found: list[Delayed] = []
        keep: list[tuple[int, int]] = []
        while self._order and self._order[0][0] <= now and len(found) < most:
            key = heappop(self._order)
            delayed = self.messages.get(key[1])
            if delayed is not None and delayed.due == key[0]:
                found.append(delayed)
                keep.append(key)
        self._order += keep
        heapify(self._order)
        return found


class DelayedJournal:
    """The file with all changes of a partition's delayed queues.

    With ``durable``, `sync` and `rewrite` wait for the medium.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self.path: Path = path
        self._durable = durable
        self._unsynced = False
        #: copy of a damaged file that `load` found, or empty
        self.damaged_file: str = ""
        self.torn_bytes: int = 0  #: of an unfinished last line that `load` found
        self._out: int | None = None
        self._size = 0
        self._compact_size = 0  # bytes after the last compaction
        self._closed = False

    def load(self) -> dict[str, dict[int, Delayed]]:
        """Return the delayed queues, by channel and internal id.

        The last line may be torn. Other unreadable lines are damage: they are logged, and a copy of the file is kept.
        """
        held: dict[str, dict[int, Delayed]] = {}
        if not self.path.exists():
            return held
        lines = self.path.read_bytes().split(b"\n")
        damaged, self.torn_bytes = 0, len(lines[-1])
        for line in lines[:-1]:
            try:
                _apply(held, decode_checked(line, _Change))
            except (ValueError, ProtocolError):
                damaged += 1
        if damaged:
            kept = keep_aside(self.path, "damaged", move=False)
            self.damaged_file = kept.name
            logger.warning(
                "%s is damaged: %d of %d changes of delayed queues are lost; the file is kept as %s",
                self.path, damaged, len(lines) - 1, kept.name,
            )  # fmt: skip
        if self.torn_bytes:
            logger.warning("%s: removed a torn line of %d bytes at the end", self.path, self.torn_bytes)
        return held

    def rewrite(self, held: Iterable[tuple[str, Iterable[Delayed]]]) -> None:
        """Compact the file; after an `OSError` it is unchanged."""
        data = b"".join(_encode_put(channel, delayed) for channel, messages in held for delayed in messages)
        write_atomically(self.path, data, sync=self._durable)
        self._unsynced = False
        self._release()
        self._size = self._compact_size = len(data)

    @property
    def is_overgrown(self) -> bool:
        return self._size > max(_OVERGROWN, 4 * self._compact_size)

    def put(self, channel: str, delayed: Delayed) -> None:
        self._write(_encode_put(channel, delayed))

    def _write(self, line: bytes) -> None:
        """Write a change; if closed, or for an unwritable disk, raises `Refusal` with an unchanged file."""
        if self._closed:
            raise Refusal("exiting")
        written = 0
        try:
            if self._out is None:
                self._out = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                self._size = os.fstat(self._out).st_size
            self._unsynced = True
            while written < len(line):
                written += os.write(self._out, line[written:])
        except OSError as error:
            if written and self._out is not None:
                self._cut_back(self._out)
            raise Refusal(f"{self.path} cannot be written: {error.strerror}") from error
        self._size += written

    def sync(self) -> None:
        """Wait for the medium, if required: the queue counts delayed messages as finished. Raises OSError."""
        if self._durable and self._unsynced and self._out is not None:
            os.fsync(self._out)
            self._unsynced = False

    def _cut_back(self, out: int) -> None:
        """Remove a partly written line; on failure, close the journal: nothing may follow it."""
        try:
            os.ftruncate(out, self._size)
        except OSError:
            self._closed = True

    def removed(self, channel: str, internal_id: int | None = None) -> None:
        """Record that a message, or every message, was removed; else, with a warning, a restart redelivers it."""
        try:
            self._write(_encode(_Change(channel, internal_id)))
        except Refusal as refusal:
            logger.warning("%s", refusal.text)

    def close(self) -> None:
        self._closed = True
        self._release()

    def _release(self) -> None:
        out, self._out = self._out, None
        if out is not None:
            os.close(out)

    def destroy(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)


class _Change(msgspec.Struct, omit_defaults=True):
    """An added message, a removed message, or without both an emptied queue."""

    channel: str
    removed: int | None = None
    record: bytes = b""
    offset: Number = 0
    size: Number = 0
    count: Number = 0
    attempts: Number = 0
    due: Number = 0


def _apply(held: dict[str, dict[int, Delayed]], change: _Change) -> None:
    messages = held.setdefault(change.channel, {})
    if change.record:
        record, _ = decode_record(change.record)
        entry = LogEntry(record, change.offset, change.size, change.count)
        messages[record.internal_id] = Delayed(entry, change.attempts, change.due)
    elif change.removed is not None:
        messages.pop(change.removed, None)
    else:
        messages.clear()


def _encode(change: _Change) -> bytes:
    return with_checksum(msgspec.json.encode(change)) + b"\n"


def _encode_put(channel: str, delayed: Delayed) -> bytes:
    entry, record = delayed.entry, encode_record(delayed.entry.record)
    return _encode(_Change(channel, None, record, entry.offset, entry.size, entry.count, delayed.attempts, delayed.due))
