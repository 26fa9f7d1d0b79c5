"""The queue on disk: files of records, named as the real server names them.

``TOPIC-PARTITION.diskqueue.000000.dat`` contains records (captured: disk_records); ``….000000.base.json`` beside it
contains the offset and the number of messages at which the file begins. Every record is passed to the operating system
before the publish is acknowledged, so it survives the end of the process; `DiskOptions.fsync` decides what survives a
power failure.
"""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING

import orjson
from attrs import define, frozen

from nsqext.broker.engine.errors import Refusal
from nsqext.broker.engine.storage.files import (
    checked_number,
    usable,
    with_checksum,
    without_checksum,
    write_atomically,
)
from nsqext.broker.engine.storage.log import Entry
from nsqext.broker.engine.storage.recovery import Recovery, Run, keep_aside, scan
from nsqext.errors import ProtocolError
from nsqext.protocol.record import decode_record, encode_record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ("DiskOptions", "Recovery", "SegmentStore")

_LOG = logging.getLogger(__name__)
_MIB = 1024 * 1024
_CHUNK = 1024


@frozen
class DiskOptions:
    """How a partition uses the disk.

    Attributes:
        fsync: ``never``, ``interval`` or ``always``: when written data is flushed to the medium by fsync.
        sync_interval: seconds between two writes of the channels' positions, and of ``interval`` for fsync.
        max_file_bytes: size at which a new file is started.
        retention_bytes: finished messages that are kept for consumers that seek backwards.
    """

    fsync: str = "never"
    sync_interval: float = 0.5
    max_file_bytes: int = 100 * _MIB
    retention_bytes: int = 64 * _MIB


@define(eq=False)
class _File:
    path: Path
    number: int
    offset: int
    count: int
    size: int = 0
    follows: int = -1
    """Where the queue ended before the file, if records before it are lost; -1 if it begins there."""

    @property
    def end(self) -> int:
        return self.offset + self.size


class SegmentStore:
    """The files of one partition's queue.

    Args:
        folder: folder of the files; it is created.
        topic: name of the topic.
        partition: number of the partition.
        options: how to use the disk.

    Attributes:
        recovery: what `recover` found.
    """

    def __init__(self, folder: Path, topic: str, partition: int, options: DiskOptions) -> None:
        self.recovery: Recovery = Recovery()
        self._folder = folder
        self._name = f"{topic}-{partition}"
        self._partition = partition
        self._options = options
        self._files: list[_File] = []
        self._last_number = -1
        self._out = -1
        self._dirty = False
        self._was_empty = False
        self._missing: list[_File] = []
        self._read = (-1, -1)  # offset behind the records that were read, and messages up to there
        self._scanned = ""  # the file that was read last
        self._accounted = 0  # offset up to which lost bytes were counted
        with usable(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def _path(self, number: int, kind: str = "dat") -> Path:
        return self._folder / f"{self._name}.diskqueue.{number:06d}.{kind}"

    # opening

    def recover(
        self, known_end: tuple[int, int] = (0, 0), begins: Mapping[int, tuple[int, int]] | None = None
    ) -> Iterator[list[Entry]]:
        """Return all records in runs; an offset that does not follow on the last one stands for lost records.

        Has to be consumed before any other method is called. Everything but whole files is logged.

        Args:
            known_end: offset and number of messages where the queue ended at least; only bytes behind it may be torn.
            begins: offset and number of messages at which files begin, by their numbers, where that is known.

        Raises:
            InvalidSetting: the folder cannot be used.
        """
        with usable(self._folder):
            yield from self._recover(known_end, begins or {})
            self._report(known_end)

    def _recover(self, known_end: tuple[int, int], begins: Mapping[int, tuple[int, int]]) -> Iterator[list[Entry]]:
        pattern = re.compile(re.escape(self._name) + r"\.diskqueue\.(\d+)\.dat")
        matches = (pattern.fullmatch(path.name) for path in self._folder.iterdir())
        numbers = sorted(int(match[1]) for match in matches if match)
        self._last_number = max(numbers, default=-1)
        self._was_empty = not numbers
        self._missing = self._missing_files(numbers)
        end: Entry | None = None
        for file in self._begins_of(numbers, begins):
            if end is not None and file.offset < end.offset + end.size:
                self._set_aside(file, "overlaps with the file before it")
                continue
            before = self._read[0]
            if self._note_gap(file.offset, file.count, file.follows) and before >= 0:
                file.follows = before
                self._write_base(file)
            runs = self._scan(file, known_end, before)
            for run in runs:
                self.recovery.messages += len(run.entries)
                for first in range(0, len(run.entries), _CHUNK):
                    yield run.entries[first : first + _CHUNK]
                end = run.entries[-1]
                self._read = max(self._read, (end.offset + end.size, end.count))
        if not self._files:
            self._begin(*max((end.offset + end.size, end.count) if end else (0, 0), known_end))
        else:
            self._open(self._files[-1])

    def _begins_of(self, numbers: list[int], begins: Mapping[int, tuple[int, int]]) -> list[_File]:
        """Return the files in the order of their offsets; a file whose begin is unknown is renamed and kept."""
        files: dict[int, _File] = {}
        for number in numbers:
            base = self._path(number, "base.json")
            try:
                files[number] = self._with_begin(number)
            except (OSError, ValueError, TypeError, KeyError) as error:
                kept = keep_aside(base, "damaged", move=True) if base.exists() else base
                self.recovery.damaged_files.append(kept.name)
                file = self._follow(number, files.get(number - 1), begins.get(number))
                if file is None:
                    self._set_aside(_File(self._path(number), number, 0, 0), "begins at an unknown offset")
                    continue
                files[number] = file
                _LOG.warning("%s cannot be read (%r); the records begin at offset %d", base, error, file.offset)
                self._write_base(file)
        return sorted(files.values(), key=lambda file: file.offset)

    def _follow(self, number: int, before: _File | None, begin: tuple[int, int] | None) -> _File | None:
        """Return a file that begins at a known position, or where the one before it ends; None if both are unknown."""
        if begin is not None:
            return _File(self._path(number), number, *begin)
        if before is not None:
            runs, size = scan(before.path.read_bytes(), (before.offset, before.count), self._partition)
            count = runs[-1].count + len(runs[-1].entries) if runs else before.count
            return _File(self._path(number), number, before.offset + size, count)
        if number == 0:
            return _File(self._path(number), number, 0, 0)
        return None

    def _set_aside(self, file: _File, reason: str) -> None:
        """Rename a file that cannot be a part of the queue."""
        kept = keep_aside(file.path, "lost", move=True)
        self.recovery.damaged_files.append(kept.name)
        _LOG.warning("%s %s; renamed to %s", file.path, reason, kept.name)

    def _missing_files(self, numbers: list[int]) -> list[_File]:
        """Return the files of which only the begin is stored; it is renamed and kept."""
        pattern = re.compile(re.escape(self._name) + r"\.diskqueue\.(\d+)\.base\.json")
        matches = (pattern.fullmatch(path.name) for path in self._folder.iterdir())
        missing = []
        for number in sorted(int(match[1]) for match in matches if match):
            self._last_number = max(self._last_number, number)
            if number not in numbers:
                missing.append(self._begin_of_missing(number))
        return sorted(missing, key=lambda file: file.offset)

    def _begin_of_missing(self, number: int) -> _File:
        base = self._path(number, "base.json")
        try:
            file = self._with_begin(number)
        except (OSError, ValueError, TypeError, KeyError):
            file = _File(self._path(number), number, 0, 0)
        keep_aside(base, "lost", move=True)
        return file

    def _with_begin(self, number: int) -> _File:
        values = orjson.loads(without_checksum(self._path(number, "base.json").read_bytes()))
        begin = checked_number(values["offset"]), checked_number(values["count"])
        return _File(self._path(number), number, *begin, follows=values.get("follows", -1))

    def _note_gap(self, offset: int, count: int, follows: int = -1) -> bool:
        """Report that records before a position are lost, and the file that had them.

        Args:
            offset: the position.
            count: messages before it.
            follows: where the queue ended before a gap that was reported earlier; -1 without one.

        Returns:
            Whether there is a gap that was not reported earlier.
        """
        gone = [file for file in self._missing if file.offset < offset]
        self._missing = self._missing[len(gone) :]
        if self._read == (-1, -1):
            self._read = (gone[0].offset, gone[0].count) if gone else (offset, count)
        self._accounted = max(self._accounted, self._read[0])
        lost, messages = max(offset - self._accounted, 0), max(count - self._read[1], 0)
        is_known = follows == self._read[0]
        self._read, self._accounted = max(self._read, (offset, count)), max(self._accounted, offset)
        if is_known or not (lost or messages or gone):
            return False
        recovery, names = self.recovery, [file.path.name for file in gone]
        recovery.lost_bytes += lost
        recovery.lost_messages += messages
        if not names and self._scanned and not any(name.startswith(self._scanned) for name in recovery.damaged_files):
            names = [self._scanned]
        recovery.damaged_files += names
        _LOG.warning(
            "%s: %d bytes with %d messages before offset %d are missing%s",
            self._folder / self._name, lost, messages, offset, f", of {', '.join(names)}" if names else "",
        )  # fmt: skip
        return True

    def _scan(self, file: _File, known_end: tuple[int, int], before: int) -> list[Run]:
        """Read a file and repair it: a torn end is cut off; damaged bytes split the file, and a copy of it is kept.

        Args:
            file: the file.
            known_end: see `recover`.
            before: where the queue ended before it; -1 for the first file.
        """
        data = file.path.read_bytes()
        self._scanned = file.path.name
        runs, end = scan(data, (file.offset, file.count), self._partition)
        torn = len(data) - end
        starts_late = bool(runs) and runs[0].position > 0
        is_damaged = len(runs) > 1 or starts_late or (torn > 0 and file.offset + end < known_end[0])
        if not is_damaged:
            file.size = end
            if torn:
                os.truncate(file.path, end)
                self.recovery.torn_file, self.recovery.torn_bytes = file.path.name, torn
                _LOG.warning(
                    "%s: removed a torn record of %d bytes at the end, which was not acknowledged", file.path, torn
                )
            self._files.append(file)
            return runs
        kept = keep_aside(file.path, "damaged", move=False)
        self.recovery.damaged_files.append(kept.name)
        self._accounted = file.offset + len(data)
        messages = runs[-1].entries[-1].count - file.count - sum(len(run.entries) for run in runs) if runs else 0
        lost = len(data) - sum(run.end - run.position for run in runs)
        self.recovery.lost_bytes += lost
        self.recovery.lost_messages += messages
        _LOG.warning(
            "%s is damaged: %d bytes with about %d messages are lost, %d messages are readable; the file is kept as %s",
            file.path, lost, messages, sum(len(run.entries) for run in runs), kept.name,
        )  # fmt: skip
        self._split(file, data, runs, before)
        return runs

    def _split(self, file: _File, data: bytes, runs: list[Run], before: int) -> None:
        """Replace a damaged file by one file per run; they are written before the damaged one is removed."""
        fresh: list[_File] = []
        for run in runs:
            self._last_number += 1
            part = _File(
                self._path(self._last_number), self._last_number, file.offset + run.position, run.count,
                run.end - run.position,
            )  # fmt: skip
            if before not in (-1, part.offset):
                part.follows = before
            before = part.end
            self._write_base(part)
            write_atomically(part.path, data[run.position : run.end], sync=self._options.fsync != "never")
            fresh.append(part)
        self._remove(file)
        self._files += fresh

    def _report(self, known_end: tuple[int, int]) -> None:
        if self._was_empty and known_end[0]:
            _LOG.warning("%s: all files of the queue are missing; it had %d messages", self._folder, known_end[1])
            if not self._missing:
                self.recovery.lost_bytes += known_end[0]
                return
        self._note_gap(*known_end)
        for file in self._missing:
            _LOG.warning("%s is missing; nothing is known of its messages", file.path)

    def _write_base(self, file: _File) -> None:
        begin = {"offset": file.offset, "count": file.count}
        if file.follows >= 0:
            begin["follows"] = file.follows
        base = with_checksum(orjson.dumps(begin))
        write_atomically(self._path(file.number, "base.json"), base, sync=self._options.fsync != "never")

    def _begin(self, offset: int, count: int) -> None:
        """Start a file; its begin is written first."""
        file = _File(self._path(self._last_number + 1), self._last_number + 1, offset, count)
        if self._files and self._files[-1].end != offset:
            file.follows = self._files[-1].end
        self._write_base(file)
        self._open(file)
        self._last_number = file.number

    def _open(self, file: _File) -> None:
        """Write to a file from now on; it becomes the last one."""
        out = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.close()
        self._out = out
        if not self._files or self._files[-1] is not file:
            self._files.append(file)

    @property
    def begins(self) -> list[tuple[int, int, int]]:
        """Number of each file, and the offset and the messages before it at which it begins."""
        return [(file.number, file.offset, file.count) for file in self._files]

    @property
    def beginning(self) -> tuple[int, int]:
        """Offset of the first record, and messages before it."""
        return self._files[0].offset, self._files[0].count

    # the log's side

    def append(self, entries: Sequence[Entry]) -> None:
        """Store records at the end.

        Raises:
            Refusal: the disk cannot be written; none of the records is stored.
        """
        if self._out < 0:
            raise Refusal(f"{self._files[-1].path} is closed after an error" if self._files else "exiting")
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
            self._cut_back(file)
            raise Refusal(f"{file.path} cannot be written: {error.strerror}") from error
        file.size += len(data)
        self._dirty = True

    def _cut_back(self, file: _File) -> None:
        """Remove the bytes of refused records; if that fails, the file is closed so that nothing follows on them."""
        try:
            os.ftruncate(self._out, file.size)
        except OSError:
            self._abandon()

    def _abandon(self) -> None:
        """Refuse further records, because the content of the files is unknown."""
        if self._out >= 0:
            os.close(self._out)
            self._out = -1

    def load(self, first: tuple[int, int], end: int) -> list[Entry]:
        """Return the records from a position (offset, messages before it) to an end offset.

        Raises:
            Refusal: the records cannot be read.
        """
        offset, count = first
        entries: list[Entry] = []
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
                    entries.append(Entry(record, offset + position, stop - position, count))
                    position = stop
            except (OSError, ProtocolError) as error:
                raise Refusal(f"{file.path} cannot be read: {error}") from error
            offset += wanted
        return entries

    def trim(self, offset: int) -> None:
        """Remove the files that end before an offset; a file that cannot be removed is logged and kept."""
        while len(self._files) > 1 and self._files[0].end <= offset:
            file = self._files.pop(0)
            try:
                self._remove(file)
            except OSError as error:
                _LOG.warning("%s cannot be removed: %s", file.path, error.strerror)

    def truncate(self, offset: int) -> None:
        """Remove everything at or behind an offset.

        Raises:
            Refusal: the disk cannot be changed; further records are refused.
        """
        try:
            while len(self._files) > 1 and self._files[-1].offset >= offset:
                self._remove(self._files.pop())
            last = self._files[-1]
            last.size = max(min(last.size, offset - last.offset), 0)
            self._open(last)
            os.ftruncate(self._out, last.size)
        except OSError as error:
            self._abandon()
            raise Refusal(f"{self._files[-1].path} cannot be cut off: {error.strerror}") from error

    def restart(self, offset: int, count: int) -> None:
        """Remove everything and continue at a position.

        Raises:
            Refusal: the disk cannot be changed; nothing was changed, or further records are refused.
        """
        old = list(self._files)
        try:
            self._begin(offset, count)
            for file in old:
                self._files.remove(file)
                self._remove(file)
        except OSError as error:
            if self._files != old:
                self._abandon()
            raise Refusal(f"{self._folder} cannot be written: {error.strerror}") from error

    def _remove(self, file: _File) -> None:
        file.path.unlink(missing_ok=True)
        self._path(file.number, "base.json").unlink(missing_ok=True)

    # end

    @property
    def is_dirty(self) -> bool:
        """Whether `sync` has to be called."""
        return self._dirty and self._options.fsync == "interval"

    def sync(self) -> None:
        """Wait until the medium has everything, if the options ask for it."""
        if self.is_dirty and self._out >= 0:
            try:
                os.fsync(self._out)
            except OSError as error:
                _LOG.warning("%s cannot be written: %s", self._files[-1].path, error.strerror)
                return
        self._dirty = False

    def close(self) -> None:
        """Close the files; a failed fsync is logged."""
        if self._out >= 0:
            try:
                if self._options.fsync != "never":
                    os.fsync(self._out)
            except OSError as error:
                _LOG.warning("%s cannot be written: %s", self._folder / self._name, error.strerror)
            finally:
                os.close(self._out)
                self._out = -1

    def destroy(self) -> None:
        """Close and remove the files."""
        self.close()
        for file in self._files:
            self._remove(file)
        self._files.clear()
