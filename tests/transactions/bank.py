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
from anyio import to_thread
from attrs import Factory, asdict, frozen
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from nsqext import App, Message, Producer
from nsqext.app import Depends
from nsqext.client.middleware import Middleware
from nsqext.errors import InvalidSetting
from nsqext.transactions import Inbox, Outbox, OutboxRelay, OutboxStore

if TYPE_CHECKING:
    from nsqext.client.middleware import CallNext, Handling
    from nsqext.transactions.boundaries import OpenTransaction
    from nsqext.transactions.schema import Statement

__all__ = ("ACCOUNTS", "OPENING", "SKIPPED", "Bank", "create_accounts", "engine_of", "transfer")

ACCOUNTS = 100
OPENING = 1000
SKIPPED = "skipped"
"""A worker prints this line for each message that its inbox drops."""
_TABLES = (
    "CREATE TABLE account (number INTEGER PRIMARY KEY, balance INTEGER NOT NULL)",
    "CREATE TABLE transfer (number INTEGER PRIMARY KEY, amount INTEGER NOT NULL, times INTEGER NOT NULL)",
)


@frozen
class Bank:
    """What the processes of a bank share.

    Attributes:
        lookupd: lookup addresses.
        first: database that is debited, and counts confirmations.
        second: database that is credited.
        transfers: topic of the transfers.
        confirmations: topic of the confirmations.
        death: chance that a worker dies between its commit and FIN; that of a relay between publish and deletion is 2.5
            times as large.
        padding: bytes that each transfer is longer.
        address_map: addresses of nodes, and where the relays connect in their place: to a slow link.
        redesigned: whether messages have keys and headers; otherwise the inbox knows a transfer by its number.
    """

    lookupd: list[str]
    first: str
    second: str
    transfers: str = "transfers"
    confirmations: str = "confirmations"
    death: float = 0.02
    padding: int = 0
    address_map: dict[str, str] = Factory(dict)
    redesigned: bool = True

    def words(self, role: str) -> tuple[str, str, str]:
        """Return the program of a process and its arguments: ``work`` or ``relay``."""
        return __file__, role, orjson.dumps(asdict(self)).decode()


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


async def transfer(session: AsyncSession, bank: Bank, number: int, accounts: tuple[int, int], amount: int) -> None:
    """Debit the first account in the first database, and add the transfer to the second one to its outbox."""
    source, target = accounts
    await _change(session, source, -amount)
    await _record(session, number, amount, times=0)
    content = {"number": number, "account": target, "amount": amount, "padding": "x" * bank.padding}
    body = orjson.dumps(content)
    await Outbox().add_async(session, bank.transfers, body, key=source if bank.redesigned else None)


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

    def __init__(self, chance: float) -> None:
        self._chance = chance

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        result = await call_next(handling)
        _die(self._chance)
        return result


class _Inbox(Inbox[AsyncSession]):
    """Reports each message that it drops; the counts of a process that is killed would be lost."""

    async def _record(self, opened: OpenTransaction, channel: str, message: Message) -> Statement | None:
        found = await super()._record(opened, channel, message)
        if found is None:
            sys.stdout.write(f"{SKIPPED}\n")
            sys.stdout.flush()
        return found


class _Store(OutboxStore):
    """Kills the process now and then after messages were published, before they are deleted from the outbox."""

    death = 0.0

    def delete(self, sequences: Sequence[int]) -> None:
        _die(self.death)
        super().delete(sequences)


def _die(chance: float) -> None:
    if random.random() < chance:
        os.kill(os.getpid(), signal.SIGKILL)


def _number(message: Message) -> str:
    return str(orjson.loads(message.body)["number"])


async def work(bank: Bank) -> None:
    """Credit transfers in the second database, and count confirmations in the first one, until killed."""
    debits, credits = (async_sessionmaker(engine_of(database)) for database in (bank.first, bank.second))
    identity = None if bank.redesigned else _number
    crediting, confirming = _Inbox(credits.begin, identity=identity), _Inbox(debits.begin, identity=identity)
    outbox = Outbox()
    app = App(bank.lookupd, max_in_flight=20, msg_timeout=3.0, requeue_delay=0.2, backoff="off")

    @app.handler(bank.transfers, "bank", middleware=[_Dies(bank.death), crediting])
    async def credit(message: Message, session: Annotated[AsyncSession, Depends(crediting.session)]) -> None:
        found = orjson.loads(message.body)
        await _change(session, found["account"], found["amount"])
        await _record(session, found["number"], found["amount"], times=1)
        key = found["account"] if bank.redesigned else None
        await outbox.add_async(session, bank.confirmations, message.body, key=key)

    @app.handler(bank.confirmations, "bank", middleware=[_Dies(bank.death), confirming])
    async def confirm(message: Message, session: Annotated[AsyncSession, Depends(confirming.session)]) -> None:
        found = orjson.loads(message.body)
        await _record(session, found["number"], found["amount"], times=1)

    await app.serve()


async def _opened(database: str) -> _Store:
    """Open an outbox as soon as its database can be reached."""
    while True:
        try:
            return await to_thread.run_sync(_Store, database)
        except InvalidSetting:
            await anyio.sleep(0.2)


async def relay(bank: Bank) -> None:
    """Relay the outboxes of both databases, until killed."""
    async with (
        Producer(bank.lookupd, timeout=2.0, address_map=bank.address_map or None) as producer,
        anyio.create_task_group() as tasks,
    ):
        for database in (bank.first, bank.second):
            store = await _opened(database)
            store.death = 2.5 * bank.death
            tasks.start_soon(OutboxRelay(store, poll=0.05, batch=100).run, producer)


if __name__ == "__main__":
    anyio.run({"relay": relay, "work": work}[sys.argv[1]], Bank(**orjson.loads(sys.argv[2])))
