"""Unknown outcomes are settled by the log: stored, not stored, or still unknown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from anyio.to_thread import run_sync

from nsqext import Admin, DeliveryUnknown, OutgoingMessage, Producer
from nsqext.broker import Cluster
from nsqext.errors import (
    InvalidSetting,
    OperationNotSupported,
    PublishFailed,
)
from tests.support.consumers import eventually
from tests.support.machine_pauses import repeated_if_paused
from tests.support.producers import bounded

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with Cluster(nodes=1) as running:
        running.create_topic("plain", partitions=1, replicas=1, channels=["ch"])
        running.create_topic("extended", partitions=1, replicas=1, extend=True, channels=["ch"])
        yield running


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    shared.faults.heal()


def _settling(cluster: Cluster, **settings: Any) -> Producer:
    return Producer(cluster.lookupd, **{"on_unknown": "settle", "timeout": 10.0, **settings})


async def _stored(cluster: Cluster, topic: str, count: int) -> list[bytes]:
    """Return the newest bodies of a topic, oldest first."""
    async with Admin(cluster.lookupd) as admin:
        return [message.body.encode() for message in reversed(await admin.peek(topic, count=count))]


@pytest.mark.parametrize("topic", ["plain", "extended"])
@pytest.mark.parametrize("direction", ["in", "out"])
async def test_a_message_is_stored_once_whichever_half_of_the_exchange_is_lost(
    cluster: Cluster, topic: str, direction: Any
) -> None:
    async with bounded(), _settling(cluster) as producer:
        await producer.publish(topic, b"before")
        await run_sync(lambda: cluster.faults.cut("n1", direction))
        receipt = await producer.publish(topic, b"lost")
        after = await producer.publish(topic, b"after")
        found = producer.statistics()
        assert (found.stored, found.unknown, found.retries) == (3, 0, direction == "in")
    assert await _stored(cluster, topic, 3) == [b"before", b"lost", b"after"]
    assert receipt.offset is not None
    assert receipt.size is not None
    assert receipt.offset + receipt.size == after.offset


@pytest.mark.parametrize("direction", ["in", "out"])
async def test_a_batch_is_stored_once(cluster: Cluster, direction: Any) -> None:
    tagged, traced = OutgoingMessage(b"tagged", headers={"a": "b"}), OutgoingMessage(b"traced", trace_id=77)
    async with bounded(), _settling(cluster) as producer:
        await producer.publish("extended", b"before")
        await run_sync(lambda: cluster.faults.cut("n1", direction))
        receipts = await producer.publish_many("extended", [b"plain", tagged, traced])
        assert receipts[2].trace_id == 77
    assert await _stored(cluster, "extended", 4) == [b"before", b"plain", b"tagged", b"traced"]


@pytest.mark.parametrize("direction", ["in", "out"])
async def test_waiting_publishes_of_a_key_are_settled_together(cluster: Cluster, direction: Any) -> None:
    bodies = [b"%d" % number for number in range(30)]

    async def publish(producer: Producer, body: bytes) -> None:
        await producer.publish("plain", body, key="k")

    async with bounded(), _settling(cluster) as producer:
        await producer.publish("plain", b"before", key="k")
        await run_sync(lambda: cluster.faults.cut("n1", direction, connections=2))
        async with anyio.create_task_group() as tasks:
            for body in bodies:
                tasks.start_soon(publish, producer, body)
                await checkpoint()  # trio starts tasks in random order
    assert await _stored(cluster, "plain", 31) == [b"before", *bodies]


async def _delayed(cluster: Cluster, producer: Producer, seconds: float) -> None:
    """Delay what the server receives on the producer's connection; its other connections are not delayed."""
    (node,) = producer._pool._nodes.values()
    assert node.connection is not None
    peer = node.connection.local_address
    await run_sync(lambda: cluster.faults.delay("n1", "in", seconds, peer=peer))


async def test_a_command_that_the_server_executes_late_is_not_published_again(cluster: Cluster) -> None:
    """It was received on a connection that the client has ended meanwhile, so that no response shows its execution."""
    async with bounded(), _settling(cluster, request_timeout=0.3) as producer:
        before = await producer.publish("plain", b"before")
        await _delayed(cluster, producer, 1.5)
        receipts = [await producer.publish("plain", b"late"), await producer.publish("plain", b"after")]
        await eventually(lambda: producer._pool._half_closed == [])
    assert await _stored(cluster, "plain", 3) == [b"before", b"late", b"after"]
    assert before.offset is not None
    assert before.size is not None
    assert receipts[0].offset == before.offset + before.size


async def test_a_command_that_is_refused_late_was_not_stored(cluster: Cluster) -> None:
    async with bounded(), _settling(cluster, timeout=0.3) as producer:
        await producer.publish("plain", b"before")
        await _delayed(cluster, producer, 1.0)
        await run_sync(lambda: cluster.faults.answer("n1", "E_PUB_FAILED", command="PUB_TRACE"))
        with pytest.raises(PublishFailed, match=r"not stored within 0.3 s: its log does not contain it"):
            await producer.publish("plain", b"late")
    assert await _stored(cluster, "plain", 1) == [b"before"]


async def test_a_command_that_the_server_may_still_execute_stays_unknown(cluster: Cluster) -> None:
    async with bounded(), _settling(cluster, request_timeout=0.2, settle_timeout=0.8) as producer:
        await producer.publish("plain", b"before")
        await _delayed(cluster, producer, 25.0)
        with pytest.raises(DeliveryUnknown, match=r"still unknown after 0.8 s"):
            await producer.publish("plain", b"x")
        await producer.publish("plain", b"after")
        assert len(producer._pool._half_closed) == 1
        await eventually(lambda: producer._pool._half_closed == [])
    assert await _stored(cluster, "plain", 2) == [b"before", b"after"]


async def test_many_publishes_at_a_time_share_searches(cluster: Cluster) -> None:
    bodies = {b"%d" % number for number in range(200)}
    async with bounded(), _settling(cluster) as producer:
        await producer.publish("plain", b"before")
        await run_sync(lambda: cluster.faults.cut("n1", "out"))
        async with anyio.create_task_group() as tasks:
            for body in bodies:
                tasks.start_soon(producer.publish, "plain", body)
        assert producer.statistics().stored == 201
    found = await _stored(cluster, "plain", 201)
    assert found[0] == b"before"
    assert sorted(found[1:]) == sorted(bodies)


@pytest.mark.parametrize("others", [0, 3, 9])
async def test_the_log_of_a_topic_that_was_created_again_is_searched_from_its_beginning(
    cluster: Cluster, others: int
) -> None:
    def create() -> None:
        cluster.create_topic("again", partitions=1, replicas=1, channels=["ch"])

    await run_sync(create)
    async with bounded(), _settling(cluster) as producer, Producer(cluster.lookupd) as other:
        for number in range(4):
            await producer.publish("again", b"old %d" % number)
        await run_sync(lambda: cluster.delete_topic("again"))
        await run_sync(create)
        if others:
            await other.publish_many("again", [b"new %d" % number for number in range(others)])
        await run_sync(lambda: cluster.faults.cut("n1", "out"))
        await producer.publish("again", b"lost")
    stored = [b"new %d" % number for number in range(others)]
    assert await _stored(cluster, "again", others + 2) == [*stored, b"lost"]
    await run_sync(lambda: cluster.delete_topic("again"))


async def test_a_publish_that_may_have_been_in_the_log_of_a_deleted_topic_stays_unknown(cluster: Cluster) -> None:
    """Simulation, seed 61707: it was delivered before the topic was deleted, and sent again to the new one."""

    def create() -> None:
        cluster.create_topic("replaced", partitions=1, replicas=1, channels=["ch"])

    await run_sync(create)
    async with bounded(), _settling(cluster) as producer:
        await producer.publish("replaced", b"old")
        await run_sync(lambda: cluster.delete_topic("replaced"))
        await run_sync(create)
        await run_sync(lambda: cluster.faults.cut("n1", "in", connections=1))
        with pytest.raises(DeliveryUnknown, match="the log was replaced"):
            await producer.publish("replaced", b"lost")
    await run_sync(lambda: cluster.delete_topic("replaced"))


async def test_the_first_publish_of_a_producer_is_looked_for_from_the_beginning(cluster: Cluster) -> None:
    async with bounded(), _settling(cluster) as producer:
        await producer.ping()
        await run_sync(lambda: cluster.faults.cut("n1", "out"))
        receipt = await producer.publish("plain", b"first")
        assert receipt.offset is not None
    assert await _stored(cluster, "plain", 1) == [b"first"]


@repeated_if_paused(0.1)
async def test_without_the_leader_it_stays_unknown(cluster: Cluster) -> None:
    await run_sync(cluster.faults.heal)
    async with bounded(), _settling(cluster, settle_timeout=0.8) as producer:
        await producer.publish("plain", b"before")
        await run_sync(lambda: cluster.faults.cut("n1", "in"))
        await run_sync(lambda: cluster.faults.refuse("n1"))
        with pytest.raises(DeliveryUnknown, match=r"still unknown after 0.8 s; last error of the search: "):
            await producer.publish("plain", b"x", partition=0)
        assert producer.statistics().unknown == 1


async def test_it_is_refused_where_no_log_can_be_searched() -> None:
    with pytest.raises(InvalidSetting, match="needs lookupd"):
        Producer(nsqd="127.0.0.1:4150", on_unknown="settle")
    with pytest.raises(InvalidSetting, match="settle_timeout has no effect"):
        Producer("127.0.0.1:4161", settle_timeout=3)
    with Cluster(nodes=1, generation="original") as original:
        original.create_topic("t")
        async with bounded(), _settling(original) as producer:
            with pytest.raises(OperationNotSupported, match="redesigned"):
                await producer.publish("t", b"x")
            with pytest.raises(OperationNotSupported, match="redesigned"):
                await producer.publish_many("t", [b"x"])
            with pytest.raises(OperationNotSupported, match="redesigned"):
                await producer.publish("t", b"x", delay=1)
