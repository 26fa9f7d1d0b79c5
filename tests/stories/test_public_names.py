"""All public names, used as documented, on asyncio and trio, on both generations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from secrets import token_hex

import anyio
import httpx
import pytest

import nsqext
from nsqext import App, Consumer, Message, MessageBatch, Producer, Router
from nsqext.broker import Cluster
from tests.support.consumers import eventually

pytestmark = pytest.mark.anyio


@dataclass
class Order:
    """The body of a message."""

    number: int


@dataclass
class Invoice:
    """The result of a handler."""

    order: int


@pytest.fixture(scope="module", params=["redesigned", "original"])
def lookupd(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The lookup addresses of a cluster of a generation."""
    with Cluster(nodes=1, generation=request.param) as cluster:
        yield cluster.lookupd


@pytest.fixture
async def topic(lookupd: list[str]) -> str:
    """A topic with the channel ``billing``."""
    name = f"orders.{token_hex(4)}"
    async with nsqext.Admin(lookupd) as admin:
        await admin.create_topic(name, channels=["billing"])
    return name


async def test_a_producer_starts_pings_counts_and_closes(lookupd: list[str], topic: str) -> None:
    producer = Producer(lookupd, connect=True)
    await producer.start()
    assert producer.statistics().connections == 1
    await producer.ping()
    await producer.publish(topic, b"one")
    statistics = producer.statistics()
    await producer.aclose()
    assert (statistics.stored, statistics.failed, statistics.unknown, statistics.retries) == (1, 0, 0, 0)


async def test_batches_have_a_length_and_are_finished(lookupd: list[str], topic: str) -> None:
    async with Producer(lookupd) as producer:
        await producer.publish_many(topic, [b"one", b"two", b"three"])
    count = 0
    with anyio.fail_after(25):
        async with Consumer(topic, "billing", lookupd=lookupd) as consumer:
            async for batch in consumer.batches(max_count=500, max_wait=0.2):
                count += len(batch)
                await batch.finish()
                if count == 3:
                    break
            assert len(await consumer.fetch(10, 0.05)) == 0
            statistics = consumer.statistics()
    assert (statistics.finished, statistics.in_flight) == (3, 0)


async def test_a_batch_handler_and_a_handler_that_leaves_its_message(lookupd: list[str], topic: str) -> None:
    consumer = Consumer(topic, "billing", lookupd=lookupd)

    @consumer.batch_handler(max_count=10, max_wait=0.05)
    async def handle(batch: MessageBatch) -> None:
        await batch.finish()
        consumer.stop()

    by_hand = Consumer(topic, "billing", lookupd=lookupd)
    kept: list[Message] = []

    @by_hand.handler(auto_finish=False)
    async def keep(message: Message) -> None:
        kept.append(message)

    async with Producer(lookupd) as producer:
        await producer.publish(topic, b"one")
        with anyio.fail_after(25):
            await consumer.serve(signals=False)
            await by_hand.start()
            await producer.publish(topic, b"two")
            await eventually(lambda: kept)
            await kept[0].finish()
            await by_hand.aclose()
    assert (consumer.statistics().finished, by_hand.statistics().finished) == (1, 1)


async def test_the_admin_client(lookupd: list[str], topic: str) -> None:
    async with nsqext.Admin(lookupd) as admin:
        assert topic in await admin.topics()
        await admin.pause_channel(topic, "billing")
        assert (await admin.stats(topic)).channels["billing"].paused
        await admin.unpause_channel(topic, "billing")
        assert not (await admin.stats(topic)).channels["billing"].paused


async def test_an_app_with_typed_handlers_publishers_routers_and_health(lookupd: list[str], topic: str) -> None:
    router = Router()
    invoices = f"{topic}.invoices"
    seen: list[object] = []

    @router.publisher(invoices)
    @router.handler(topic, "billing")
    async def bill(order: Order) -> Invoice:
        return Invoice(order.number)

    app = App(lookupd)
    app.include_router(router)

    @app.handler(invoices, "audit")
    async def audit(invoice: Invoice) -> None:
        seen.append(invoice)
        app.stop()

    async with nsqext.Admin(lookupd) as admin:
        await admin.create_topic(invoices, channels=["audit"])
    async with app.test() as test:
        assert await test.deliver(topic, Order(1)) == [Invoice(1)]
    with anyio.fail_after(25):
        async with app:
            assert app.health().ready, app.health().reasons
            transport = httpx.ASGITransport(app.asgi())
            async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
                assert (await client.get("/readyz")).status_code == (await client.get("/healthz")).status_code == 200
            await app.publish(topic, Order(2))
            await app.wait()
    assert seen == [Invoice(2)]


async def test_patterns(lookupd: list[str], topic: str) -> None:
    async with Producer(lookupd) as producer:
        await producer.publish(topic, b"one")
    consumer = Consumer("none", "billing", lookupd=lookupd)
    consumer.topics = f"{topic}*"
    async with consumer:
        with anyio.fail_after(25):
            message = await anext(consumer)
        await message.finish()
    assert (consumer.topics, message.topic) == ((f"{topic}*",), topic)
