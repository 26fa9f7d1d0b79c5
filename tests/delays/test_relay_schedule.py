"""When a relay publishes delayed messages, and what it records; its producer has no servers."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest

from nsqext.delays import Cancellation, DelayRelay, DelayStore, relay
from nsqext.errors import (
    InvalidInput,
    NsqError,
    PublishFailed,
)
from nsqext.errors.server import BadMessage
from nsqext.protocol.delay_record import DelayedMessage, encode_delay
from nsqext.protocol.messages import IDENTITY_HEADER
from tests.delays.test_relay import knows
from tests.support.consumers import eventually
from tests.support.kept_connections import fill_disk, free_disk, kept_connections
from tests.support.machine_pauses import unless_paused
from tests.support.relays import running

if TYPE_CHECKING:
    from nsqext import Producer
    from nsqext.delays.store import TakenMessage

pytestmark = pytest.mark.anyio


DEADLINE = 20.0


class Scripted:
    """A producer without servers, whose publishes end when they may."""

    def __init__(self) -> None:
        self.settings = {"timeout": "2.0"}
        self.publishing: list[bytes] = []
        self.parts: list[dict[str, object]] = []
        self.most = 0
        self.published: list[bytes] = []
        self.may_end = anyio.Event()

    async def meta(self, topic: str) -> Any:
        return SimpleNamespace(extend_support=True)

    async def publish(self, topic: str, body: bytes, **parts: object) -> None:
        self.publishing.append(body)
        self.parts.append(parts)
        self.most = max(self.most, len(self.publishing))
        await self.may_end.wait()
        self.publishing.remove(body)
        self.published.append(body)


def scripted(store: DelayStore, producer: Scripted, keep: float = 86_400.0) -> AbstractAsyncContextManager[DelayRelay]:
    """Run a relay with a scripted producer."""
    return running(DelayRelay(store, keep=keep), producer, DEADLINE)


async def test_a_number_of_messages_is_published_at_once_and_the_end_of_one_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "AT_ONCE", 2)
    monkeypatch.setattr(relay, "POLL", 2 * DEADLINE)
    looks, recorded, forgets = 0, list[str](), list[float]()
    take = DelayStore.take

    def counted(store: DelayStore, published: list[str], *arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        recorded.extend(published)
        return take(store, published, *arguments)

    monkeypatch.setattr(DelayStore, "take", counted)
    monkeypatch.setattr(DelayStore, "forget", lambda _, before: forgets.append(before))
    producer = Scripted()
    with DelayStore(tmp_path / "store") as store:
        store.add([(DelayedMessage(identity=str(one), topic="t", due=1), b"%d" % one) for one in range(6)])
        async with scripted(store, producer):
            await eventually(lambda: looks == 2, DEADLINE)
            await anyio.sleep(0.05)
            assert (len(producer.publishing), looks) == (2, 2), "it waits while no message can be taken"
            producer.may_end.set()
            await eventually(lambda: len(producer.published) == 6 and not store.count(), DEADLINE)
    assert producer.most == 2
    assert sorted(recorded) == [str(one) for one in range(6)], "each is recorded once"
    assert len(forgets) == 1, "old identities are not looked for all the time"


async def test_identities_are_forgotten_after_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "FORGET", 0.01)
    now = time.time()
    with DelayStore(tmp_path / "store") as store:
        for name, age in (("old", 120.0), ("new", 60.0), ("ended", 120.0)):
            store.add([(DelayedMessage(identity=name, topic="t", due=round((now - age) * 1000)), b"x")])
        for name, age in (("new", 60.0), ("ended", 120.0)):
            store.take([name], 0, now - age, 0.0)
        async with scripted(store, Scripted(), keep=90.0):
            await eventually(lambda: not knows(store, "ended"), DEADLINE)
            assert knows(store, "new")
            assert knows(store, "old"), "it is published now"
            store.add([(DelayedMessage(identity="next", topic="t", due=1), b"x")])
            store.take(["next"], 0, now - 120.0, 0.0)
            await eventually(lambda: not knows(store, "next"), DEADLINE)


async def test_headers_are_published_as_they_are_stored(tmp_path: Path) -> None:
    producer = Scripted()
    producer.may_end.set()
    with DelayStore(tmp_path / "store") as store:
        raw = DelayedMessage(identity="raw", topic="t", due=1, header=b'{"a":1e0}')
        own = DelayedMessage(identity="own", topic="t", due=2, headers={IDENTITY_HEADER: "of the program"})
        store.add([(raw, b"1"), (own, b"2")])
        async with scripted(store, producer):
            await eventually(lambda: not store.count(), DEADLINE)
    found = {(parts["header"], str(parts["headers"])) for parts in producer.parts}
    assert found == {(b'{"a":1e0}', "None"), (None, str({IDENTITY_HEADER: "of the program"}))}


async def test_a_relay_that_ends_records_what_it_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: DelayRelay, due: float | None, free: int) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(DelayRelay, "_wait", never)  # it does not look again before its end
    producer = Scripted()
    producer.may_end.set()
    with DelayStore(tmp_path / "store") as store:
        store.add([(DelayedMessage(identity="a", topic="t", due=1), b"a")])
        async with scripted(store, producer):
            await eventually(lambda: producer.published == [b"a"], DEADLINE)
            assert store.count() == 1
        assert store.count() == 0
        assert store.forget(time.time() - 60.0) == 0, "the identity is kept from the publish"


async def test_a_relay_that_is_stopped_ends_when_what_it_publishes_has_an_outcome(tmp_path: Path) -> None:
    producer = Scripted()
    with DelayStore(tmp_path / "store") as store:
        store.add([(DelayedMessage(identity="a", topic="t", due=1), b"a")])
        stopped = DelayRelay(store)
        with anyio.fail_after(DEADLINE):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stopped.run, cast("Any", producer))
                await eventually(lambda: producer.publishing == [b"a"], DEADLINE)
                stopped.stop()
                producer.may_end.set()
        assert (producer.published, store.count()) == ([b"a"], 0)


@pytest.mark.parametrize(
    "settings", [{"timeout": "70.0"}, {"timeout": "30.0", "on_unknown": "settle", "settle_timeout": "40.0"}]
)
async def test_a_lease_is_longer_than_a_publish_may_take(
    settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another relay published again what was looked for in the log."""
    producer, leases = Scripted(), list[float]()
    producer.settings = settings
    take = DelayStore.take

    def noted(store: DelayStore, published: Sequence[str], count: int, now: float, lease: float, *rest: Any) -> Any:
        leases.append(lease)
        return take(store, published, count, now, lease, *rest)

    monkeypatch.setattr(DelayStore, "take", noted)
    with DelayStore(tmp_path / "store") as store:
        async with scripted(store, producer):
            await eventually(lambda: bool(leases), DEADLINE)
    assert leases[0] > 70.0


def handlers_of(delayed: DelayRelay) -> dict[str, Any]:
    """Return channel -> handler of a relay."""
    handlers = dict[str, Any]()

    def batch_handler(_: str, channel: str, **settings: object) -> Any:
        return partial(handlers.__setitem__, channel)

    delayed.attach(cast("Any", SimpleNamespace(lifespan=bool, batch_handler=batch_handler, readiness_check=bool)))
    return handlers


async def test_a_record_that_cannot_be_read_is_counted_once(tmp_path: Path) -> None:
    """Both channels receive it."""
    with DelayStore(tmp_path / "store") as store:
        delayed = DelayRelay(store)
        for handle in handlers_of(delayed).values():
            await handle([SimpleNamespace(body=b"hello")])
        assert (len(store.refused()), delayed.statistics().refused) == (1, 1)


def looks_of(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the times for which relays ask when a message is due."""
    looks, next_due = list[float](), DelayStore.next_due

    def noted(store: DelayStore, now: float, *rest: Any) -> float | None:
        looks.append(now)
        return next_due(store, now, *rest)

    monkeypatch.setattr(DelayStore, "next_due", noted)
    return looks


async def test_a_message_that_arrives_and_a_stop_wake_a_relay_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "POLL", 2 * DEADLINE)
    producer, looks = Scripted(), looks_of(monkeypatch)
    producer.may_end.set()
    with DelayStore(tmp_path / "store") as store, anyio.fail_after(DEADLINE):
        delayed = DelayRelay(store)
        handlers = handlers_of(delayed)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(delayed.run, cast("Any", producer))
            await eventually(lambda: len(looks) == 1, DEADLINE)
            await anyio.sleep(0.02)
            record = encode_delay(DelayedMessage(identity="a", topic="t", due=1), b"a")
            await handlers[delayed.channels[0]]([SimpleNamespace(body=record)])
            await eventually(lambda: producer.published == [b"a"] and len(looks) == 3, DEADLINE)
            await anyio.sleep(0.02)
            delayed.stop()


@pytest.mark.parametrize("refused", [InvalidInput("too large"), BadMessage("E_BAD_MESSAGE", "too big")])
async def test_a_message_that_is_refused_does_not_delay_its_topic(
    refused: NsqError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the server refused delayed the topic by 15 seconds, again and again."""
    monkeypatch.setattr(relay, "RETRY", 2 * DEADLINE)
    monkeypatch.setattr(relay, "AT_ONCE", 1)
    producer, publish = Scripted(), relay.publish_record

    async def refuse(to: Producer, data: bytes) -> None:
        if data.endswith(b"large"):
            raise refused
        await publish(to, data)

    monkeypatch.setattr(relay, "publish_record", refuse)
    with DelayStore(tmp_path / "store") as store:
        for due, body in enumerate((b"large", b"other"), 1):
            store.add([(DelayedMessage(identity=body.decode(), topic="t", due=due), body)])
        async with scripted(store, producer) as delayed:
            await eventually(lambda: producer.publishing == [b"other"], DEADLINE)
            assert delayed.failure is None, "the relay is ready"
            producer.may_end.set()
            await eventually(lambda: producer.published == [b"other"], DEADLINE)
            await eventually(lambda: store.count() == 1, DEADLINE)
        assert [(one.identity, one.error) for one in store.waiting()] == [("large", str(refused))]


async def test_a_relay_looks_when_the_next_message_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "POLL", 2 * DEADLINE)
    producer = Scripted()
    producer.may_end.set()
    with DelayStore(tmp_path / "store") as store:
        due = time.time() + 0.3
        store.add([(DelayedMessage(identity="a", topic="t", due=round(due * 1000)), b"a")])
        async with scripted(store, producer):
            await eventually(lambda: producer.published == [b"a"], DEADLINE)
    assert time.time() >= due


async def test_a_publish_that_takes_long_does_not_delay_what_is_due_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "POLL", 2 * DEADLINE)
    producer = Scripted()
    with DelayStore(tmp_path / "store") as store:
        for identity, due in (("now", 1), ("soon", round((time.time() + 0.3) * 1000))):
            store.add([(DelayedMessage(identity=identity, topic="t", due=due), identity.encode())])
        async with scripted(store, producer):
            await eventually(lambda: producer.publishing == [b"now", b"soon"], DEADLINE)


async def test_messages_of_a_topic_without_a_leader_hold_up_no_other_topic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They held all places until their publishes failed, after 30 seconds."""
    monkeypatch.setattr(relay, "AT_ONCE", 2)
    monkeypatch.setattr(relay, "SLOW", 0.05)
    monkeypatch.setattr(relay, "POLL", 0.05)

    class Leaderless(Scripted):
        async def publish(self, topic: str, body: bytes, **parts: object) -> None:
            if topic == "up":
                self.published.append(body)
            else:
                await super().publish(topic, body, **parts)

    producer, looks = Leaderless(), looks_of(monkeypatch)
    with DelayStore(tmp_path / "store") as store:
        store.add([(DelayedMessage(identity=str(one), topic="down", due=1 + one), b"%d" % one) for one in range(5)])
        store.add([(DelayedMessage(identity=f"up{one}", topic="up", due=9), b"up") for one in range(3)])
        async with scripted(store, producer):
            await eventually(lambda: producer.published == [b"up"] * 3, DEADLINE)
            assert sorted(producer.publishing) == [b"0", b"1"], "the topic has no more than its places"
            before = len(looks)
            await anyio.sleep(0.2)
            assert len(looks) - before < 20, "what is due and has to wait is not looked for all the time"
            producer.may_end.set()
            await eventually(lambda: not store.count(), DEADLINE)
    assert producer.most == 2


async def test_topics_that_are_slow_take_a_bounded_number_of_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "AT_ONCE", 2)
    monkeypatch.setattr(relay, "MOST_SLOW", 3)
    monkeypatch.setattr(relay, "SLOW", 0.05)
    monkeypatch.setattr(relay, "POLL", 0.01)
    producer, looks = Scripted(), looks_of(monkeypatch)
    with DelayStore(tmp_path / "store") as store:
        names = [f"{topic}{one}" for topic in "abcdef" for one in range(2)]
        store.add([(DelayedMessage(identity=name, topic=name[0], due=1), name.encode()) for name in names])
        async with scripted(store, producer):
            await eventually(lambda: len(producer.publishing) == 6, DEADLINE)
            before = len(looks)
            await eventually(lambda: len(looks) > before + 20, DEADLINE)
            assert producer.most == 6
            producer.may_end.set()
            await eventually(lambda: not store.count(), DEADLINE)


async def test_a_few_slow_publishes_of_a_topic_do_not_delay_its_other_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of its partitions may have no leader."""
    monkeypatch.setattr(relay, "AT_ONCE", 5)
    monkeypatch.setattr(relay, "SLOW", 0.05)
    monkeypatch.setattr(relay, "POLL", 0.01)
    producer, looks = Scripted(), looks_of(monkeypatch)
    with DelayStore(tmp_path / "store") as store:
        store.add([(DelayedMessage(identity=str(one), topic="t", due=1), b"%d" % one) for one in range(2)])
        async with scripted(store, producer):
            await eventually(lambda: len(producer.publishing) == 2, DEADLINE)
            await anyio.sleep(0.1)
            before = len(looks)
            await eventually(lambda: len(looks) > before + 2, DEADLINE)
            store.add([(DelayedMessage(identity="later", topic="t", due=2), b"later")])
            await eventually(lambda: b"later" in producer.publishing, DEADLINE)


async def test_a_message_that_another_process_adds_is_published_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "POLL", 0.05)
    producer = Scripted()
    producer.may_end.set()
    with DelayStore(tmp_path / "store") as store, DelayStore(tmp_path / "store") as other:
        store.add([(DelayedMessage(identity="later", topic="t", due=round((time.time() + 3600) * 1000)), b"later")])
        async with scripted(store, producer):
            await anyio.sleep(0.1)  # it waits for the message that is due in an hour
            other.add([(DelayedMessage(identity="a", topic="t", due=1), b"a")])
            await eventually(lambda: producer.published == [b"a"], DEADLINE)


async def test_a_store_that_fails_while_it_is_read_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After an outage that was longer than a lease, what was due waited for the end of another lease."""
    monkeypatch.setattr(relay, "REOPEN", 0.2)
    monkeypatch.setattr(relay, "lease_time", lambda _: 0.5)
    take = DelayStore.take

    async def attempt(number: int) -> None:
        caplog.clear()
        failures, taken = [sqlite3.OperationalError("disk I/O error")] * 3, list[str]()

        def fail_first(store: DelayStore, *arguments: Any) -> list[TakenMessage]:
            if failures:
                raise failures.pop()
            found = take(store, *arguments)
            taken.extend(one.identity for one in found)
            return found

        monkeypatch.setattr(DelayStore, "take", fail_first)
        producer = Scripted()
        producer.may_end.set()
        with DelayStore(tmp_path / f"store{number}") as store:
            store.add([(DelayedMessage(identity="a", topic="t", due=1), b"a")])
            began = time.monotonic()
            async with scripted(store, producer):
                await eventually(lambda: producer.published == [b"a"], DEADLINE)
        assert time.monotonic() - began > 0.59, "it is not tried again at once"
        assert taken == ["a"]
        assert caplog.text.count("the store of delayed messages cannot be used") == 3

    await unless_paused(attempt, 0.1)


async def test_a_relay_that_ends_waits_for_its_store_without_blocking_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may hold the file for long, as for a copy of it."""
    take, last, free, waited = DelayStore.take, threading.Event(), threading.Event(), list[bool]()

    def take_when_free(store: DelayStore, published: Sequence[str], count: int, *arguments: Any) -> list[TakenMessage]:
        if not count:
            last.set()
            waited.append(free.wait(5.0))
        return take(store, published, count, *arguments)

    monkeypatch.setattr(DelayStore, "take", take_when_free)
    producer = Scripted()
    producer.may_end.set()
    with DelayStore(tmp_path / "store") as store:
        store.add([(DelayedMessage(identity="a", topic="t", due=1), b"a")])
        async with anyio.create_task_group() as tasks:

            async def release() -> None:
                await eventually(last.is_set, DEADLINE)
                free.set()

            tasks.start_soon(release)
            async with scripted(store, producer):
                await eventually(lambda: producer.published == [b"a"], DEADLINE)
        assert waited == [True]
        assert store.summary(2.0).waiting == 0


async def test_outages_and_failures_are_reported_as_long_as_they_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "REOPEN", 0.01)
    monkeypatch.setattr(relay, "RETRY", 2 * DEADLINE)
    monkeypatch.setattr(relay, "POLL", 0.01)
    producer, take, publish, broken = Scripted(), DelayStore.take, relay.publish_record, {"store", "leader"}
    producer.may_end.set()

    def take_unless_broken(store: DelayStore, *arguments: Any) -> Any:
        if "store" in broken:
            raise sqlite3.OperationalError("disk I/O error")
        return take(store, *arguments)

    async def publish_unless_broken(to: Producer, data: bytes) -> None:
        if "leader" in broken:
            raise PublishFailed("no leader")
        await publish(to, data)

    monkeypatch.setattr(DelayStore, "take", take_unless_broken)
    monkeypatch.setattr(relay, "publish_record", publish_unless_broken)
    monkeypatch.setattr(DelayStore, "forget", lambda _, before: None)  # in a thread of its own, it ends the outage
    with DelayStore(tmp_path / "store") as store:
        store.add([(DelayedMessage(identity="a", topic="t", due=1), b"a")])
        async with scripted(store, producer) as delayed:
            await eventually(lambda: "disk I/O error" in str(delayed.outage), DEADLINE)
            broken.discard("store")
            await eventually(lambda: "no leader" in str(delayed.failure) and delayed.outage is None, DEADLINE)
            broken.discard("leader")
            store.add([(DelayedMessage(identity="b", topic="u", due=1), b"b")])
            await eventually(lambda: producer.published == [b"b"] and delayed.failure is None, DEADLINE)


async def test_a_failure_ends_with_the_message_that_is_not_published_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An app was not ready although its store was empty."""
    monkeypatch.setattr(relay, "RETRY", 0.3)
    monkeypatch.setattr(relay, "POLL", 0.01)
    producer, looks = Scripted(), looks_of(monkeypatch)

    async def fail(_: Producer, __: bytes) -> None:
        raise PublishFailed("no leader")

    monkeypatch.setattr(relay, "publish_record", fail)
    with DelayStore(tmp_path / "store") as store:
        store.add([(DelayedMessage(identity="a", topic="t", due=1), b"a")])
        async with scripted(store, producer) as delayed:
            await eventually(lambda: "no leader" in str(delayed.failure), DEADLINE)
            failed = len(looks)
            await eventually(lambda: len(looks) > failed + 2 or delayed.failure is None, DEADLINE)
            assert delayed.failure, "it is tried again"
            await eventually(lambda: store.cancel("a") is Cancellation.CANCELLED or not store.count(), DEADLINE)
            await eventually(lambda: delayed.failure is None, DEADLINE)


async def test_a_store_that_takes_no_message_is_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk can be read: the app was ready, and requeued what it received."""
    monkeypatch.setattr(relay, "POLL", 0.01)
    looks = looks_of(monkeypatch)
    later = round(time.time() * 1000) + 3_600_000
    with kept_connections() as opened, DelayStore(tmp_path / "store") as store:
        async with scripted(store, Scripted()) as delayed:
            handle = handlers_of(delayed)[delayed.channels[0]]
            record = encode_delay(DelayedMessage(identity="a", topic="t", due=later), bytes(30_000))
            fill_disk(opened[0])
            with pytest.raises(sqlite3.OperationalError):  # the consumer requeues it, and other relays receive it
                await handle([SimpleNamespace(body=record)])
            before = len(looks)
            await eventually(lambda: len(looks) > before + 2, DEADLINE)
            assert "disk is full" in str(delayed.outage)
            free_disk(opened[0])
            await handle([SimpleNamespace(body=record)])
            await eventually(lambda: delayed.outage is None, DEADLINE)


async def test_nothing_is_published_when_the_lease_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stood still published what was cancelled meanwhile."""
    monkeypatch.setattr(relay, "lease_time", lambda _: 0.05)
    monkeypatch.setattr(relay, "POLL", 0.01)
    producer = Scripted()
    take = DelayStore.take

    def slow(store: DelayStore, *arguments: Any) -> Any:
        taken = take(store, *arguments)
        if taken:
            time.sleep(0.1)
            assert store.cancel("a") is Cancellation.TOO_LATE
        return taken

    monkeypatch.setattr(DelayStore, "take", slow)
    with DelayStore(tmp_path / "store") as store:
        store.add([(DelayedMessage(identity="a", topic="t", due=1), b"a")])
        async with scripted(store, producer):
            await eventually(lambda: store.count() == 0, DEADLINE)
        assert producer.parts == []
