"""The billing service of `faststream_before.py` with nsqext: ``nsqext run examples.migration.faststream_after:app``."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import AsyncIterator
from typing import Annotated

from pydantic import BaseModel

from nsqext import App, Reject, Requeue, Router
from nsqext.app import Depends, Header
from nsqext.middleware import CallNext, Handling, Middleware

logger = logging.getLogger("billing")


class Order(BaseModel):
    number: int
    cents: int


class Invoice(BaseModel):
    order: int
    customer: str
    cents: int


class Refund(BaseModel):
    order: int
    cents: int


class Timing(Middleware):
    """Logs the duration of handlers."""

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        started = time.monotonic()
        try:
            return await call_next(handling)
        finally:
            logger.info("handled in %.3f s", time.monotonic() - started)


class Busy(Exception):
    """The database is locked."""


class Ledger:
    """Invoices and refunds in SQLite."""

    def __init__(self, path: str) -> None:
        self.database = sqlite3.connect(path)
        self.database.execute("CREATE TABLE IF NOT EXISTS entries (number INTEGER, kind TEXT, cents INTEGER)")
        self.database.execute("CREATE UNIQUE INDEX IF NOT EXISTS once ON entries (number, kind)")

    def add(self, number: int, kind: str, cents: int) -> bool:
        """Store an entry; False if it was stored before."""
        try:
            with self.database:
                done = self.database.execute("INSERT OR IGNORE INTO entries VALUES (?, ?, ?)", (number, kind, cents))
        except sqlite3.OperationalError as error:
            raise Busy from error
        return done.rowcount == 1

    def total(self) -> int:
        return int(self.database.execute("SELECT COALESCE(SUM(cents), 0) FROM entries").fetchone()[0])


opened: list[Ledger] = []


def ledger() -> Ledger:
    return opened[-1]


router = Router()


@router.publisher("invoices")
@router.handler("orders", "billing")
async def bill(
    order: Order, customer: Annotated[str, Header("customer")], entries: Annotated[Ledger, Depends(ledger)]
) -> Invoice:
    if order.cents <= 0:
        raise Reject(f"order {order.number} costs nothing")
    try:
        if not entries.add(order.number, "invoice", order.cents):
            logger.info("order %d was invoiced before", order.number)
    except Busy:
        raise Requeue(1) from None
    return Invoice(order=order.number, customer=customer, cents=order.cents)


@router.handler("refunds.*", "billing")
async def refund(refund: Refund, entries: Annotated[Ledger, Depends(ledger)]) -> None:
    entries.add(refund.order, "refund", -refund.cents)


lookupd = os.environ.get("NSQEXT_LOOKUPD", "127.0.0.1:4161")
app = App(lookupd=lookupd, middleware=[Timing()], max_attempts=10, dead_letter="billing-dead")
app.include_router(router)


@app.lifespan
async def storage(app: App) -> AsyncIterator[None]:
    opened.append(Ledger(os.environ.get("BILLING_DATABASE", "billing.db")))
    yield
    opened.pop().database.close()
