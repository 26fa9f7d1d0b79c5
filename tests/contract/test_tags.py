"""Tag dispatch: which consumer receives which messages."""

from __future__ import annotations

import pytest
from anyio import create_task_group

from nsqext import Consumer, Producer
from tests.support.cluster import PARTITIONS, ClusterUnderTest
from tests.support.messages import finish_all, nothing_for, subscribed

pytestmark = pytest.mark.anyio


async def test_each_consumer_gets_its_settings(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.extend, cluster_under_test.lookupd
    tags = [("canary", "blue", None)[number % 3] for number in range(30)]
    canary = Consumer(topic, channel, lookupd=lookupd, tag="canary")
    blue = Consumer(topic, channel, lookupd=lookupd, tag="blue")
    other = Consumer(topic, channel, lookupd=lookupd)
    async with subscribed(canary, blue, other), Producer(lookupd) as producer:
        for number, tag in enumerate(tags):
            await producer.publish(topic, b"%d" % number, tag=tag, headers={"n": str(number)})
        got: dict[str | None, set[int]] = {}

        async def collect(tag: str | None, consumer: Consumer) -> None:
            got[tag] = {int(message.headers["n"]) for message in await finish_all(consumer, 10)}

        async with create_task_group() as tasks:  # a message for a consumer that is not ready holds up the others
            for tag, consumer in (("canary", canary), ("blue", blue), (None, other)):
                tasks.start_soon(collect, tag, consumer)
    assert got == {tag: {number for number, given in enumerate(tags) if given == tag} for tag in set(tags)}


async def test_a_tagged_message_without_a_tagged_consumer_is_delivered_to_the_untagged_one(
    cluster_under_test: ClusterUnderTest, channel: str
) -> None:
    topic, lookupd = cluster_under_test.extend, cluster_under_test.lookupd
    blue = Consumer(topic, channel, lookupd=lookupd, tag="blue")
    other = Consumer(topic, channel, lookupd=lookupd)
    async with subscribed(blue, other), Producer(lookupd) as producer:
        for partition in range(PARTITIONS):
            await producer.publish(topic, b"hi", tag="canary", partition=partition)
        messages = await finish_all(other, PARTITIONS)
        assert await nothing_for(blue, 0.2)
    assert [message.tag for message in messages] == ["canary"] * PARTITIONS


async def test_the_untagged_consumer_gets_the_messages_when_the_tagged_one_leaves(
    cluster_under_test: ClusterUnderTest, channel: str
) -> None:
    topic, lookupd = cluster_under_test.extend, cluster_under_test.lookupd
    async with Consumer(topic, channel, lookupd=lookupd) as other, Producer(lookupd) as producer:
        async with Consumer(topic, channel, lookupd=lookupd, tag="canary") as canary:
            await producer.publish(topic, b"1", tag="canary")
            assert [message.body for message in await finish_all(canary, 1)] == [b"1"]
        await producer.publish(topic, b"2", tag="canary")
        assert [message.body for message in await finish_all(other, 1)] == [b"2"]


async def test_on_a_plain_topic_a_tagged_consumer_gets_everything(
    cluster_under_test: ClusterUnderTest, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    async with Consumer(topic, channel, lookupd=lookupd, tag="canary") as consumer, Producer(lookupd) as producer:
        await producer.publish(topic, b"hi")
        assert [message.body for message in await finish_all(consumer, 1)] == [b"hi"]
    assert "the topic does not support tags" in caplog.text
