"""SQL on the connections that programs have: SQLAlchemy's, psycopg's and sqlite3's."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from anyio import to_thread

from nsqext.errors import InvalidInput

_PARAMETER = re.compile(r":([a-z]+\d*)")
_PACKAGES = ("sqlalchemy", "psycopg", "sqlite3", "aiosqlite")

OF_PARTITION = "topic = :topic AND channel = :channel AND partition = :partition"
"""Condition of the rows of a `ChannelPartition`, whose members are the values."""


class ChannelPartition(NamedTuple):
    """A partition, as a channel reads it."""

    topic: str
    channel: str
    partition: int


class SqlConnection(Protocol):
    """A session or connection with an open transaction: of SQLAlchemy, psycopg, sqlite3 or aiosqlite."""

    def execute(self, statement: Any, parameters: Any = ..., /) -> Any:
        """Execute a statement; an asynchronous connection returns an awaitable."""


def prepared(connection: SqlConnection, sql: str, values: Mapping[str, object]) -> tuple[Any, Mapping[str, object]]:
    """Return what `execute` of a connection takes for a statement with named parameters, such as ``:topic``."""
    package = _package_of(connection)
    if package == "sqlalchemy":
        from sqlalchemy import text

        return text(sql), values
    return (_PARAMETER.sub(r"%(\1)s", sql) if package == "psycopg" else sql), values


async def execute(connection: SqlConnection, sql: str, values: Mapping[str, object]) -> Any:
    """Execute a statement on a connection of any kind, in a thread if it is a blocking one; return the result."""
    statement = prepared(connection, sql, values)
    if inspect.iscoroutinefunction(connection.execute) or _package_of(connection) == "aiosqlite":
        return await connection.execute(*statement)
    return await to_thread.run_sync(connection.execute, *statement)


async def fetched(result: Any) -> list[tuple[Any, ...]]:
    """Return the rows of what `execute` returned."""
    rows: Any = result.fetchall()
    return [tuple(row) for row in (await rows if inspect.isawaitable(rows) else rows)]


def is_postgresql(connection: SqlConnection) -> bool:
    """Return whether a connection is one to PostgreSQL."""
    package = _package_of(connection)
    if package != "sqlalchemy":
        return package == "psycopg"
    found: Any = connection
    bind = found.get_bind() if hasattr(found, "get_bind") else found
    return bool(bind.dialect.name == "postgresql")


def _package_of(connection: SqlConnection) -> str:
    for base in type(connection).__mro__:
        package = base.__module__.partition(".")[0]
        if package in _PACKAGES:
            return package
    raise InvalidInput(
        f"{type(connection).__name__} is no database connection that is known",
        hint="give a session or connection of SQLAlchemy, psycopg, sqlite3 or aiosqlite",
    )
