"""The connections of SQLite that a store opens, for tests of what only the database does: a full disk, a lock."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

__all__ = ("fill_disk", "free_disk", "kept_connections")


@contextmanager
def kept_connections() -> Iterator[list[sqlite3.Connection]]:
    """Return the connections that are opened in the block, in their order."""
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def connect_and_keep(*args: Any, **named: Any) -> sqlite3.Connection:
        opened.append(connect(*args, **named))
        return opened[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sqlite3, "connect", connect_and_keep)
        yield opened


def fill_disk(connection: sqlite3.Connection) -> None:
    """Let the file of a connection grow no longer: SQLite then reports a full disk."""
    ((pages,),) = connection.execute("PRAGMA page_count").fetchall()
    connection.execute(f"PRAGMA max_page_count = {pages}")


def free_disk(connection: sqlite3.Connection) -> None:
    """Let the file grow again."""
    connection.execute("PRAGMA max_page_count = 1000000000")
