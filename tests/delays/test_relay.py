"""Messages that a relay publishes when they are due, on both generations."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from secrets import token_hex

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
    PublishFailed,
    ReceiptsMissing,
    TopicNotFound,
)
from nsqext.middleware import Middleware, Publishing, SendNext
from nsqext.protocol.delay_record import DelayedMessage
from tests.support.consumers import eventually
from tests.support.kept_connections import fill_disk, free_disk, kept_connections
from tests.support.machine_pauses import unless_paused

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
