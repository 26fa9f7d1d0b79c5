"""Names of the files of partitions, atomic writes, and JSON with a checksum."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING
from zlib import crc32

from nsqext.errors import InvalidSetting

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MOST = 1 << 62
_CONTENT = b',"content":'


def checked_number(value: object) -> int:
    """Return an offset or a count that was read from a file; raises `ValueError` for any other value."""
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"{value!r} is not an offset or a count")
    return value


def topic_folder(data_path: Path, topic: str) -> Path:
    """Return the folder of a topic's partitions; ``.`` and ``..`` are valid topics, but not valid folders."""
    return data_path / (topic if topic.strip(".") else topic.replace(".", "%2E"))


@contextmanager
def usable(folder: Path) -> Iterator[None]:
    """Turn an OSError while stored data is opened into an `InvalidSetting` that says what to do."""
    try:
        yield
    except OSError as error:
        raise InvalidSetting(
            f"{folder} cannot be used: {error.strerror}", hint="choose another data path, or make room on its disk"
        ) from error


def write_atomically(path: Path, data: bytes, *, sync: bool) -> None:
    """Replace a file: a reader sees the old or the new content; with ``sync``, the medium has the new one, too."""
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as out:
        out.write(data)
        if sync:
            out.flush()
            os.fsync(out.fileno())
    fresh.replace(path)
    if sync:
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Wait until the medium has the names in a folder: without this, a loss of power can undo a rename."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def with_checksum(content: bytes) -> bytes:
    """Return JSON of one line together with its checksum, as JSON of one line."""
    return b'{"crc32":%d%b%b}' % (crc32(content), _CONTENT, content)


def without_checksum(data: bytes) -> bytes:
    """Return the JSON that `with_checksum` was given; raises `ValueError` if it is damaged."""
    head, _, rest = data.partition(_CONTENT)
    content = rest[:-1]
    if head != b'{"crc32":%d' % crc32(content) or rest[-1:] != b"}":
        raise ValueError("the checksum is wrong")
    return content
