"""A bank: transfers between two databases, while workers, relays and a leader are killed; the sum stays the same."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from signal import SIGKILL
from subprocess import DEVNULL
from typing import TYPE_CHECKING

import anyio
import psycopg
import pytest
from anyio.to_thread import run_sync
from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker

from nsqext.broker import Cluster
from nsqext.transactions import Outbox, OutboxStore
from tests.support.programs import ROOT
from tests.transactions.bank import ACCOUNTS, CONFIRMATIONS, OPENING, TRANSFERS, create_accounts, engine_of, transfer

if TYPE_CHECKING:
    from anyio.abc import Process

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(150)]

_TRANSFERS = 120
_KILLS = 6
_WORKERS = 3
_SECONDS = 100


@pytest.fixture(params=["sqlite", "postgresql"])
def databases(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """Two databases with the tables of outbox and inbox."""
    if request.param == "sqlite":
        found = (f"sqlite:///{tmp_path}/first.db", f"sqlite:///{tmp_path}/second.db")
    else:
        server: str = request.getfixturevalue("postgres")
        names = [f"bank_{token_hex(4)}" for _ in range(2)]
        with psycopg.connect(server, autocommit=True) as connection:
            for name in names:
                connection.execute(f'CREATE DATABASE "{name}"'.encode())
        found = (
            server.replace("dbname=postgres", f"dbname={names[0]}"),
            server.replace("dbname=postgres", f"dbname={names[1]}"),
        )
    for database in found:
        OutboxStore(database, create=True).close()
    return found


@pytest.fixture
def bank_cluster() -> Iterator[Cluster]:
    """Three nodes, of which one may be down."""
    with Cluster(nodes=3) as running:
        for topic in (TRANSFERS, CONFIRMATIONS):
            running.create_topic(topic, partitions=2, replicas=3, extend=True, channels=["bank"])
        yield running


class _Processes:
    """Processes of the bank, which are replaced when they were killed."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._running: list[Process] = []
        self.deaths: int = 0

    async def keep(self, role: str) -> None:
        """Run processes of a role, one after the other."""
        command = [sys.executable, "-m", "tests.transactions.bank", role, *self._arguments]
        while True:
            process = await anyio.open_process(command, cwd=ROOT, stdin=DEVNULL, stdout=DEVNULL, stderr=None)
            self._running.append(process)
            try:
                assert await process.wait() == -SIGKILL, f"a process of the bank ({role}) ended by itself"
                self.deaths += 1
            finally:
                self._running.remove(process)
                if process.returncode is None:
                    process.kill()
                with anyio.CancelScope(shield=True):
                    await process.aclose()

    def kill(self, number: int) -> None:
        """Kill a process, as kill -9 does."""
        if self._running:
            self._running[number % len(self._running)].kill()


async def _transfer_all(database: str, chance: random.Random) -> None:
    """Make all transfers; every fifth transaction is rolled back at first."""
    engine, outbox = engine_of(database), Outbox()
    sessions = async_sessionmaker(engine)
    for number in range(_TRANSFERS):
        account, amount = chance.randrange(ACCOUNTS), chance.randint(1, 9)
        for rolls_back in (True, False) if number % 5 == 0 else (False,):
            async with sessions() as session:
                await transfer(session, outbox, number, account, amount)
                await (session.rollback() if rolls_back else session.commit())
        await anyio.sleep(0.02)
    await engine.dispose()


async def _totals(database: str) -> tuple[int, dict[int, int]]:
    """Return the sum of the accounts, and how many times each transfer was counted."""
    engine = engine_of(database)
    async with engine.connect() as connection:
        total = (await connection.execute(text("SELECT sum(balance) FROM account"))).scalar_one()
        times = dict(map(tuple, (await connection.execute(text("SELECT number, times FROM transfer"))).all()))
    await engine.dispose()
    return int(total), times


async def test_every_transfer_is_applied_once_although_processes_and_leaders_are_killed(
    databases: tuple[str, str], bank_cluster: Cluster
) -> None:
    first, second = databases
    chance = random.Random(7)
    await create_accounts(first, OPENING)
    await create_accounts(second, 0)
    processes = _Processes(bank_cluster.lookupd[0], first, second)
    with anyio.fail_after(_SECONDS):
        async with anyio.create_task_group() as tasks:
            for role in ("relay", "relay", *["work"] * _WORKERS):
                tasks.start_soon(processes.keep, role)
            tasks.start_soon(_transfer_all, first, random.Random(11))
            for kill in range(_KILLS):
                await anyio.sleep(chance.uniform(0.5, 1.0))
                processes.kill(chance.randrange(100))
                if kill == _KILLS // 2:
                    await run_sync(bank_cluster.kill, bank_cluster.leader(TRANSFERS, 0))
            await _until_confirmed(first)
            tasks.cancel_scope.cancel()
    assert processes.deaths > _KILLS // 2
    (debited, confirmed), (credited, applied) = await _totals(first), await _totals(second)
    assert applied == dict.fromkeys(range(_TRANSFERS), 1)
    assert confirmed == dict.fromkeys(range(_TRANSFERS), 1)
    assert debited + credited == ACCOUNTS * OPENING
    assert credited > 0


async def _until_confirmed(database: str) -> None:
    while True:
        _, times = await _totals(database)
        if len(times) == _TRANSFERS and all(times.values()):
            return
        await anyio.sleep(0.2)
