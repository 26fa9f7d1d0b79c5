"""Which errors of a database end by themselves or by an operator, and which are final."""

from __future__ import annotations

import sqlite3
from typing import Final

POSTGRESQL: Final = {
    "08": "the connection is lost",
    "25006": "the server only reads, as after a failover",
    "25P03": "the server has ended an idle transaction",
    "25P04": "the server has ended a long transaction",
    "28": "the login is refused",
    "3D": "the database does not exist",
    "3F": "the schema does not exist",
    "40": "the transaction conflicts with another transaction",
    "42501": "a right is missing",
    "42P01": "a table is missing: nsqext outbox sql",
    "53": "the disk, memory, locks or connections are used up",
    "55": "a lock or an object is not available",
    "57": "an operator or a timeout has ended the statement or the server",
    "58": "the system of the server has failed",
    "XX000": "an internal error of the server",
}
"""SQLSTATE of PostgreSQL, or its beginning, for errors after which a relay tries again; others are final."""

MISSING: Final = tuple(POSTGRESQL[state] for state in ("3F", "42501", "42P01"))
"""Reasons why a table cannot be read although the database responds."""

SQLITE: Final = {
    sqlite3.SQLITE_PERM: "the file must not be used",
    sqlite3.SQLITE_BUSY: "another process writes",
    sqlite3.SQLITE_LOCKED: "another connection writes",
    sqlite3.SQLITE_NOMEM: "the memory is used up",
    sqlite3.SQLITE_READONLY: "the file must not be written",
    sqlite3.SQLITE_IOERR: "the disk has failed",
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened",
    sqlite3.SQLITE_PROTOCOL: "another process locks the file",
    sqlite3.SQLITE_SCHEMA: "the tables were changed",
}
"""Primary result codes of SQLite for errors after which a relay tries again."""

_PRIMARY = 0xFF  # bits of the primary code in a result code of SQLite


def outage_of(error: BaseException) -> str | None:
    """Return why a database cannot be used now; None for a final error, and for an error of no database.

    An error of SQLAlchemy is judged by the error of the driver.
    """
    error = getattr(error, "orig", error)
    if isinstance(error, sqlite3.Error):
        return _outage_of_sqlite(error)
    if type(error).__module__.partition(".")[0] != "psycopg":
        return None
    state: str | None = getattr(error, "sqlstate", None)
    if state is not None:
        return next((reason for begin, reason in POSTGRESQL.items() if state.startswith(begin)), None)
    import psycopg

    return POSTGRESQL["08"] if isinstance(error, psycopg.OperationalError) else None


def _outage_of_sqlite(error: sqlite3.Error) -> str | None:
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return SQLITE[sqlite3.SQLITE_BUSY] if isinstance(error, sqlite3.OperationalError) else None
    if code == sqlite3.SQLITE_ERROR and str(error).startswith("no such table"):
        return POSTGRESQL["42P01"]
    return SQLITE.get(code & _PRIMARY)
