"""Operating an outbox: migrations, its index, metrics, and the doctor."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from alembic import command
from alembic.config import Config
from prometheus_client import CollectorRegistry
from sqlalchemy import create_engine, inspect

from nsqext.observability.prometheus import Prometheus
from nsqext.transactions import Outbox, OutboxRelay, OutboxStore
from tests.support.command_line import run
from tests.transactions.databases import url_of
from tests.transactions.test_outbox import connect

if TYPE_CHECKING:
    from nsqext.broker import Cluster

_ENVIRONMENT = """
from alembic import context
from sqlalchemy import create_engine

if context.is_offline_mode():
    context.configure(url=context.config.get_main_option("sqlalchemy.url"))
    with context.begin_transaction():
        context.run_migrations()
else:
    engine = create_engine(context.config.get_main_option("sqlalchemy.url"))
    with engine.connect() as connection:
        context.configure(connection=connection)
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()
"""
_REVISION = """
from alembic import op

from nsqext.transactions import create_tables, drop_tables

revision, down_revision = "1", None


def upgrade() -> None:
    create_tables(op)


def downgrade() -> None:
    drop_tables(op)
"""


def migrations(folder: Path, url: str) -> Config:
    """Write a project of Alembic with one revision."""
    (folder / "versions").mkdir(parents=True)
    (folder / "env.py").write_text(_ENVIRONMENT)
    (folder / "versions" / "1_outbox.py").write_text(_REVISION)
    config = Config()
    config.set_main_option("script_location", str(folder))
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    return config


@pytest.fixture
def empty(request: pytest.FixtureRequest, database: str, tmp_path: Path) -> str:
    """A database without any table."""
    if database.startswith("sqlite"):
        return f"sqlite:///{tmp_path}/empty.db"
    name = f"empty_{token_hex(4)}"
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"'.encode())
    return database.replace("dbname=postgres", f"dbname={name}")


def test_alembic_creates_and_drops_the_tables(empty: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = url_of(empty, "sync")
    if not empty.startswith("sqlite"):
        url = url.replace("@/postgres?", f"@/{empty.split('dbname=')[1].split()[0]}?")
    config = migrations(tmp_path / "alembic", url)
    command.upgrade(config, "head")
    engine = create_engine(url)
    made = set(inspect(engine).get_table_names())
    with closing(connect(empty)) as connection:
        Outbox().add(connection, "t", b"one", key="k")
        connection.commit()
    with OutboxStore(empty) as store:
        assert store.lease("relay", 1, now=1.0) == list(range(16))
        assert [row.body for row in store.rows(range(16), [], 10)] == [b"one"]
    command.downgrade(config, "base")
    left = set(inspect(engine).get_table_names())
    engine.dispose()
    assert made - left == {name for name in made if name.startswith("nsqext_")}
    assert left == {"alembic_version"}
    assert "nsqext_outbox" in made
    command.upgrade(config, "head", sql=True)
    assert "CREATE TABLE IF NOT EXISTS nsqext_outbox" in capsys.readouterr().out


class _Explained(OutboxStore):
    """Keeps the plan of each statement that reads messages."""

    def _run(self, sql: str, values: Any) -> list[tuple[Any, ...]]:
        if sql.startswith("SELECT sequence"):
            prefix = "EXPLAIN " if self.dialect == "postgresql" else "EXPLAIN QUERY PLAN "
            self.plan = " ".join(str(row[-1]) for row in super()._run(prefix + sql, values))
        return super()._run(sql, values)


@pytest.mark.parametrize("shards", [range(16), range(5), range(1)])
def test_the_index_contains_only_what_waits_and_is_used(database: str, shards: Sequence[int]) -> None:
    """Relays do not read through messages that were set aside."""
    with _Explained(database) as store, closing(store.connect()) as connection:
        connection.execute(
            "INSERT INTO nsqext_outbox (identity, topic, body, shard, added, error) "
            "WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < 20000) "
            "SELECT 'i', 't', '1', n % 16, 1.0, CASE WHEN n % 20 = 0 THEN NULL ELSE 'too large' END FROM s"
        )
        connection.execute("ANALYZE nsqext_outbox")
        assert store.rows(shards, [], 100)
        assert "nsqext_outbox_next" in store.plan
        if store.dialect == "postgresql":
            sizes = store._run(
                "SELECT pg_relation_size('nsqext_outbox_next'), pg_relation_size('nsqext_outbox_pkey')", {}
            )
            assert sizes[0][0] * 8 < sizes[0][1]


def test_processes_on_one_file_wait_for_each_other(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'outbox.db'}"
    with OutboxStore(database, create=True) as opened, closing(opened.connect()) as connection:
        assert connection.execute("PRAGMA busy_timeout").fetchone() == (30_000,), "milliseconds"

    def lease(owner: str) -> None:
        with closing(OutboxStore(database)) as store:
            for _ in range(100):
                shards = store.lease(owner, 5.0)
                store.rows(shards, (), 10, owner=owner)  # reads, then writes

    with closing(connect(database)) as connection:
        for number in range(20):
            Outbox().add(connection, "t", b"%d" % number)
        connection.commit()
    with ThreadPoolExecutor(3) as threads:
        for lent in [threads.submit(lease, owner) for owner in ("a", "b", "c")]:
            lent.result(60)


def test_metrics_report_what_waits(database: str) -> None:
    registry = CollectorRegistry()
    metrics = Prometheus(registry=registry)
    with closing(connect(database)) as connection:
        Outbox().add(connection, "t", b"one")
        connection.commit()
    store = OutboxStore(database)
    relay = OutboxRelay(store)
    metrics.attach(relay)
    store.lease("relay", 50.0)
    value = registry.get_sample_value
    assert value("nsqext_outbox_waiting_messages") == 1
    assert value("nsqext_outbox_relays") == 1
    assert value("nsqext_outbox_refused_messages") == 0
    assert value("nsqext_outbox_published_messages_total") == 0
    age = value("nsqext_outbox_oldest_seconds")
    assert age is not None
    assert 0 <= age < 60
    store.close()
    assert value("nsqext_outbox_waiting_messages") is None
    assert value("nsqext_outbox_failed_publishes_total") == 0


def test_the_doctor_examines_the_outbox(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "o.db"
    database = f"sqlite:///{path}"

    def last(status: int) -> dict[str, Any]:
        done = run("doctor", "--lookupd", cluster.lookupd[0], "--database", database)
        assert (done.returncode, done.stderr) == (status, b"")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert found["subject"] == "outbox"
        return found

    assert last(1)["hint"] == "create its tables: nsqext outbox sql"
    with OutboxStore(database, create=True) as store, closing(sqlite3.connect(path)) as connection:
        assert last(0)["status"] == "ok"
        Outbox().add(connection, "t", b"one")
        connection.commit()
        found = last(1)
        assert found["status"] == "error"
        assert found["text"].startswith("1 message waiting")
        store.lease("relay", 50.0)
        assert last(0)["status"] == "ok"
        connection.execute("UPDATE nsqext_outbox SET added = 1.0")
        connection.commit()
        assert last(0)["hint"].startswith("read the log of the relays")
        store.refuse(store.rows(range(16), [], 1)[0].sequence, "too large")
        assert "1 message set aside" in last(0)["text"]
