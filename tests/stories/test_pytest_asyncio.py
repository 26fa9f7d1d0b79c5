"""User stories on asyncio alone: clients in fixtures of pytest-asyncio, which opens and closes in different tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from nsqext import Consumer, Message, Producer
from nsqext.errors import InvalidState

if TYPE_CHECKING:
    from nsqext.broker import Cluster

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def producer(nsq_cluster: Cluster) -> AsyncIterator[Producer]:
    """A producer in ``async with``: the end of the block runs in the task of the fixture's finalizer."""
    async with Producer(nsq_cluster.lookupd) as producer:
        yield producer


@pytest_asyncio.fixture
async def started(nsq_cluster: Cluster) -> AsyncIterator[Producer]:
    """A producer with ``start`` and ``aclose``, as in aiokafka and nats-py."""
    producer = Producer(nsq_cluster.lookupd)
    await producer.start()
    yield producer
    await producer.aclose()


@pytest_asyncio.fixture
async def consumer(nsq_cluster: Cluster, nsq_topic: str) -> AsyncIterator[Consumer]:
    """A consumer that is opened before the test and closed after it."""
    async with Consumer(nsq_topic, "default", lookupd=nsq_cluster.lookupd) as consumer:
        yield consumer


async def _next_body(consumer: Consumer) -> bytes:
    async with asyncio.timeout(25):
        message = await anext(consumer)
    await message.finish()
    return message.body


async def test_a_test_publishes_and_consumes_with_clients_of_fixtures(
    producer: Producer, consumer: Consumer, nsq_topic: str
) -> None:
    await producer.publish(nsq_topic, b"one coffee")
    assert await _next_body(consumer) == b"one coffee"


async def test_start_and_aclose_replace_the_block(started: Producer, consumer: Consumer, nsq_topic: str) -> None:
    await started.publish(nsq_topic, b"one tea")
    assert await _next_body(consumer) == b"one tea"


async def test_a_fixture_survives_a_failing_publish(producer: Producer, nsq_topic: str) -> None:
    with pytest.raises(ValueError, match="topic"):
        await producer.publish("no topic!", b"x")
    await producer.publish(nsq_topic, b"x")


async def test_a_producer_is_closed_by_another_task(nsq_cluster: Cluster, nsq_topic: str) -> None:
    producer = Producer(nsq_cluster.lookupd)
    await asyncio.create_task(_call(producer.start))
    await asyncio.gather(*(producer.publish(nsq_topic, b"%d" % number) for number in range(20)))
    await asyncio.create_task(_call(producer.aclose))
    with pytest.raises(InvalidState):
        await producer.publish(nsq_topic, b"late")


async def _call(function: Callable[[], Awaitable[object]]) -> None:
    await function()


async def test_a_task_that_is_cancelled_while_it_publishes_leaves_the_producer_usable(
    producer: Producer, nsq_cluster: Cluster, nsq_topic: str
) -> None:
    leader = nsq_cluster.leader(nsq_topic)
    await producer.publish(nsq_topic, b"before")
    nsq_cluster.faults.delay(leader, "out", 0.2)
    try:
        publishing = asyncio.create_task(producer.publish(nsq_topic, b"cancelled"))
        await asyncio.sleep(0)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
    finally:
        nsq_cluster.faults.heal()
    await producer.publish(nsq_topic, b"after")


async def test_a_worker_handles_messages_until_its_task_is_cancelled(
    producer: Producer, nsq_cluster: Cluster, nsq_topic: str
) -> None:
    handled: asyncio.Queue[bytes] = asyncio.Queue()
    consumer = Consumer(nsq_topic, "default", lookupd=nsq_cluster.lookupd)

    @consumer.handler
    async def handle(message: Message) -> None:
        await handled.put(message.body)

    worker = asyncio.create_task(consumer.serve(signals=False))
    await producer.publish(nsq_topic, b"work")
    async with asyncio.timeout(25):
        assert await handled.get() == b"work"
    worker.cancel()
    with pytest.raises(asyncio.CancelledError):
        await worker
