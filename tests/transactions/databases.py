"""The databases of the tests, as SQLAlchemy writes them."""

from __future__ import annotations

__all__ = ("url_of",)


def url_of(database: str, driver: str) -> str:
    """Return the database as SQLAlchemy writes it."""
    if database.startswith("sqlite:///"):
        return database.replace("sqlite:", "sqlite+aiosqlite:" if driver == "async" else "sqlite:")
    folder = database.split()[0].removeprefix("host=")
    return f"postgresql+psycopg://postgres@/postgres?host={folder}"
