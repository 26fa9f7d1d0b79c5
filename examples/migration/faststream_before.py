# mypy: ignore-errors
"""A billing service with FastStream on NATS, before its migration to `faststream_after.py`."""

import logging
import os
import sqlite3
import time
from typing import Annotated

from faststream import BaseMiddleware, Depends, FastStream, Header
from faststream.annotations import ContextRepo
from faststream.exceptions import NackMessage, RejectMessage
from faststream.nats import NatsBroker, NatsMessage, NatsRouter
from pydantic import BaseModel

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


class Timing(BaseMiddleware):
    """Logs the duration of handlers."""

    async def consume_scope(self, call_next, msg):
        started = time.monotonic()
        try:
            return await call_next(msg)
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
        return self.database.execute("SELECT COALESCE(SUM(cents), 0) FROM entries").fetchone()[0]


def ledger(context: ContextRepo) -> Ledger:
    return context.get("ledger")


router = NatsRouter()


@router.subscriber("orders", queue="billing")
@router.publisher("invoices")
async def bill(
    order: Order,
    customer: Annotated[str, Header("customer")],
    message: NatsMessage,
    entries: Annotated[Ledger, Depends(ledger)],
) -> Invoice:
    if order.cents <= 0:
        logger.error("order %d costs nothing", order.number)
        raise RejectMessage
    try:
        if not entries.add(order.number, "invoice", order.cents):
            logger.info("order %d was invoiced before", order.number)
    except Busy:
        raise NackMessage(delay=1) from None
    return Invoice(order=order.number, customer=customer, cents=order.cents)


@router.subscriber("refunds.*", queue="billing")
async def refund(refund: Refund, entries: Annotated[Ledger, Depends(ledger)]) -> None:
    entries.add(refund.order, "refund", -refund.cents)


broker = NatsBroker(os.environ.get("NATS_URL", "nats://127.0.0.1:4222"), middlewares=[Timing])
broker.include_router(router)
app = FastStream(broker)


@app.on_startup
async def open_ledger(context: ContextRepo) -> None:
    context.set_global("ledger", Ledger(os.environ.get("BILLING_DATABASE", "billing.db")))


@app.after_shutdown
async def close_ledger(context: ContextRepo) -> None:
    context.get("ledger").database.close()
