"""Lock of a data path: one cluster or nsqd at a time uses it."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nsqext.errors import InvalidSetting

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def locked(folder: Path | None, *, make: bool = False) -> Iterator[None]:
    """Hold the lock of a data path, None for no lock; the end of the process releases it as well.

    Raises `InvalidSetting` if another cluster or nsqd holds it, or if the folder cannot be used.
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
