"""A bank of two databases: a process applies transfers, another one relays; both may be killed at any time.

A transfer is debited in the first database and added to its outbox in the same transaction. Workers with an inbox
credit it in the second database, and add a confirmation to the outbox of that one; they count it in the first database.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import anyio
import orjson
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from nsqext import App, Message, Producer
from nsqext.app import Depends
from nsqext.client.middleware import Middleware
from nsqext.transactions import Inbox, Outbox, OutboxRelay, OutboxStore

if TYPE_CHECKING:
    from nsqext.client.middleware import CallNext, Handling

__all__ = ("ACCOUNTS", "CONFIRMATIONS", "OPENING", "TRANSFERS", "create_accounts", "engine_of", "transfer")

ACCOUNTS = 20
OPENING = 1000
TRANSFERS = "transfers"
CONFIRMATIONS = "confirmations"
_TABLES = (
    "CREATE TABLE account (number INTEGER PRIMARY KEY, balance INTEGER NOT NULL)",
    "CREATE TABLE transfer (number INTEGER PRIMARY KEY, amount INTEGER NOT NULL, times INTEGER NOT NULL)",
)


def engine_of(database: str) -> AsyncEngine:
    """Return an engine for a database as `OutboxStore` takes it."""
    if database.startswith("sqlite:"):
        return create_async_engine(database.replace("sqlite:", "sqlite+aiosqlite:"), connect_args={"timeout": 30})
    words = dict(word.split("=", 1) for word in database.split())
    return create_async_engine(f"postgresql+psycopg://{words['user']}@/{words['dbname']}?host={words['host']}")


async def create_accounts(database: str, opening: int) -> None:
    """Create the tables of a database, and its accounts."""
    engine = engine_of(database)
    async with engine.begin() as connection:
        for statement in _TABLES:
            await connection.execute(text(statement))
        values = [{"number": number, "opening": opening} for number in range(ACCOUNTS)]
        await connection.execute(text("INSERT INTO account VALUES (:number, :opening)"), values)
    await engine.dispose()


async def transfer(session: AsyncSession, outbox: Outbox, number: int, account: int, amount: int) -> None:
    """Debit an account of the first database, and add the transfer to its outbox."""
    await _change(session, account, -amount)
    await _record(session, number, amount, times=0)
    body = orjson.dumps({"number": number, "account": account, "amount": amount})
    await outbox.add_async(session, TRANSFERS, body, key=account)


async def _change(session: AsyncSession, account: int, amount: int) -> None:
    statement = text("UPDATE account SET balance = balance + :amount WHERE number = :account")
    await session.execute(statement, {"amount": amount, "account": account})


async def _record(session: AsyncSession, number: int, amount: int, *, times: int) -> None:
    """Count a transfer, with no rule of the database that would hide a second one."""
    statement = text(
        "INSERT INTO transfer VALUES (:number, :amount, :times) "
        "ON CONFLICT (number) DO UPDATE SET times = transfer.times + 1"
    )
    await session.execute(statement, {"number": number, "amount": amount, "times": times})


class _Dies(Middleware):
    """Kills the process now and then after a handler's transaction was committed, before its message is finished."""

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        result = await call_next(handling)
        _die(0.02)
        return result


class _Store(OutboxStore):
    """Kills the process now and then after messages were published, before they are deleted from the outbox."""

    def delete(self, sequences: Sequence[int]) -> None:
        _die(0.05)
        super().delete(sequences)


def _die(chance: float) -> None:
    if random.random() < chance:
        os.kill(os.getpid(), signal.SIGKILL)


async def work(lookupd: str, first: str, second: str) -> None:
    """Credit transfers in the second database, and count confirmations in the first one, until killed."""
    debits, credits = (async_sessionmaker(engine_of(database)) for database in (first, second))
    crediting, confirming, outbox = Inbox(credits.begin), Inbox(debits.begin), Outbox()
    app = App(lookupd, max_in_flight=20, msg_timeout=3.0, requeue_delay=0.2, backoff="off")

    @app.handler(TRANSFERS, "bank", middleware=[_Dies(), crediting])
    async def credit(message: Message, session: Annotated[AsyncSession, Depends(crediting.session)]) -> None:
        found = orjson.loads(message.body)
        await _change(session, found["account"], found["amount"])
        await _record(session, found["number"], found["amount"], times=1)
        await outbox.add_async(session, CONFIRMATIONS, message.body, key=found["account"])

    @app.handler(CONFIRMATIONS, "bank", middleware=[_Dies(), confirming])
    async def confirm(message: Message, session: Annotated[AsyncSession, Depends(confirming.session)]) -> None:
        found = orjson.loads(message.body)
        await _record(session, found["number"], found["amount"], times=1)

    await app.serve()


async def relay(lookupd: str, databases: Sequence[str]) -> None:
    """Relay the outboxes of both databases, until killed."""
    async with Producer(lookupd, timeout=2.0) as producer, anyio.create_task_group() as tasks:
        for database in databases:
            tasks.start_soon(OutboxRelay(_Store(database), poll=0.05, batch=20).run, producer)


def main(role: str, lookupd: str, first: str, second: str) -> None:
    """Run a process of the bank."""
    if role == "relay":
        anyio.run(relay, lookupd, (first, second))
    else:
        anyio.run(work, lookupd, first, second)


if __name__ == "__main__":
    main(*sys.argv[1:])
