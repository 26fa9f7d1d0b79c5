"""Ordered topics: one message at a time for each partition, none before the previous one is finished."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from nsqext import Consumer, Message, Producer
from tests.support.cluster import PARTITIONS, ClusterUnderTest
from tests.support.messages import DEADLINE, finish_all, nothing_for, subscribed, take

pytestmark = pytest.mark.anyio

QUICK: dict[str, Any] = {"requeue_delay": 0.1, "backoff": "off"}


async def test_messages_of_a_key_keep_their_order(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.ordered, cluster_under_test.lookupd
    keys = [f"account {number}" for number in range(5)]
    async with Consumer(topic, channel, lookupd=lookupd) as consumer, Producer(lookupd) as producer:

        async def publish(key: str) -> None:
            for number in range(12):
                await producer.publish(topic, f"{key}:{number}".encode(), key=key)

        async with anyio.create_task_group() as tasks:
            for key in keys:
                tasks.start_soon(publish, key)
        messages = await finish_all(consumer, 60)
    for key in keys:
        bodies = [message.body.decode() for message in messages if message.body.startswith(key.encode())]
        assert bodies == [f"{key}:{number}" for number in range(12)]
    for partition in range(PARTITIONS):
        offsets = [message.offset for message in messages if message.partition == partition]
        assert offsets == sorted(set(offsets))


async def test_one_message_of_a_partition_is_in_flight(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.ordered, cluster_under_test.lookupd
    async with Consumer(topic, channel, lookupd=lookupd) as consumer, Producer(lookupd) as producer:
        for body in (b"1", b"2"):
            for partition in range(PARTITIONS):
                await producer.publish(topic, body, partition=partition)
        first = await take(consumer, PARTITIONS)
        assert await nothing_for(consumer, 0.5)
        for message in first:
            await message.finish()
        second = await finish_all(consumer, PARTITIONS)
    assert [message.body for message in first + second] == [b"1"] * PARTITIONS + [b"2"] * PARTITIONS
    assert {message.partition for message in first} == set(range(PARTITIONS))


async def test_a_requeued_message_is_delivered_before_all_others(
    cluster_under_test: ClusterUnderTest, channel: str
) -> None:
    topic, lookupd = cluster_under_test.ordered, cluster_under_test.lookupd
    async with Consumer(topic, channel, lookupd=lookupd) as consumer, Producer(lookupd) as producer:
        for body in (b"1", b"2"):
            await producer.publish(topic, body, partition=0)
        message = (await take(consumer, 1))[0]
        await message.requeue()
        messages = await finish_all(consumer, 2)
    assert [(message.body, message.attempts) for message in messages] == [(b"1", 2), (b"2", 1)]


async def test_a_handler_that_raises_blocks_its_partition(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.ordered, cluster_under_test.lookupd
    tried: list[tuple[bytes, int]] = []
    consumer = Consumer(topic, channel, lookupd=lookupd, concurrency=4, **QUICK)

    @consumer.handler
    async def handle(message: Message) -> None:
        tried.append((message.body, message.attempts))
        if message.body == b"2" and message.attempts < 3:
            raise LookupError("not yet")
        if message.body == b"4":
            consumer.stop()

    async with Consumer(topic, channel, lookupd=lookupd):
        pass
    async with Producer(lookupd) as producer:
        for body in (b"1", b"2", b"3", b"4"):
            await producer.publish(topic, body, partition=0)
    with anyio.fail_after(DEADLINE):
        await consumer.serve(signals=False)
    assert tried == [(b"1", 1), (b"2", 1), (b"2", 2), (b"2", 3), (b"3", 1), (b"4", 1)]


async def test_another_consumer_continues_in_order_when_one_leaves(
    cluster_under_test: ClusterUnderTest, channel: str
) -> None:
    topic, lookupd = cluster_under_test.ordered, cluster_under_test.lookupd
    one = Consumer(topic, channel, lookupd=lookupd)
    other = Consumer(topic, channel, lookupd=lookupd)
    async with subscribed(other), Producer(lookupd) as producer:
        async with one:
            for number in range(6):
                await producer.publish(topic, b"%d" % number, partition=1)
            async with anyio.create_task_group() as tasks:
                bodies: list[bytes] = []

                async def collect(consumer: Consumer) -> None:
                    async for message in consumer:
                        bodies.append(message.body)
                        await message.finish()
                        if len(bodies) == 3:
                            tasks.cancel_scope.cancel()

                for consumer in (one, other):
                    tasks.start_soon(collect, consumer)
        bodies += [message.body for message in await finish_all(other, 3)]
    assert bodies == [b"%d" % number for number in range(6)]
