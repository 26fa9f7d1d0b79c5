"""Messages that a relay publishes when they are due, on both generations."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from secrets import token_hex
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest

from nsqext import App, AppSettings, Consumer, ExtFilter, Message, OutgoingMessage, Producer, Receipt
from nsqext.broker import Cluster
from nsqext.delays import Cancellation, DelayRelay, DelayStore, relay
from nsqext.errors import (
    ExtendNotSupported,
    InvalidInput,
    InvalidPartition,
    InvalidSetting,
    InvalidState,
    NsqError,
    PublishFailed,
    ReceiptsMissing,
    TopicNotFound,
)
from nsqext.errors.server import BadMessage
from nsqext.middleware import Middleware, Publishing, SendNext
from nsqext.protocol.delay_record import DelayedMessage, encode_delay
from nsqext.protocol.messages import IDENTITY_HEADER
from tests.support.consumers import eventually
from tests.support.kept_connections import fill_disk, free_disk, kept_connections
from tests.support.machine_pauses import unless_paused

if TYPE_CHECKING:
    from nsqext.delays.store import TakenMessage

pytestmark = pytest.mark.anyio

DEADLINE = 20.0


@pytest.fixture(scope="module", params=["redesigned", "original"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two nodes of one generation."""
    with Cluster(nodes=2, generation=request.param) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def redesigned() -> Iterator[Cluster]:
    """One redesigned node."""
    with Cluster(nodes=1) as cluster:
        yield cluster


@asynccontextmanager
async def relaying(cluster: Cluster, *stores: DelayStore) -> AsyncIterator[str]:
    """Run a relay for each store; yield the topic of the delayed messages."""
    topic = f"delayed_{token_hex(4)}"
    relays = [DelayRelay(store, topic=topic) for store in stores]
    cluster.create_topic(topic, channels={name for one in relays for name in one.channels})
    apps = [App(cluster.lookupd) for _ in stores]
    for app, one in zip(apps, relays, strict=True):
        one.attach(app)
        await app.start()
    try:
        yield topic
    finally:
        for app in apps:
            await app.aclose()


@asynccontextmanager
async def receiving(cluster: Cluster, topic: str) -> AsyncIterator[list[tuple[Message, float]]]:
    """Consume a topic; yield the list of its messages with the times when they were received."""
    received: list[tuple[Message, float]] = []
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd)

    @consumer.handler
    async def handle(message: Message) -> None:
        received.append((message, time.time()))

    async with consumer:
        yield received


async def count(received: list[tuple[Message, float]], number: int) -> None:
    """Wait for a number of messages."""
    await eventually(lambda: len(received) >= number, DEADLINE)


def make_topic(cluster: Cluster, *, extend: bool = False, ordered: bool = False) -> str:
    """Return a topic with the channel ``ch``."""
    name = f"t_{token_hex(4)}"
    cluster.create_topic(name, channels=["ch"], extend=extend, ordered=ordered)
    return name


def test_no_setting_of_an_app_keeps_records_from_its_relay(tmp_path: Path) -> None:
    """Delayed messages were lost: rejected while the disk was full, or left out. A function for keys ended the app."""
    settings: list[AppSettings] = [
        {},
        {"max_attempts": 3, "dead_letter": "dead", "reject_ordered": True},
        {"tag": "canary"},
        {"ext_filter": ExtFilter(1, "country", "NL")},
        {"sample_rate": 50},
        {"partitions": (1,)},
        {"key": "order"},
        {"decompress": False},
        {"max_in_flight": 1},
    ]
    with DelayStore(tmp_path / "store") as store:
        found = []
        for given in settings:
            app = App("127.0.0.1:1", **given)
            DelayRelay(store).attach(app)
            found.append([app.options_of(spec) for spec in app.specs])
    assert found[1:] == found[:-1]


async def test_records_that_an_app_with_a_start_finds_are_not_left_out(redesigned: Cluster, tmp_path: Path) -> None:
    """An app that reads from the end whenever it starts moved the channel of its relay: delayed messages were lost."""
    cluster, topic, delayed = redesigned, make_topic(redesigned), f"delayed_{token_hex(4)}"
    with DelayStore(tmp_path / "store") as store:
        relay = DelayRelay(store, topic=delayed)
        cluster.create_topic(delayed, channels=set(relay.channels))
        async with Producer(cluster.lookupd, delay_via="relay", delay_topic=delayed) as producer:
            for _ in range(3):  # servers deliver the first one before they move the channel
                await producer.publish(topic, b"late", delay=0.01)
        app = App(cluster.lookupd, start="latest", start_existing=True)
        relay.attach(app)
        async with app, receiving(cluster, topic) as received:
            await count(received, 3)


async def test_messages_are_published_when_they_are_due(cluster: Cluster, tmp_path: Path) -> None:
    topic = make_topic(cluster)
    with DelayStore(tmp_path / "one") as one, DelayStore(tmp_path / "two") as two:
        async with relaying(cluster, one, two) as delayed, receiving(cluster, topic) as received:
            async with Producer(cluster.lookupd, delay_via="relay", delay_topic=delayed) as producer:
                due = {}
                for number, delay in enumerate([0.6, 0.01, 0.3] * 3):
                    due[b"%d" % number] = time.time() + delay
                    receipt = await producer.publish(topic, b"%d" % number, delay=delay)
                    assert receipt.topic == delayed
                await producer.publish(topic, b"now", delay=0)
            await count(received, len(due) + 1)
        assert (one.count(), two.count()) == (0, 0)
    assert sorted(message.body for message, _ in received) == sorted([*due, b"now"])
    for message, arrived in received:
        assert arrived >= due.get(message.body, 0.0)


async def test_messages_keep_headers_tag_trace_id_and_key(redesigned: Cluster, tmp_path: Path) -> None:
    cluster, topic = redesigned, make_topic(redesigned, extend=True)
    with DelayStore(tmp_path / "store") as store:
        async with relaying(cluster, store) as delayed, receiving(cluster, topic) as received:
            async with Producer(cluster.lookupd, delay_topic=delayed) as producer:
                headers = {"id": "ä", "outbox": "7"}
                await producer.publish(
                    topic, b"x", delay=0.05, via="relay", headers=headers, tag="blue", trace_id=9, key=b"\xffk"
                )
            await count(received, 1)
    message = received[0][0]
    assert message.headers.keys() == {*headers, "nsqext_id"}
    assert headers.items() <= message.headers.items()
    assert (message.tag, message.trace_id, message.key) == ("blue", 9, "ÿk")


async def test_ordered_topics_receive_delayed_messages(redesigned: Cluster, tmp_path: Path) -> None:
    topic = make_topic(redesigned, ordered=True)
    with DelayStore(tmp_path / "store") as store:
        async with relaying(redesigned, store) as delayed, receiving(redesigned, topic) as received:
            async with Producer(redesigned.lookupd, delay_topic=delayed, delay_via="relay") as producer:
                await producer.publish(topic, b"x", delay=0.05, key="k")
                with pytest.raises(InvalidPartition):
                    await producer.publish(topic, b"x", delay=0.05)
            await count(received, 1)


async def test_cancelled_messages_are_not_published(cluster: Cluster, tmp_path: Path) -> None:
    topic = make_topic(cluster)
    with DelayStore(tmp_path / "one") as one, DelayStore(tmp_path / "two") as two:
        async with relaying(cluster, one, two) as delayed, receiving(cluster, topic) as received:
            async with Producer(cluster.lookupd, delay_via="relay", delay_topic=delayed) as producer:
                await producer.cancel_delayed("before")
                await eventually(lambda: knows(one, "before") and knows(two, "before"), DEADLINE)
                for identity, delay in (("before", 1.0), ("after", 600.0), ("kept", 1.0), ("kept", 1.0)):
                    await producer.publish(topic, identity.encode(), delay=delay, identity=identity)
                await eventually(lambda: knows(one, "after") or knows(two, "after"), DEADLINE)
                await producer.cancel_delayed("after")
            await count(received, 1)
            await eventually(lambda: one.count() + two.count() == 0, DEADLINE)
    bodies = [message.body for message, _ in received]
    assert {*bodies} == {b"kept"}


def knows(store: DelayStore, identity: str) -> bool:
    """Return whether a store knows a message, which waits, was cancelled, or was published."""
    with store._transaction() as run:
        return run.execute("SELECT 1 FROM delayed WHERE identity=?", (identity,)).fetchone() is not None


async def test_a_message_that_cannot_be_published_waits_and_others_do_not(
    redesigned: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "RETRY", 0.2)
    cluster = redesigned

    async def attempt(number: int) -> None:
        topic, away = make_topic(cluster), make_topic(cluster)
        with DelayStore(tmp_path / f"store{number}") as store:
            async with relaying(cluster, store) as delayed, receiving(cluster, topic) as received:
                async with Producer(cluster.lookupd, delay_via="relay", delay_topic=delayed) as producer:
                    for body in range(5):
                        await producer.publish(away, b"%d" % body, delay=0.3)
                    cluster.delete_topic(away)
                    await producer.publish(topic, b"x", delay=0.5)
                await count(received, 1)
                waiting = store.waiting(away)
                assert len(waiting) == 5
                assert "not found" in waiting[0].error or "not know" in waiting[0].error
                cluster.create_topic(away, channels=["ch"])
                await eventually(lambda: store.count() == 0, DEADLINE)

    await unless_paused(attempt, 0.1)


async def test_wrong_publishes_are_refused_before_anything_is_sent(redesigned: Cluster) -> None:
    topic = make_topic(redesigned)
    async with Producer(redesigned.lookupd, delay_topic="nothing_here") as producer:
        for wrong in ({"via": "relays"}, {"identity": "a"}, {"identity": "a", "via": "consumer"}):
            with pytest.raises(InvalidInput):
                await producer.publish(topic, b"x", delay=1, **wrong)  # type: ignore[arg-type]
        for identity in ("", "x" * 201, 5):
            with pytest.raises(InvalidInput):
                await producer.publish(topic, b"x", delay=1, via="relay", identity=identity)  # type: ignore[arg-type]
        for without_delay in ({"identity": "a", "via": "relay"}, {"via": "relay"}, {"via": "consumer"}):
            with pytest.raises(InvalidInput, match="delay"):
                await producer.publish(topic, b"x", **without_delay)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput):
            await producer.publish(topic, b"x", delay=-1, via="relay")
        with pytest.raises(InvalidPartition):
            await producer.publish(topic, b"x", delay=1, via="relay", key="k", partition=0)
        with pytest.raises(ExtendNotSupported):
            await producer.publish(topic, b"x", delay=1, via="relay", headers={"a": "b"})
        with pytest.raises(TopicNotFound, match="nothing_here"):
            await producer.publish(topic, b"x", delay=1, via="relay")
    with pytest.raises(InvalidSetting):
        Producer(redesigned.lookupd, delay_via="postman")  # type: ignore[arg-type]


async def test_middleware_sees_the_message_and_its_topic(redesigned: Cluster, tmp_path: Path) -> None:
    topic = make_topic(redesigned, extend=True)
    seen: list[tuple[str, object, object]] = []

    class Stamp(Middleware):
        async def publish(self, publishing: Publishing, send_next: SendNext) -> Sequence[Receipt]:
            seen.append((publishing.topic, publishing.delay, publishing.via))
            (message,) = publishing.messages
            publishing.messages = [OutgoingMessage(message.body, {"stamp": "1"})]
            return await send_next(publishing)

    with DelayStore(tmp_path / "store") as store:
        async with relaying(redesigned, store) as delayed, receiving(redesigned, topic) as received:
            async with Producer(redesigned.lookupd, delay_topic=delayed, middleware=[Stamp()]) as producer:
                await producer.publish(topic, b"x", delay=0.05, via="relay")
            await count(received, 1)
    assert seen == [(topic, 0.05, "relay")]
    assert received[0][0].headers["stamp"] == "1"


async def test_middleware_that_drops_messages_or_receipts_ends_the_relay(redesigned: Cluster, tmp_path: Path) -> None:
    """It published each such message again every 15 seconds."""
    topic = make_topic(redesigned)

    class Drops(Middleware):
        async def publish(self, publishing: Publishing, send_next: SendNext) -> Sequence[Receipt]:
            await send_next(publishing)
            return []

    with DelayStore(tmp_path / "store") as store:
        store.add([(DelayedMessage(identity="one", topic=topic, due=1), b"x")])
        async with Producer(redesigned.lookupd, middleware=[Drops()]) as producer:
            with anyio.fail_after(DEADLINE), pytest.raises(InvalidState, match="drops messages of the store") as caught:
                await DelayRelay(store).run(producer)
        assert (store.count(), caught.value.topic) == (1, topic)
        assert isinstance(caught.value.__cause__, ReceiptsMissing)


POISON = (
    b"hello",
    b'{"nsqext":"delay","identity":"i1","topic":"x","due":9223372036854775808}\nbody',
    b'{"nsqext":"delay","identity":"i2","topic":"x","due":9223372036854775807}\nbody',
    b'{"nsqext":"delay","identity":"i3","topic":"x","due":-1}\nbody',
    b'{"nsqext":"delay","identity":"i4","topic":"no topic","due":1}\nbody',
    b'{"nsqext":"delay","identity":"","topic":"x","due":1}\nbody',
    b'{"nsqext":"delay","identity":"i6","topic":"x","due":1}\n',
    b'{"nsqext":"delay","identity":"i7","topic":"x","due":1,"trace_id":18446744073709551616}\nbody',
    b'{"nsqext":"delay","identity":"i8","topic":"x","due":1,"partition":-1}\nbody',
    b'{"nsqext":"delay","identity":"i\\u0000","topic":"x","due":1}\nbody',
    b'{"nsqext":"cancel","identity":"i9","time":9223372036854775808}\n',
    b'{"nsqext":"delay","identity":"\xff","topic":"x","due":1}\nbody',
)


async def test_other_records_of_the_topic_are_set_aside_and_hold_up_no_message(
    redesigned: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A due time of 2**63 raised OverflowError at each delivery, for the whole batch."""
    topic = make_topic(redesigned)
    with DelayStore(tmp_path / "store") as store:
        async with relaying(redesigned, store) as delayed, receiving(redesigned, topic) as received:
            async with Producer(redesigned.lookupd, delay_topic=delayed, delay_via="relay") as producer:
                await producer.publish_many(delayed, POISON)
                await producer.publish(topic, b"x", delay=0.05)
            await count(received, 1)
            await eventually(lambda: len(store.refused()) == len(POISON), DEADLINE)
        assert {one.record for one in store.refused()} == {*POISON}
        assert all(one.reason.startswith("not a delayed message") for one in store.refused())
        assert store.count() == 0
    assert "are set aside: not a delayed message" in caplog.text


async def test_a_message_that_is_cancelled_while_its_publish_fails_is_never_delivered(
    redesigned: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the leader of its topic is down."""
    monkeypatch.setattr(relay, "RETRY", 0.05)
    topic = make_topic(redesigned)
    trying, go = anyio.Event(), anyio.Event()
    publish = relay.publish_record

    async def fail(producer: Producer, data: bytes) -> None:
        if b"\nnever" not in data:
            return await publish(producer, data)
        trying.set()
        await go.wait()
        raise PublishFailed("no leader")

    monkeypatch.setattr(relay, "publish_record", fail)
    with DelayStore(tmp_path / "store") as store:
        async with relaying(redesigned, store) as delayed, receiving(redesigned, topic) as received:
            async with Producer(redesigned.lookupd, delay_topic=delayed, delay_via="relay") as producer:
                await producer.publish(topic, b"never", delay=0.01, identity="never")
                with anyio.fail_after(DEADLINE):
                    await trying.wait()
                assert store.cancel("never") is Cancellation.TOO_LATE
                assert [one.publishing for one in store.waiting()] == [True]
                go.set()
                await eventually(lambda: store.count() == 0, DEADLINE)
                await producer.publish(topic, b"after", delay=0.01)
            await count(received, 1)
    assert [message.body for message, _ in received] == [b"after"]


async def test_a_message_that_is_cancelled_while_its_leader_is_down_is_never_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay has tried to publish it: the cancellation answers that it is too late, and ends the attempts."""
    monkeypatch.setattr(relay, "RETRY", 0.2)
    taken, killed, publish = anyio.Event(), anyio.Event(), relay.publish_record

    async def wait_and_publish(producer: Producer, data: bytes) -> None:
        if data.endswith(b"\nnever"):
            taken.set()
        await killed.wait()
        await publish(producer, data)

    monkeypatch.setattr(relay, "publish_record", wait_and_publish)
    with Cluster(nodes=2) as cluster, DelayStore(tmp_path / "store") as store:
        topic = make_topic(cluster)
        away = cluster.leader(topic)
        delayed = f"delayed_{token_hex(4)}"
        while True:  # a leader of its own, which stays
            channels = DelayRelay(store, topic=delayed).channels
            cluster.create_topic(delayed, channels=channels)
            if cluster.leader(delayed) != away:
                break
            cluster.delete_topic(delayed)
            delayed = f"delayed_{token_hex(4)}"
        app = App(cluster.lookupd, timeout=1.0)
        DelayRelay(store, topic=delayed).attach(app)
        async with app, Producer(cluster.lookupd, delay_topic=delayed, delay_via="relay") as producer:
            for body in ("never", "kept"):
                await producer.publish(topic, body.encode(), delay=0.01, identity=body)
            with anyio.fail_after(DEADLINE):
                await taken.wait()
            await eventually(lambda: store.count() == 2, DEADLINE)
            cluster.kill(away)
            assert store.cancel("never") is Cancellation.TOO_LATE
            killed.set()
            await eventually(lambda: "never" not in {one.identity for one in store.waiting()}, DEADLINE)
            assert [one.identity for one in store.waiting()] == ["kept"]
            cluster.restart(away)
            async with receiving(cluster, topic) as received:
                await count(received, 1)
                await eventually(lambda: store.count() == 0, DEADLINE)
    assert {message.body for message, _ in received} == {b"kept"}


async def test_the_partition_that_the_publisher_chose_is_kept(redesigned: Cluster, tmp_path: Path) -> None:
    name = f"t_{token_hex(4)}"
    redesigned.create_topic(name, partitions=3, channels=["ch"])
    with DelayStore(tmp_path / "store") as store:
        async with relaying(redesigned, store) as delayed, receiving(redesigned, name) as received:
            async with Producer(redesigned.lookupd, delay_topic=delayed, delay_via="relay") as producer:
                for _ in range(4):
                    await producer.publish(name, b"x", delay=0.01, partition=2)
            await count(received, 4)
    assert {message.partition for message, _ in received} == {2}


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


@asynccontextmanager
async def scripted(store: DelayStore, producer: Scripted, keep: float = 86_400.0) -> AsyncIterator[DelayRelay]:
    """Run a relay with a scripted producer."""
    delayed = DelayRelay(store, keep=keep)
    with anyio.fail_after(DEADLINE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(delayed.run, cast("Any", producer))
            yield delayed
            tasks.cancel_scope.cancel()


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


async def test_a_full_disk_ends_no_relay_and_loses_no_message(
    redesigned: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is received is requeued, and what is published is recorded later."""
    monkeypatch.setattr(relay, "REOPEN", 0.01)
    topic = make_topic(redesigned)
    with kept_connections() as opened, DelayStore(tmp_path / "store") as store:
        async with relaying(redesigned, store) as delayed, receiving(redesigned, topic) as received:
            async with Producer(redesigned.lookupd, delay_topic=delayed, delay_via="relay") as producer:
                await producer.publish(topic, b"before", delay=0.01)
                await count(received, 1)
                fill_disk(opened[0])
                for number in range(3):
                    await producer.publish(topic, b"%d " % number + bytes(30_000), delay=0.01)
                await eventually(lambda: "database or disk is full" in caplog.text, DEADLINE)
                free_disk(opened[0])
            await count(received, 4)
            await eventually(lambda: store.count() == 0, DEADLINE)
    assert sorted(message.body[:2] for message, _ in received) == [b"0 ", b"1 ", b"2 ", b"be"]


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
