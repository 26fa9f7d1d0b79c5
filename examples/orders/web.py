"""The web application: ``uvicorn examples.orders.web:web``. It needs no connection to NSQ."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field
from sqlalchemy import text

from examples.orders.database import sessions
from nsqext.transactions import Outbox

web = FastAPI()
begin = sessions().begin
outbox = Outbox()


class Order(BaseModel):
    """What a customer sends."""

    customer: str = Field(min_length=1)
    cents: int = Field(gt=0)


@web.post("/orders", status_code=201)
async def accept(order: Order) -> dict[str, int]:
    """Accept an order: it is stored, and its message will be published, or neither."""
    async with begin() as session:
        insert = text("INSERT INTO orders (customer, cents) VALUES (:customer, :cents) RETURNING number")
        number = (await session.execute(insert, order.model_dump())).scalar_one()
        await outbox.add_async(session, "orders", b'{"number": %d}' % number, key=order.customer)
    return {"number": number}


@web.get("/orders/{number}")
async def show(number: int) -> dict[str, Any]:
    """Return an order."""
    async with begin() as session:
        found = await session.execute(text("SELECT * FROM orders WHERE number = :number"), {"number": number})
        row = found.mappings().one_or_none()
    if row is None:
        raise HTTPException(404, f"there is no order {number}")
    return dict(row)


@web.get("/totals")
async def totals() -> dict[str, int]:
    """Return how many orders there are in which state, and what they and the accounts amount to."""
    async with begin() as session:
        orders = await session.execute(
            text(
                "SELECT count(*) AS accepted, coalesce(sum(cents), 0) AS ordered, "
                "count(*) FILTER (WHERE state = 'billed') AS billed, "
                "count(*) FILTER (WHERE state = 'confirmed') AS confirmed FROM orders"
            )
        )
        owed = await session.execute(text("SELECT coalesce(sum(cents), 0) FROM accounts"))
        return {**orders.mappings().one(), "owed": owed.scalar_one()}
