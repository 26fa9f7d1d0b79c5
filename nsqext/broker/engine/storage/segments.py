"""The queue on disk, in files of records.

An acknowledged record has reached the operating system and survives the process; `DiskOptions.fsync` decides what
survives a power failure.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from attrs import frozen

from nsqext.broker.engine.storage.files import SegmentFile, SegmentFolder, usable
from nsqext.broker.engine.storage.log import LogEntry, Refusal
from nsqext.broker.engine.storage.recovery import Recovery, SegmentRecovery
from nsqext.errors import ProtocolError
from nsqext.protocol.record import decode_record, encode_record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

logger: logging.Logger = logging.getLogger(__name__)
_MIB = 1024 * 1024


@frozen
class DiskOptions:
    """How a partition uses the disk."""

    fsync: str = "never"  #: ``never``, ``interval`` or ``always``
    sync_interval: float = 0.5  #: seconds between writes of the channels' positions, and fsync with ``interval``
    max_file_bytes: int = 100 * _MIB  #: size at which a new file starts
    retention_bytes: int = 64 * _MIB  #: finished messages for consumers that seek backwards


class SegmentStore:
    """Files of a partition's queue."""

    def __init__(self, folder: Path, topic: str, partition: int, options: DiskOptions) -> None:
        self.recovery: Recovery = Recovery()  #: findings of `recover`
        self._folder = SegmentFolder(folder, topic, partition, sync=options.fsync != "never")
        self._options = options
        self._files: list[SegmentFile] = []
        self._last_number: int
        self._out: int | None = None
        self._dirty = False
        with usable(folder):
            folder.mkdir(parents=True, exist_ok=True)

    # Opening

    def recover(
        self, known_end: tuple[int, int] = (0, 0), begins: Mapping[int, tuple[int, int]] | None = None
    ) -> Iterator[list[LogEntry]]:
        """Return what `SegmentRecovery.read` finds; consume it before any other call."""
        with usable(self._folder.path):
            found = SegmentRecovery(self._folder, self.recovery, known_end)
            yield from found.read(begins or {})
            self._files, self._last_number = found.files, found.last_number
            if self._files:
                self._open(self._files[-1])
            else:
                self._begin(*max(found.end, known_end))

    def _begin(self, offset: int, count: int) -> None:
        file = self._folder.file(self._last_number + 1, offset, count)
        if self._files and self._files[-1].end != offset:
            file.follows = self._files[-1].end
        self._folder.write_begin(file)
        self._open(file)
        self._last_number = file.number

    def _open(self, file: SegmentFile) -> int:
        """Open a file for writing, as the last file; return its descriptor."""
        out = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.close()
        self._out = out
        if not self._files or self._files[-1] is not file:
            self._files.append(file)
        return out

    @property
    def begins(self) -> list[tuple[int, int, int]]:
        return [(file.number, file.offset, file.count) for file in self._files]

    @property
    def beginning(self) -> tuple[int, int]:
        return self._files[0].offset, self._files[0].count

    # the log's side

    def append(self, entries: Sequence[LogEntry]) -> None:
        """Store all records at the end, or for an unwritable disk none and raise `Refusal`."""
        if self._out is None:
            raise Refusal(f"{self._files[-1].path} is closed after an error")
        data = b"".join([encode_record(entry.record) for entry in entries])
        file = self._files[-1]
        try:
            if file.size >= self._options.max_file_bytes or file.end != entries[0].offset:
                self._begin(entries[0].offset, entries[0].count - 1)
                file = self._files[-1]
            written = 0
            while written < len(data):
                written += os.write(self._out, data[written:] if written else data)
            if self._options.fsync == "always":
                os.fsync(self._out)
        except OSError as error:
            self._cut_back(self._out, file)
            raise Refusal(f"{file.path} cannot be written: {error.strerror}") from error
        file.size += len(data)
        self._dirty = True

    def _cut_back(self, out: int, file: SegmentFile) -> None:
        """Remove the bytes of refused records; on failure, close the file: nothing may follow them."""
        try:
            os.ftruncate(out, file.size)
        except OSError:
            self._release()

    def _release(self) -> None:
        out, self._out = self._out, None
        if out is not None:
            os.close(out)

    def load(self, first: tuple[int, int], end: int) -> list[LogEntry]:
        """Return the records from a position (offset, messages before it) to an end offset; raises `Refusal`."""
        offset, count = first
        entries: list[LogEntry] = []
        for file in self._files:
            if file.end <= offset or file.offset >= end:
                continue
            wanted = min(end, file.end) - offset
            try:
                with file.path.open("rb") as source:
                    source.seek(offset - file.offset)
                    data = source.read(wanted)
                position = 0
                while position < wanted:
                    record, stop = decode_record(data, position)
                    count += 1
                    entries.append(LogEntry(record, offset + position, stop - position, count))
                    position = stop
            except (OSError, ProtocolError) as error:
                raise Refusal(f"{file.path} cannot be read: {error}") from error
            offset += wanted
        return entries

    def trim(self, offset: int) -> None:
        """Remove files that end before an offset; log and keep unremovable files."""
        while len(self._files) > 1 and self._files[0].end <= offset:
            file = self._files.pop(0)
            try:
                self._folder.remove(file)
            except OSError as error:
                logger.warning("%s cannot be removed: %s", file.path, error.strerror)

    def truncate(self, offset: int) -> None:
        """Remove everything at or behind an offset; after a `Refusal`, refuse records."""
        try:
            while len(self._files) > 1 and self._files[-1].offset >= offset:
                self._folder.remove(self._files.pop())
            last = self._files[-1]
            last.size = max(min(last.size, offset - last.offset), 0)
            os.ftruncate(self._open(last), last.size)
        except OSError as error:
            self._release()
            raise Refusal(f"{self._files[-1].path} cannot be cut off: {error.strerror}") from error

    def restart(self, offset: int, count: int) -> None:
        """Remove everything and continue at a position; a `Refusal` changes nothing or refuses records."""
        old = list(self._files)
        try:
            self._begin(offset, count)
            for file in old:
                self._files.remove(file)
                self._folder.remove(file)
        except OSError as error:
            if self._files != old:
                self._release()
            raise Refusal(f"{self._folder.path} cannot be written: {error.strerror}") from error

    # End

    @property
    def is_dirty(self) -> bool:
        return self._dirty and self._options.fsync == "interval"

    def sync(self) -> None:
        """Wait for the medium, if the options require it."""
        if self.is_dirty and self._out is not None:
            try:
                os.fsync(self._out)
            except OSError as error:
                logger.warning("%s cannot be written: %s", self._files[-1].path, error.strerror)
                return
        self._dirty = False

    def close(self) -> None:
        try:
            if self._out is not None and self._options.fsync != "never":
                os.fsync(self._out)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._folder, error.strerror)
        finally:
            self._release()

    def destroy(self) -> None:
        self.close()
        for file in self._files:
            self._folder.remove(file)
