"""The databases of the tests, as SQLAlchemy writes them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

__all__ = ("rows_as_dicts", "url_of")


def url_of(database: str, driver: str) -> str:
    """Return the database as SQLAlchemy writes it."""
    if database.startswith("sqlite:///"):
        return database.replace("sqlite:", "sqlite+aiosqlite:" if driver == "async" else "sqlite:")
    folder = database.split()[0].removeprefix("host=")
    return f"postgresql+psycopg://postgres@/postgres?host={folder}"


def _as_dict(cursor: Any, row: tuple[object, ...]) -> dict[str, object]:
    return dict(zip([column[0] for column in cursor.description], row, strict=True))


@asynccontextmanager
async def rows_as_dicts(database: str) -> AsyncIterator[Any]:
    """Open a transaction on a connection of the driver that returns rows as dicts, of psycopg with own cursors."""
    if database.startswith("sqlite:///"):
        import aiosqlite

        async with aiosqlite.connect(database.removeprefix("sqlite:///")) as connection:
            connection.row_factory = cast("Any", _as_dict)
            yield connection
            await connection.commit()
        return
    from psycopg import AsyncConnection, AsyncCursor
    from psycopg.rows import dict_row

    class OwnCursor(AsyncCursor[Any]):
        """A cursor of the program."""

    async with await AsyncConnection.connect(database, row_factory=dict_row, cursor_factory=OwnCursor) as opened:
        yield opened
