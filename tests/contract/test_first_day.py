"""Two consumers that start one after the other, programs that start before lookup, and the first message after a pause.

Each on the redesigned NSQ and on the original.
"""

from __future__ import annotations

import time
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext import Consumer, ConsumerSettings, Message, Producer
from tests.support.consumers import eventually
from tests.support.machine_pauses import unless_paused
from tests.support.messages import DEADLINE, finish_all, share_of_a_late_consumer
from tests.support.tcp_relay import relaying

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nsqext.types import Address
    from tests.support.cluster import ClusterUnderTest, Original

pytestmark = pytest.mark.anyio


@pytest.fixture
async def topic(original: Original) -> str:
    """A topic of the original NSQ on one node, registered with lookup."""
    name = f"contract_{token_hex(4)}"
    async with Producer(nsqd=original.nodes[0]) as producer:
        await producer.publish(name, b"the first one")
    async with Producer(original.lookupd) as producer:
        await producer.publish(name, b"the second one")
    return name


async def test_a_late_consumer_gets_its_share(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    options: ConsumerSettings = {"partitions": (0,)}
    async with Producer(lookupd) as producer:
        share = await share_of_a_late_consumer(
            lambda: Consumer(topic, channel, lookupd=lookupd, **options),
            partial(producer.publish_many, topic, partition=0),
        )
    assert share >= 45


async def test_a_late_consumer_of_the_original_gets_its_share(original: Original) -> None:
    topic, node = f"contract_{token_hex(4)}", original.nodes[0]
    async with Producer(nsqd=node) as producer:
        share = await share_of_a_late_consumer(
            lambda: Consumer(topic, "ch", nsqd=node), partial(producer.publish_many, topic)
        )
    assert share >= 45


async def test_publishes_and_consumers_wait_for_lookup(
    cluster_under_test: ClusterUnderTest, channel: str, closed_address: Address, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = cluster_under_test
    await _wait_for_lookup(cluster.lookupd[0], cluster.plain, channel, closed_address, caplog)


async def test_publishes_and_consumers_wait_for_lookup_of_the_original(
    original: Original, topic: str, closed_address: Address, caplog: pytest.LogCaptureFixture
) -> None:
    await _wait_for_lookup(original.lookupd[0], topic, "ch", closed_address, caplog)


async def _wait_for_lookup(
    lookupd: str, topic: str, channel: str, closed: Address, caplog: pytest.LogCaptureFixture
) -> None:
    """Start a consumer and publish before the lookup service starts."""
    address = str(closed)
    consumer = Consumer(topic, channel, lookupd=address, lookup_timeout=60.0)
    handled = anyio.Event()

    @consumer.handler
    async def handle(message: Message) -> None:
        if message.body == b"after":
            handled.set()

    with anyio.fail_after(3 * DEADLINE):
        async with (
            Producer(address, lookup_timeout=60.0) as producer,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(consumer.serve)
            tasks.start_soon(producer.publish, topic, b"before")
            await eventually(lambda: "waiting for a partition to subscribe to" in caplog.text)
            await eventually(lambda: "no lookup service answers yet" in caplog.text)
            assert not consumer.connections
            async with relaying(lookupd, closed.port):
                # a channel starts at the end of each partition when the consumer subscribes to it
                partitions = (await producer.meta(topic)).partition_num or 1
                await eventually(lambda: len(consumer.connections) == partitions)
                await eventually(lambda: producer.statistics().stored == 1)
                await producer.publish(topic, b"after")
                await handled.wait()
                consumer.stop()


async def test_the_original_sends_the_first_message_after_an_idle_time_at_once(original: Original) -> None:
    """A tick is pending, so the message does not wait for the whole output buffer timeout of 1 s."""

    async def attempt(number: int) -> None:
        topic, node = f"contract_{token_hex(4)}", original.nodes[0]
        async with (
            Consumer(topic, "ch", nsqd=node, output_buffer_timeout=1.0, initial_ready=10) as consumer,
            Producer(nsqd=node) as producer,
        ):
            assert await _delay(consumer, partial(producer.publish, topic, b"x"), idle=1.2) < 0.5

    await unless_paused(attempt, 0.2)


async def test_the_redesigned_server_waits_the_output_buffer_timeout(
    cluster_under_test: ClusterUnderTest, channel: str
) -> None:
    """It waits exactly as long as negotiated from the first message on."""

    async def attempt(number: int) -> None:
        topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
        consumer = Consumer(
            topic, f"{channel}_{number}", lookupd=lookupd, output_buffer_timeout=0.5, initial_ready=10, partitions=(0,)
        )
        async with consumer, Producer(lookupd) as producer:
            publish = partial(producer.publish, topic, b"x", partition=0)
            delays = [await _delay(consumer, publish, idle=0.6) for _ in range(3)]
        assert min(delays) > 0.4
        assert min(delays) < 0.7

    await unless_paused(attempt, 0.1)


async def _delay(consumer: Consumer, publish: Callable[[], Awaitable[object]], idle: float) -> float:
    """Return the seconds from a publish until its message is received, after an idle time.

    RDY is above 1, because a message that uses up RDY is sent immediately.
    """
    await anyio.sleep(idle)
    started = time.monotonic()
    await publish()
    await finish_all(consumer, 1)
    return time.monotonic() - started
