"""One program at a time on a data path."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nsqext.errors import InvalidSetting

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ("locked",)


@contextmanager
def locked(folder: Path | None, *, make: bool = False) -> Iterator[None]:
    """Keep others away from the data, in this process and in others, until the end; a kill ends it, too.

    Args:
        folder: where the data is; None for nowhere.
        make: make the folder when it is not there.

    Raises:
        InvalidSetting: somebody else has it, or it cannot be used.
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
