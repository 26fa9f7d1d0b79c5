"""The queue on disk: files of records one after the other, named as the real server names them.

``TOPIC-PARTITION.diskqueue.000000.dat`` holds records (captured: disk_records); ``….000000.base.json`` beside it tells
at which offset and number the file begins. Everything that was put is handed to the operating system before the publish
is answered, so it survives the end of the process; `DiskOptions.fsync` decides what survives the end of the machine.
"""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING

import orjson
from attrs import define, field, frozen

from nsqext.broker.engine.errors import Refusal
from nsqext.broker.engine.storage.files import usable, write_atomically
from nsqext.broker.engine.storage.log import Entry
from nsqext.errors import InvalidSetting, ProtocolError
from nsqext.protocol.record import decode_record, encode_record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ("DiskOptions", "Recovery", "SegmentStore")

_LOG = logging.getLogger(__name__)
_MIB = 1024 * 1024
_CHUNK = 1024


@frozen
class DiskOptions:
    """How a partition uses the disk.

    Attributes:
        fsync: ``never``, ``interval`` or ``always``: when the machine is told to write to the medium.
        sync_interval: seconds between two writings of the channels' positions, and of ``interval`` for fsync.
        max_file_bytes: size at which a new file is begun.
        retention_bytes: finished messages that are kept, for consumers that go back.
    """

    fsync: str = "never"
    sync_interval: float = 0.5
    max_file_bytes: int = 100 * _MIB
    retention_bytes: int = 64 * _MIB


@define
class Recovery:
    """What was found on the disk.

    Attributes:
        messages: records that are there.
        cut_bytes: bytes of a torn tail that were cut off.
        cut_file: the file that had them; empty for none.
        lost_files: files behind a damaged one; they were renamed to ``….lost``.
    """

    messages: int = 0
    cut_bytes: int = 0
    cut_file: str = ""
    lost_files: list[str] = field(factory=list)


@define(eq=False)
class _File:
    path: Path
    number: int
    offset: int
    count: int
    size: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.size


class SegmentStore:
    """The files of one partition's queue.

    Args:
        folder: where they are; it is made.
        name: ``TOPIC-PARTITION``.
        options: how to use the disk.

    Attributes:
        recovery: what `recover` found.
    """

    def __init__(self, folder: Path, name: str, options: DiskOptions) -> None:
        self.recovery: Recovery = Recovery()
        self._folder = folder
        self._name = name
        self._options = options
        self._files: list[_File] = []
        self._out = -1
        self._dirty = False
        with usable(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def _path(self, number: int, kind: str = "dat") -> Path:
        return self._folder / f"{self._name}.diskqueue.{number:06d}.{kind}"

    # opening

    def recover(self) -> Iterator[list[Entry]]:
        """Return all records in runs; a torn tail is cut off. Has to be consumed before anything else is done.

        Raises:
            InvalidSetting: the folder cannot be used, or what is in it is damaged.
        """
        with usable(self._folder):
            yield from self._recover()

    def _recover(self) -> Iterator[list[Entry]]:
        pattern = re.compile(re.escape(self._name) + r"\.diskqueue\.(\d+)\.dat")
        matches = (pattern.fullmatch(path.name) for path in self._folder.iterdir())
        for number in sorted(int(match[1]) for match in matches if match):
            file = self._base_of(number)
            before = self._files[-1] if self._files else None
            if before is not None and (self.recovery.cut_file or file.offset != before.end):
                self._lose(file)
                continue
            self._files.append(file)
            yield from self._scan(file)
        if not self._files:
            self._begin(0, 0, 0)
        else:
            self._open(self._files[-1])

    def _base_of(self, number: int) -> _File:
        base = self._path(number, "base.json")
        try:
            values = orjson.loads(base.read_bytes())
            return _File(self._path(number), number, values["offset"], values["count"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidSetting(
                f"{base} cannot be read: {error!r}", hint="restore it; it tells where the records beside it begin"
            ) from error

    def _lose(self, file: _File) -> None:
        file.path.replace(file.path.with_name(file.path.name + ".lost"))
        self.recovery.lost_files.append(file.path.name)

    def _scan(self, file: _File) -> Iterator[list[Entry]]:
        data = file.path.read_bytes()
        position, count, run = 0, file.count, []
        while position < len(data):
            try:
                record, stop = decode_record(data, position)
            except ProtocolError:
                self.recovery.cut_bytes = len(data) - position
                self.recovery.cut_file = file.path.name
                os.truncate(file.path, position)
                break
            count += 1
            run.append(Entry(record, file.offset + position, stop - position, count))
            position = stop
            if len(run) == _CHUNK:
                yield run
                run = []
        file.size = position
        self.recovery.messages += count - file.count
        if run:
            yield run

    def _begin(self, number: int, offset: int, count: int) -> None:
        """Begin a file; what it begins with is written first."""
        base = orjson.dumps({"offset": offset, "count": count})
        write_atomically(self._path(number, "base.json"), base, sync=self._options.fsync != "never")
        self._open(_File(self._path(number), number, offset, count))

    def _open(self, file: _File) -> None:
        """Write to a file from now on; it becomes the last one."""
        out = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.close()
        self._out = out
        if not self._files or self._files[-1] is not file:
            self._files.append(file)

    @property
    def beginning(self) -> tuple[int, int]:
        """Offset and number of messages before the first record."""
        return self._files[0].offset, self._files[0].count

    # the log's side

    def append(self, entries: Sequence[Entry]) -> None:
        """Store records at the end.

        Raises:
            Refusal: the disk does not take them; nothing of them is kept.
        """
        if self._out < 0:
            raise Refusal(f"{self._files[-1].path} is closed after an error" if self._files else "exiting")
        data = b"".join([encode_record(entry.record) for entry in entries])
        file = self._files[-1]
        try:
            if file.size >= self._options.max_file_bytes:
                self._begin(file.number + 1, entries[0].offset, entries[0].count - 1)
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
        """Take away what was written of records that were refused; where that fails, nothing may follow on it."""
        try:
            os.ftruncate(self._out, file.size)
        except OSError:
            self._abandon()

    def _abandon(self) -> None:
        """Take nothing more, because nobody knows what is in the files."""
        if self._out >= 0:
            os.close(self._out)
            self._out = -1

    def load(self, first: tuple[int, int], end: int) -> list[Entry]:
        """Return the records from a position (offset, messages before it) to an end offset.

        Raises:
            Refusal: they cannot be read any more.
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
        """Remove the files that end before an offset; one that cannot be removed stays behind."""
        while len(self._files) > 1 and self._files[0].end <= offset:
            file = self._files.pop(0)
            try:
                self._remove(file)
            except OSError as error:
                _LOG.warning("%s cannot be removed: %s", file.path, error.strerror)

    def truncate(self, offset: int) -> None:
        """Forget what lies at or behind an offset.

        Raises:
            Refusal: the disk does not do it; nothing may follow then.
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
        """Forget everything and go on at a position.

        Raises:
            Refusal: the disk does not do it; everything is as it was, or nothing may follow.
        """
        old = list(self._files)
        try:
            self._begin(old[-1].number + 1, offset, count)
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

    def sync(self) -> None:
        """Wait until the medium has what was stored, when the options ask for it."""
        if self._dirty and self._options.fsync == "interval" and self._out >= 0:
            try:
                os.fsync(self._out)
            except OSError as error:
                _LOG.warning("%s cannot be written: %s", self._files[-1].path, error.strerror)
                return
        self._dirty = False

    def close(self) -> None:
        """Close the files."""
        if self._out >= 0:
            if self._options.fsync != "never":
                os.fsync(self._out)
            os.close(self._out)
            self._out = -1

    def destroy(self) -> None:
        """Close and remove the files."""
        self.close()
        for file in self._files:
            self._remove(file)
        self._files.clear()
