"""User stories with fixtures of anyio's pytest plugin, on asyncio, uvloop and trio."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext import Consumer, Producer

if TYPE_CHECKING:
    from nsqext.broker import Cluster

pytestmark = pytest.mark.anyio


@pytest.fixture
async def producer(nsq_cluster: Cluster) -> AsyncIterator[Producer]:
    """A producer that is opened before the test and closed after it."""
    async with Producer(nsq_cluster.lookupd) as producer:
        yield producer


@pytest.fixture
async def started(nsq_cluster: Cluster) -> AsyncIterator[Producer]:
    """A producer with ``start`` and ``aclose``."""
    producer = await Producer(nsq_cluster.lookupd).start()
    yield producer
    await producer.aclose()


@pytest.fixture
async def consumer(nsq_cluster: Cluster, nsq_topic: str) -> AsyncIterator[Consumer]:
    """A consumer that is opened before the test and closed after it."""
    async with Consumer(nsq_topic, "default", lookupd=nsq_cluster.lookupd) as consumer:
        yield consumer


async def test_a_test_publishes_and_consumes_with_clients_of_fixtures(
    producer: Producer, started: Producer, consumer: Consumer, nsq_topic: str
) -> None:
    await producer.publish(nsq_topic, b"one")
    await started.publish(nsq_topic, b"two")
    found = []
    with anyio.fail_after(25):
        async for message in consumer:
            found.append(message.body)
            await message.finish()
            if len(found) == 2:
                break
    assert sorted(found) == [b"one", b"two"]


async def test_a_producer_of_a_fixture_serves_many_tasks(producer: Producer, nsq_topic: str) -> None:
    stored: set[int | None] = set()

    async def publish(number: int) -> None:
        stored.add((await producer.publish(nsq_topic, b"%d" % number, trace_id=number + 1)).message_id)

    async with anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(publish, number)
    assert len(stored - {None}) == 20
