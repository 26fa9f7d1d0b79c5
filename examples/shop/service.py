"""The handlers: orders become invoices, invoices are written to the ledger."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

from examples.shop.ledger import Ledger
from examples.shop.models import Invoice, Order
from nsqext import App, MessageBatch, Reject, Router
from nsqext.app import Key, decode_body
from nsqext.middleware import HandlerTimeout
from nsqext.observability.otel import OpenTelemetry

router = Router()
_ledgers: list[Ledger] = []


def ledger() -> Ledger:
    """Return the open ledger."""
    return _ledgers[-1]


@router.lifespan
async def storage(app: App) -> AsyncIterator[None]:
    """Keep the ledger open while handlers run."""
    opened = Ledger(os.environ.get("SHOP_DATABASE", "shop.db"))
    _ledgers.append(opened)
    yield
    _ledgers.remove(opened)
    opened.close()


@router.publisher("invoices")
@router.handler("orders", "billing", concurrency=8)
async def bill(order: Order, key: Key) -> Invoice:
    """Return the invoice of an order, which is published before the order is finished."""
    if order.cents <= 0:
        raise Reject(f"order {order.number} costs {order.cents} cents")
    return Invoice(order.number, key or order.customer, order.cents)


@router.batch_handler("invoices", "ledger", max_count=100, max_wait=0.1)
async def write(batch: MessageBatch) -> None:
    """Write invoices; their messages are finished after the commit."""
    await ledger().add(decode_body(message.body, Invoice) for message in batch)


def make_app() -> App:
    """Return the app; addresses, TLS and secrets are in the environment (``NSQEXT_LOOKUPD``, …)."""
    telemetry = OpenTelemetry()
    app = App(
        middleware=[telemetry, HandlerTimeout(20)],
        max_attempts=20,
        requeue_delay=0.2,
        dead_letter="shop-dead",
        backoff="off",
        close_timeout=5.0,
    )
    app.include_router(router)
    return app
