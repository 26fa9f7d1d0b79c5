"""Read the files of a queue when it is opened, repair them, and report losses.

Only bytes behind the last known end of the queue may be torn: an unacknowledged record, which is cut off. Other
unreadable bytes are damage: the file is split into a file per run of whole records, and a copy is kept. A file with an
unknown start position, or that overlaps another file, is renamed. Records missing between two files are reported once:
the later file's start position then records where the queue ended.
"""

from __future__ import annotations

import logging
import os
from itertools import zip_longest
from typing import TYPE_CHECKING

from attrs import define, field

from nsqext.broker.engine.storage.files import BAD_BEGIN, keep_aside
from nsqext.broker.engine.storage.log import FIRST_COUNTER, LogEntry
from nsqext.errors import ProtocolError
from nsqext.protocol.record import COUNTER_BITS, RECORD_OVERHEAD, decode_record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from nsqext.broker.engine.storage.files import SegmentFile, SegmentFolder
    from nsqext.protocol.record import Record

_COUNTER = (1 << COUNTER_BITS) - 1
_ID_AT = 14  # where the internal id lies in a record
_NEAR = 16  # a record with an id up to this far behind the expected id needs no second record to be believed
_CHUNK = 1024
logger: logging.Logger = logging.getLogger(__name__)


@define
class Recovery:
    """What was found on disk."""

    messages: int = 0
    torn_file: str = ""  #: file whose torn end was removed
    torn_bytes: int = 0
    damaged_files: list[str] = field(factory=list)  #: copies of damaged files, and files outside the queue
    lost_bytes: int = 0
    lost_messages: int = 0

    @property
    def is_damaged(self) -> bool:
        return bool(self.damaged_files or self.lost_bytes or self.lost_messages)


@define
class RecordRun:
    """Adjacent records of a file."""

    position: int  #: of the first record in the file
    count: int
    entries: list[LogEntry] = field(factory=list)

    @property
    def end(self) -> int:
        return self.position + sum(entry.size for entry in self.entries)


def scan(data: bytes, start: tuple[int, int], partition: int) -> tuple[list[RecordRun], int]:
    """Read all whole records of a file that begins at ``start`` (offset, messages before it).

    Returns a run for the start and behind each damaged range, and the position behind the last whole record.
    """
    offset, count = start
    runs = [RecordRun(0, count)]
    position = 0
    previous: int | None = None
    while position < len(data):
        run = runs[-1]
        found = _record_at(data, position, partition, previous)
        if found is None:
            following = _resynchronise(data, run, position, partition)
            if following is None:
                break
            position, lost = following
            previous = None
            runs.append(RecordRun(position, run.count + len(run.entries) + lost))
            continue
        record, stop = found
        run.entries.append(LogEntry(record, offset + position, stop - position, run.count + len(run.entries) + 1))
        position, previous = stop, record.internal_id
    return [run for run in runs if run.entries], runs[-1].end


def _record_at(data: bytes, position: int, partition: int, previous: int | None) -> tuple[Record, int] | None:
    """Decode a record; None unless its internal id fits the partition and exceeds the previous id."""
    try:
        record, stop = decode_record(data, position)
    except ProtocolError:
        return None
    if record.internal_id >> COUNTER_BITS != partition or not record.internal_id & _COUNTER:
        return None
    if previous is not None and record.internal_id <= previous:
        return None
    return record, stop


def _resynchronise(data: bytes, run: RecordRun, position: int, partition: int) -> tuple[int, int] | None:
    """Return the position of the next whole record behind damaged bytes, and messages lost before it; or None.

    A record with a damaged length looks whole, and the next bytes damaged; a damaged id makes later ids look too small.
    So the search starts inside the last record, which leaves the run if the found record contradicts it.
    """
    last = run.entries[-1] if run.entries else None
    begin = position - last.size + RECORD_OVERHEAD if last else position
    known = run.entries[-2].record.internal_id if len(run.entries) > 1 else _id_before(run, partition)
    whole = known.to_bytes(8, "big")
    for prefix in (whole[:5], whole[:2]):  # ids that follow closely, then all ids of the partition
        at = data.find(prefix, begin + _ID_AT)
        while at != -1:
            start = at - _ID_AT
            found = _record_at(data, start, partition, known)
            if found is not None and (_is_followed(data, found, partition) or found[0].internal_id - known <= _NEAR):
                return start, _drop_contradicted(run, found[0].internal_id, start, position, partition)
            at = data.find(prefix, at + 1)
    return None


def _id_before(run: RecordRun, partition: int) -> int:
    return (partition << COUNTER_BITS) + FIRST_COUNTER + run.count - 1


def _drop_contradicted(run: RecordRun, found_id: int, start: int, position: int, partition: int) -> int:
    """Remove a run's last record if the record at ``start`` contradicts it; return the number of lost messages."""
    if run.entries:
        last_id = run.entries[-1].record.internal_id
        if found_id <= last_id + 1 or start < position:
            run.entries.pop()
    before = run.entries[-1].record.internal_id if run.entries else _id_before(run, partition)
    return max(min(found_id - before - 1, (start - run.end) // RECORD_OVERHEAD), 1)


def _is_followed(data: bytes, found: tuple[Record, int], partition: int) -> bool:
    record, stop = found
    return stop == len(data) or _record_at(data, stop, partition, record.internal_id) is not None


class SegmentRecovery:
    """The files of a queue while it is opened."""

    def __init__(self, folder: SegmentFolder, recovery: Recovery, known_end: tuple[int, int]) -> None:
        #: by offset, after the end of `read`
        self.files: list[SegmentFile] = []
        self._numbers = folder.numbers()
        self.last_number: int = max(self._numbers, default=-1)  #: largest file number; -1 for none
        self.end: tuple[int, int] = (0, 0)  #: offset behind the last record, and messages before it
        self._folder = folder
        self._recovery = recovery
        # smallest known end of the queue; bytes behind it may be torn
        self._known_end = known_end
        self._missing: list[SegmentFile] = []
        self._read = (-1, -1)  # offset behind the records read, and messages before it
        self._scanned = ""
        self._accounted = 0  # offset up to which lost bytes were counted

    def read(self, begins: Mapping[int, tuple[int, int]]) -> Iterator[list[LogEntry]]:
        """Return all records in runs; an offset that does not continue the last run stands for lost records.

        All damage is logged. ``begins`` has known start positions (offset, messages before it) by file number.
        """
        self._missing = self._missing_files()
        files = self._with_begins(begins)
        for file, following in zip_longest(files, files[1:]):
            if file.offset < self.end[0]:
                self._set_aside(file.path, "overlaps with the file before it")
                continue
            before = self._read[0]
            if self._note_gap(file.offset, file.count, file.follows):
                file.follows = before
                self._folder.write_begin(file)
            for run in self._scan(file, before, following):
                self._recovery.messages += len(run.entries)
                for first in range(0, len(run.entries), _CHUNK):
                    yield run.entries[first : first + _CHUNK]
                last = run.entries[-1]
                self.end = last.offset + last.size, last.count
                self._read = max(self._read, self.end)
        self._note_end(was_empty=not self._numbers)

    # Begins of files

    def _with_begins(self, begins: Mapping[int, tuple[int, int]]) -> list[SegmentFile]:
        """Return files by offset; rename files with unknown start positions."""
        files: dict[int, SegmentFile] = {}
        for number in self._numbers:
            base = self._folder.base_path(number)
            try:
                files[number] = self._folder.read_begin(number)
            except BAD_BEGIN as error:
                kept = keep_aside(base, "damaged", move=True) if base.exists() else base
                self._recovery.damaged_files.append(kept.name)
                file = self._follow(number, files.get(number - 1), begins.get(number))
                if file is None:
                    self._set_aside(self._folder.data_path(number), "begins at an unknown offset")
                    continue
                files[number] = file
                logger.warning("%s cannot be read (%r); the records begin at offset %d", base, error, file.offset)
                self._folder.write_begin(file)
        return sorted(files.values(), key=lambda file: file.offset)

    def _follow(self, number: int, before: SegmentFile | None, begin: tuple[int, int] | None) -> SegmentFile | None:
        """Return a file at its known position or the previous file's end; None if both are unknown."""
        if begin is not None:
            return self._folder.file(number, *begin)
        if before is not None:
            runs, size = scan(before.path.read_bytes(), (before.offset, before.count), self._folder.partition)
            count = runs[-1].count + len(runs[-1].entries) if runs else before.count
            return self._folder.file(number, before.offset + size, count)
        if number == 0:
            return self._folder.file(number, 0, 0)
        return None

    def _set_aside(self, path: Path, reason: str) -> None:
        """Rename a file that cannot belong to the queue."""
        kept = keep_aside(path, "lost", move=True)
        self._recovery.damaged_files.append(kept.name)
        logger.warning("%s %s; renamed to %s", path, reason, kept.name)

    def _missing_files(self) -> list[SegmentFile]:
        """Return files of which only the start position is left; rename it."""
        missing = []
        for number in self._folder.numbers("base.json"):
            self.last_number = max(self.last_number, number)
            if number not in self._numbers:
                missing.append(self._begin_of_missing(number))
        return sorted(missing, key=lambda file: file.offset)

    def _begin_of_missing(self, number: int) -> SegmentFile:
        try:
            file = self._folder.read_begin(number)
        except BAD_BEGIN:
            file = self._folder.file(number, 0, 0)
        keep_aside(self._folder.base_path(number), "lost", move=True)
        return file

    # Lost records

    def _note_gap(self, offset: int, count: int, follows: int = -1) -> bool:
        """Report records lost before a position, with their files.

        Returns False without a gap, or if ``follows`` (where the queue ended before) shows an earlier report.
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
        recovery, names = self._recovery, [file.path.name for file in gone]
        recovery.lost_bytes += lost
        recovery.lost_messages += messages
        if not names and self._scanned and not any(name.startswith(self._scanned) for name in recovery.damaged_files):
            names = [self._scanned]
        recovery.damaged_files += names
        logger.warning(
            "%s: %d bytes with %d messages before offset %d are missing%s",
            self._folder, lost, messages, offset, f", of {', '.join(names)}" if names else "",
        )  # fmt: skip
        return True

    def _note_end(self, *, was_empty: bool) -> None:
        """Report records and files missing at the end of the queue."""
        end, messages = self._known_end
        if was_empty and end:
            logger.warning("%s: all files of the queue are missing; it had %d messages", self._folder.path, messages)
            if not self._missing:
                self._recovery.lost_bytes += end
                return
        self._note_gap(end, messages)
        for file in self._missing:
            logger.warning("%s is missing; nothing is known of its messages", file.path)

    # Damaged bytes

    def _scan(self, file: SegmentFile, before: int, following: SegmentFile | None) -> list[RecordRun]:
        """Read and repair a file; ``before`` is where the queue ended before it, -1 for the first file."""
        data = file.path.read_bytes()
        self._scanned = file.path.name
        runs, end = scan(data, (file.offset, file.count), self._folder.partition)
        if (
            following is not None
            and following.offset >= file.offset + end  # else it overlaps
            and self._is_contradicted(runs, following)
        ):
            end -= runs[-1].entries.pop().size
            runs = [run for run in runs if run.entries]
        torn = len(data) - end
        if any(run.position for run in runs) or (torn and file.offset + end < self._known_end[0]):
            self._note_damage(file, data, runs)
            self._split(file, data, runs, before)
            return runs
        file.size = end
        if torn:
            os.truncate(file.path, end)
            self._recovery.torn_file, self._recovery.torn_bytes = file.path.name, torn
            logger.warning(
                "%s: removed a torn record of %d bytes at the end, which was not acknowledged", file.path, torn
            )
        self.files.append(file)
        return runs

    def _is_contradicted(self, runs: list[RecordRun], following: SegmentFile) -> bool:
        """Return whether a file's last id is too large for its neighbours."""
        if not runs:
            return False
        with following.path.open("rb") as opened:
            first_id = int.from_bytes(opened.read(RECORD_OVERHEAD)[_ID_AT : _ID_AT + 8], "big")
        ids = [entry.record.internal_id for entry in runs[-1].entries[-2:]]
        before = ids[0] if len(ids) > 1 else _id_before(runs[-1], self._folder.partition)
        return before < first_id <= ids[-1]

    def _note_damage(self, file: SegmentFile, data: bytes, runs: list[RecordRun]) -> None:
        kept = keep_aside(file.path, "damaged", move=False)
        self._recovery.damaged_files.append(kept.name)
        self._accounted = file.offset + len(data)
        messages = runs[-1].entries[-1].count - file.count - sum(len(run.entries) for run in runs) if runs else 0
        lost = len(data) - sum(run.end - run.position for run in runs)
        self._recovery.lost_bytes += lost
        self._recovery.lost_messages += messages
        logger.warning(
            "%s is damaged: %d bytes with about %d messages are lost, %d messages are readable; the file is kept as %s",
            file.path, lost, messages, sum(len(run.entries) for run in runs), kept.name,
        )  # fmt: skip

    def _split(self, file: SegmentFile, data: bytes, runs: list[RecordRun], before: int) -> None:
        """Replace a damaged file by a file per run; remove it last."""
        for run in runs:
            self.last_number += 1
            part = self._folder.file(self.last_number, file.offset + run.position, run.count, run.end - run.position)
            if before != part.offset:
                part.follows = before
            before = part.end
            self._folder.write(part, data[run.position : run.end])
            self.files.append(part)
        self._folder.remove(file)
