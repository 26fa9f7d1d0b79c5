"""Handlers of batches: answers, signals, errors, cancellation."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext import Consumer, Finish, Message, MessageBatch, Reject, Requeue
from tests.support.consumers import QUICK, depth, eventually, in_batches, publish, running, tape
from tests.support.fake_nsqd import PLAIN, message, scripted_node
from tests.support.machine_pauses import unless_paused

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqext.broker import Cluster

pytestmark = pytest.mark.anyio

TEN = [b"%d" % number for number in range(10)]


async def test_a_batch_handler_finishes_unanswered_messages(cluster: Cluster, topic: str) -> None:
    consumer = in_batches(cluster, topic, backoff="off")
    attempts: list[tuple[bytes, int]] = []

    @consumer.batch_handler(max_count=10, max_wait=0.2)
    async def handle(batch: MessageBatch) -> None:
        attempts.extend((message.body, message.attempts) for message in batch)
        if batch[0].attempts == 1:
            await batch.requeue(batch[:2])

    publish(cluster, topic, *TEN)
    await running(consumer, lambda: eventually(lambda: len(attempts) == 12))
    assert sorted(attempts) == sorted([(body, 1) for body in TEN] + [(b"0", 2), (b"1", 2)])
    await eventually(lambda: depth(cluster, topic) == 0)


@pytest.mark.parametrize("key", [None, lambda message: message.body[-1:]], ids=["queue", "lanes"])
async def test_messages_that_a_clean_close_returns_are_not_lost(
    cluster: Cluster, topic: str, key: Callable[[Message], bytes] | None
) -> None:
    consumer = in_batches(cluster, topic, key=key, max_in_flight=100)
    handled: list[bytes] = []

    @consumer.batch_handler(max_count=10, max_wait=0.2)
    async def handle(batch: MessageBatch) -> None:
        handled.extend(message.body for message in batch)
        if consumer.statistics().received > len(handled):
            consumer.stop()

    publish(cluster, topic, *(b"%d" % number for number in range(100)))
    with anyio.fail_after(25):
        await consumer.serve(signals=False)
    found = consumer.statistics()
    assert (found.finished, found.lost, found.in_flight) == (len(handled), 0, 0)
    assert found.requeued == found.received - len(handled) > 0


async def test_a_batch_handler_that_raises_requeues_the_rest_and_logs_once(
    cluster: Cluster, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = in_batches(cluster, topic, backoff="off", requeue_delay=0)
    seen: list[tuple[bytes, int]] = []

    @consumer.batch_handler(max_count=10, max_wait=0.2)
    async def handle(batch: MessageBatch) -> None:
        seen.extend((message.body, message.attempts) for message in batch)
        if len(seen) == len(TEN):
            await batch.finish_up_to(6)
            raise ZeroDivisionError("no")

    publish(cluster, topic, *TEN)
    with caplog.at_level(logging.ERROR):
        await running(consumer, lambda: eventually(lambda: len(seen) == 13))
    assert sorted(seen[10:]) == [(b"7", 2), (b"8", 2), (b"9", 2)]
    (record,) = (record for record in caplog.records if "handler failed" in record.message)
    assert "3 messages of it are not answered: no" in record.message
    await eventually(lambda: depth(cluster, topic) == 0)


@pytest.mark.parametrize(
    ("signal", "expected"),
    [
        (Requeue(7.0, backoff=False), ["FIN 2", "REQ 1", "REQ 3"]),
        (Reject("bad"), ["FIN 2", "FIN 1", "FIN 3"]),
        (Finish(), ["FIN 2", "FIN 1", "FIN 3"]),
    ],
)
async def test_a_signal_decides_about_the_rest_of_a_batch(signal: Exception, expected: list[str]) -> None:
    async with scripted_node(granted=PLAIN) as node:
        consumer = Consumer("t", "ch", nsqd=str(node), **QUICK)

        @consumer.batch_handler(max_count=3, max_wait=30.0)
        async def handle(batch: MessageBatch) -> None:
            await batch[1].finish()
            raise signal

        async def body() -> None:
            peer = await node.accept_subscribed()
            await peer.raw(message(1) + message(2) + message(3))
            assert await tape(peer, 3) == expected

        await running(consumer, body, node)


async def test_batches_run_concurrently(cluster: Cluster, topic: str) -> None:
    consumer = in_batches(cluster, topic, concurrency=2)
    together = anyio.Event()
    inside = 0

    @consumer.batch_handler(max_count=5, max_wait=30.0)
    async def handle(batch: MessageBatch) -> None:
        nonlocal inside
        inside += 1
        if inside == 2:
            together.set()
        await together.wait()

    publish(cluster, topic, *TEN)
    await running(consumer, together.wait)
    await eventually(lambda: depth(cluster, topic) == 0)


async def test_the_messages_of_a_batch_are_touched(cluster: Cluster, topic: str) -> None:
    async def attempt(number: int) -> None:
        name = f"{topic}_{number}"
        cluster.create_topic(name, channels=["ch"])
        publish(cluster, name, *TEN[:3])
        async with in_batches(cluster, name, msg_timeout=1.0) as consumer:
            batch = await consumer.fetch(3, 10.0)
            received = [message.received for message in batch]
            await eventually(lambda: all(message.received > received[0] for message in batch))
            await batch.finish()
        await eventually(lambda: depth(cluster, name) == 0)

    await unless_paused(attempt, 0.3)
