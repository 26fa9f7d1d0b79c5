"""Where the files of partitions are, and how they are replaced."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nsqext.errors import InvalidSetting

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ("topic_folder", "usable", "write_atomically")


def topic_folder(data_path: Path, topic: str) -> Path:
    """Return the folder of a topic's partitions; topics may be called ``.`` and ``..``, folders may not."""
    return data_path / (topic if topic.strip(".") else topic.replace(".", "%2E"))


@contextmanager
def usable(folder: Path) -> Iterator[None]:
    """Turn an error of the disk, while what is there is opened, into one that says what to do.

    Raises:
        InvalidSetting: there was one.
    """
    try:
        yield
    except OSError as error:
        raise InvalidSetting(
            f"{folder} cannot be used: {error.strerror}", hint="choose another data path, or make room on its disk"
        ) from error


def write_atomically(path: Path, data: bytes, *, sync: bool) -> None:
    """Replace a file as a whole; a reader sees the old one or the new one, never a part.

    Args:
        path: the file.
        data: what it is to hold.
        sync: wait for the medium.
    """
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as out:
        out.write(data)
        if sync:
            out.flush()
            os.fsync(out.fileno())
    fresh.replace(path)
