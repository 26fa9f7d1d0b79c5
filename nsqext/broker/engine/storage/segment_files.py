"""Files of records and of their begins, named as the real server names them.

``TOPIC-PARTITION.diskqueue.000000.dat`` contains records (captured: disk_records); ``….000000.base.json`` beside it
contains the offset and the number of messages at which the file begins.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import orjson
from attrs import define

from nsqext.broker.engine.storage.files import checked_number, with_checksum, without_checksum, write_atomically

if TYPE_CHECKING:
    from pathlib import Path

BAD_BEGIN = (OSError, ValueError, TypeError, KeyError)
"""Raised for the begin of a file that is missing or damaged."""


@define(eq=False)
class SegmentFile:
    """One file of records."""

    path: Path
    number: int
    offset: int  # offset in the queue at which it begins
    count: int  # messages before it
    size: int = 0  # its bytes
    follows: int = -1  # where the queue ended before the file, if records before it are lost; -1 if it begins there

    @property
    def end(self) -> int:
        """Offset behind the last record."""
        return self.offset + self.size


class SegmentFolder:
    """The folder with the files of one partition's queue."""

    def __init__(self, path: Path, topic: str, partition: int, *, sync: bool) -> None:
        self.path: Path = path
        self.partition: int = partition
        self._name = f"{topic}-{partition}"
        self._sync = sync  # whether written files are flushed to the medium

    def __str__(self) -> str:
        return str(self.path / self._name)

    def file(self, number: int, offset: int, count: int, size: int = 0) -> SegmentFile:
        """Return the file with a number, which begins at an offset after so many messages."""
        return SegmentFile(self.data_path(number), number, offset, count, size)

    def base_path(self, number: int) -> Path:
        return self.data_path(number, "base.json")

    def data_path(self, number: int, kind: str = "dat") -> Path:
        return self.path / f"{self._name}.diskqueue.{number:06d}.{kind}"

    def numbers(self, kind: str = "dat") -> list[int]:
        """Return the numbers of the files with an ending, sorted."""
        pattern = re.compile(re.escape(self._name) + r"\.diskqueue\.(\d+)\." + re.escape(kind))
        matches = (pattern.fullmatch(path.name) for path in self.path.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def read_begin(self, number: int) -> SegmentFile:
        """Return a file with its stored begin; raises `BAD_BEGIN` if that is missing or damaged."""
        values = orjson.loads(without_checksum(self.base_path(number).read_bytes()))
        file = self.file(number, checked_number(values["offset"]), checked_number(values["count"]))
        file.follows = values.get("follows", -1)
        return file

    def write_begin(self, file: SegmentFile) -> None:
        begin = {"offset": file.offset, "count": file.count}
        if file.follows >= 0:
            begin["follows"] = file.follows
        write_atomically(self.base_path(file.number), with_checksum(orjson.dumps(begin)), sync=self._sync)

    def write(self, file: SegmentFile, data: bytes) -> None:
        """Store a whole file, after its begin."""
        self.write_begin(file)
        write_atomically(file.path, data, sync=self._sync)

    def remove(self, file: SegmentFile) -> None:
        file.path.unlink(missing_ok=True)
        self.base_path(file.number).unlink(missing_ok=True)
