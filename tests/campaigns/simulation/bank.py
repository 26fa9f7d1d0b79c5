"""A bank of two databases in virtual time: workers and relays die by the seed, and each transfer is applied once.

A transfer is debited in the first database, published from its outbox, and credited in the second one by workers with
an inbox; a confirmation comes back from the outbox of the second database. The databases are SQLite's, in memory.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import anyio
import orjson
from attrs import define, field

from nsqext import Consumer, Message, Producer
from nsqext.client.middleware import Middleware
from nsqext.transactions import Inbox, Outbox, OutboxRelay, OutboxStore

if TYPE_CHECKING:
    from nsqext.client.middleware import CallNext, Handling
    from nsqext.testing.simulation import World
    from tests.campaigns.simulation.plan import Plan

__all__ = ("BankViolated", "run_bank")

TRANSFERS, CONFIRMATIONS = "transfers", "confirmations"
_ACCOUNTS = 10
_OPENING = 1000
_DRAIN = 150.0
"""Virtual seconds in which one more transfer is applied or confirmed, when nothing fails any longer."""
_PATIENT = 30.0
"""Virtual seconds after the end of all faults in which what is delivered again is delivered."""
_RELAYS, _WORKERS = 2, 2
_TABLES = (
    "CREATE TABLE account (number INTEGER PRIMARY KEY, balance INTEGER NOT NULL)",
    "CREATE TABLE transfer (number INTEGER PRIMARY KEY, amount INTEGER NOT NULL, times INTEGER NOT NULL)",
)


class BankViolated(AssertionError):
    """The books of the bank are wrong."""


class _HandlerFailed(Exception):
    """What handlers raise now and then."""


class _Died(Exception):
    """Ends the tasks of a process that has been killed."""


class _Session(sqlite3.Connection):
    """A connection as asynchronous drivers have it."""

    async def execute(self, statement: str, values: Mapping[str, object] | Sequence[object] = (), /) -> Any:  # type: ignore[override]
        return super().execute(statement, values)


@define(eq=False)
class _Life:
    """A process from its start to its death.

    Attributes:
        world: the world.
        name: name of the process.
        dead: it does nothing more.
    """

    world: World
    name: str
    dead: bool = False
    dying: anyio.Event = field(factory=anyio.Event)

    def die(self, chance: float) -> bool:
        """Let the process die with a probability: nothing that it sends from now on is transmitted."""
        if not self.dead and self.world.random.random() < chance:
            self.dead = True
            self.world.network.kill_host(self.name)
            self.dying.set()
        return self.dead


class _Store(OutboxStore):
    """The outbox for a process, which may die after messages were published, before they are deleted."""

    def __init__(self, database: str, life: _Life | None = None, death: float = 0.0) -> None:
        self._life = life
        self._death = death
        super().__init__(database, create=life is None)

    def connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._address.target, uri=True, timeout=0, isolation_level=None)
        # leases go by the clock of the database: in virtual time, too
        connection.create_function("julianday", 1, lambda _: time.time() / 86400.0 + 2440587.5)
        return connection

    def _begin(self) -> None:
        if self._life is not None and self._life.dead:
            raise _Died
        super()._begin()

    def delete(self, sequences: Sequence[int]) -> None:
        if self._life is not None and self._life.die(self._death):
            raise _Died
        super().delete(sequences)


class _Database:
    """A database that ends with the schedule."""

    def __init__(self, opening: int) -> None:
        self._folder = TemporaryDirectory()
        self.name: str = f"sqlite:///{self._folder.name}/bank.db"
        self._turn = anyio.Lock()  # a lock of SQLite would stop the only thread
        self._store = _Store(self.name)
        connection = self._store.connect()
        for statement in _TABLES:
            connection.execute(statement)
        connection.executemany("INSERT INTO account VALUES (?, ?)", [(n, opening) for n in range(_ACCOUNTS)])
        connection.close()

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[_Session]:
        """Open a transaction, which is rolled back if the block raises or is cancelled."""
        async with self._turn:
            path = self.name.removeprefix("sqlite:///")
            session = sqlite3.connect(path, uri=True, timeout=0, isolation_level=None, factory=_Session)
            try:
                await session.execute("BEGIN IMMEDIATE")
                yield session
                await session.execute("COMMIT")
            finally:
                session.close()

    async def open_store(self, life: _Life, death: float) -> _Store:
        """Return the outbox for a process."""
        async with self._turn:
            return _Store(self.name, life, death)

    async def book(self) -> tuple[int, dict[int, int]]:
        """Return the sum of the accounts, and how many times each transfer was counted."""
        async with self.begin() as session:
            total = (await session.execute("SELECT sum(balance) FROM account")).fetchone()[0]
            return total, dict((await session.execute("SELECT number, times FROM transfer")).fetchall())

    def close(self) -> None:
        """End it."""
        self._store.close()
        self._folder.cleanup()


async def _change(session: _Session, account: int, amount: int) -> None:
    await session.execute("UPDATE account SET balance = balance + ? WHERE number = ?", (amount, account))


async def _record(session: _Session, number: int, amount: int, times: int) -> None:
    """Count a transfer, with no rule of the database that would hide a second one."""
    statement = "INSERT INTO transfer VALUES (?, ?, ?) ON CONFLICT (number) DO UPDATE SET times = times + 1"
    await session.execute(statement, (number, amount, times))


class _Dies(Middleware):
    """Lets the process die now and then after the commit, before the message is finished."""

    def __init__(self, life: _Life, chance: float) -> None:
        self._life = life
        self._chance = chance

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        result = await call_next(handling)
        if self._life.die(self._chance):
            await anyio.sleep_forever()
        return result


class _Bank:
    """The bank of one schedule."""

    def __init__(self, world: World, plan: Plan) -> None:
        random = world.random
        self._world = world
        self._plan = plan
        self._first, self._second = _Database(_OPENING), _Database(0)
        self._made = 0
        self._failing = True
        self._death: float = random.choice((0.0, 0.03, 0.1))
        self._lives: tuple[float, float] = random.choice(((1.0, 3.0), (3.0, 20.0)))
        self._on_unknown: Literal["retry", "raise", "settle"] = random.choice(("retry", "retry", "raise", "settle"))
        self._timeout: float = random.choice((4.0, 10.0))
        self._request_timeout: float = random.choice((1.0, 3.0))
        self._batch: int = random.choice((1, 5, 50))

    async def run(self) -> None:
        """Run it.

        Raises:
            BankViolated: a transfer was lost, or applied or confirmed twice, or the sum has changed.
        """
        world, plan = self._world, self._plan
        for topic in (TRANSFERS, CONFIRMATIONS):
            await world.cluster.create_topic(
                topic, plan.partitions, replicas=plan.replicas, extend=True, channels=["bank"]
            )
        async with anyio.create_task_group() as tasks:
            for number in range(_RELAYS):
                tasks.start_soon(self._keep, f"relay {number}", self._relay)
            for number in range(_WORKERS):
                tasks.start_soon(self._keep, f"worker {number}", self._work)
            async with world.inject_faults():
                await self._transfer()
            self._failing = False
            await self._drain()
            tasks.cancel_scope.cancel()
        found = await self._faults()
        self._first.close()
        self._second.close()
        if found:
            raise BankViolated("\n".join(found))

    async def _keep(self, role: str, main: Callable[[_Life], Awaitable[None]]) -> None:
        """Run a process, and another one when it was killed."""
        random, world = self._world.random, self._world
        for number in count(1):
            life = _Life(world, f"{role}.{number}")

            async def live(life: _Life = life) -> None:
                try:
                    await main(life)
                except Exception:
                    if not life.dead:
                        raise
                await anyio.sleep_forever()

            process = world.start(live, life.name)
            try:
                with anyio.move_on_after(random.uniform(*self._lives)):
                    await life.dying.wait()
                if not self._failing:
                    await life.dying.wait()
            finally:
                life.dead = True
                with anyio.CancelScope(shield=True):
                    await process.kill(silently=random.random() < 0.3)
            await anyio.sleep(random.uniform(0.0, 0.5))

    async def _relay(self, life: _Life) -> None:
        settings: dict[str, Any] = {
            "on_unknown": self._on_unknown,
            "timeout": self._timeout,
            "request_timeout": self._request_timeout,
        }
        async with (
            Producer(self._world.cluster.lookupd, **settings) as producer,
            anyio.create_task_group() as tasks,
        ):
            for database in (self._first, self._second):
                store = await database.open_store(life, self._deadly)
                tasks.start_soon(OutboxRelay(store, poll=0.1, batch=self._batch).run, producer)

    @property
    def _deadly(self) -> float:
        return self._death if self._failing else 0.0

    async def _work(self, life: _Life) -> None:
        crediting, confirming = Inbox(self._second.begin), Inbox(self._first.begin)
        outbox, random = Outbox(), self._world.random

        async def stumble() -> None:
            await anyio.sleep(random.choice((0.0, 0.0, 0.01, 0.05)))
            if self._failing and random.random() < 0.05:
                raise _HandlerFailed

        async def credit(message: Message) -> None:
            found, session = orjson.loads(message.body), crediting.session()
            await _change(session, found["account"], found["amount"])
            await stumble()
            await _record(session, found["number"], found["amount"], 1)
            await outbox.add_async(session, CONFIRMATIONS, message.body, key=found["account"])
            await stumble()

        async def confirm(message: Message) -> None:
            found = orjson.loads(message.body)
            await stumble()
            await _record(confirming.session(), found["number"], found["amount"], 1)

        async with (
            self._consumer(TRANSFERS, life, crediting, credit),
            self._consumer(CONFIRMATIONS, life, confirming, confirm),
        ):
            await anyio.sleep_forever()

    def _consumer(
        self, topic: str, life: _Life, inbox: Inbox[_Session], handle: Callable[[Message], Awaitable[None]]
    ) -> Consumer:
        consumer = Consumer(
            topic,
            "bank",
            self._world.cluster.lookupd,
            middleware=[_Dies(life, self._deadly), inbox],
            concurrency=4,
            msg_timeout=5.0,
            requeue_delay=0.05,
            backoff="off",
            max_reconnect_wait=1.0,
            close_timeout=0.001,
            request_timeout=self._request_timeout,
        )
        consumer.handler(handle)
        return consumer

    async def _transfer(self) -> None:
        """Make transfers while faults happen; every fifth transaction is rolled back at first."""
        random, outbox = self._world.random, Outbox()
        until = self._world.now + 2 * self._plan.seconds
        while self._world.now < until:
            source, target, amount = random.randrange(_ACCOUNTS), random.randrange(_ACCOUNTS), random.randint(1, 9)
            for fails in (True, False) if self._made % 5 == 0 else (False,):
                with suppress(_HandlerFailed):
                    async with self._first.begin() as session:
                        await _change(session, source, -amount)
                        await _record(session, self._made, amount, 0)
                        body = orjson.dumps({"number": self._made, "account": target, "amount": amount})
                        await outbox.add_async(session, TRANSFERS, body, key=source)
                        if fails:
                            raise _HandlerFailed
            self._made += 1
            await anyio.sleep(random.uniform(0.0, self._plan.pause))

    async def _drain(self) -> None:
        """Wait until every transfer is confirmed; give up when no other one was for a while."""
        world = self._world
        most, since = 0, world.now
        while most < self._made and world.now < since + _DRAIN:
            await anyio.sleep(0.25)
            _, confirmed = await self._first.book()
            done = sum(1 for times in confirmed.values() if times)
            if done > most:
                most, since = done, world.now
        await anyio.sleep(_PATIENT)

    async def _faults(self) -> list[str]:
        (debited, confirmed), (credited, applied) = await self._first.book(), await self._second.book()
        found = []
        for what, times in (("applied", applied), ("confirmed", confirmed)):
            wrong = {number: times.get(number, 0) for number in range(self._made) if times.get(number, 0) != 1}
            if wrong:
                found.append(f"transfers that are not {what} once, and how often they are: {wrong}")
        if debited + credited != _ACCOUNTS * _OPENING:
            found.append(f"the sum is {debited + credited}, not {_ACCOUNTS * _OPENING}")
        return found


async def run_bank(world: World, plan: Plan) -> None:
    """Run the bank of a schedule, and compare its books.

    Raises:
        BankViolated: see `_Bank.run`.
    """
    await _Bank(world, plan).run()
