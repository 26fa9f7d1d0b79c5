"""A table of invoices in SQLite, written in batches."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import anyio

from examples.shop.models import Invoice

_LINGER = 0.02
_INSERT = "INSERT OR IGNORE INTO invoices VALUES (?, ?, ?)"


class Ledger:
    """Collects invoices of concurrent handlers and commits them together.

    An invoice that was stored before is ignored: messages may be delivered twice.
    """

    def __init__(self, path: str) -> None:
        self._database = sqlite3.connect(path, check_same_thread=False)
        self._database.execute("CREATE TABLE IF NOT EXISTS invoices (number INTEGER PRIMARY KEY, customer, cents)")
        self._waiting: list[Invoice] = []
        self._committed = anyio.Event()
        self._arrived = anyio.Event()

    @classmethod
    @asynccontextmanager
    async def open(cls, path: str) -> AsyncIterator[Self]:
        """Open a ledger and run its writer."""
        ledger = cls(path)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ledger._write)
                yield ledger
                tasks.cancel_scope.cancel()
        finally:
            ledger._database.close()

    async def add(self, invoice: Invoice) -> None:
        """Add an invoice; returns when it is committed."""
        self._waiting.append(invoice)
        committed = self._committed
        self._arrived.set()
        await committed.wait()

    def totals(self) -> dict[str, int]:
        """Return the number of invoices and their sum."""
        count, cents = self._database.execute("SELECT COUNT(*), COALESCE(SUM(cents), 0) FROM invoices").fetchone()
        return {"invoices": count, "cents": cents}

    async def _write(self) -> None:
        while True:
            await self._arrived.wait()
            await anyio.sleep(_LINGER)
            batch, self._waiting = self._waiting, []
            committed, self._committed = self._committed, anyio.Event()
            self._arrived = anyio.Event()
            await anyio.to_thread.run_sync(self._insert, batch)
            committed.set()

    def _insert(self, batch: list[Invoice]) -> None:
        with self._database:
            self._database.executemany(_INSERT, [(one.order, one.customer, one.cents) for one in batch])
