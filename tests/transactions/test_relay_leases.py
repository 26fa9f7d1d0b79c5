"""Leases of relays: they hold while a relay publishes, however slow the link is."""

from __future__ import annotations

import math
import sqlite3
import time
from contextvars import ContextVar
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import anyio
import pytest

from nsqext import OutgoingMessage, Producer
from nsqext.transactions import OutboxRelay, OutboxStore
from tests.support.consumers import eventually
from tests.support.relays import running
from tests.support.tcp_relay import relaying
from tests.transactions.relays import Scripted, accept, all_stored, fill, one_database, publishing

if TYPE_CHECKING:
    from nsqext.broker import Cluster

pytestmark = pytest.mark.anyio

_SECONDS = 40


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
        async with (
            Producer(cluster.lookupd, timeout=timeout) as producer,
            running(OutboxRelay(store, poll=0.05), producer),
        ):
            await eventually(lambda: bool(leased), _SECONDS)
    assert {*map(round, leased)} == {expected}


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
