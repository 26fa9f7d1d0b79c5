"""The workers: ``nsqext run examples.orders.worker:app --workers 3``. Each also relays messages of the outbox."""

from __future__ import annotations

from typing import Annotated

from attrs import frozen
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

import nsqext
from examples.orders.database import address, sessions
from nsqext.app import Depends, Key
from nsqext.transactions import Inbox, Outbox, OutboxRelay, OutboxStore

inbox, outbox = Inbox(sessions().begin), Outbox()
Session = Annotated[AsyncSession, Depends(inbox.session)]

# NSQEXT_LOOKUPD has the address; keys of a killed relay are taken over after timeout and 5 seconds
app = nsqext.App(middleware=[inbox], requeue_delay=0.2, msg_timeout=5.0, timeout=5.0)
OutboxRelay(OutboxStore(address())).attach(app)


@frozen
class Order:
    """An order in the database."""

    number: int


# what the relay publishes: web.py adds the first, the handler of the first the second
app.publishes("orders", Order, key=True)
app.publishes("bills", Order, key=True)


@app.handler("orders", "billing")
async def bill(accepted: Order, customer: Key, session: Session) -> None:
    """Add the price of an order to the account of its customer: done twice, it would be wrong."""
    update = text("UPDATE orders SET state = 'billed' WHERE number = :number RETURNING customer, cents")
    order = (await session.execute(update, {"number": accepted.number})).mappings().one()
    await session.execute(
        text(
            "INSERT INTO accounts VALUES (:customer, :cents) "
            "ON CONFLICT (customer) DO UPDATE SET cents = accounts.cents + excluded.cents"
        ),
        dict(order),
    )
    await outbox.add_async(session, "bills", accepted, key=customer)


@app.handler("bills", "confirmation")
async def confirm(billed: Order, session: Session) -> None:
    """Confirm an order that was billed."""
    await session.execute(
        text("UPDATE orders SET state = 'confirmed' WHERE number = :number"), {"number": billed.number}
    )
