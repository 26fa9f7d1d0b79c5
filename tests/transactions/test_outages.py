"""Outages of a database: which errors end a relay, and that no other does."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import psycopg
import pytest
from psycopg import sql

from nsqext import Producer
from nsqext.transactions import OutboxRelay, OutboxStore
from nsqext.transactions.outages import POSTGRESQL, SQLITE, outage_of
from tests.support.consumers import eventually
from tests.support.programs import ROOT
from tests.transactions.relays import END_OTHERS, Scripted, accept, fill, on_postgresql, one_database, publishing
from tests.transactions.test_outbox import add_with_driver, connect

if TYPE_CHECKING:
    from nsqext.broker import Cluster

pytestmark = pytest.mark.anyio
_SECONDS = 40
STATES = (
    *("08006", "25006", "25P03", "28P01", "3D000", "40001", "40P01", "42501", "42P01", "53100"),
    *("53200", "53300", "53400", "55P03", "57014", "57P01", "57P03", "58030", "XX000"),
)


@contextmanager
def raising(postgres: str, state: str) -> Iterator[None]:
    """Let the server raise an error at each lease."""
    with psycopg.connect(postgres, autocommit=True) as connection:
        raised = sql.SQL("BEGIN RAISE EXCEPTION 'put in' USING ERRCODE = {}; END").format(sql.Literal(state))
        body = sql.Literal(raised.as_string(connection))
        connection.execute(
            sql.SQL("CREATE OR REPLACE FUNCTION put_in() RETURNS trigger LANGUAGE plpgsql AS {}").format(body)
        )
        connection.execute(
            "CREATE TRIGGER put_in BEFORE UPDATE OR INSERT ON nsqext_outbox_relay EXECUTE FUNCTION put_in()"
        )
        try:
            yield
        finally:
            connection.execute("DROP TRIGGER put_in ON nsqext_outbox_relay")


@on_postgresql
async def test_a_relay_continues_after_each_outage_that_a_server_reports(
    cluster: Cluster, topic: str, database: str
) -> None:
    with OutboxStore(database) as store:
        relay = OutboxRelay(store, poll=0.05)
        for state in STATES:
            async with Producer(cluster.lookupd) as producer, anyio.create_task_group() as tasks:
                with raising(database, state), pytest.MonkeyPatch.context() as patched:
                    patched.setattr("nsqext.transactions.relay._RECONNECT", 0.05)
                    warned = anyio.Event()
                    patched.setattr(
                        "nsqext.transactions.relay.logger.warning", lambda *_, event=warned, **__: event.set()
                    )
                    tasks.start_soon(relay.run, producer)
                    with anyio.fail_after(_SECONDS):
                        await warned.wait()
                    before = relay.statistics().published
                    add_with_driver(database, topic, commit=True)
                await eventually(lambda before=before: relay.statistics().published == before + 1, _SECONDS)  # type: ignore[misc]
                tasks.cancel_scope.cancel()


@on_postgresql
async def test_a_final_error_ends_the_relay(cluster: Cluster, database: str) -> None:
    with OutboxStore(database) as store, raising(database, "22012"):
        async with Producer(cluster.lookupd) as producer:
            with pytest.raises(psycopg.errors.DivisionByZero):
                await OutboxRelay(store, poll=0.05).run(producer)


@one_database
async def test_a_relay_says_that_its_database_cannot_be_used(database: str) -> None:
    with OutboxStore(database) as store, closing(connect(database)) as connection:
        async with publishing(store, Scripted(accept)) as relay:
            for before, behind in (("nsqext_outbox_relay", "away"), ("away", "nsqext_outbox_relay")):
                connection.execute(f"ALTER TABLE {before} RENAME TO {behind}")
                connection.commit()
                await eventually(lambda: (relay.outage is not None) is (behind == "away"), _SECONDS)  # noqa: B023


@contextmanager
def read_only(postgres: str) -> Iterator[None]:
    """As a server is after a failover."""
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("ALTER DATABASE postgres SET default_transaction_read_only = on")
        connection.execute("SET default_transaction_read_only = off")
        connection.execute(END_OTHERS)
        try:
            yield
        finally:
            connection.execute("ALTER DATABASE postgres RESET default_transaction_read_only")


@contextmanager
def without_table(postgres: str) -> Iterator[None]:
    """As while a backup is restored."""
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("ALTER TABLE nsqext_outbox RENAME TO away")
        try:
            yield
        finally:
            connection.execute("ALTER TABLE away RENAME TO nsqext_outbox")


@contextmanager
def no_connections(postgres: str) -> Iterator[None]:
    """As with too many clients."""
    with psycopg.connect(postgres.replace("dbname=postgres", "dbname=template1"), autocommit=True) as connection:
        connection.execute("ALTER DATABASE postgres ALLOW_CONNECTIONS false")
        connection.execute(END_OTHERS)
        try:
            yield
        finally:
            connection.execute("ALTER DATABASE postgres ALLOW_CONNECTIONS true")


@contextmanager
def statement_timeout(postgres: str) -> Iterator[None]:
    """A row is locked for longer than a statement may take."""
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("ALTER DATABASE postgres SET statement_timeout = 30")
        connection.execute(END_OTHERS)
        try:
            with connection.transaction():
                connection.execute("LOCK TABLE nsqext_outbox_shard")
                yield
        finally:
            connection.execute("ALTER DATABASE postgres RESET statement_timeout")
            connection.execute(END_OTHERS)


@contextmanager
def locked(postgres: str) -> Iterator[None]:
    """As by VACUUM FULL: the relay waited without an end, said that it was ready, and could not be read."""
    with psycopg.connect(postgres) as connection, pytest.MonkeyPatch.context() as patched:
        patched.setattr("nsqext.transactions.store._BUSY", 0.05)
        connection.execute("LOCK TABLE nsqext_outbox_shard")
        yield


@on_postgresql
@pytest.mark.parametrize("outage", [read_only, without_table, no_connections, statement_timeout, locked])
async def test_a_relay_and_its_app_continue_after_an_outage(
    cluster: Cluster, topic: str, database: str, outage: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqext.transactions.relay._RECONNECT", 0.05)
    warned = anyio.Event()
    monkeypatch.setattr("nsqext.transactions.relay.logger.warning", lambda *_, **__: warned.set())
    with OutboxStore(database) as store:
        async with Producer(cluster.lookupd) as producer, publishing(store, producer, 0.05) as relay:
            add_with_driver(database, topic, commit=True)
            await eventually(lambda: relay.statistics().published == 1, _SECONDS)
            with outage(database), anyio.fail_after(_SECONDS):
                await warned.wait()
            add_with_driver(database, topic, commit=True)
            await eventually(lambda: relay.statistics().published == 2, _SECONDS)


def test_errors_of_sqlite_are_outages_or_final(tmp_path: Path) -> None:
    """A full disk, a file that only reads, a missing table and a lock end; a damaged file does not."""
    path = tmp_path / "o.db"
    OutboxStore(f"sqlite:///{path}", create=True).close()

    def error_of(act: Callable[[sqlite3.Connection], object]) -> sqlite3.Error:
        with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as connection:
            with pytest.raises(sqlite3.Error) as caught:
                act(connection)
            return caught.value

    def fill_disk(connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA max_page_count = 1")
        connection.execute("CREATE TABLE large (body BLOB)")
        connection.execute("INSERT INTO large VALUES (zeroblob(1000000))")

    def lock(connection: sqlite3.Connection) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            connection.execute("BEGIN IMMEDIATE")

    def only_read(connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA query_only = on")
        connection.execute("DELETE FROM nsqext_outbox")

    snapshot = sqlite3.OperationalError("database is locked")
    snapshot.sqlite_errorcode = sqlite3.SQLITE_BUSY_SNAPSHOT  # one of the extended codes
    assert outage_of(snapshot) == "another process writes"
    assert outage_of(error_of(fill_disk)) == "the disk is full"
    assert outage_of(error_of(lock)) == "another process writes"
    assert outage_of(error_of(only_read)) == "the file must not be written"
    assert outage_of(error_of(lambda one: one.execute("SELECT * FROM missing"))) == POSTGRESQL["42P01"]
    assert outage_of(error_of(lambda one: one.execute("SELEC"))) is None
    path.write_bytes(b"no database, but long enough for the header of a file" * 30)
    assert outage_of(error_of(lambda one: one.execute("SELECT * FROM nsqext_outbox"))) is None
    assert outage_of(ValueError("of another kind")) is None


def test_an_error_of_psycopg_without_a_code_is_a_lost_connection_or_final() -> None:
    assert outage_of(psycopg.OperationalError("the connection is closed")) == POSTGRESQL["08"]
    assert outage_of(psycopg.ProgrammingError("the query has 1 placeholder")) is None


def test_the_page_lists_every_outage() -> None:
    page = Path(ROOT, "docs", "howto", "transactions.md").read_text(encoding="utf-8")
    listed = page.partition("## Outages")[2].partition("\n## ")[0]
    for state in POSTGRESQL:
        assert re.search(rf"\b{state}\b", listed), state
    names = {getattr(sqlite3, name): name for name in dir(sqlite3) if re.fullmatch("SQLITE_[A-Z]+", name)}
    for code in SQLITE:
        assert f"`{names[code]}`" in listed, names[code]


@one_database
async def test_a_full_disk_ends_no_relay(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nsqext.transactions.relay._RECONNECT", 0.05)
    fill(database, "t", 3, 100)
    with OutboxStore(database) as store:
        failures = [sqlite3.OperationalError("database or disk is full")] * 3
        for failure in failures:
            failure.sqlite_errorcode = sqlite3.SQLITE_FULL
        lease = store.lease

        def fail(*args: Any, **options: Any) -> list[int]:
            if failures:
                raise failures.pop()
            return lease(*args, **options)

        monkeypatch.setattr(store, "lease", fail)
        async with publishing(store, Scripted(accept)) as relay:
            await eventually(lambda: relay.statistics().published == 3, _SECONDS)
    assert "the disk is full" in caplog.text
