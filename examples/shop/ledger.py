"""A table of invoices in SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

import anyio

from examples.shop.models import Invoice

_INSERT = "INSERT OR IGNORE INTO invoices VALUES (?, ?, ?)"


class Ledger:
    """Stores invoices, and ignores stored ones, because messages may be delivered twice."""

    def __init__(self, path: str) -> None:
        self._database = sqlite3.connect(path, check_same_thread=False)
        self._database.execute("CREATE TABLE IF NOT EXISTS invoices (number INTEGER PRIMARY KEY, customer, cents)")

    async def add(self, invoices: Iterable[Invoice]) -> None:
        """Store invoices in one transaction; return when it is committed."""
        rows = [(one.order, one.customer, one.cents) for one in invoices]
        await anyio.to_thread.run_sync(self._insert, rows)

    def _insert(self, rows: list[tuple[int, str, int]]) -> None:
        with self._database:
            self._database.executemany(_INSERT, rows)

    def totals(self) -> dict[str, int]:
        """Return the number of invoices and their sum."""
        count, cents = self._database.execute("SELECT COUNT(*), COALESCE(SUM(cents), 0) FROM invoices").fetchone()
        return {"invoices": count, "cents": cents}

    def close(self) -> None:
        """Close the database."""
        self._database.close()
