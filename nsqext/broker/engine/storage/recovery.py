"""Find the whole records in the bytes of a file: its end, and those behind damaged bytes.

Only bytes behind the last known end of the queue may be torn: a record that was never acknowledged. Everything else
that cannot be read is damage. It is reported, the damaged file is kept, and reading continues at the next whole record.
"""

from __future__ import annotations

from itertools import count as counting
from typing import TYPE_CHECKING

from attrs import define, field

from nsqext.broker.engine.storage.log import FIRST_COUNTER, Entry
from nsqext.errors import ProtocolError
from nsqext.protocol.record import COUNTER_BITS, RECORD_OVERHEAD, decode_record

if TYPE_CHECKING:
    from pathlib import Path

    from nsqext.protocol.record import Record

_COUNTER = (1 << COUNTER_BITS) - 1
_ID_AT = 14
"""Where the internal id lies in a record."""
_NEAR = 16
"""A record whose id is at most so far behind the expected one needs no second record to be believed."""


@define
class Recovery:
    """What was found on disk."""

    messages: int = 0  # records that were read
    torn_file: str = ""  # file whose torn end was removed; empty for none
    torn_bytes: int = 0  # bytes of that end
    damaged_files: list[str] = field(factory=list)  # copies of damaged files, and files that do not continue the queue
    lost_bytes: int = 0  # bytes of records that could not be read
    lost_messages: int = 0  # messages that could not be read

    @property
    def is_damaged(self) -> bool:
        """Whether anything but a torn end was found."""
        return bool(self.damaged_files or self.lost_bytes or self.lost_messages)


@define
class Run:
    """Adjacent records of a file."""

    position: int  # where the first one begins in the file
    count: int  # messages of the partition before it
    entries: list[Entry] = field(factory=list)  # the records

    @property
    def end(self) -> int:
        """Position behind the last record."""
        return self.position + sum(entry.size for entry in self.entries)


def scan(data: bytes, start: tuple[int, int], partition: int) -> tuple[list[Run], int]:
    """Read all whole records of a file that begins at an offset, after so many messages.

    Returns the records, with a new run behind each damaged range, and the position behind the last whole record.
    """
    offset, count = start
    runs = [Run(0, count)]
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
            runs.append(Run(position, run.count + len(run.entries) + lost))
            continue
        record, stop = found
        run.entries.append(Entry(record, offset + position, stop - position, run.count + len(run.entries) + 1))
        position, previous = stop, record.internal_id
    return [run for run in runs if run.entries], runs[-1].end


def _record_at(data: bytes, position: int, partition: int, previous: int | None) -> tuple[Record, int] | None:
    """Decode a record; None unless its internal id can be one of the partition and is greater than the previous one."""
    try:
        record, stop = decode_record(data, position)
    except ProtocolError:
        return None
    if record.internal_id >> COUNTER_BITS != partition or not record.internal_id & _COUNTER:
        return None
    if previous is not None and record.internal_id <= previous:
        return None
    return record, stop


def _resynchronise(data: bytes, run: Run, position: int, partition: int) -> tuple[int, int] | None:
    """Find the next whole record behind damaged bytes: its position, and messages that are lost before it; or None.

    A damaged length makes its own record look whole and the bytes behind it look damaged; a damaged id makes later ids
    look too small. So the search starts inside of the last record, and that record is removed from the run if the
    record that is found contradicts it.
    """
    last = run.entries[-1] if run.entries else None
    begin = position - last.size + RECORD_OVERHEAD if last else position
    known = run.entries[-2].record.internal_id if len(run.entries) > 1 else _id_before(run, partition)
    whole = known.to_bytes(8, "big")
    for prefix in (whole[:5], whole[:2]):  # ids that follow shortly, then all ids of the partition
        at = data.find(prefix, begin + _ID_AT)
        while at != -1:
            start = at - _ID_AT
            found = _record_at(data, start, partition, known)
            if found is not None and (_is_followed(data, found, partition) or found[0].internal_id - known <= _NEAR):
                return start, _drop_contradicted(run, found[0].internal_id, start, position, partition)
            at = data.find(prefix, at + 1)
    return None


def _id_before(run: Run, partition: int) -> int:
    return (partition << COUNTER_BITS) + FIRST_COUNTER + run.count - 1


def _drop_contradicted(run: Run, found_id: int, start: int, position: int, partition: int) -> int:
    """Remove the last record of a run if the record found at ``start`` contradicts it; return the lost messages."""
    if run.entries:
        last_id = run.entries[-1].record.internal_id
        if found_id <= last_id + 1 or start < position:
            run.entries.pop()
    before = run.entries[-1].record.internal_id if run.entries else _id_before(run, partition)
    return max(min(found_id - before - 1, (start - run.end) // RECORD_OVERHEAD), 1)


def _is_followed(data: bytes, found: tuple[Record, int], partition: int) -> bool:
    """Return whether a record ends at the end of the file, or another one follows."""
    record, stop = found
    return stop == len(data) or _record_at(data, stop, partition, record.internal_id) is not None


def keep_aside(path: Path, ending: str, *, move: bool) -> Path:
    """Copy or rename a file to ``NAME.ENDING``, or ``NAME.ENDING.2`` and so on, which is returned."""
    for number in counting(1):
        target = path.with_name(f"{path.name}.{ending}" + (f".{number}" if number > 1 else ""))
        if not target.exists():
            if move:
                path.replace(target)
            else:
                target.write_bytes(path.read_bytes())
            return target
    raise AssertionError
