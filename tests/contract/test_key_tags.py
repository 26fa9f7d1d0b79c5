"""Keys over tags: consumers share the keys of a channel where the server does not know key_failover."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio import create_task_group
from anyio.to_thread import run_sync

from nsqext import Admin, Consumer, Message, OutgoingMessage, Producer
from nsqext.errors import ExtendNotSupported, InvalidSetting
from tests.support.consumers import eventually

if TYPE_CHECKING:
    from tests.support.cluster import ClusterUnderTest, Killable

pytestmark = pytest.mark.anyio

TAGS = 8
PATIENCE = 150.0


class Service:
    """Consumers of a channel that share the keys, with a check of every handled message.

    Without ``tags`` they share them as the server supports it.
    """

    def __init__(self, lookupd: list[str], topic: str, channel: str, tags: int | None = TAGS) -> None:
        self.tags = tags
        self.lookupd = lookupd
        self.topic = topic
        self.channel = channel
        self.seen: dict[str, dict[int, None]] = defaultdict(dict)
        self.handled: set[int] = set()
        self.by: dict[str, set[int]] = defaultdict(set)
        self.running: dict[str, int] = {}
        self.both: list[str] = []
        self.chance = random.Random(3)

    def consumer(self, number: int) -> Consumer:
        """Return a consumer that records keys and numbers."""
        consumer = Consumer(
            self.topic,
            self.channel,
            lookupd=self.lookupd,
            dispatch="key_failover",
            key_tags=self.tags,
            concurrency=8,
            max_in_flight=200,
            close_timeout=5.0,
            client_id="billing",
        )

        @consumer.handler
        async def handle(message: Message) -> None:
            key, body = str(message.key), int(message.body)
            if self.running.setdefault(key, number) != number:
                self.both.append(key)
            self.seen[key].setdefault(body)
            self.by[key].add(number)
            try:
                await anyio.sleep(self.chance.random() * 0.01)
            finally:
                self.running.pop(key, None)
            self.handled.add(body)

        return consumer


def drafts(first: int, count: int, numbers: dict[str, list[int]]) -> list[OutgoingMessage]:
    """Return messages of 60 keys whose bodies are their numbers."""
    made = []
    for number in range(first, first + count):
        key = f"key-{number * 7919 % 60}"
        numbers[key].append(number)
        made.append(OutgoingMessage(b"%d" % number, key=key))
    return made


@pytest.mark.parametrize("tags", [TAGS, None], ids=["tags", "as the server can"])
async def test_consumers_share_the_keys_and_keep_their_order(
    cluster_under_test: ClusterUnderTest, channel: str, tags: int | None
) -> None:
    """Two consumers start, a third one joins, and one leaves, while messages flow."""
    topic, lookupd = cluster_under_test.extend, cluster_under_test.lookupd
    await cluster_under_test.make_named_channel(topic, channel)
    service = Service(lookupd, topic, channel, tags)
    numbers: dict[str, list[int]] = defaultdict(list)
    async with create_task_group() as tasks, Producer(lookupd, key_tags=tags or 16) as producer:
        consumers = [service.consumer(number) for number in range(3)]
        for consumer in consumers[:2]:
            tasks.start_soon(consumer.serve)
        for turn in range(30):
            await producer.publish_many(topic, drafts(turn * 50, 50, numbers))
            await anyio.sleep(0.15)
            if turn == 10:
                tasks.start_soon(consumers[2].serve)
            if turn == 20:
                consumers[0].stop()
        await eventually(lambda: len(service.handled) == 1500, patience=PATIENCE)
        for consumer in consumers:
            consumer.stop()
    assert service.both == []
    assert {key: list(found) for key, found in service.seen.items()} == numbers
    owners = [{key for key, by in service.by.items() if number in by} for number in range(3)]
    assert all(owners)


async def test_a_consumer_that_dies_is_replaced_in_order(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    """Its task is cancelled without a close: its connections end with messages in flight."""
    topic, lookupd = cluster_under_test.extend, cluster_under_test.lookupd
    await cluster_under_test.make_named_channel(topic, channel)
    service = Service(lookupd, topic, channel)
    numbers: dict[str, list[int]] = defaultdict(list)
    async with create_task_group() as tasks, Producer(lookupd, key_tags=TAGS) as producer:
        first, second = service.consumer(0), service.consumer(1)
        for consumer in (first, second):
            tasks.start_soon(consumer.serve)
        await eventually(lambda: len(first.connections) > 3 and len(second.connections) > 3, patience=PATIENCE)
        for turn in range(6):
            await producer.publish_many(topic, drafts(turn * 100, 100, numbers))
        await eventually(lambda: len(service.handled) > 100, patience=PATIENCE)
        for subscription in first._group.subscriptions:
            subscription.end()  # as if its network were lost
        first.stop()
        await eventually(lambda: len(service.handled) == 600, patience=PATIENCE)
        second.stop()
    assert {key: list(found) for key, found in service.seen.items()} == numbers


@pytest.mark.parametrize("killable", [True], indirect=True, ids=["extend"])
async def test_keys_keep_their_order_when_the_leader_is_killed(killable: Killable, channel: str) -> None:
    topic, lookupd = killable.topic, killable.lookupd
    async with Admin(lookupd) as admin:
        await admin.create_channel(topic, channel)
    service = Service(lookupd, topic, channel)
    numbers: dict[str, list[int]] = defaultdict(list)
    async with create_task_group() as tasks, Producer(lookupd, key_tags=TAGS, timeout=90.0) as producer:
        consumers = [service.consumer(number) for number in range(2)]
        for consumer in consumers:
            tasks.start_soon(consumer.serve)
        for turn in range(20):
            await producer.publish_many(topic, drafts(turn * 50, 50, numbers))
            if turn == 8:
                # until a first message is finished, a real server tells no follower about the channel
                await eventually(lambda: service.handled >= set(range(50)), patience=PATIENCE)
                await run_sync(killable.kill, (await producer.publish(topic, b"1000000")).node)
        await eventually(lambda: len(service.handled) == 1001, patience=2 * PATIENCE)
        for consumer in consumers:
            consumer.stop()
    assert service.both == []
    assert {key: list(found) for key, found in service.seen.items() if key in numbers} == numbers


async def test_messages_without_a_key_go_to_any_consumer(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.extend, cluster_under_test.lookupd
    await cluster_under_test.make_named_channel(topic, channel)
    service = Service(lookupd, topic, channel)
    async with create_task_group() as tasks, Producer(lookupd, key_tags=TAGS) as producer:
        consumer = service.consumer(0)
        tasks.start_soon(consumer.serve)
        await producer.publish_many(topic, [b"%d" % number for number in range(50)])
        await producer.publish(topic, b"50")
        await eventually(lambda: len(service.handled) == 51, patience=PATIENCE)
        consumer.stop()


async def test_a_topic_without_extend_support_is_refused(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    service = Service(lookupd, topic, channel)
    with pytest.raises(InvalidSetting, match="does not support extend headers, which key_tags needs"):
        await service.consumer(0).serve()
    async with Producer(lookupd, key_tags=TAGS) as producer:
        with pytest.raises(ExtendNotSupported):
            await producer.publish(topic, b"x", key="a")


async def test_producers_without_tags_are_named(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.extend, cluster_under_test.lookupd
    await cluster_under_test.make_named_channel(topic, channel)
    service = Service(lookupd, topic, channel)
    async with Producer(lookupd) as producer:
        await producer.publish(topic, b"1", key="a")
    with pytest.raises(InvalidSetting, match=f"the next message has no tag of key_tags={TAGS}"):
        await service.consumer(0).serve()
