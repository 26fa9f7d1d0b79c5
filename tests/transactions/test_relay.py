"""Relays of an outbox: what they publish, in which order, and what stays after a failure."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest

from nsqext import OutgoingMessage, Producer, Receipt
from nsqext.app.relay import Cancellation
from nsqext.errors import BatchFailed, ExtendNotSupported, InvalidBody, InvalidSetting, InvalidState, PublishFailed
from nsqext.middleware import Middleware, Publishing, SendNext
from nsqext.transactions import Outbox, OutboxRelay, OutboxStore
from nsqext.transactions.relay import Pace
from nsqext.transactions.store import OutboxRow
from tests.support.consumers import eventually
from tests.support.relays import running
from tests.transactions.relays import Scripted, accept, all_stored, fill, one_database, publishing
from tests.transactions.test_outbox import connect

if TYPE_CHECKING:
    from nsqext.broker import Cluster

pytestmark = pytest.mark.anyio
_SECONDS = 40


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
async def test_a_message_that_the_database_does_not_set_aside_is_not_counted_as_set_aside(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nsqext.transactions.relay._RECONNECT", 0.01)

    async def publish(topic: str, messages: list[OutgoingMessage]) -> None:
        raise InvalidBody("too large", topic=topic)

    fill(database, "t", 1, 4)
    with OutboxStore(database) as store:
        refuse, failures = store.refuse, [sqlite3.OperationalError("database is locked")] * 2

        def fail(sequence: int, error: str) -> None:
            if failures:
                raise failures.pop()
            refuse(sequence, error)

        monkeypatch.setattr(store, "refuse", fail)
        async with publishing(store, Scripted(publish)) as relay:
            await eventually(lambda: relay.statistics().refused > 0, _SECONDS)
            assert (store.summary(0.0).refused, relay.statistics().refused) == (1, 1)
    assert sum("is set aside" in record.getMessage() for record in caplog.records) == 1


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
        async with running(OutboxRelay(store, batch=2, poll=2.0 * _SECONDS), producer):
            await fast.wait()


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
