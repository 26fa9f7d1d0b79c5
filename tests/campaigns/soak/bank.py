"""A bank of real processes for minutes: ``python -m tests.campaigns.soak.bank --minutes 10``.

Workers and relays, leaders of partitions, and connections of PostgreSQL are killed at random. Now and then,
PostgreSQL only reads or accepts no connection. Two relays share each outbox, and reach the nodes over a slow link. The
nodes of a real cluster are killed if the environment says how; otherwise its leaders are moved. Nodes of the original
NSQ are killed and stopped; an inbox knows its transfers by their numbers.
"""

from __future__ import annotations

import argparse
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from secrets import token_hex
from typing import Any

import anyio
import psycopg
from anyio.to_thread import run_sync
from attrs import define, evolve, field

from examples.orders.postgres import postgres_server
from nsqext import Admin, NsqError
from nsqext.testing.simulation import Fault
from nsqext.transactions import OutboxStore
from tests.campaigns.soak.__main__ import say
from tests.campaigns.soak.clusters import EmbeddedProcess, OriginalProcesses, RealCluster, new_cluster, targets
from tests.support.tcp_relay import relaying
from tests.transactions.bank import ACCOUNTS, OPENING, Bank, create_accounts
from tests.transactions.bank_run import BankRun, two_databases

__all__ = ("BankResult", "run_bank")

_Cluster = EmbeddedProcess | OriginalProcesses | RealCluster
_NAMES = ("embedded", "original", "real")
_PARTITIONS = 2
_REPLICAS = 3
DOWN = (1.0, 6.0)
"""Seconds for which a leader is down, beyond the shortest time of its cluster."""
_OUTAGE = (0.5, 3.0)
"""Seconds for which PostgreSQL only reads, or accepts no connection."""
_RATE = 100_000
"""Bytes in a second that a relay sends to a node over each connection."""
_PADDING = 2_000
"""Bytes that each transfer is longer, so that 100 of them do not fit into the timeout of a publish."""
_DRAIN = 180.0
"""Seconds after the last kill within which every transfer is applied and confirmed."""
_TERMINATE = """
SELECT count(pg_terminate_backend(pid)) FROM (
    SELECT pid FROM pg_stat_activity WHERE datname LIKE 'bank%' AND backend_start < now() - interval '2 seconds'
    ORDER BY random() LIMIT 1
) AS one
"""
"""Not those of a process that starts: it has nothing to lose yet, and ends with an error."""


@define
class BankResult:
    """What a run gave.

    Attributes:
        transfers: transfers that were made.
        kills: number of kills by kind.
        skipped: messages that an inbox dropped.
        sums: how often the sum of both databases was compared while processes were killed.
        seconds: how long the kills lasted.
        faults: what is wrong.
    """

    transfers: int
    kills: Counter[str]
    skipped: int
    sums: int
    seconds: float
    faults: list[str] = field(factory=list)


class Disaster:
    """Kills what a bank consists of, until `over`.

    Args:
        run: the bank.
        cluster: its cluster.
        postgres: the server of its databases.
        every: seconds between two kills of a kind, on average.
        chance: draws times and targets.
    """

    def __init__(self, run: BankRun, cluster: _Cluster, postgres: str, every: float, chance: random.Random) -> None:
        self._run = run
        self._cluster = cluster
        self._postgres = postgres
        self._every = every
        self._chance = chance
        self._server = anyio.Lock()
        self.kills: Counter[str] = Counter()
        self.over: bool = False

    async def cause(self) -> None:
        """Kill until `over`; nodes run again then."""
        async with anyio.create_task_group() as tasks:
            kinds: dict[str, Callable[[], Awaitable[int]]] = {
                "worker": self._worker,
                "relay": self._relay,
                "backend": self._backend,
                "server that only reads": self._only_reads,
                "server without a free connection": self._use_up,
            }
            for kind, kill in kinds.items():
                tasks.start_soon(self._repeat, kind, kill)
            if isinstance(self._cluster, OriginalProcesses):
                tasks.start_soon(self.stop_nodes, self._cluster)
            else:
                kills = "kill" in self._cluster.kinds
                tasks.start_soon(self._kill_leaders if kills else self._move_leaders, self._cluster)

    async def _rest(self) -> None:
        await anyio.sleep(self._chance.uniform(0.5, 1.5) * self._every)

    async def _repeat(self, kind: str, kill: Callable[[], Awaitable[int]]) -> None:
        while not self.over:
            await self._rest()
            self.kills[kind] += await kill()

    async def _worker(self) -> int:
        return self._run.kill(self._chance, "work")

    async def _relay(self) -> int:
        return self._run.kill(self._chance, "relay")

    async def _backend(self) -> int:
        async with self._server, await psycopg.AsyncConnection.connect(self._postgres, autocommit=True) as connection:
            row = await (await connection.execute(_TERMINATE)).fetchone()
        return int(row[0]) if row else 0

    async def _only_reads(self) -> int:
        """Let all sessions only read for a while, as after a failover."""
        async with self._server, await psycopg.AsyncConnection.connect(self._postgres, autocommit=True) as connection:
            for setting in ("= on", "TO DEFAULT"):
                await connection.execute("SET default_transaction_read_only = off")
                await connection.execute(f"ALTER SYSTEM SET default_transaction_read_only {setting}".encode())
                await connection.execute("SELECT pg_reload_conf()")
                if setting == "= on":
                    await anyio.sleep(self._chance.uniform(*_OUTAGE))
        return 1

    async def _use_up(self) -> int:
        """Hold every connection that is free for a while, after one of a process was ended, which cannot come back."""
        async with self._server:
            held: list[psycopg.AsyncConnection[Any]] = []
            try:
                while True:
                    held.append(await psycopg.AsyncConnection.connect(self._postgres, autocommit=True))
            except psycopg.OperationalError:
                if held:
                    await held[0].execute(_TERMINATE)
                await anyio.sleep(self._chance.uniform(*_OUTAGE))
            finally:
                for connection in held:
                    await connection.close()
        return 1

    async def stop_nodes(self, cluster: OriginalProcesses) -> None:
        """Kill, end or freeze nodes that have a part of each topic."""
        kinds = sorted({"kill", "terminate", "freeze"} - ({"kill"} if cluster.forgets else set()))
        while not self.over:
            await self._rest()
            kind, node = self._chance.choice(kinds), self._chance.choice(("n1", "n2", "n3"))
            end = await run_sync(cluster.begin, Fault(kind, 0.0, 0.0, node, 0.0), ())
            self.kills[f"node ({kind})"] += 1
            await anyio.sleep(self._chance.uniform(*DOWN))
            await run_sync(end)

    async def _move_leaders(self, cluster: EmbeddedProcess | RealCluster) -> None:
        bank = self._run.bank
        topics = (bank.transfers, bank.confirmations)
        while not self.over:
            await self._rest()
            fault = Fault("move", 0.0, 0.0, "", self._chance.random())
            await run_sync(cluster.begin, fault, topics)
            self.kills["leader moved"] += 1

    async def _kill_leaders(self, cluster: EmbeddedProcess | RealCluster) -> None:
        bank = self._run.bank
        topics = (bank.transfers, bank.confirmations)
        async with Admin(bank.lookupd) as admin:
            while not self.over:
                await self._rest()
                await until_in_sync(admin, topics)
                topic, partition = self._chance.choice(topics), self._chance.randrange(_PARTITIONS)
                seconds = cluster.shortest + self._chance.uniform(*DOWN)
                leader = await run_sync(cluster.leader, topic, partition)
                end = await run_sync(cluster.begin, Fault("kill", 0.0, seconds, leader, 0.0), topics)
                self.kills["leader"] += 1
                await anyio.sleep(seconds)
                await run_sync(end)


async def until_in_sync(admin: Admin, topics: tuple[str, ...]) -> None:
    """Wait until every replica has every message: one that leads too early would lose some."""
    for topic in topics:
        while True:
            try:
                if all(len(found) == _REPLICAS for found in (await admin.replicas(topic)).values()):
                    break
            except NsqError as error:
                logging.getLogger("tests.campaigns.soak").info("%s", error)
            await anyio.sleep(0.5)


async def _run_bank(
    cluster: _Cluster, postgres: str, folder: Path, seconds: float, every: float, seed: int
) -> BankResult:
    chance, token = random.Random(seed), token_hex(4)
    original = isinstance(cluster, OriginalProcesses)
    bank = Bank(
        cluster.lookupd,
        *two_databases(postgres),
        f"transfers_{token}",
        f"confirmations_{token}",
        death=0.001,
        padding=_PADDING,
        redesigned=not original,
    )
    for database, opening in ((bank.first, OPENING), (bank.second, 0)):
        OutboxStore(database, create=True).close()
        await create_accounts(database, opening)
    async with Admin(bank.lookupd) as admin:
        for topic in (bank.transfers, bank.confirmations):
            if original:
                await admin.create_topic(topic, channels=["bank"])
                continue
            await admin.create_topic(
                topic,
                partitions=_PARTITIONS,
                replicas=_REPLICAS,
                extend=True,
                multipart=True,
                channels=["bank"],
                wait=180.0,
            )
    async with AsyncExitStack() as links:
        async with Admin(bank.lookupd) as admin:
            nodes = [str(node.tcp) for node in await admin.nodes()]
        slow = {node: (await links.enter_async_context(relaying(node, rate=_RATE))).address for node in nodes}
        return await _run_processes(evolve(bank, address_map=slow), cluster, postgres, folder, seconds, every, chance)


async def _run_processes(
    bank: Bank,
    cluster: _Cluster,
    postgres: str,
    folder: Path,
    seconds: float,
    every: float,
    chance: random.Random,
) -> BankResult:
    run = BankRun(bank, folder)
    disaster = Disaster(run, cluster, postgres, every, chance)
    result = BankResult(0, disaster.kills, 0, 0, 0.0)
    async with anyio.create_task_group() as tasks:
        await tasks.start(run.keep_all)
        began = time.monotonic()
        async with anyio.create_task_group() as working:
            working.start_soon(run.transfer_until, chance, 0.05, lambda made: disaster.over)
            working.start_soon(disaster.cause)
            while time.monotonic() < began + seconds:
                await anyio.sleep(min(5.0, seconds / 4))
                total, result.sums = await run.sum(), result.sums + 1
                if total != ACCOUNTS * OPENING:
                    result.faults.append(f"the sum was {total} after {time.monotonic() - began:.0f} s")
            disaster.over, result.seconds = True, time.monotonic() - began
        with anyio.move_on_after(_DRAIN):
            await run.until_confirmed(run.made)
        await anyio.sleep(2.0)  # what is delivered again is delivered now
        tasks.cancel_scope.cancel()
    result.transfers, result.skipped = run.made, run.skipped
    disaster.kills["by itself, between commit and FIN or deletion"] = run.deaths.total() - sum(
        disaster.kills[kind] for kind in ("worker", "relay")
    )
    result.faults += await run.faults()
    await run.close()
    return result


def run_bank(target: str, seconds: float, every: float, seed: int, folder: Path) -> BankResult:
    """Run a bank on a kind of cluster.

    Args:
        target: the kind of cluster, ``embedded``, ``original`` or ``real``.
        seconds: how long transfers are made and processes killed.
        every: seconds between two kills of a kind, on average.
        seed: of times and targets.
        folder: for what processes print.
    """
    cluster = new_cluster(target, seed, folder)
    assert isinstance(cluster, _Cluster)
    cluster.start()
    try:
        with postgres_server() as postgres:
            return anyio.run(_run_bank, cluster, postgres, folder, seconds, every, seed)
    finally:
        cluster.stop()


def main() -> int:
    """Run a bank on each cluster; 1 when a transfer was lost or applied twice."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.soak.bank", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--target", action="append", choices=_NAMES, help="all by default")
    parser.add_argument("--every", type=float, default=6.0, help="seconds between two kills of a kind")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000, help="random without it")
    given = parser.parse_args()
    failed = False
    for target in given.target or [name for name in targets() if name in _NAMES]:
        folder = Path(tempfile.mkdtemp(prefix=f"bank-{target}-"))
        say(f"seed {given.seed} on {target} ...")
        result = run_bank(target, 60 * given.minutes, given.every, given.seed, folder)
        kills = ", ".join(f"{kind} {count}" for kind, count in result.kills.items())
        say(
            f"  {result.transfers} transfers in {result.seconds:.0f} s; kills: {kills}; {result.skipped} duplicates "
            f"dropped by inboxes; sum compared {result.sums} times; {len(result.faults)} faults"
        )
        for text in result.faults:
            say(f"  {text}")
        failed |= bool(result.faults)
        if result.faults:
            say(f"logs: {folder}")
        else:
            shutil.rmtree(folder)
    return failed


if __name__ == "__main__":
    sys.exit(main())
