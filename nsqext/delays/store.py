"""The delayed messages of a relay, in a SQLite file."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Self

from attrs import frozen

from nsqext.errors import InvalidSetting, InvalidState
from nsqext.protocol.delay_record import DelayCancel, DelayRecord, encode_delay

_SCHEMA = """
CREATE TABLE IF NOT EXISTS store (name TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS delayed (
    identity TEXT PRIMARY KEY,
    topic TEXT NOT NULL,
    due INTEGER NOT NULL,
    next INTEGER,  -- when it is published next, in milliseconds since 1970; NULL when it was published or cancelled
    record BLOB NOT NULL,
    error TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS delayed_next ON delayed (next) WHERE next IS NOT NULL;
CREATE INDEX IF NOT EXISTS delayed_ended ON delayed (due) WHERE next IS NULL;
"""
_BUSY = 30.0
"""Seconds that a transaction waits for those of other processes."""


@frozen
class WaitingMessage:
    """A delayed message that waits."""

    identity: str  #: identifies it among all delayed messages
    topic: str  #: where it is published
    due: float  #: when, in seconds since 1970
    error: str = ""  #: why it could not be published when it was due; empty otherwise


class DelayStore:
    """Delayed messages in a SQLite file; thread-safe, and shared by any number of processes of one machine.

    A call that returned is on disk. Identities of published and cancelled messages are kept for a time, so that a
    message that is received again is not published again.

    Args:
        path: the file. Its folder must keep files when a machine restarts.
        create: create the file if it does not exist.

    Raises:
        InvalidSetting: the file does not exist, cannot be opened, or is no such store.

    Attributes:
        name: name of this store among those of other machines.
    """

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        if not create and not Path(path).is_file():
            raise InvalidSetting(f"{path} does not exist", hint="name the file of a relay")
        self._lock = threading.Lock()
        try:
            self._database = sqlite3.connect(
                path, timeout=_BUSY, isolation_level=None, check_same_thread=False, cached_statements=32
            )
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
            self._database.executescript(_SCHEMA)
            with self._transaction() as run:
                run.execute("INSERT INTO store SELECT ? WHERE NOT EXISTS (SELECT * FROM store)", (token_hex(6),))
                self.name: str = run.execute("SELECT name FROM store").fetchone()[0]
        except sqlite3.Error as error:
            raise InvalidSetting(f"{path} cannot be used as a store of delayed messages: {error}") from error

    def close(self) -> None:
        """Close the file; later calls raise `InvalidState`."""
        with self._lock:
            self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Hold the lock, and commit at the end, or roll back after an exception."""
        with self._lock:
            try:
                self._database.execute("BEGIN IMMEDIATE")
            except sqlite3.ProgrammingError as error:
                raise InvalidState("the store of delayed messages is closed") from error
            try:
                yield self._database
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    def add(self, records: Iterable[tuple[DelayRecord, bytes]]) -> None:
        """Store delayed messages with their bodies, and cancellations; known identities are not stored again.

        A cancellation that is received before its message is kept for it.
        """
        with self._transaction() as run:
            for record, body in records:
                if isinstance(record, DelayCancel):
                    self._cancel(run, record.identity, record.time)
                else:
                    values = (record.identity, record.topic, record.due, record.due, encode_delay(record, body))
                    run.execute(
                        "INSERT INTO delayed (identity, topic, due, next, record) VALUES (?, ?, ?, ?, ?) "
                        "ON CONFLICT DO NOTHING",
                        values,
                    )

    def cancel(self, identity: str) -> bool:
        """Cancel a message; return False if it does not wait: it is unknown, or was published or cancelled."""
        with self._transaction() as run:
            return self._cancel(run, identity, round(time.time() * 1000))

    def _cancel(self, run: sqlite3.Connection, identity: str, now: int) -> bool:
        found = run.execute(
            "UPDATE delayed SET next=NULL, record='' WHERE identity=? AND next IS NOT NULL", (identity,)
        )
        if not found.rowcount:
            run.execute(
                "INSERT INTO delayed (identity, topic, due, record) VALUES (?, '', ?, '') ON CONFLICT DO NOTHING",
                (identity, now),
            )
        return found.rowcount > 0

    def take(self, published: Sequence[str], count: int, now: float, lease: float) -> list[tuple[str, bytes]]:
        """Record that messages were published, and return identities and records of others that are due.

        Args:
            published: identities of the published messages.
            count: how many are returned, at most.
            now: seconds since 1970.
            lease: seconds until they are returned again, unless they are recorded as published or failed before.
        """
        with self._transaction() as run:
            run.executemany(
                "UPDATE delayed SET next=NULL, record='', error='' WHERE identity=?", [(one,) for one in published]
            )
            return run.execute(
                "UPDATE delayed SET next=? WHERE identity IN "
                "(SELECT identity FROM delayed WHERE next<=? ORDER BY next LIMIT ?) RETURNING identity, record",
                (round((now + lease) * 1000), int(now * 1000), count),
            ).fetchall()

    def failed(self, identity: str, error: str, again: float, *, alone: bool) -> None:
        """Record why a message was not published, and when that is tried again.

        Args:
            identity: identity of the message.
            error: the reason.
            again: seconds since 1970.
            alone: whether the reason is the message; otherwise other messages of its topic wait as well.
        """
        with self._transaction() as run:
            values = (round(again * 1000), error, identity)
            run.execute("UPDATE delayed SET next=?, error=? WHERE identity=? AND next IS NOT NULL", values)
            if not alone:
                run.execute(
                    "UPDATE delayed SET next=?, error=? WHERE next<? AND topic="
                    "(SELECT topic FROM delayed WHERE identity=?)",
                    (*values[:2], values[0], identity),
                )

    def forget(self, before: float) -> int:
        """Forget published and cancelled messages that were due before a time; return how many."""
        with self._transaction() as run:
            return run.execute("DELETE FROM delayed WHERE next IS NULL AND due<?", (int(before * 1000),)).rowcount

    def next_due(self) -> float | None:
        """Return when the next message is to be published, in seconds since 1970; None without any."""
        with self._transaction() as run:
            found: int | None = run.execute("SELECT min(next) FROM delayed WHERE next IS NOT NULL").fetchone()[0]
        return None if found is None else found / 1000

    def count(self) -> int:
        """Return how many messages wait."""
        with self._transaction() as run:
            return int(run.execute("SELECT count(*) FROM delayed WHERE next IS NOT NULL").fetchone()[0])

    def waiting(self, topic: str | None = None, count: int = 1000) -> list[WaitingMessage]:
        """Return messages that wait, the first due ones.

        Args:
            topic: of this topic only.
            count: how many, at most.
        """
        with self._transaction() as run:
            found = run.execute(
                "SELECT identity, topic, due, error FROM delayed WHERE next IS NOT NULL AND (? IS NULL OR topic=?) "
                "ORDER BY due LIMIT ?",
                (topic, topic, count),
            ).fetchall()
        return [WaitingMessage(identity, where, due / 1000, error) for identity, where, due, error in found]
