"""The example of inserts into PostgreSQL: each message once, whatever is killed between the insert and its FIN."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import anyio.lowlevel
import psycopg
import pytest

from examples.orders.postgres import postgres_server
from nsqext import Admin, Producer
from nsqext.broker import Cluster
from tests.support.consumers import eventually
from tests.support.programs import ROOT

BODIES = [b"order %d" % number for number in range(600)]
_WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"


@contextmanager
def archiving(lookupd: str, database: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the example, and kill it at the end as ``kill -9`` does."""
    program = (sys.executable, str(ROOT / "examples" / "orders_to_postgres.py"), lookupd, database)
    with subprocess.Popen(program, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}) as process:
        try:
            yield process
        finally:
            process.kill()


async def wait_until(database: psycopg.Connection, query: str, wanted: int) -> None:
    """Wait until a query returns a number."""
    await eventually(lambda: database.execute(query).fetchone() == (wanted,), 30)


async def drained(lookupd: str) -> bool:
    """Wait until every message is acknowledged: those that were in flight on the killed leader were received again."""
    with anyio.move_on_after(30):
        async with Admin(lookupd) as admin:
            while (await admin.stats("orders")).channels["archive"].lag:
                await anyio.lowlevel.checkpoint()
            return True
    return False


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
async def test_each_message_is_stored_once() -> None:
    with (
        postgres_server() as address,
        psycopg.connect(address, autocommit=True) as database,
        psycopg.connect(address) as blocker,
        Cluster(nodes=3) as cluster,
    ):
        database.execute("CREATE TABLE orders (id bytea PRIMARY KEY, body bytea)")
        cluster.create_topic("orders", partitions=2, replicas=3, channels=["archive"])
        async with Producer(cluster.lookupd) as producer:
            for partition in range(2):
                await producer.publish_many("orders", BODIES[partition::2], partition=partition)
        lookupd = cluster.lookupd[0]

        # the process is killed while it inserts its first batch
        blocker.execute("LOCK TABLE orders IN EXCLUSIVE MODE")
        with archiving(lookupd, address):
            await wait_until(database, _WAITING, 1)
        blocker.rollback()

        # the leader is killed while a batch is inserted: it is committed, cannot be acknowledged, and is received again
        blocker.execute("LOCK TABLE orders IN EXCLUSIVE MODE")
        with archiving(lookupd, address) as process:
            await wait_until(database, _WAITING, 1)
            cluster.kill(cluster.leader("orders", 0))
            blocker.rollback()
            await wait_until(database, "SELECT count(*) FROM orders", len(BODIES))
            assert await drained(lookupd)
            assert process.poll() is None
        stored = [bytes(body) for (body,) in database.execute("SELECT body FROM orders")]
        assert sorted(stored) == sorted(BODIES)
