"""Nodes that `node_filter` leaves out, on both generations."""

from __future__ import annotations

import logging

import anyio
import pytest

from nsqext import Consumer, Producer
from nsqext.errors import InvalidSetting
from tests.support.cluster import PARTITIONS, ClusterUnderTest, Original
from tests.support.messages import finish_all, nothing_for, subscribed

pytestmark = pytest.mark.anyio


async def leaders_of(cluster: ClusterUnderTest) -> list[str]:
    async with Producer(cluster.lookupd) as producer:
        return [(await producer.publish(cluster.plain, b"x", partition=number)).node for number in range(PARTITIONS)]


async def test_a_producer_publishes_to_the_nodes_that_are_kept(cluster_under_test: ClusterUnderTest) -> None:
    cluster = cluster_under_test
    first, second = await leaders_of(cluster)
    assert first != second
    async with Producer(cluster.lookupd, node_filter=first.__ne__) as producer:
        for _ in range(4):
            assert (await producer.publish(cluster.plain, b"any")).partition == 1
        with anyio.fail_after(25), pytest.raises(InvalidSetting, match="node_filter leaves out the leader") as caught:
            await producer.publish(cluster.plain, b"here", partition=0)
        assert (caught.value.topic, caught.value.partition, caught.value.node) == (cluster.plain, 0, first)
        refused = 0
        for number in range(20):
            try:
                await producer.publish(cluster.plain, b"key", key=f"key {number}")
            except InvalidSetting:
                refused += 1
        assert 0 < refused < 20


async def test_a_filter_that_keeps_no_node_is_named(cluster_under_test: ClusterUnderTest, original: Original) -> None:
    for lookupd in (cluster_under_test.lookupd, original.lookupd):
        async with Producer(lookupd, node_filter=lambda node: False) as producer:
            with anyio.fail_after(25), pytest.raises(InvalidSetting, match="node_filter leaves out every node"):
                await producer.publish(cluster_under_test.plain, b"nowhere")


async def test_a_consumer_receives_from_the_nodes_that_are_kept(
    cluster_under_test: ClusterUnderTest, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "nsqext.lookup")
    cluster = cluster_under_test
    first, _ = await leaders_of(cluster)
    await cluster.make_named_channel(cluster.plain, channel)
    consumer = Consumer(cluster.plain, channel, lookupd=cluster.lookupd, node_filter=first.__ne__)
    async with Producer(cluster.lookupd) as producer, consumer:
        for partition in (0, 1, 0, 1):
            await producer.publish(cluster.plain, b"%d" % partition, partition=partition)
        assert [message.body for message in await finish_all(consumer, 2)] == [b"1", b"1"]
        assert await nothing_for(consumer, 0.3)
    assert f"partition 0 at {first}" in caplog.text


async def test_a_filter_that_raises_ends_no_consumer(
    cluster_under_test: ClusterUnderTest, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = cluster_under_test

    def broken(node: str) -> bool:
        raise ValueError(node)

    consumer = Consumer(cluster.plain, channel, lookupd=cluster.lookupd, node_filter=broken)
    async with Producer(cluster.lookupd, node_filter=broken) as producer, subscribed(consumer):
        await producer.publish(cluster.plain, b"one", partition=0)
        (message,) = await finish_all(consumer, 1)
    assert message.body == b"one"
    assert "node_filter raised for" in caplog.text


async def test_the_original_nsq(original: Original, channel: str) -> None:
    topic = f"filter_{channel}"
    kept = original.nodes[0]
    async with Producer(original.lookupd, node_filter=kept.__eq__) as producer:
        assert {(await producer.publish(topic, b"%d" % number)).node for number in range(4)} == {kept}
