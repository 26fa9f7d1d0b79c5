"""The delayed queues of a partition on disk: a line for each change, written anew when it was opened."""

from __future__ import annotations

import logging
import os
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING, Any

import orjson

from nsqext.broker.engine.errors import Refusal
from nsqext.broker.engine.storage.delayed_queue import Delayed
from nsqext.broker.engine.storage.files import write_atomically
from nsqext.broker.engine.storage.log import Entry
from nsqext.protocol.record import decode_record, encode_record

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ("ChannelJournal", "DelayedJournal")

_OVERGROWN = 16 * 1024 * 1024
_LOG = logging.getLogger(__name__)


class DelayedJournal:
    """The file with all changes of the delayed queues of one partition.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._out = -1
        self._size = 0
        self._kept = 0  # bytes after it was written anew
        self._closed = False

    def load(self) -> dict[str, dict[int, Delayed]]:
        """Return what the delayed queues hold, by channel and internal id."""
        held: dict[str, dict[int, Delayed]] = {}
        if not self._path.exists():
            return held
        for line in self._path.read_bytes().split(b"\n"):
            try:
                change = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue  # empty, or the torn last line
            messages = held.setdefault(change["channel"], {})
            if "record" in change:
                record, _ = decode_record(b64decode(change["record"]))
                entry = Entry(record, change["offset"], change["size"], change["count"])
                messages[record.internal_id] = Delayed(entry, change["attempts"], change["due"])
            elif "removed" in change:
                messages.pop(change["removed"], None)
            else:
                messages.clear()
        return held

    def rewrite(self, held: Iterable[tuple[str, Iterable[Delayed]]]) -> None:
        """Write only what is still there, and go on from it.

        Raises:
            OSError: the disk does not take it; the file is as it was.
        """
        data = b"".join(_put(channel, delayed) for channel, messages in held for delayed in messages)
        write_atomically(self._path, data, sync=False)
        self._release()
        self._size = self._kept = len(data)

    @property
    def is_overgrown(self) -> bool:
        """Whether most of the file tells of messages that are gone."""
        return self._size > max(_OVERGROWN, 4 * self._kept)

    def write(self, line: bytes) -> None:
        """Write one change.

        Raises:
            Refusal: the disk does not take it, and has nothing of it; or the partition is closed.
        """
        if self._closed:
            raise Refusal("exiting")
        written = 0
        try:
            if self._out < 0:
                self._out = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                self._size = os.fstat(self._out).st_size
            while written < len(line):
                written += os.write(self._out, line[written:])
        except OSError as error:
            if written:
                self._cut_back()
            raise Refusal(f"{self._path} cannot be written: {error.strerror}") from error
        self._size += written

    def _cut_back(self) -> None:
        """Take half a line away; where that fails, nothing may follow on it."""
        try:
            os.ftruncate(self._out, self._size)
        except OSError:
            self._closed = True

    def try_write(self, line: bytes) -> None:
        """Write one change that may be forgotten: the message comes once more after a restart then."""
        try:
            self.write(line)
        except Refusal as refusal:
            _LOG.warning("%s", refusal.text)

    def close(self) -> None:
        """Close the file; nothing is written to it any more."""
        self._closed = True
        self._release()

    def _release(self) -> None:
        if self._out >= 0:
            os.close(self._out)
            self._out = -1

    def destroy(self) -> None:
        """Close and remove the file."""
        self.close()
        self._path.unlink(missing_ok=True)


def _line(change: dict[str, Any]) -> bytes:
    return orjson.dumps(change) + b"\n"


def _put(channel: str, delayed: Delayed) -> bytes:
    entry = delayed.entry
    return _line(
        {
            "channel": channel,
            "record": b64encode(encode_record(entry.record)).decode(),
            "offset": entry.offset,
            "size": entry.size,
            "count": entry.count,
            "attempts": delayed.attempts,
            "due": delayed.due,
        }
    )


class ChannelJournal:
    """One channel's part of the journal.

    Args:
        journal: the file.
        channel: the channel.
    """

    def __init__(self, journal: DelayedJournal, channel: str) -> None:
        self._journal = journal
        self._channel = channel

    def put(self, delayed: Delayed) -> None:
        """Note that a message came into the delayed queue.

        Raises:
            Refusal: the disk does not take it.
        """
        self._journal.write(_put(self._channel, delayed))

    def removed(self, internal_id: int) -> None:
        """Note that a message left it."""
        self._journal.try_write(_line({"channel": self._channel, "removed": internal_id}))

    def cleared(self) -> None:
        """Note that all left it."""
        self._journal.try_write(_line({"channel": self._channel}))
