"""A message of an outbox that is cancelled is not published, or the cancellation says that it is too late."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from secrets import token_hex
from threading import Event, Thread
from typing import Any

import anyio
import pytest

from nsqext import Consumer, OutgoingMessage, Position, Producer
from nsqext.broker import Cluster
from nsqext.delays import Cancellation
from nsqext.errors import PublishFailed
from nsqext.transactions import Outbox, OutboxRelay, OutboxStore, relay
from nsqext.transactions.store import MOST_BYTES, OutboxRow
from tests.support.command_line import run
from tests.support.consumers import eventually
from tests.transactions.relays import Scripted, one_database, publishing
from tests.transactions.test_outbox import connect

CANCELLED, TOO_LATE, UNKNOWN = Cancellation
_LONG = 60.0
_SECONDS = 20


def add(database: str, *identities: str, topic: str = "t") -> None:
    """Add messages."""
    with closing(connect(database)) as connection:
        for identity in identities:
            Outbox().add(connection, topic, identity.encode(), identity=identity)
        connection.commit()


def read(store: OutboxStore, owner: str, count: int = 100) -> list[str]:
    """Read as a relay does, and return the identities."""
    shards = store.lease(owner, _LONG)
    return [row.identity for row in store.rows(shards, [], count, MOST_BYTES, owner)]


def test_a_waiting_message_is_cancelled_once(database: str) -> None:
    add(database, "one", "two")
    with OutboxStore(database) as store:
        assert [store.cancel(identity) for identity in ("one", "one", "three")] == [CANCELLED, UNKNOWN, UNKNOWN]
        assert read(store, "relay") == ["two"]


def test_a_topic_bounds_a_cancellation(database: str) -> None:
    for topic in ("t", "u", "v"):
        add(database, "one", topic=topic)
    with OutboxStore(database) as store:
        assert [store.cancel("one", topic) for topic in ("u", "w")] == [CANCELLED, UNKNOWN]
        assert [one.topic for one in store.waiting()] == ["t", "v"]
        assert store.cancel("one") is CANCELLED
        assert store.waiting() == []


def test_a_cancellation_in_several_topics_is_too_late_if_it_is_in_one(database: str) -> None:
    for topic in ("t", "u"):
        add(database, "one", topic=topic)
    with OutboxStore(database) as store:
        assert read(store, "relay", 1) == ["one"]
        assert store.cancel("one") is TOO_LATE
        assert store.waiting() == []


def test_a_message_that_is_read_is_too_late_and_not_read_again(database: str) -> None:
    add(database, "one", "two")
    with OutboxStore(database) as store:
        assert read(store, "relay", 1) == ["one"]
        assert [one.publishing for one in store.waiting()] == [True, False]
        assert [store.cancel(identity) for identity in ("one", "two")] == [TOO_LATE, CANCELLED]
        assert read(store, "relay") == []


def test_a_message_whose_publish_has_failed_is_cancelled(database: str) -> None:
    """A relay that leases again publishes nothing."""
    add(database, "one")
    with OutboxStore(database) as store:
        assert read(store, "relay") == ["one"]
        store.lease("relay", _LONG)
        assert store.cancel("one") is CANCELLED


@pytest.mark.parametrize("ends", ["killed", "stopped"])
def test_a_message_of_a_relay_that_has_ended_is_cancelled(database: str, ends: str) -> None:
    add(database, "one")
    with OutboxStore(database) as store:
        assert read(store, "relay") == ["one"]
        if ends == "stopped":
            store.leave("relay")
        else:
            store.renew("relay", [], -1.0)
        assert store.cancel("one") is CANCELLED


def test_a_relay_without_a_lease_reads_nothing(database: str) -> None:
    """A cancellation could not know what it publishes."""
    add(database, "one")
    with OutboxStore(database) as store:
        shards = store.lease("relay", _LONG)
        store.leave("relay")
        assert store.rows(shards, [], 100, MOST_BYTES, "relay") == []
        assert not store.renew("relay", [], _LONG)


def test_a_message_that_was_set_aside_is_cancelled(database: str) -> None:
    add(database, "one")
    with OutboxStore(database) as store:
        store.refuse(store.rows(range(16), [], 1)[0].sequence, "too large")
        (found,) = store.waiting()
        assert (found.identity, found.topic, found.error, found.publishing) == ("one", "t", "too large", False)
        assert abs(found.added - time.time()) < _LONG
        assert store.cancel("one") is CANCELLED


def test_the_first_messages_are_listed(database: str) -> None:
    add(database, "one", "two", "three")
    add(database, "four", topic="u")
    with OutboxStore(database) as store:
        assert [one.identity for one in store.waiting(count=2)] == ["one", "two"]
        assert [one.identity for one in store.waiting("u")] == ["four"]


# Cancellations and reads at the same time


class _Pausing(OutboxStore):
    """Calls a function before a statement."""

    def __init__(self, database: str, begin: str, call: Callable[[], None]) -> None:
        self._beginning, self._call = begin, call
        super().__init__(database)

    def _run(self, sql: str, values: Any) -> list[tuple[Any, ...]]:
        if sql.startswith(self._beginning):
            self._call()
        return super()._run(sql, values)


def waits_for_lock(database: str, thread: Thread) -> None:
    """Return when a thread waits for a lock of PostgreSQL, or has ended."""
    with closing(connect(database)) as connection:
        connection.autocommit = True
        while thread.is_alive():
            (waiting,) = connection.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone()
            if waiting:
                return
            time.sleep(0.005)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("first", ["read", "cancellation"])
def test_a_cancellation_and_a_read_wait_for_each_other(database: str, first: str) -> None:
    add(database, "one")
    results: dict[str, Any] = {}
    with OutboxStore(database) as other:
        shards = other.lease("relay", _LONG)

        def cancel(store: OutboxStore) -> None:
            results["cancellation"] = store.cancel("one")

        def take(store: OutboxStore) -> None:
            results["read"] = [row.identity for row in store.rows(shards, [], 10, MOST_BYTES, "relay")]

        late = Thread(target=cancel if first == "read" else take, args=(other,))

        def start() -> None:
            late.start()
            waits_for_lock(database, late)

        begin = "UPDATE nsqext_outbox_relay SET publishing" if first == "read" else "DELETE FROM nsqext_outbox"
        with _Pausing(database, begin, start) as store:
            (take if first == "read" else cancel)(store)
            late.join()
    expected: dict[str, Any] = {"read": ["one"], "cancellation": TOO_LATE}
    assert results == (expected if first == "read" else {"read": [], "cancellation": CANCELLED})


def test_each_message_is_either_read_or_cancelled(database: str) -> None:
    names = [f"m{number}" for number in range(120)]
    add(database, *names)
    published: list[str] = []
    results: dict[str, Cancellation] = {}
    cancelling = Event()  # a relay that is alone would read all messages first

    def publish() -> None:
        with OutboxStore(database) as store:
            cancelling.wait()
            while store.waiting(count=1):
                shards = store.lease("relay", _LONG)
                rows: Sequence[OutboxRow] = store.rows(shards, [], 5, MOST_BYTES, "relay")
                published.extend(row.identity for row in rows)
                store.delete([row.sequence for row in rows])

    relaying = Thread(target=publish)
    relaying.start()
    with OutboxStore(database) as store:
        for name in reversed(names):
            results[name] = store.cancel(name)
            cancelling.set()
    relaying.join()
    assert sorted(published) == sorted(name for name in names if results[name] is not CANCELLED)
    assert CANCELLED in results.values()


# Relays


@pytest.mark.anyio
async def test_a_message_that_is_cancelled_while_its_publish_fails_is_not_published_again(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "RETRY", 0.05)
    add(database, "never", "kept")
    trying, go = anyio.Event(), anyio.Event()
    attempts: list[list[bytes]] = []

    async def fail_once(topic: str, messages: list[OutgoingMessage]) -> None:
        attempts.append([message.body for message in messages])
        if not trying.is_set():
            trying.set()
            await go.wait()
            raise PublishFailed("no leader")

    with OutboxStore(database) as store:
        async with publishing(store, Scripted(fail_once)):
            with anyio.fail_after(_SECONDS):
                await trying.wait()
            assert store.cancel("never") is TOO_LATE
            go.set()
            await eventually(lambda: not store.waiting(), _SECONDS)
    assert attempts == [[b"never", b"kept"], [b"kept"]]


@pytest.mark.anyio
async def test_a_message_that_is_cancelled_while_its_topic_rests_is_not_published(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of the time that a leader is away."""
    add(database, "never")
    failed = anyio.Event()
    attempts: list[list[bytes]] = []

    async def fail(topic: str, messages: list[OutgoingMessage]) -> None:
        attempts.append([message.body for message in messages])
        failed.set()
        raise PublishFailed("no leader")

    with OutboxStore(database) as store:
        async with publishing(store, Scripted(fail)):
            with anyio.fail_after(_SECONDS):
                await failed.wait()
            await eventually(lambda: not any(one.publishing for one in store.waiting()), _SECONDS)
            assert store.cancel("never") is CANCELLED
    assert attempts == [[b"never"]]


@pytest.mark.anyio
async def test_a_message_that_is_cancelled_while_its_leader_is_down_is_never_delivered(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "RETRY", 0.05)
    topic = f"t_{token_hex(4)}"
    with Cluster(nodes=1) as cluster, OutboxStore(database) as store:
        cluster.create_topic(topic, extend=True, channels=["ch"])
        node = cluster.leader(topic)
        async with Producer(cluster.lookupd, timeout=0.3) as producer, anyio.create_task_group() as tasks:
            await producer.publish(topic, b"before")
            cluster.kill(node)
            add(database, "never", "kept", topic=topic)
            tasks.start_soon(OutboxRelay(store, poll=0.02).run, producer)
            await eventually(lambda: any(one.publishing for one in store.waiting()), _SECONDS)
            assert store.cancel("never") in (TOO_LATE, CANCELLED)
            await eventually(lambda: not any(one.publishing for one in store.waiting()), _SECONDS)
            cluster.restart(node)
            await eventually(lambda: not store.waiting(), _SECONDS)
            tasks.cancel_scope.cancel()
        received = []
        async with Consumer(topic, "ch", cluster.lookupd, start=Position.earliest(), start_existing=True) as consumer:
            with anyio.fail_after(_SECONDS):
                async for message in consumer:
                    await message.finish()
                    received.append(message.body)
                    if message.body == b"kept":
                        break
    assert received == [b"before", b"kept"]


# The command


@one_database
def test_commands_list_and_cancel(database: str) -> None:
    add(database, "one", "two", "three")

    def lines(*words: str, status: int) -> list[dict[str, Any]]:
        done = run("outbox", *words, "--database", database)
        assert (done.returncode, done.stderr) == (status, b"")
        return [json.loads(line) for line in done.stdout.splitlines()]

    with OutboxStore(database) as store:
        assert read(store, "relay", 1) == ["one"]
        listed = lines("list", "--limit", "2", status=0)
        assert [(one["identity"], one["publishing"], one["error"]) for one in listed] == [
            ("one", True, ""),
            ("two", False, ""),
        ]
        found = lines("cancel", "one", "four", "two", "--yes", status=1)
        assert [(one["identity"], one["cancelled"], one["result"]) for one in found] == [
            ("one", False, "too late"),
            ("four", False, "unknown"),
            ("two", True, "cancelled"),
        ]
        assert lines("cancel", "three", "--topic", "u", "--yes", status=1)[0]["result"] == "unknown"
        assert lines("cancel", "three", "--topic", "t", "--yes", status=0)[0]["cancelled"]
        assert store.waiting() == []
