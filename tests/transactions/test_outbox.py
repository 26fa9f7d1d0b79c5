"""The outbox: what a transaction adds is published after its commit, in order, by any number of relays."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import anyio
import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from nsqext import Consumer, Message, Position, Producer
from nsqext.app import App
from nsqext.errors import (
    InvalidBody,
    InvalidHeader,
    InvalidInput,
    InvalidName,
    InvalidSetting,
    InvalidState,
    UnknownSetting,
)
from nsqext.transactions import Outbox, OutboxRelay, OutboxStore, schema_sql
from tests.support.consumers import eventually
from tests.transactions.databases import url_of

if TYPE_CHECKING:
    from nsqext.broker import Cluster

pytestmark = pytest.mark.anyio
_SECONDS = 25


def connect(database: str) -> Any:
    """Open a connection with transactions."""
    if database.startswith("sqlite:///"):
        return sqlite3.connect(database.removeprefix("sqlite:///"), timeout=20)
    return psycopg.connect(database)


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A topic with extend support and two partitions."""
    name = f"t_{token_hex(4)}"
    cluster.create_topic(name, partitions=2, extend=True, channels=["ch"])
    return name


async def received(cluster: Cluster, topic: str, count: int) -> list[Message]:
    """Consume a number of messages from the beginning, and finish them."""
    found: list[Message] = []
    async with Consumer(topic, "ch", cluster.lookupd, start=Position.earliest(), start_existing=True) as consumer:
        with anyio.fail_after(_SECONDS):
            while len(found) < count:
                found.append(await anext(consumer))
                await found[-1].finish()
    return found


async def relay_until_empty(cluster: Cluster, database: str, relays: int = 1) -> list[OutboxRelay]:
    """Run relays until nothing waits."""
    with OutboxStore(database) as store:
        made = [OutboxRelay(store, poll=0.02, batch=7) for _ in range(relays)]
        async with Producer(cluster.lookupd) as producer, anyio.create_task_group() as tasks:
            for relay in made:
                tasks.start_soon(relay.run, producer)
            await eventually(lambda: store.summary(time.time()).waiting == 0, _SECONDS)
            tasks.cancel_scope.cancel()
        assert store.summary(time.time()).relays == 0
    return made


def add_with_driver(database: str, topic: str, *, commit: bool) -> None:
    with closing(connect(database)) as connection:
        Outbox().add(connection, topic, b"one", headers={"a": "b"}, key="k", tag="canary")
        if commit:
            connection.commit()


def add_with_sqlalchemy(database: str, topic: str, *, commit: bool) -> None:
    engine = create_engine(url_of(database, "sync"))
    with Session(engine) as session:
        Outbox().add(session, topic, b"one", headers={"a": "b"}, key="k", tag="canary")
        if commit:
            session.commit()
    engine.dispose()


@pytest.mark.parametrize("add", [add_with_driver, add_with_sqlalchemy], ids=["driver", "sqlalchemy"])
async def test_a_committed_message_is_published_and_a_rolled_back_one_is_not(
    cluster: Cluster, database: str, topic: str, add: Callable[..., None]
) -> None:
    add(database, topic, commit=False)
    add(database, topic, commit=True)
    (relay,) = await relay_until_empty(cluster, database)
    assert relay.statistics() == (1, 0, 0)
    (message,) = await received(cluster, topic, 1)
    assert (message.body, message.key, message.tag) == (b"one", "k", "canary")
    assert message.headers["a"] == "b"
    assert len(message.headers["nsqext_id"]) == 32


async def test_an_asynchronous_session_adds_in_its_transaction(cluster: Cluster, database: str, topic: str) -> None:
    engine = create_async_engine(url_of(database, "async"))
    sessions = async_sessionmaker(engine)
    async with sessions.begin() as session:
        identity = await Outbox().add_async(session, topic, b"one")
    with pytest.raises(ZeroDivisionError):
        async with sessions.begin() as session:
            await Outbox().add_async(session, topic, b"two")
            raise ZeroDivisionError
    await engine.dispose()
    await relay_until_empty(cluster, database)
    (message,) = await received(cluster, topic, 1)
    assert (message.body, message.headers["nsqext_id"]) == (b"one", identity)


async def test_relays_share_the_keys_and_keep_their_order(cluster: Cluster, database: str, topic: str) -> None:
    sent: dict[str, list[bytes]] = {f"k{number}": [] for number in range(20)}
    with closing(connect(database)) as connection:
        for number in range(400):
            key = f"k{number % 20}"
            sent[key].append(b"%d" % number)
            Outbox().add(connection, topic, b"%d" % number, key=key)
        connection.commit()
    made = await relay_until_empty(cluster, database, relays=3)
    assert sum(relay.statistics().published for relay in made) == 400
    found: dict[str, list[bytes]] = {key: [] for key in sent}
    for message in sorted(await received(cluster, topic, 400), key=lambda one: (one.partition, one.id)):
        assert message.key is not None
        found[message.key].append(message.body)
    assert found == sent


async def test_a_relay_that_ended_between_publish_and_deletion_publishes_again_with_the_same_identity(
    cluster: Cluster, database: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(connect(database)) as connection:
        identity = Outbox().add(connection, topic, b"one", key="k")
        connection.commit()

    def fail(self: OutboxStore, sequences: object) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(OutboxStore, "delete", fail)
        with OutboxStore(database) as store:
            async with Producer(cluster.lookupd) as producer:
                with pytest.raises(OSError, match="killed"):
                    await OutboxRelay(store).run(producer)
    await relay_until_empty(cluster, database)
    messages = await received(cluster, topic, 2)
    assert [message.headers["nsqext_id"] for message in messages] == [identity] * 2


async def test_a_message_that_can_never_be_stored_is_set_aside(cluster: Cluster, database: str, topic: str) -> None:
    with closing(connect(database)) as connection:
        for body in (b"one", bytes(1 << 20), b"two"):
            Outbox().add(connection, topic, body, key="k")
        connection.commit()
    (relay,) = await relay_until_empty(cluster, database)
    assert relay.statistics().refused == 1
    assert [message.body for message in await received(cluster, topic, 2)] == [b"one", b"two"]
    with OutboxStore(database) as store:
        assert store.summary(time.time()).refused == 1
        assert store.retry_refused() == 1
        assert store.summary(time.time()).waiting == 1


async def test_a_topic_that_cannot_be_published_to_does_not_delay_others(
    cluster: Cluster, database: str, topic: str
) -> None:
    missing = f"missing_{token_hex(4)}"
    with closing(connect(database)) as connection:
        for number in range(20):
            Outbox().add(connection, missing, b"%d" % number)
        Outbox().add(connection, topic, b"one")
        connection.commit()
    with OutboxStore(database) as store:
        async with App(cluster.lookupd) as app:
            relay = OutboxRelay(store, poll=0.02, batch=7)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(relay.run, app.producer)
                await eventually(lambda: store.summary(time.time()).waiting == 20, _SECONDS)
                tasks.cancel_scope.cancel()
        assert relay.statistics().failed


async def test_refused_messages_are_deleted_on_request_after_a_time(database: str) -> None:
    with closing(connect(database)) as connection:
        for _ in range(3):
            Outbox().add(connection, "t", b"one")
        connection.commit()
    with OutboxStore(database) as store:
        store.refuse(store.rows(range(16), [], 10)[1].sequence, "too large")
        with closing(store.connect()) as connection:
            errors = connection.execute("SELECT error FROM nsqext_outbox ORDER BY sequence").fetchall()
        assert errors == [(None,), ("too large",), (None,)]
        now = time.time()
        assert store.discard_refused(now - 60) == 0
        assert store.discard_refused(now + 1) == 1
        found = store.summary(now + 5)
        assert (found.waiting, found.refused) == (2, 0)
        assert found.age is not None
        assert 4 < found.age < 60


async def test_keys_are_spread_over_the_parts_and_each_stays_in_one(database: str) -> None:
    with closing(connect(database)) as connection:
        for number in range(60):
            Outbox().add(connection, "t", b"one", key=number % 20)
        connection.commit()
        found = connection.execute("SELECT key, shard FROM nsqext_outbox").fetchall()
    parts = dict(found)
    assert all(parts[key] == part for key, part in found)
    assert len({*parts.values()}) > 8


async def test_leases_of_a_relay_that_was_killed_end(database: str) -> None:
    with OutboxStore(database) as store:
        first = store.lease("first", 10, now=100.0)
        assert len(first) == 16
        assert store.lease("second", 10, now=101.0) == []
        assert len(store.lease("first", 10, now=102.0)) == 8
        assert len(store.lease("second", 17, now=103.0)) == 8
        assert len(store.lease("second", 10, now=113.0)) == 16


async def test_bad_input_is_refused_before_anything_is_added(database: str) -> None:
    with closing(connect(database)) as connection:
        outbox = Outbox()
        with pytest.raises(InvalidName):
            outbox.add(connection, "a b", b"x")
        with pytest.raises(InvalidBody):
            outbox.add(connection, "t", b"")
        with pytest.raises(InvalidHeader):
            outbox.add(connection, "t", b"x", headers={"##x": "y"})
        for wrong in ("", "a\0b", "\ud800", "i" * 201, 5):
            with pytest.raises(InvalidInput, match="identity="):
                outbox.add(connection, "t", b"x", identity=wrong)  # type: ignore[arg-type]
        for key in ("\ud800", "", b"", 1.5, "k" * 60_000):
            with pytest.raises(InvalidInput):
                outbox.add(connection, "t", b"x", key=key)  # type: ignore[arg-type]
        for tag in ("", "a b", "t" * 101):
            with pytest.raises(InvalidName):
                outbox.add(connection, "t", b"x", tag=tag)
        for headers in ({"nsqext_id": "1"}, {"a": "\ud800"}, {"a": "x" * 59_990}):
            with pytest.raises(InvalidHeader):
                outbox.add(connection, "t", b"x", headers=headers)
        assert len(outbox.add(connection, "t", b"x", identity="\u00e4\n\U0001f600" * 50, key="a\0b")) == 150
        assert connection.execute("SELECT count(*) FROM nsqext_outbox").fetchone() == (1,)  # not aborted
        with pytest.raises(InvalidInput, match="is not asynchronous"):
            await outbox.add_async(connection, "t", b"x")
        with pytest.raises(InvalidInput, match="no database connection"):
            outbox.add(object(), "t", b"x")  # type: ignore[arg-type]
    engine = create_async_engine(url_of(database, "async"))
    async with async_sessionmaker(engine)() as session:
        with pytest.raises(InvalidInput, match="add_async"):
            outbox.add(session, "t", b"x")
        with pytest.raises(UnknownSetting, match="identity"):
            await outbox.add_async(session, "t", b"x", identiy="a")  # type: ignore[arg-type]
    await engine.dispose()


def test_tables_that_exist_are_kept(database: str) -> None:
    with closing(connect(database)) as connection:
        Outbox().add(connection, "t", b"one")
        connection.commit()
    with OutboxStore(database) as relay, OutboxStore(database, create=True) as store:
        held = relay.lease("relay", 60.0)
        assert store.summary(0.0).waiting == 1
        OutboxStore(database, create=True).close()
        assert relay.renew("relay", held, 60.0)


def test_an_outbox_in_memory_which_no_program_shares_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="':memory:' is not a file"):
        OutboxStore("sqlite:///:memory:", create=True)


def test_a_database_without_the_tables_says_how_to_create_them(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="nsqext outbox sql"):
        OutboxStore(f"sqlite:///{tmp_path / 'empty.db'}")
    with pytest.raises(InvalidSetting, match="is unknown"):
        schema_sql("mysql")  # type: ignore[arg-type]


@pytest.mark.parametrize("table", ["nsqext_outbox.trace_context", "nsqext_outbox_relay.publishing"])
def test_tables_of_another_version_name_the_column_that_is_missing(database: str, table: str) -> None:
    name, column = table.split(".")
    statement = f"ALTER TABLE {name} RENAME COLUMN {column} TO renamed"
    with closing(connect(database)) as connection:
        connection.execute(statement)
        connection.commit()
        try:
            for create in (False, True):
                with pytest.raises(InvalidSetting, match=column) as caught:
                    OutboxStore(database, create=create)
                assert "add this column as nsqext outbox sql writes it" in str(caught.value.hint)
        finally:
            connection.execute(f"ALTER TABLE {name} RENAME COLUMN renamed TO {column}")
            connection.commit()
    OutboxStore(database).close()


async def test_a_relay_waits_for_a_database_that_is_locked(
    tmp_path: Path, cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqext.transactions.store._BUSY", 0.05)
    database = f"sqlite:///{tmp_path}/o.db"
    with OutboxStore(database, create=True) as store, closing(connect(database)) as other:
        relay = OutboxRelay(store, poll=0.05)
        async with Producer(cluster.lookupd) as producer, anyio.create_task_group() as tasks:
            other.execute("BEGIN IMMEDIATE")
            tasks.start_soon(relay.run, producer)
            await anyio.sleep(0.3)
            Outbox().add(other, topic, b"x")
            other.commit()
            await eventually(lambda: relay.statistics().published == 1, _SECONDS)
            tasks.cancel_scope.cancel()


def test_a_store_that_was_closed_says_so(tmp_path: Path) -> None:
    store = OutboxStore(f"sqlite:///{tmp_path}/o.db", create=True)
    store.close()
    with pytest.raises(InvalidState, match="was closed"):
        store.summary(0.0)
