"""Relays of an outbox: their leases hold while they publish, however slow the link is, and an outage ends none."""

from __future__ import annotations

import math
import re
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from contextvars import ContextVar
from pathlib import Path
from secrets import token_hex
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import anyio
import psycopg
import pytest
from psycopg import sql

from nsqext import Consumer, OutgoingMessage, Position, Producer, Receipt
from nsqext.app.relay import Cancellation
from nsqext.errors import BatchFailed, ExtendNotSupported, InvalidBody, InvalidSetting, InvalidState, PublishFailed
from nsqext.middleware import Middleware, Publishing, SendNext
from nsqext.transactions import Outbox, OutboxRelay, OutboxStore
from nsqext.transactions.listener import OutboxListener
from nsqext.transactions.outages import POSTGRESQL, SQLITE, outage_of
from nsqext.transactions.relay import Pace
from nsqext.transactions.store import OutboxRow
from tests.support.consumers import eventually
from tests.support.kept_connections import fill_disk, free_disk, kept_connections
from tests.support.programs import ROOT
from tests.support.tcp_relay import relaying
from tests.transactions.test_outbox import add_with_driver, add_with_sqlalchemy, connect

if TYPE_CHECKING:
    from nsqext.broker import Cluster

pytestmark = pytest.mark.anyio
_SECONDS = 40
one_database = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
on_postgresql = pytest.mark.parametrize("database", ["postgresql"], indirect=True)


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A topic with extend support and one partition."""
    name = f"t_{token_hex(4)}"
    cluster.create_topic(name, partitions=1, extend=True, channels=["ch"])
    return name


def fill(database: str, topic: str, count: int, size: int) -> list[bytes]:
    """Add messages of a number of bytes."""
    bodies = [(b"%d " % number).ljust(size, b"x") for number in range(count)]
    with closing(connect(database)) as connection:
        for number, body in enumerate(bodies):
            Outbox().add(connection, topic, body, key=number % 5)
        connection.commit()
    return bodies


async def all_stored(cluster: Cluster, topic: str) -> Counter[bytes]:
    """Return how often each body is stored: the last of a partition is one that is published now."""
    found: Counter[bytes] = Counter()
    async with Producer(cluster.lookupd) as producer:
        await producer.publish(topic, b"last")
    async with Consumer(topic, "ch", cluster.lookupd, start=Position.earliest(), start_existing=True) as consumer:
        with anyio.fail_after(_SECONDS):
            async for message in consumer:
                await message.finish()
                if message.body == b"last":
                    return found
                found[message.body] += 1
    raise AssertionError("the consumer has ended")


# Leases


@one_database
async def test_two_relays_on_a_slow_link_publish_each_message_once(
    cluster: Cluster, topic: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease ended while 500 rows were published, and the second relay published them too."""
    monkeypatch.setattr("nsqext.app.relay.MARGIN", 0.5)
    monkeypatch.setattr("nsqext.transactions.relay.MARGIN", 0.1)
    bodies = fill(database, topic, 60, 20_000)
    node = str(next(iter(cluster.nodes.values())).tcp)
    async with relaying(node, rate=300_000) as slow:
        with OutboxStore(database) as store:
            async with (
                Producer(cluster.lookupd, timeout=2.0, address_map={node: slow.address}) as producer,
                anyio.create_task_group() as tasks,
            ):
                for _ in range(2):
                    tasks.start_soon(OutboxRelay(store, poll=0.05).run, producer)
                await eventually(lambda: store.summary(time.time()).waiting == 0, _SECONDS)
                tasks.cancel_scope.cancel()
    assert await all_stored(cluster, topic) == dict.fromkeys(bodies, 1)


@one_database
async def test_a_batch_that_takes_longer_than_the_timeout_gets_smaller(
    cluster: Cluster, topic: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was published again and again, and never stored within the timeout."""
    monkeypatch.setattr("nsqext.transactions.relay._FIRST", 1 << 20)
    bodies = fill(database, topic, 40, 20_000)
    node = str(next(iter(cluster.nodes.values())).tcp)
    async with relaying(node, rate=200_000) as slow:
        with OutboxStore(database) as store:
            async with (
                Producer(cluster.lookupd, timeout=1.0, address_map={node: slow.address}) as producer,
                publishing(store, producer, 0.05) as relay,
            ):
                await eventually(lambda: store.summary(time.time()).waiting == 0, _SECONDS)
    assert relay.statistics().published == 40
    assert 1 <= relay.statistics().failed < 12
    assert (await all_stored(cluster, topic)).keys() == {*bodies}


class _Unrenewed(OutboxStore):
    """A store whose leases cannot be renewed."""

    def __init__(self, database: str, error: Exception | None) -> None:
        super().__init__(database)
        self.error = error
        self.renewals = 0

    def renew(self, *args: Any) -> bool:
        self.renewals += 1
        if self.error is not None:
            raise self.error
        return False


@one_database
@pytest.mark.parametrize("error", [None, sqlite3.OperationalError("locked")], ids=["taken over", "locked"])
async def test_a_relay_stops_when_its_lease_cannot_be_renewed(
    cluster: Cluster,
    topic: str,
    database: str,
    error: Exception | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("nsqext.app.relay.MARGIN", -7.0)  # with a timeout of ten seconds
    fill(database, topic, 1, 10)
    publishing, cancelled = anyio.Event(), anyio.Event()

    async def publish_many(*_: Any, **__: Any) -> None:
        publishing.set()
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    with _Unrenewed(database, error) as store:
        async with Producer(cluster.lookupd, timeout=10.0) as producer, anyio.create_task_group() as tasks:
            monkeypatch.setattr(producer, "publish_many", publish_many)
            tasks.start_soon(OutboxRelay(store, poll=0.05).run, producer)
            with anyio.fail_after(_SECONDS):
                await publishing.wait()
                await cancelled.wait()
                await eventually(lambda: "could not be renewed" in caplog.text, _SECONDS)
            tasks.cancel_scope.cancel()
        assert store.renewals
        assert store.summary(time.time()).waiting == 1


@one_database
async def test_a_final_error_of_a_renewal_ends_the_relay(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqext.app.relay.MARGIN", -1.1)  # with a timeout of two seconds
    monkeypatch.setattr("nsqext.transactions.relay.MARGIN", 0.1)

    async def publish(topic: str, messages: list[OutgoingMessage]) -> None:
        await anyio.sleep_forever()

    fill(database, "t", 1, 10)
    with _Unrenewed(database, ZeroDivisionError()) as store, pytest.raises(ZeroDivisionError):
        with anyio.fail_after(_SECONDS):
            await OutboxRelay(store).run(cast("Any", Scripted(publish)))


@one_database
async def test_publishes_end_before_the_lease_that_was_renewed_last(database: str) -> None:
    class Renewed(OutboxStore):
        at = 0.0

        def renew(self, *args: Any) -> bool:
            self.at = anyio.from_thread.run_sync(anyio.current_time)
            anyio.from_thread.run(anyio.sleep, 0.05)  # a slow database: the lease may have begun before
            return True

    lease, leased = 0.3, anyio.CancelScope()
    with Renewed(database) as store:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(OutboxRelay(store)._renew, range(16), lease, leased, [])
            await eventually(lambda: leased.deadline < math.inf, _SECONDS)
            assert leased.deadline <= store.at + lease - 1.0
            tasks.cancel_scope.cancel()


@one_database
async def test_publishes_end_before_a_lease_that_was_not_renewed(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewing, ends, began = anyio.Event(), list[float](), list[float]()
    lease = OutboxStore.lease

    def note(store: OutboxStore, owner: str, seconds: float) -> list[int]:
        began.append(anyio.from_thread.run_sync(anyio.current_time))
        return lease(store, owner, seconds)

    async def never(self: OutboxRelay, _: object, seconds: float, leased: anyio.CancelScope, __: object) -> None:
        ends.append(leased.deadline - seconds)
        renewing.set()
        await anyio.sleep_forever()

    async def publish(topic: str, messages: list[OutgoingMessage]) -> None:
        await renewing.wait()

    monkeypatch.setattr(OutboxStore, "lease", note)
    monkeypatch.setattr(OutboxRelay, "_renew", never)
    fill(database, "t", 1, 10)
    with OutboxStore(database) as store:
        async with publishing(store, Scripted(publish)):
            with anyio.fail_after(_SECONDS):
                await renewing.wait()
    assert ends[0] < began[0] - 0.9


@one_database
async def test_a_lease_that_was_not_renewed_is_tried_again_soon(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Unrenewed(OutboxStore):
        errors: ClassVar[list[Exception]] = [sqlite3.OperationalError("database is locked")]

        def renew(self, *args: Any) -> bool:
            if self.errors:
                raise self.errors.pop()
            return True

    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise ZeroDivisionError

    monkeypatch.setattr(
        "nsqext.transactions.relay.anyio", SimpleNamespace(sleep=sleep, current_time=anyio.current_time)
    )
    with Unrenewed(database) as store, pytest.raises(ZeroDivisionError):
        await OutboxRelay(store)._renew(range(16), 60.0, anyio.CancelScope(), [])
    assert pauses == [20.0, 1.0, 20.0]


@one_database
async def test_a_lease_is_renewed_three_times_and_not_all_the_time(database: str) -> None:
    class Renewed(OutboxStore):
        at: ClassVar[list[float]] = []

        def renew(self, *args: Any) -> bool:
            self.at.append(anyio.from_thread.run_sync(anyio.current_time))
            return True

    lease = 0.3
    with Renewed(database) as store:
        async with anyio.create_task_group() as tasks:
            began = anyio.current_time()
            tasks.start_soon(OutboxRelay(store)._renew, range(16), lease, anyio.CancelScope(), [])
            await eventually(lambda: len(store.at) == 3, _SECONDS)
            tasks.cancel_scope.cancel()
    assert store.at[-1] - began > 0.99 * lease


@one_database
def test_a_summary_is_read_or_says_why_not(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = [sqlite3.OperationalError("database is locked"), ZeroDivisionError()]

    def fail(*_: object) -> None:
        raise errors.pop(0)

    with OutboxStore(database) as store:
        relay = OutboxRelay(store)
        assert relay.summary().waiting == 0
        monkeypatch.setattr(store, "summary", fail)
        with pytest.raises(InvalidState, match="the outbox cannot be read: database is locked") as caught:
            relay.summary()
        assert caught.value.__cause__ is None, "an error of the driver may contain the password"
        with pytest.raises(ZeroDivisionError):
            relay.summary()


_ahead: ContextVar[float] = ContextVar("ahead", default=0.0)
"""Seconds by which the clock of a host is ahead."""
_time = time.time


@pytest.mark.parametrize("hour", [3600.0, -3600.0], ids=["ahead", "behind"])
async def test_leases_hold_between_hosts_whose_clocks_differ_by_an_hour(
    cluster: Cluster, topic: str, database: str, monkeypatch: pytest.MonkeyPatch, hour: float
) -> None:
    """For the host that was ahead, every other lease had ended; its own lasted for an hour after it was killed."""
    monkeypatch.setattr(time, "time", lambda: _time() + _ahead.get())
    bodies = fill(database, topic, 300, 100)

    async def relay(seconds: float, publishes: list[int]) -> None:
        _ahead.set(seconds)
        relay = OutboxRelay(store, poll=0.02, batch=5)
        try:
            await relay.run(producer)
        finally:
            publishes.append(relay.statistics().published)

    with OutboxStore(database) as store:
        publishes: list[int] = []
        async with Producer(cluster.lookupd) as producer:
            with anyio.fail_after(_SECONDS):
                async with anyio.create_task_group() as tasks:
                    for seconds in (0.0, hour):
                        tasks.start_soon(relay, seconds, publishes)
                    await eventually(lambda: store.summary(time.time()).waiting == 0, _SECONDS)
                    assert store.summary(time.time()).relays == 2
                    tasks.cancel_scope.cancel()
        assert sum(publishes) == len(bodies)
        token = _ahead.set(hour)
        assert len(store.lease("killed", 10)) == 16
        _ahead.reset(token)
        assert store.lease("other", 10) == []
        assert len(store.lease("other", 10, now=_time() + 11)) == 16
    assert await all_stored(cluster, topic) == dict.fromkeys(bodies, 1)


def test_a_renewal_extends_the_lease_and_reports_a_part_that_is_lost(database: str) -> None:
    with OutboxStore(database) as store:
        held = store.lease("first", 10, now=100.0)
        assert store.renew("first", held, 20, now=100.0)
        assert store.lease("second", 10, now=115.0) == []
        assert len(store.lease("second", 10, now=121.0)) == 16
        assert not store.renew("first", held, 10, now=121.0)


def test_leases_end_by_the_clock_of_the_database(database: str) -> None:
    with OutboxStore(database) as store:
        before = time.time()
        store.lease("first", 50)
        with closing(store.connect()) as connection:
            ends = connection.execute("SELECT DISTINCT until FROM nsqext_outbox_shard").fetchall()
    assert before - 1 < ends[0][0] - 50 < time.time() + 1  # SQLite's clock has milliseconds
    assert len(ends) == 1


def test_a_clock_that_is_set_back_does_not_keep_the_parts_of_a_killed_relay(database: str) -> None:
    with OutboxStore(database) as store:
        store.lease("killed", 60, now=time.time() + 3600)
        assert store.summary(0.0).relays == 0
        assert store.lease("other", 60, now=time.time() + 3598) == []
        assert len(store.lease("other", 60)) == 16
        assert store.summary(0.0).relays == 1


def test_a_file_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="does not exist"):
        OutboxStore(f"sqlite:///{tmp_path}/misspelt.db")
    assert not list(tmp_path.iterdir())


def test_a_relay_that_leaves_returns_its_own_parts(database: str) -> None:
    with OutboxStore(database) as store:
        for owner in ("first", "second", "first", "second"):
            held = store.lease(owner, 10, now=100.0)
        store.leave("first")
        assert store.renew("second", held, 10, now=101.0)
        assert len(held) == 8
        assert len(store.lease("second", 10, now=101.0)) == 16


@on_postgresql
def test_a_lease_does_not_wait_for_parts_that_another_relay_leases_now(database: str) -> None:
    with OutboxStore(f"{database} options='-c lock_timeout=1000'") as store, psycopg.connect(database) as other:
        other.execute("SELECT shard FROM nsqext_outbox_shard WHERE shard < 8 FOR UPDATE")
        assert store.lease("first", 10) == [*range(8, 16)]


def test_no_part_is_left_without_a_relay(database: str) -> None:
    with OutboxStore(database) as store:
        for _ in range(2):
            parts = [store.lease(owner, 10, now=100.0) for owner in ("first", "second", "third")]
    assert sorted(map(len, parts)) == [4, 6, 6]
    assert sorted(part for held in parts for part in held) == [*range(16)]


def test_a_renewal_reports_one_lost_part_of_several(database: str) -> None:
    with OutboxStore(database) as store:
        held = store.lease("first", 10, now=100.0)
        assert store.lease("second", 10, now=100.0) == []
        kept = store.lease("first", 10, now=101.0)
        assert len(kept) == 8
        assert not store.renew("first", held, 10, now=101.0)
        assert store.renew("first", kept[1:], 10, now=101.0)


def test_a_relay_that_leases_again_runs_for_longer(database: str) -> None:
    with OutboxStore(database) as store:
        for now, running in ((100.0, 0), (None, 1)):  # by the clock of the database
            store.lease("first", 10.0, now=now)
            assert store.summary(now=100.0).relays == running


def test_a_renewal_keeps_the_relay_among_those_that_run(database: str) -> None:
    with OutboxStore(database) as store:
        held = store.lease("first", 10, now=100.0)
        assert store.summary(now=100.0).relays == 0  # by the clock of the database, the lease has ended
        assert store.renew("first", held, 30)
        assert store.summary(now=100.0).relays == 1


@pytest.mark.parametrize(("timeout", "expected"), [(7.0, 12), (600.0, 60)])
async def test_a_relay_leases_for_longer_than_a_publish_takes_but_not_for_ever(
    cluster: Cluster, topic: str, database: str, timeout: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    leased: list[float] = []
    lease = OutboxStore.lease

    def note(self: OutboxStore, owner: str, seconds: float) -> list[int]:
        leased.append(seconds)
        return lease(self, owner, seconds)

    monkeypatch.setattr(OutboxStore, "lease", note)
    with OutboxStore(database) as store:
        async with Producer(cluster.lookupd, timeout=timeout) as producer, anyio.create_task_group() as tasks:
            tasks.start_soon(OutboxRelay(store, poll=0.05).run, producer)
            await eventually(lambda: bool(leased), _SECONDS)
            tasks.cancel_scope.cancel()
    assert {*map(round, leased)} == {expected}


# Reads


def test_a_read_is_bound_by_count_and_bytes(database: str) -> None:
    fill(database, "t", 10, 1000)
    with OutboxStore(database) as store:
        for count, size, expected in ((4, 1 << 20, 4), (500, 3500, 3), (500, 1, 1), (500, 10_000, 10)):
            assert len(store.rows(range(16), [], count, size)) == expected
        found = store.rows(range(16), [], 500)
    assert [row.body.split()[0] for row in found] == [b"%d" % number for number in range(10)]


def test_messages_of_other_parts_are_not_read_and_all_that_were_published_are_deleted(database: str) -> None:
    fill(database, "t", 510, 10)
    with OutboxStore(database) as store:
        parts = [[row.sequence for row in store.rows([part], [], 1000)] for part in range(16)]
        published = [sequence for part in parts for sequence in part]
        assert len({*published}) == len(published) == 510
        store.delete(published)
        assert store.summary(0.0).waiting == 0


def test_messages_are_read_in_the_order_of_their_numbers_whatever_the_clock_was(database: str) -> None:
    fill(database, "t", 5, 10)
    with closing(connect(database)) as connection:
        connection.execute("UPDATE nsqext_outbox SET added = 1000 - sequence")
        connection.commit()
    with OutboxStore(database) as store:
        found = store.rows(range(16), [], 500)
        assert store.summary(1000.0).age == found[-1].sequence
    assert [row.body.split()[0] for row in found] == [b"%d" % number for number in range(5)]


def test_the_pace_follows_the_link() -> None:
    pace = Pace()
    rows = [OutboxRow(number, "i", "t", None, None, None, None, bytes(50_000)) for number in range(100)]
    first = pace.part(rows)
    assert len(first) == 2
    for _ in range(10):
        assert not pace.took(pace.part(rows), 0.1, 10.0, failed=False)
    assert len(pace.part(rows)) == 100
    assert not pace.took(rows, 4.0, 10.0, failed=False)
    assert len(pace.part(rows)) == 100
    assert pace.took(rows, 9.0, 10.0, failed=True)
    assert len(pace.part(rows)) == 50
    assert not pace.took(pace.part(rows), 0.1, 10.0, failed=True)
    assert len(pace.part(rows)) == 50
    for _ in range(30):
        pace.took(pace.part(rows), 10.0, 10.0, failed=True)
    assert len(pace.part(rows)) == 1


# What a failed publish leaves


async def test_messages_of_a_failed_batch_stay_and_stored_ones_are_deleted(
    cluster: Cluster, topic: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay that deleted them all lost 23 of 600."""
    bodies = fill(database, topic, 12, 10)
    failures = 3

    async with Producer(cluster.lookupd) as producer:
        publish_many = producer.publish_many

        async def fail(name: str, messages: list[OutgoingMessage]) -> list[Receipt]:
            nonlocal failures
            if not failures:
                return await publish_many(name, messages)
            failures -= 1
            half = len(messages) // 2
            receipts = await publish_many(name, messages[:half]) if half else []
            raise BatchFailed([*receipts, *[PublishFailed("no leader")] * (len(messages) - half)])

        monkeypatch.setattr(producer, "publish_many", fail)
        monkeypatch.setattr("nsqext.transactions.relay.RETRY", 0.05)
        with OutboxStore(database) as store:
            async with publishing(store, producer) as relay:
                await eventually(lambda: relay.statistics().published == 12, _SECONDS)
            assert store.summary(time.time()).waiting == 0
            assert relay.statistics().failed == 3
    assert await all_stored(cluster, topic) == dict.fromkeys(bodies, 1)


@on_postgresql
def test_a_call_behind_a_lost_connection_is_a_transaction(database: str) -> None:
    """A call of two statements, of which the second fails."""
    fill(database, "t", 1, 10)
    with OutboxStore(database) as store:
        (row,) = store.rows(range(16), [], 10)
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute(_END_OTHERS)
        sequences: list[Any] = [row.sequence, *range(10**6, 10**6 + 499), "no number"]
        with pytest.raises(psycopg.DataError):
            store.delete(sequences)
        assert store.summary(0.0).waiting == 1


@on_postgresql
@pytest.mark.parametrize("way", ["psycopg", "session"])
def test_a_commit_notifies_relays_and_a_rollback_does_not(database: str, way: str) -> None:
    with psycopg.connect(database, autocommit=True) as listener:
        listener.execute("LISTEN nsqext_outbox")
        add = {"psycopg": add_with_driver, "session": add_with_sqlalchemy}[way]
        add(database, "t", commit=False)
        assert list(listener.notifies(timeout=0.1, stop_after=1)) == []
        add(database, "t", commit=True)
        assert len(list(listener.notifies(timeout=10, stop_after=1))) == 1


@on_postgresql
async def test_a_listener_waits_for_a_message_from_its_first_call_on(database: str) -> None:
    with OutboxStore(database) as store, closing(OutboxListener(store)) as listener:
        assert await listener.wait(0.0), "messages may have been added before it listens"
        add_with_driver(database, "t", commit=True)
        began = anyio.current_time()
        await listener.wait(8.0)
        assert anyio.current_time() - began < 6


@on_postgresql
async def test_a_listener_that_lost_its_connection_listens_again(database: str) -> None:
    with OutboxStore(database) as store, closing(OutboxListener(store)) as listener:
        await listener.wait(0.0)
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute(_END_OTHERS)
        with pytest.raises(psycopg.OperationalError):
            await listener.wait(8.0)
        await listener.wait(0.0)


async def test_a_relay_that_seldom_looks_is_stopped_at_once(database: str) -> None:
    """An app waited for its relay, as long as the relay waited for PostgreSQL."""
    with OutboxStore(database) as store:
        relay, leased, lease = OutboxRelay(store, poll=3600.0), 0, store.lease

        def counted(owner: str, seconds: float) -> list[int]:
            nonlocal leased
            leased += 1
            return lease(owner, seconds)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "lease", counted)
            with anyio.fail_after(_SECONDS):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(relay.run, cast("Any", Scripted(accept)))
                    await eventually(lambda: leased > (not database.startswith("sqlite")), _SECONDS)
                    relay.stop()


# Outages


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


STATES = (
    *("08006", "25006", "25P03", "28P01", "3D000", "40001", "40P01", "42501", "42P01", "53100"),
    *("53200", "53300", "53400", "55P03", "57014", "57P01", "57P03", "58030", "XX000"),
)


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


class Drops(Middleware):
    """Drops every second message of a publish."""

    async def publish(self, publishing: Publishing, send_next: SendNext) -> Sequence[Receipt]:
        publishing.messages = publishing.messages[::2]
        return await send_next(publishing)


@one_database
async def test_middleware_that_drops_messages_ends_the_relay(cluster: Cluster, topic: str, database: str) -> None:
    """They were deleted as if they were stored."""
    fill(database, topic, 4, 10)
    with OutboxStore(database) as store:
        async with Producer(cluster.lookupd, middleware=[Drops()]) as producer:
            with anyio.fail_after(_SECONDS), pytest.raises(InvalidState, match="drops messages of the outbox"):
                await OutboxRelay(store, poll=0.05).run(producer)
        assert store.summary(time.time()).waiting == 4


_END_OTHERS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
    "AND backend_type = 'client backend'"
)


@contextmanager
def read_only(postgres: str) -> Iterator[None]:
    """As a server is after a failover."""
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("ALTER DATABASE postgres SET default_transaction_read_only = on")
        connection.execute("SET default_transaction_read_only = off")
        connection.execute(_END_OTHERS)
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
        connection.execute(_END_OTHERS)
        try:
            yield
        finally:
            connection.execute("ALTER DATABASE postgres ALLOW_CONNECTIONS true")


@contextmanager
def statement_timeout(postgres: str) -> Iterator[None]:
    """A row is locked for longer than a statement may take."""
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("ALTER DATABASE postgres SET statement_timeout = 30")
        connection.execute(_END_OTHERS)
        try:
            with connection.transaction():
                connection.execute("LOCK TABLE nsqext_outbox_shard")
                yield
        finally:
            connection.execute("ALTER DATABASE postgres RESET statement_timeout")
            connection.execute(_END_OTHERS)


@on_postgresql
@pytest.mark.parametrize("outage", [read_only, without_table, no_connections, statement_timeout])
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
def test_an_error_that_has_rolled_back_already_is_raised(database: str) -> None:
    """As that of a full disk."""
    fill(database, "t", 1, 10)
    with kept_connections() as opened, OutboxStore(database) as store:
        (row,) = store.rows(range(16), [], 10)
        fill_disk(opened[0])
        with pytest.raises(sqlite3.OperationalError, match="disk is full"):
            store.refuse(row.sequence, "x" * 1_000_000)
        free_disk(opened[0])
        assert (store.summary(0.0).waiting, store.summary(0.0).refused) == (1, 0)


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


# What a relay sends, and in which order


class Scripted:
    """A producer without servers."""

    def __init__(
        self, publish: Callable[[str, list[OutgoingMessage]], Awaitable[None]], *, extend: bool = True
    ) -> None:
        self.settings = {"timeout": "2.0"}
        self.calls: list[tuple[str, list[bytes]]] = []
        self.messages: list[OutgoingMessage] = []
        self._publish = publish
        self._meta = SimpleNamespace(extend_support=extend)

    async def meta(self, topic: str) -> Any:
        return self._meta

    async def publish_many(self, topic: str, messages: list[OutgoingMessage]) -> list[Receipt]:
        self.calls.append((topic, [message.body for message in messages]))
        self.messages += messages
        await self._publish(topic, messages)
        return [Receipt(topic, 0, "scripted")] * len(messages)


async def accept(topic: str, messages: list[OutgoingMessage]) -> None:
    """Store everything."""


@asynccontextmanager
async def publishing(
    store: OutboxStore, producer: Scripted | Producer, poll: float = 0.01
) -> AsyncIterator[OutboxRelay]:
    """Run a relay."""
    relay = OutboxRelay(store, poll=poll)
    with anyio.fail_after(_SECONDS):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(relay.run, cast("Any", producer))
            yield relay
            tasks.cancel_scope.cancel()


@one_database
async def test_after_a_refused_message_its_batch_is_published_one_by_one_and_later_ones_together(database: str) -> None:
    async def publish(topic: str, messages: list[OutgoingMessage]) -> None:
        if any(message.body.startswith(b"2 ") for message in messages):
            raise InvalidBody("too large", topic=topic)

    first = fill(database, "t", 5, 4)
    producer = Scripted(publish)
    with OutboxStore(database) as store:
        async with publishing(store, producer) as relay:
            await eventually(lambda: store.summary(0.0).waiting == 0, _SECONDS)
            with closing(connect(database)) as connection:
                for body in (b"8", b"9"):
                    Outbox().add(connection, "t", body)
                connection.commit()
            await eventually(lambda: store.summary(0.0).waiting == 0, _SECONDS)
        assert store.summary(0.0).refused == 1
        assert relay.statistics() == (6, 0, 1)
    assert producer.calls == [("t", first), *[("t", [body]) for body in first], ("t", [b"8", b"9"])]


@one_database
async def test_of_two_messages_only_the_refused_one_is_set_aside(database: str) -> None:
    async def publish(topic: str, messages: list[OutgoingMessage]) -> None:
        if messages[-1].body.startswith(b"1 "):
            raise InvalidBody("too large", topic=topic)

    fill(database, "t", 2, 4)
    with OutboxStore(database) as store:
        async with publishing(store, Scripted(publish)) as relay:
            await eventually(lambda: store.summary(0.0).waiting == 0, _SECONDS)
        assert relay.statistics() == (1, 0, 1)


@one_database
async def test_a_relay_says_that_nothing_is_stored(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqext.transactions.relay.RETRY", 0.01)
    down = True

    async def publish(topic: str, messages: list[OutgoingMessage]) -> None:
        if down:
            raise PublishFailed("no node", topic=topic)

    fill(database, "t", 2, 4)
    with OutboxStore(database) as store:
        async with publishing(store, Scripted(publish), 10 * _SECONDS) as relay:
            await eventually(lambda: "no node" in str(relay.failure), _SECONDS)
            down = False
            await eventually(lambda: relay.failure is None, _SECONDS)


@one_database
async def test_a_failure_ends_with_the_message_that_is_not_published_any_more(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An app was not ready although its outbox was empty."""
    monkeypatch.setattr("nsqext.transactions.relay.RETRY", 0.01)

    async def publish(topic: str, messages: list[OutgoingMessage]) -> None:
        raise PublishFailed("no node", topic=topic)

    fill(database, "t", 1, 4)
    with OutboxStore(database) as store:
        async with publishing(store, Scripted(publish)) as relay:
            await eventually(lambda: "no node" in str(relay.failure), _SECONDS)
            store.cancel(store.waiting()[0].identity)
            await eventually(lambda: relay.failure is None, _SECONDS)


@one_database
async def test_a_message_that_is_too_large_by_its_trace_is_published_without_it(database: str) -> None:
    async def publish(topic: str, messages: list[OutgoingMessage]) -> None:
        if "traceparent" in (messages[0].headers or {}):
            raise InvalidBody("too large", topic=topic)

    fill(database, "t", 1, 4)
    with closing(sqlite3.connect(database.removeprefix("sqlite:///"))) as connection:
        connection.execute('UPDATE nsqext_outbox SET trace_context = \'{"traceparent":"00"}\'')
        connection.commit()
    with OutboxStore(database) as store:
        async with publishing(store, Scripted(publish)) as relay:
            await eventually(lambda: relay.statistics() == (1, 0, 0), _SECONDS)


@one_database
async def test_more_messages_are_published_at_once_after_fast_publishes(database: str) -> None:
    producer, bodies = Scripted(accept), fill(database, "t", 8, 100_000)
    with OutboxStore(database) as store:
        async with publishing(store, producer):
            await eventually(lambda: store.summary(0.0).waiting == 0, _SECONDS)
    assert producer.calls == [("t", bodies[:1]), ("t", bodies[1:3]), ("t", bodies[3:])]


@one_database
async def test_a_database_that_cannot_be_used_is_not_tried_again_at_once(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, attempts = anyio.Event(), 0

    def lease(*_: object) -> list[int]:
        nonlocal attempts
        attempts += 1
        anyio.from_thread.run_sync(failed.set)
        raise sqlite3.OperationalError("locked")

    monkeypatch.setattr("nsqext.transactions.relay._RECONNECT", 10 * _SECONDS)
    with OutboxStore(database) as store:
        monkeypatch.setattr(store, "lease", lease)
        async with publishing(store, Scripted(accept)):
            await failed.wait()
            for _ in range(50):  # as many as the relay would have had
                await anyio.to_thread.run_sync(int)
    assert attempts == 1


@one_database
def test_settings_of_a_relay_are_checked(database: str) -> None:
    with OutboxStore(database) as store:
        for name in ("batch", "poll"):
            with pytest.raises(InvalidSetting, match=name):
                OutboxRelay(store, **{name: 0})


@one_database
@pytest.mark.parametrize("extend", [True, False])
async def test_all_parts_of_a_message_are_sent(extend: bool, database: str) -> None:
    with closing(connect(database)) as connection:
        for headers in ({"a": "b"}, None):
            Outbox().add(connection, "t", b"x", headers=headers, key="k", tag="red", identity=f"id {headers}")
        connection.commit()
    producer = Scripted(accept, extend=extend)
    with OutboxStore(database) as store:
        async with publishing(store, producer):
            await eventually(lambda: store.summary(0.0).waiting == 0, _SECONDS)
    sent: list[dict[str, str] | None] = [{"a": "b"}, None]
    if extend:
        sent = [{"a": "b", "nsqext_id": "id {'a': 'b'}"}, {"nsqext_id": "id None"}]
    assert [message.headers for message in producer.messages] == sent
    assert {(message.body, message.key, message.tag) for message in producer.messages} == {(b"x", b"k", "red")}


@one_database
async def test_a_topic_that_takes_long_does_not_delay_others(database: str) -> None:
    fast = anyio.Event()

    async def publish(topic: str, messages: list[OutgoingMessage]) -> None:
        if topic == "slow":
            await fast.wait()
        fast.set()

    for topic in ("slow", "fast"):
        fill(database, topic, 1, 4)
    with OutboxStore(database) as store:
        async with publishing(store, Scripted(publish)):
            await eventually(lambda: store.summary(0.0).waiting == 0, _SECONDS)


@one_database
async def test_what_is_added_while_a_topic_takes_long_is_published_at_once(database: str) -> None:
    """It waited until the publish to a topic without a leader had failed, after 30 seconds."""
    slow, may_end = anyio.Event(), anyio.Event()

    async def publish(topic: str, messages: list[OutgoingMessage]) -> None:
        if topic == "slow":
            slow.set()
            await may_end.wait()

    fill(database, "slow", 2, 4)
    producer = Scripted(publish)
    producer.settings = {"timeout": str(2 * _SECONDS)}
    with OutboxStore(database) as store:
        identity = store.waiting()[0].identity
        async with publishing(store, producer) as relay:
            await slow.wait()
            for number in range(3):
                fill(database, "fast", 1, 4)
                await eventually(lambda: relay.statistics().published == number + 1, _SECONDS)  # noqa: B023
            fill(database, "slow", 1, 4)
            assert store.cancel(identity) is Cancellation.TOO_LATE, "it is being published"
            may_end.set()
            await eventually(lambda: relay.statistics().published == 6, _SECONDS)
    slow_calls = [len(bodies) for topic, bodies in producer.calls if topic == "slow"]
    assert slow_calls == [2, 1], "one publish of a topic at a time"


@one_database
async def test_what_many_topics_have_is_not_read_by_the_clock_while_one_takes_long(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that was full is followed by the next one as soon as a topic is done."""
    monkeypatch.setattr("nsqext.transactions.relay._SLICE", 2.0 * _SECONDS)
    fast = anyio.Event()

    async def publish(topic: str, messages: list[OutgoingMessage]) -> None:
        if topic == "slow":
            await fast.wait()
        elif messages[0].body.startswith(b"last"):
            fast.set()

    fill(database, "slow", 1, 4)
    fill(database, "fast", 3, 4)
    with closing(connect(database)) as connection:
        Outbox().add(connection, "fast", b"last")
        connection.commit()
    producer = Scripted(publish)
    producer.settings = {"timeout": str(4 * _SECONDS)}
    with OutboxStore(database) as store, anyio.fail_after(_SECONDS):
        relay = OutboxRelay(store, batch=2, poll=2.0 * _SECONDS)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(relay.run, cast("Any", producer))
            await fast.wait()
            tasks.cancel_scope.cancel()


@one_database
async def test_a_database_that_fails_while_a_topic_takes_long_is_an_outage(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqext.transactions.relay._RECONNECT", 0.01)
    slow, failed, rows = anyio.Event(), anyio.Event(), OutboxStore.rows

    async def publish(topic: str, messages: list[OutgoingMessage]) -> None:
        slow.set()
        await failed.wait()

    def fail_once(store: OutboxStore, *arguments: Any) -> list[OutboxRow]:
        if slow.is_set() and not failed.is_set():
            anyio.from_thread.run_sync(failed.set)
            raise sqlite3.OperationalError("locked")
        return rows(store, *arguments)

    monkeypatch.setattr(OutboxStore, "rows", fail_once)
    fill(database, "t", 1, 4)
    producer = Scripted(publish)
    with OutboxStore(database) as store:
        async with publishing(store, producer) as relay:
            await eventually(lambda: relay.statistics().published == 1, _SECONDS)
            fill(database, "t", 1, 4)
            await eventually(lambda: relay.statistics().published == 2, _SECONDS)
    assert len(producer.calls) == 2, "nothing is published twice"


@one_database
async def test_a_topic_that_failed_rests_and_its_messages_are_not_refused(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqext.transactions.relay._FIRST", 1)  # what is behind the failed message waits too
    monkeypatch.setattr("nsqext.transactions.relay.RETRY", 2.0 * _SECONDS)
    failed = 0

    async def publish(topic: str, messages: list[OutgoingMessage]) -> None:
        nonlocal failed
        if topic == "new":
            failed += 1
            raise ExtendNotSupported("the topic does not exist yet", topic=topic)

    fill(database, "new", 3, 4)
    producer = Scripted(publish)
    with OutboxStore(database) as store:
        async with publishing(store, producer) as relay:
            for number in range(5):
                fill(database, "old", 1, 4)
                await eventually(lambda: relay.statistics().published == number + 1, _SECONDS)  # noqa: B023
            assert relay.failure is None, "the last publish stored something"
        assert relay.statistics() == (5, 1, 0)
        assert store.summary(0.0).waiting == 3
    assert failed == 1


@one_database
async def test_a_batch_that_took_too_long_is_tried_again_at_once_in_smaller_parts(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqext.transactions.relay.RETRY", 2.0 * _SECONDS)

    async def publish(topic: str, messages: list[OutgoingMessage]) -> None:
        if len(messages) == 4:
            await anyio.sleep(0.06)
            raise PublishFailed("not stored within the timeout")

    bodies, producer = fill(database, "t", 4, 1000), Scripted(publish)
    producer.settings = {"timeout": "0.1"}
    with OutboxStore(database) as store:
        async with publishing(store, producer) as relay:
            await eventually(lambda: store.summary(0.0).waiting == 0, _SECONDS)
        assert relay.statistics() == (4, 1, 0)
    assert producer.calls[:2] == [("t", bodies), ("t", bodies[:2])]


@one_database
async def test_publishes_that_take_longer_than_the_timeout_lease_again(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqext.transactions.relay._FIRST", 1)
    leases: list[int] = []
    lease = OutboxStore.lease

    def note(self: OutboxStore, *arguments: Any) -> list[int]:
        leases.append(len(producer.calls))
        return lease(self, *arguments)

    async def publish(topic: str, messages: list[OutgoingMessage]) -> None:
        await anyio.sleep(0.21)

    monkeypatch.setattr(OutboxStore, "lease", note)
    fill(database, "t", 3, 10)
    producer = Scripted(publish)
    producer.settings = {"timeout": "0.2"}
    with OutboxStore(database) as store:
        async with publishing(store, producer):
            await eventually(lambda: store.summary(0.0).waiting == 0, _SECONDS)
    assert {0, 1, 2} <= {*leases}, "each publish has a lease before it"


@on_postgresql
async def test_a_relay_that_has_ended_does_not_listen_any_more(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listeners: list[OutboxListener] = []

    class Noted(OutboxListener):
        def __init__(self, store: OutboxStore) -> None:
            super().__init__(store)
            listeners.append(self)

    monkeypatch.setattr("nsqext.transactions.relay.OutboxListener", Noted)
    with OutboxStore(database) as store:
        async with publishing(store, Scripted(accept)):
            await eventually(lambda: bool(listeners) and listeners[0]._connection is not None, _SECONDS)
            connection = listeners[0]._connection
    assert connection.closed


@one_database
async def test_a_relay_ends_without_an_error_when_it_cannot_return_its_leases(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("locked")

    monkeypatch.setattr(OutboxStore, "leave", fail)
    with OutboxStore(database) as store:
        async with publishing(store, Scripted(accept)):
            await eventually(lambda: store.summary(0.0).relays == 1, _SECONDS)
        assert store.summary(0.0).relays == 1


@one_database
async def test_what_was_stored_is_not_published_again_if_the_database_fails_before_its_deletion(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a right is missing, the same messages were published every second."""
    monkeypatch.setattr("nsqext.transactions.relay._RECONNECT", 0.01)
    delete, failures = OutboxStore.delete, 3

    def fail(store: OutboxStore, sequences: Sequence[int]) -> None:
        nonlocal failures
        if failures:
            failures -= 1
            raise sqlite3.OperationalError("locked")
        delete(store, sequences)

    monkeypatch.setattr(OutboxStore, "delete", fail)
    bodies = fill(database, "t", 3, 4)
    producer = Scripted(accept)
    with OutboxStore(database) as store:
        async with publishing(store, producer) as relay:
            await eventually(lambda: failures == 1, _SECONDS)
            bodies += fill(database, "t", 2, 4)
            await eventually(lambda: store.summary(0.0).waiting == 0, _SECONDS)
        assert relay.statistics() == (5, 0, 0)
    assert [body for _, part in producer.calls for body in part] == bodies


@one_database
async def test_another_message_with_the_number_of_a_stored_message_is_published(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a database that was restored, or a replica that has become the primary."""
    monkeypatch.setattr("nsqext.transactions.relay._RECONNECT", 0.01)
    delete, restored = OutboxStore.delete, False

    def restore(store: OutboxStore, sequences: Sequence[int]) -> None:
        nonlocal restored
        if not restored:
            restored = True
            with closing(connect(database)) as connection:
                connection.execute("UPDATE nsqext_outbox SET identity = 'other', body = 'other'")
                connection.commit()
            raise sqlite3.OperationalError("locked")
        delete(store, sequences)

    monkeypatch.setattr(OutboxStore, "delete", restore)
    fill(database, "t", 1, 4)
    producer = Scripted(accept)
    with OutboxStore(database) as store:
        async with publishing(store, producer):
            await eventually(lambda: store.summary(0.0).waiting == 0, _SECONDS)
    assert [part for _, part in producer.calls] == [[b"0 xx"], [b"other"]]


@one_database
async def test_what_was_stored_is_deleted_although_the_relay_is_cancelled(database: str) -> None:
    scope = anyio.CancelScope()

    async def publish(topic: str, messages: list[OutgoingMessage]) -> None:
        scope.cancel()

    fill(database, "t", 3, 4)
    with OutboxStore(database) as store:
        with scope:
            await OutboxRelay(store).run(cast("Any", Scripted(publish)))
        assert store.summary(0.0).waiting == 0
        assert store.summary(0.0).relays == 0


def test_a_store_that_cannot_be_opened_closes_its_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connections: list[Any] = []

    for file, text in ((tmp_path / "empty", "outbox sql"), (":memory:", "is not a file")):

        def connect(store: OutboxStore, file: Path | str = file) -> Any:
            connections.append(sqlite3.connect(file, isolation_level=None))
            return connections[-1]

        monkeypatch.setattr(OutboxStore, "connect", connect)
        with pytest.raises(InvalidSetting, match=text):
            OutboxStore(f"sqlite:///{tmp_path}")
        with pytest.raises(sqlite3.ProgrammingError):
            connections[-1].execute("SELECT 1")
