"""A bank: transfers between two databases, while workers, relays and a leader are killed; the sum stays the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from anyio.to_thread import run_sync

from nsqext.broker import Cluster
from nsqext.transactions import OutboxStore
from tests.transactions.bank import ACCOUNTS, OPENING, Bank, create_accounts
from tests.transactions.bank_run import BankRun

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(150)]

_TRANSFERS = 60
_KILLS = 4
_SECONDS = 100


@pytest.fixture
def databases(tmp_path: Path) -> tuple[str, str]:
    """Two databases with the tables of outbox and inbox; `make soak-bank` runs the bank on PostgreSQL."""
    found = (f"sqlite:///{tmp_path}/first.db", f"sqlite:///{tmp_path}/second.db")
    for database in found:
        OutboxStore(database, create=True).close()
    return found


@pytest.fixture
def bank_cluster() -> Iterator[Cluster]:
    """Three nodes, of which one may be down."""
    with Cluster(nodes=3) as running:
        for topic in ("transfers", "confirmations"):
            running.create_topic(topic, partitions=2, replicas=3, extend=True, channels=["bank"])
        yield running


async def test_every_transfer_is_applied_once_although_processes_and_leaders_are_killed(
    databases: tuple[str, str], bank_cluster: Cluster, tmp_path: Path
) -> None:
    chance, bank = random.Random(7), Bank(bank_cluster.lookupd, *databases)
    await create_accounts(bank.first, OPENING)
    await create_accounts(bank.second, 0)
    run = BankRun(bank, tmp_path)
    with anyio.fail_after(_SECONDS):
        async with anyio.create_task_group() as tasks:
            await tasks.start(run.keep_all)
            tasks.start_soon(run.transfer_until, random.Random(11), 0.02, lambda made: made == _TRANSFERS)
            for kill in range(_KILLS):
                await anyio.sleep(chance.uniform(0.5, 1.0))
                run.kill(chance)
                if kill == _KILLS // 2:
                    await run_sync(bank_cluster.kill, bank_cluster.leader(bank.transfers, 0))
                assert await run.sum() == ACCOUNTS * OPENING
            await run.until_confirmed(_TRANSFERS)
            tasks.cancel_scope.cancel()
    assert await run.faults() == []
    assert run.deaths.total() > _KILLS // 2
    run.made += 1
    assert [fault.partition(" once")[0] for fault in await run.faults()] == [
        "1 transfers are not applied",
        "1 transfers are not confirmed",
    ], "a transfer that is missing is found"
    await run.close()
