"""The web application: ``uvicorn examples.shop.web:web``."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException

from examples.shop.models import Order
from examples.shop.service import ledger, make_app
from examples.shop.telemetry import spans_written
from nsqext import DeliveryUnknown, NsqError

logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
logging.getLogger("httpx").setLevel(logging.WARNING)
events = make_app()


@asynccontextmanager
async def lifespan(web: FastAPI) -> AsyncIterator[None]:
    """Run the handlers while the web server runs."""
    with spans_written():
        async with events:
            yield


web = FastAPI(lifespan=lifespan)
web.mount("/health", events.asgi())


@web.post("/orders", status_code=202)
async def order(order: Order) -> dict[str, int | None]:
    """Accept an order: it is stored when 202 is returned."""
    try:
        receipt = await events.publish("orders", order, key=order.customer, headers={"source": "web"})
    except DeliveryUnknown as error:
        raise HTTPException(503, "possibly stored: send the order again") from error
    except NsqError as error:
        raise HTTPException(503, "not stored: send the order again") from error
    return {"partition": receipt.partition}


@web.get("/ledger")
async def totals() -> dict[str, int]:
    """Return the number of invoices and their sum."""
    return ledger().totals()
