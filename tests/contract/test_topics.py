"""Topics that change, and missing topics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext import Consumer, Message, Producer
from nsqext.errors import ExtendNotSupported, LookupFailed, TopicNotFound
from tests.support.messages import DEADLINE, finish_all

if TYPE_CHECKING:
    from nsqext.types import Address
    from tests.support.cluster import ClusterUnderTest

pytestmark = pytest.mark.anyio


async def test_an_upgrade_to_extend_is_followed(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    """Old and new messages are received without reopening a client."""
    topic, lookupd = cluster_under_test.upgradable.pop(), cluster_under_test.lookupd
    consumer = Consumer(topic, channel, lookupd=lookupd, lookup_poll_interval=0.5, heartbeat_interval=1.0)
    received: list[Message] = []
    async with (
        consumer,
        Producer(lookupd) as producer,  # does not poll before the test ends: only the refusal can trigger a lookup
        anyio.create_task_group() as tasks,
    ):
        done = anyio.Event()

        async def collect() -> None:
            async for message in consumer:
                received.append(message)
                await message.finish()
                if {message.body for message in received} == {b"before", b"between", b"with headers"}:
                    done.set()

        tasks.start_soon(collect)
        await producer.publish(topic, b"before")
        with pytest.raises(ExtendNotSupported):
            await producer.publish(topic, b"too early", headers={"a": "1"})
        await cluster_under_test.upgrade(topic)
        await producer.publish(topic, b"between")
        with anyio.fail_after(DEADLINE):
            while True:
                try:
                    await producer.publish(topic, b"with headers", headers={"a": "1"}, tag="canary")
                    break
                except ExtendNotSupported:
                    await anyio.sleep(0.1)
            await done.wait()
        consumer.stop()
    headed = [message for message in received if message.body == b"with headers"]
    assert {(message.headers["a"], message.tag) for message in headed} == {("1", "canary")}


async def test_publishers_of_a_missing_topic_get_an_error(cluster_under_test: ClusterUnderTest) -> None:
    async with Producer(cluster_under_test.lookupd) as producer:
        with anyio.fail_after(DEADLINE), pytest.raises(TopicNotFound, match="never_created"):
            await producer.publish("never_created", b"hi")
        with anyio.fail_after(DEADLINE), pytest.raises(TopicNotFound, match="never_created"):
            await producer.publish_many("never_created", [b"hi"])


async def test_consumers_wait_for_a_missing_topic(
    cluster_under_test: ClusterUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = Consumer("never_created", "ch", lookupd=cluster_under_test.lookupd, start_timeout=0.3)
    with anyio.fail_after(DEADLINE):
        async with consumer:
            pass
    assert "waiting for a partition to subscribe to" in caplog.text


async def test_a_lookup_service_that_is_down_is_reported(closed_address: Address) -> None:
    lookupd = str(closed_address)
    with anyio.fail_after(DEADLINE):
        async with Producer(lookupd, lookup_timeout=0.2) as producer:
            with pytest.raises(LookupFailed, match=lookupd):
                await producer.publish("orders", b"hi")
        with pytest.raises(LookupFailed, match=lookupd):
            async with Consumer("orders", "ch", lookupd=lookupd, lookup_timeout=0.0):
                pass


async def test_one_lookup_address_that_works_is_enough(
    cluster_under_test: ClusterUnderTest, channel: str, closed_address: Address
) -> None:
    topic = cluster_under_test.plain
    lookupd = [str(closed_address), *cluster_under_test.lookupd]
    async with Consumer(topic, channel, lookupd=lookupd) as consumer, Producer(lookupd) as producer:
        await producer.publish(topic, b"hi")
        assert [message.body for message in await finish_all(consumer, 1)] == [b"hi"]
