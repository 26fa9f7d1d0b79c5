"""Files of partitions: names, folder lock, atomic writes, JSON with a checksum.

Names are the real server's: ``TOPIC-PARTITION.diskqueue.000000.dat`` contains records (captured: disk_records);
``….000000.base.json`` has the offset and the number of messages before them.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TypeVar
from zlib import crc32

import msgspec
from attrs import define

from nsqext.errors import InvalidSetting

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

T = TypeVar("T")
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""An offset or a count."""
_CONTENT = b',"content":'
BAD_BEGIN = (OSError, ValueError)
"""Errors of a missing or damaged start position of a file."""


def topic_folder(data_path: Path, topic: str) -> Path:
    """Return the folder of a topic's partitions; ``.`` and ``..`` are valid topics, but invalid folders."""
    return data_path / (topic if topic.strip(".") else topic.replace(".", "%2E"))


@contextmanager
def usable(folder: Path) -> Iterator[None]:
    """Turn an OSError into an `InvalidSetting` that says what to do."""
    try:
        yield
    except OSError as error:
        raise InvalidSetting(
            f"{folder} cannot be used: {error.strerror}", hint="choose another data path, or make room on its disk"
        ) from error


def write_atomically(path: Path, data: bytes, *, sync: bool) -> None:
    """Replace a file: readers see the old or the new content; ``sync`` waits for the medium."""
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as out:
        out.write(data)
        if sync:
            out.flush()
            os.fsync(out.fileno())
    fresh.replace(path)
    if sync:
        _sync_folder(path.parent)


def keep_aside(path: Path, ending: str, *, move: bool) -> Path:
    """Copy or rename a file to ``NAME.ENDING``, ``NAME.ENDING.2`` and so on; return the new path."""
    number, target = 1, path.with_name(f"{path.name}.{ending}")
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.{ending}.{number}")
    if move:
        path.replace(target)
    else:
        target.write_bytes(path.read_bytes())
    return target


def _sync_folder(folder: Path) -> None:
    """Wait until the medium has a folder's names: a loss of power could undo a rename."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def with_checksum(content: bytes) -> bytes:
    """Return JSON with its checksum, as JSON in a line."""
    return b'{"crc32":%d%b%b}' % (crc32(content), _CONTENT, content)


def without_checksum(data: bytes) -> bytes:
    """Return the JSON inside `with_checksum`; raises `ValueError` if it is damaged."""
    head, _, rest = data.partition(_CONTENT)
    content = rest[:-1]
    if head != b'{"crc32":%d' % crc32(content) or rest[-1:] != b"}":
        raise ValueError("the checksum is wrong")
    return content


def decode_checked(data: bytes, kind: type[T]) -> T:
    """Decode JSON with a checksum; raises `ValueError` for damage or an invalid member."""
    return msgspec.json.decode(without_checksum(data), type=kind)


class _Begin(msgspec.Struct, omit_defaults=True):
    offset: Number
    count: Number
    follows: int = -1


@define(eq=False)
class SegmentFile:
    """A file of records."""

    path: Path
    number: int
    offset: int  #: its first offset in the queue
    count: int  #: messages before it
    size: int = 0
    follows: int = -1  #: where the queue ended before it, if records before it are lost; -1 if it begins there

    @property
    def end(self) -> int:
        return self.offset + self.size


class SegmentFolder:
    """Folder of a partition's queue."""

    def __init__(self, path: Path, topic: str, partition: int, *, sync: bool) -> None:
        self.path: Path = path
        self.partition: int = partition
        self._name = f"{topic}-{partition}"
        self._sync = sync  # flush written files to the medium

    def __str__(self) -> str:
        return str(self.path / self._name)

    def file(self, number: int, offset: int, count: int, size: int = 0) -> SegmentFile:
        return SegmentFile(self.data_path(number), number, offset, count, size)

    def base_path(self, number: int) -> Path:
        return self.data_path(number, "base.json")

    def data_path(self, number: int, kind: str = "dat") -> Path:
        return self.path / f"{self._name}.diskqueue.{number:06d}.{kind}"

    def numbers(self, kind: str = "dat") -> list[int]:
        pattern = re.compile(re.escape(self._name) + r"\.diskqueue\.(\d+)\." + re.escape(kind))
        matches = (pattern.fullmatch(path.name) for path in self.path.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def read_begin(self, number: int) -> SegmentFile:
        """Return a file with its stored start position; raises `BAD_BEGIN`."""
        begin = decode_checked(self.base_path(number).read_bytes(), _Begin)
        return SegmentFile(self.data_path(number), number, begin.offset, begin.count, follows=begin.follows)

    def write_begin(self, file: SegmentFile) -> None:
        begin = msgspec.json.encode(_Begin(file.offset, file.count, file.follows))
        write_atomically(self.base_path(file.number), with_checksum(begin), sync=self._sync)

    def write(self, file: SegmentFile, data: bytes) -> None:
        self.write_begin(file)
        write_atomically(file.path, data, sync=self._sync)

    def remove(self, file: SegmentFile) -> None:
        file.path.unlink(missing_ok=True)
        self.base_path(file.number).unlink(missing_ok=True)


@contextmanager
def locked(folder: Path | None, *, make: bool = False) -> Iterator[None]:
    """Hold the lock of a data path, at the longest until the process ends; None needs no lock.

    Raises `InvalidSetting` if another cluster or nsqd holds it, or the folder is unusable.
    """
    if folder is None:
        yield
        return
    try:
        import fcntl
    except ModuleNotFoundError:
        yield
        return
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InvalidSetting(
            f"failed to lock data-path: open {folder}: {(error.strerror or str(error)).lower()}"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidSetting(
                f"failed to lock data-path: cannot flock directory {folder} (possibly in use)"
            ) from None
        yield
    finally:
        os.close(descriptor)
