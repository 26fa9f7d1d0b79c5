"""A run of the bank: its processes are kept running, transfers are made, and the books of both databases compared."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from secrets import token_hex
from signal import SIGKILL
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import anyio
import psycopg
from anyio import TASK_STATUS_IGNORED
from attrs import define, field
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

from tests.support.command_line import Process, environment
from tests.support.programs import ROOT
from tests.transactions.bank import ACCOUNTS, OPENING, SKIPPED, Bank, engine_of, transfer

if TYPE_CHECKING:
    from anyio.abc import TaskStatus

__all__ = ("WORKERS", "BankRun", "Book", "two_databases")

WORKERS = 3
_IMPORTS = ("tests.transactions.bank", "aiosqlite", "psycopg")
_ROLES = ("relay", "relay", *["work"] * WORKERS)
_BOOK = """
SELECT (SELECT sum(balance) FROM account), number, amount, times FROM (SELECT 1) AS one LEFT JOIN transfer ON 1 = 1
"""
"""One statement: the driver of SQLite begins no transaction for two that read."""
_T = TypeVar("_T")


def two_databases(server: str) -> tuple[str, str]:
    """Create two databases on a server of PostgreSQL."""
    names = [f"bank_{token_hex(4)}" for _ in range(2)]
    with psycopg.connect(server, autocommit=True) as connection:
        for name in names:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
    first, second = (server.replace("dbname=postgres", f"dbname={name}") for name in names)
    return first, second


class Book(NamedTuple):
    """What a database says.

    Attributes:
        total: sum of its accounts.
        transfers: amount of each transfer, and how many times it was counted.
    """

    total: int
    transfers: dict[int, tuple[int, int]]


@define(eq=False)
class BankRun:
    """A bank whose processes run.

    Attributes:
        bank: what they share.
        folder: for what they print.
        made: transfers that were committed.
        deaths: processes that were killed, by role.
        ended: processes that ended by themselves.
    """

    bank: Bank
    folder: Path
    made: int = 0
    deaths: Counter[str] = field(factory=Counter)
    ended: list[str] = field(factory=list)
    _running: dict[Process, str] = field(factory=dict)
    _engines: tuple[AsyncEngine, AsyncEngine] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._engines = engine_of(self.bank.first), engine_of(self.bank.second)

    async def close(self) -> None:
        """Close the connections to the databases."""
        for engine in self._engines:
            await engine.dispose()

    # Processes

    async def keep_all(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Run two relays and three workers; another process replaces each one that ends."""
        async with anyio.create_task_group() as tasks:
            for role in _ROLES:
                await tasks.start(self._keep, role)
            task_status.started()

    async def _keep(self, role: str, *, task_status: TaskStatus[None]) -> None:
        for starts in count():
            with (self.folder / f"{role}.out").open("ab") as out, (self.folder / f"{role}.err").open("ab") as errors:
                output = out.fileno(), errors.fileno()
                process = Process(self.bank.words(role), environment(), ROOT, imports=_IMPORTS, output=output)
            self._running[process] = role
            if starts == 0:
                task_status.started()
            try:
                await anyio.wait_readable(process)
                code = process.wait()
                self.deaths[role] += 1
                if code != -SIGKILL:
                    self.ended.append(f"{role} ended with {code}: {self.errors(role)}")
            finally:
                del self._running[process]
                process.kill()
                process.wait()

    def errors(self, role: str) -> str:
        """Return the end of what processes of a role wrote to standard error."""
        return (self.folder / f"{role}.err").read_text(errors="replace")[-2000:]

    def kill(self, chance: random.Random, role: str = "") -> int:
        """Kill a process, as kill -9 does; one of a role, if it is given. Return how many ran: 1 or 0."""
        found = [process for process, known in self._running.items() if role in ("", known)]
        if found:
            chance.choice(found).kill()
        return min(len(found), 1)

    @property
    def skipped(self) -> int:
        """Messages that inboxes dropped."""
        return (self.folder / "work.out").read_text().split().count(SKIPPED)

    # Transfers

    async def transfer_until(self, chance: random.Random, pause: float, done: Callable[[int], bool]) -> None:
        """Make transfers until ``done`` says so of their number; every fifth transaction is rolled back at first."""
        sessions = async_sessionmaker(self._engines[0])
        while not done(self.made):
            accounts = chance.randrange(ACCOUNTS), chance.randrange(ACCOUNTS)
            amount, committed, rolls_back = chance.randint(1, 9), False, self.made % 5 == 0
            while not committed:
                try:
                    async with sessions() as session:
                        await transfer(session, self.bank, self.made, accounts, amount)
                        await (session.rollback() if rolls_back else session.commit())
                    committed, rolls_back = not rolls_back, False
                except DBAPIError:  # the connection was ended, perhaps after the commit, or the server only reads
                    await anyio.sleep(0.05)
                    committed = self.made in (await self._again(lambda: self._book(0))).transfers
            self.made += 1
            await anyio.sleep(pause)

    # Books

    async def books(self) -> tuple[Book, Book]:
        """Return what both databases say: first the second one, which has no transfer that the first one lacks."""
        second = await self._again(lambda: self._book(1))
        return await self._again(lambda: self._book(0)), second

    async def _book(self, number: int) -> Book:
        async with self._engines[number].connect() as connection:
            rows = (await connection.execute(text(_BOOK))).all()
        return Book(
            int(rows[0][0]), {number: (amount, times) for _, number, amount, times in rows if number is not None}
        )

    async def _again(self, read: Callable[[], Awaitable[_T]]) -> _T:
        while True:
            try:
                return await read()
            except DBAPIError:  # the connection was ended
                await anyio.sleep(0.1)

    async def sum(self) -> int:
        """Return the sum of all accounts and of the transfers that are on their way."""
        first, second = await self.books()
        on_their_way = sum(amount for number, (amount, _) in first.transfers.items() if number not in second.transfers)
        return first.total + second.total + on_their_way

    async def until_confirmed(self, number: int) -> None:
        """Return when a number of transfers were made, applied and confirmed."""
        while True:
            first = await self._again(lambda: self._book(0))
            if len(first.transfers) == number and all(times for _, times in first.transfers.values()):
                return
            await anyio.sleep(0.2)

    async def faults(self) -> list[str]:
        """Return what is wrong when every transfer was made, and all of them had time to be applied."""
        (debited, confirmed), (credited, applied) = await self.books()
        found = list(self.ended)
        for name, transfers in (("applied", applied), ("confirmed", confirmed)):
            times = {number: transfers.get(number, (0, 0))[1] for number in range(self.made)}
            wrong = {number: count for number, count in times.items() if count != 1}
            if wrong:
                found.append(f"{len(wrong)} transfers are not {name} once: {dict(list(wrong.items())[:10])}")
        if debited + credited != ACCOUNTS * OPENING:
            found.append(f"the sum is {debited + credited}, not {ACCOUNTS * OPENING}")
        return found
