"""The server of the examples, and inserts into it: each message once, whatever is killed before its FIN."""

from __future__ import annotations

import pwd
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import anyio.lowlevel
import psycopg
import pytest

from examples.orders import postgres as server
from examples.orders.postgres import PostgresMissing, postgres_server
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
async def test_each_message_is_stored_once(postgres: str) -> None:
    with (
        psycopg.connect(postgres, autocommit=True) as database,
        psycopg.connect(postgres) as blocker,
        Cluster(nodes=3) as cluster,
    ):
        database.execute("CREATE TABLE orders (id bytea, stored bigint, body bytea, PRIMARY KEY (id, stored))")
        cluster.create_topic("orders", partitions=2, replicas=3, channels=["archive"])
        async with Producer(cluster.lookupd) as producer:
            for partition in range(2):
                await producer.publish_many("orders", BODIES[partition::2], partition=partition)
        lookupd = cluster.lookupd[0]

        # the process is killed while it inserts its first batch
        blocker.execute("LOCK TABLE orders IN EXCLUSIVE MODE")
        with archiving(lookupd, postgres):
            await wait_until(database, _WAITING, 1)
        blocker.rollback()

        # the leader is killed while a batch is inserted: it is committed, cannot be acknowledged, and is received again
        blocker.execute("LOCK TABLE orders IN EXCLUSIVE MODE")
        with archiving(lookupd, postgres) as process:
            await wait_until(database, _WAITING, 1)
            cluster.kill(cluster.leader("orders", 0))
            blocker.rollback()
            await wait_until(database, "SELECT count(*) FROM orders", len(BODIES))
            assert await drained(lookupd)
            assert process.poll() is None
        stored = [bytes(body) for (body,) in database.execute("SELECT body FROM orders")]
        assert sorted(stored) == sorted(BODIES)


def test_missing_programs_are_named_before_anything_else_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The account of the server belongs to its package too."""
    monkeypatch.setattr(server, "PACKAGED", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(pwd, "getpwall", lambda: pytest.fail("the account was looked up"))
    with pytest.raises(PostgresMissing, match="apt-get install postgresql"), postgres_server():
        pass


def test_root_runs_the_server_where_no_account_is_called_postgres(
    monkeypatch: pytest.MonkeyPatch, postgres: str
) -> None:
    others = [account for account in pwd.getpwall() if account.pw_name != "postgres"]
    monkeypatch.setattr(pwd, "getpwall", lambda: others)
    with postgres_server() as address, psycopg.connect(address) as database:
        assert database.execute("SELECT 1").fetchone() == (1,)


_WITHOUT_RIGHTS = """
import os, pwd
from examples.orders.postgres import postgres_server

os.chdir("/")
if os.geteuid() == 0:
    account = max(pwd.getpwall(), key=lambda found: found.pw_uid)
    os.setgroups([])
    os.setgid(account.pw_gid)
    os.setuid(account.pw_uid)
with postgres_server() as address:
    print(os.geteuid() != 0, os.stat(address.split()[0].removeprefix("host=")).st_uid == os.geteuid())
"""


def test_a_user_without_rights_runs_the_server(postgres: str) -> None:
    done = subprocess.run(
        (sys.executable, "-c", _WITHOUT_RIGHTS), cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode, done.stdout.split()) == (0, ["True", "True"]), done.stderr
