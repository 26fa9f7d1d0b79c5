"""Messages with a delay: consumers of the redesigned NSQ requeue them until they are due, or a relay publishes them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from nsqext import Admin, App, Consumer, Message, Producer
from nsqext.delays import DelayRelay, DelayStore
from nsqext.errors import DelayNotSupported
from nsqext.middleware import CallNext, Handling, Middleware
from tests.support.consumers import eventually
from tests.support.messages import DEADLINE, subscribed

if TYPE_CHECKING:
    from tests.support.cluster import ClusterUnderTest, Original

pytestmark = pytest.mark.anyio


class Called(Middleware):
    """Counts the calls that pass."""

    def __init__(self) -> None:
        self.calls = 0

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        self.calls += 1
        return await call_next(handling)


class Received:
    """A handler that records when each body arrived, and with how many attempts; it fails a number of times."""

    def __init__(self, consumer: Consumer, *, failures: int = 0) -> None:
        self.arrivals: list[tuple[bytes, float, int]] = []
        self._failures = failures
        self._changed = anyio.Event()
        consumer.handler(self.handle)

    async def handle(self, message: Message) -> None:
        self.arrivals.append((message.body, time.time(), message.attempts))
        self._changed.set()
        if message.attempts <= self._failures:
            raise ValueError("once more")

    async def wait(self, count: int) -> None:
        with anyio.fail_after(DEADLINE):
            while len(self.arrivals) < count:
                self._changed = anyio.Event()
                await self._changed.wait()


async def publish_delayed(producer: Producer, topic: str, delays: dict[bytes, float]) -> dict[bytes, float]:
    """Publish messages; return when each is due."""
    due = {}
    for body, delay in delays.items():
        due[body] = time.time() + delay
        await producer.publish(topic, body, delay=delay)
    return due


async def test_messages_arrive_when_they_are_due(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.extend, cluster_under_test.lookupd
    middleware = Called()
    consumer = Consumer(topic, channel, lookupd=lookupd, middleware=[middleware], requeue_delay=0.0, backoff="off")
    received = Received(consumer)
    async with Producer(lookupd) as producer, subscribed(consumer):
        due = await publish_delayed(producer, topic, {b"c": 1.2, b"a": 0.01, b"b": 0.4})
        await producer.publish(topic, b"now")
        await received.wait(4)
    times = {body: arrived for body, arrived, _ in received.arrivals}
    assert times[b"now"] < times[b"c"] or times[b"now"] > due[b"c"]
    assert middleware.calls == 4
    for body, arrived, attempts in received.arrivals:
        assert arrived >= due.get(body, 0.0)
        assert attempts == 1


async def test_a_message_that_waits_in_flight_does_not_hold_up_the_others(
    cluster_under_test: ClusterUnderTest, channel: str
) -> None:
    topic, lookupd = cluster_under_test.extend, cluster_under_test.lookupd
    consumer = Consumer(topic, channel, lookupd=lookupd, partitions=(0,), max_in_flight=1)
    received = Received(consumer)
    async with Producer(lookupd) as producer, subscribed(consumer):
        await producer.publish(topic, b"later", delay=4, partition=0)  # a new channel: the consumer keeps it
        due = time.time() + 4
        await producer.publish(topic, b"now", partition=0)
        await received.wait(2)
    (first, arrived, _), (second, *_) = received.arrivals
    assert (first, second) == (b"now", b"later")
    assert arrived < due


async def test_waiting_is_no_attempt(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.extend, cluster_under_test.lookupd
    letters: list[int] = []

    async def dead_letter(message: Message, error: Exception | None) -> None:
        letters.append(message.attempts)

    consumer = Consumer(
        topic, channel, lookupd=lookupd, max_attempts=3, dead_letter=dead_letter, requeue_delay=0.0, backoff="off"
    )
    received = Received(consumer, failures=2)
    async with Producer(lookupd) as producer, subscribed(consumer):
        await producer.publish(topic, b"x", delay=0.3)
        await received.wait(3)
    assert [attempts for _, _, attempts in received.arrivals] == [1, 2, 3]
    assert letters == []


async def test_messages_of_its_key_overtake_a_delayed_one(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.extend, cluster_under_test.lookupd
    consumer = Consumer(topic, channel, lookupd=lookupd, key="##key", concurrency=2, requeue_delay=0.0, backoff="off")
    received = Received(consumer, failures=1)
    async with Producer(lookupd) as producer, subscribed(consumer):
        due = time.time() + 1
        await producer.publish(topic, b"later", delay=1, key="k")
        for body in (b"first", b"second"):
            await producer.publish(topic, body, key="k")
        await received.wait(6)
    others = [(body, arrived) for body, arrived, _ in received.arrivals if body != b"later"]
    assert [body for body, _ in others] == [b"first", b"first", b"second", b"second"]
    overtaken = [body for body, _, _ in received.arrivals[4:]] == [b"later", b"later"]
    assert overtaken or others[-1][1] > due, "a slow machine handles them when the delayed one is due"


async def test_batches_and_iteration_wait_too(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.extend, cluster_under_test.lookupd
    async with Producer(lookupd) as producer:
        async with Consumer(topic, channel, lookupd=lookupd) as consumer:
            due = await publish_delayed(producer, topic, {b"one": 0.3})
            with anyio.fail_after(DEADLINE):
                message = await anext(consumer)
            assert time.time() >= due[message.body]
            await message.finish()
        async with Consumer(topic, channel, lookupd=lookupd) as consumer:
            due = await publish_delayed(producer, topic, {b"two": 0.3})
            with anyio.fail_after(DEADLINE):
                async for batch in consumer.batches(max_count=1):
                    assert time.time() >= due[batch[0].body]
                    await batch.finish()
                    break


async def test_a_consumer_in_order_waits_for_a_delayed_message(
    cluster_under_test: ClusterUnderTest, channel: str
) -> None:
    topic, lookupd = cluster_under_test.extend, cluster_under_test.lookupd
    consumer = Consumer(
        topic, channel, lookupd=lookupd, ordered=True, partitions=(0,), requeue_delay=0.0, backoff="off"
    )
    received = Received(consumer)
    async with Producer(lookupd) as producer, subscribed(consumer):
        due = time.time() + 0.5
        await producer.publish(topic, b"delayed", delay=0.5, partition=0)
        await producer.publish(topic, b"behind", partition=0)
        await received.wait(2)
    assert [(body, attempts) for body, _, attempts in received.arrivals] == [(b"delayed", 1), (b"behind", 1)]
    assert received.arrivals[0][1] >= due


@pytest.mark.parametrize("topic", ["plain", "ordered"])
async def test_topics_whose_consumers_cannot_delay_are_refused(
    cluster_under_test: ClusterUnderTest, topic: str
) -> None:
    async with Producer(cluster_under_test.lookupd) as producer:
        with pytest.raises(DelayNotSupported):
            await producer.publish(getattr(cluster_under_test, topic), b"x", delay=1, partition=0)


async def relayed(lookupd: list[str], topic: str, channel: str, store: DelayStore, **options: Any) -> list[bytes]:
    """Publish two messages by a relay, of which one is cancelled; return what arrives until nothing waits there."""
    relay = DelayRelay(store, topic=f"delayed_{channel}")
    async with Admin(lookupd) as admin:
        await admin.create_topic(relay.topic, channels=relay.channels)
        await admin.create_channel(topic, channel)
    app = App(lookupd)
    arrived: list[bytes] = []
    delivered = anyio.Event()
    relay.attach(app)

    @app.handler(topic, channel)
    async def handle(message: Message) -> None:
        assert time.time() >= due
        arrived.append(message.body)
        delivered.set()

    try:
        async with Producer(lookupd, delay_via="relay", delay_topic=relay.topic) as producer:
            await app.start()
            due = time.time() + 2
            await producer.publish(topic, b"later", delay=2, **options)
            await producer.publish(topic, b"never", delay=60, identity="never", **options)
            await producer.cancel_delayed("never")
            with anyio.fail_after(DEADLINE):
                await delivered.wait()
            await eventually(lambda: store.waiting(topic) == [])
    finally:
        await app.aclose()
        async with Admin(lookupd) as admin:
            await admin.delete_topic(relay.topic)
    return arrived


@pytest.mark.parametrize("topic", ["plain", "extend", "ordered"])
async def test_a_relay_delays_messages_of_every_topic(
    cluster_under_test: ClusterUnderTest, channel: str, topic: str, tmp_path: Path
) -> None:
    name: str = getattr(cluster_under_test, topic)
    with DelayStore(tmp_path / "store") as store:
        assert await relayed(cluster_under_test.lookupd, name, channel, store, key="k") == [b"later"]


async def test_a_relay_delays_messages_of_the_original_nsq(original: Original, channel: str, tmp_path: Path) -> None:
    topic = f"orders_{channel}"
    async with Admin(original.lookupd) as admin:
        await admin.create_topic(topic)
    with DelayStore(tmp_path / "store") as store:
        assert await relayed(original.lookupd, topic, channel, store) == [b"later"]
