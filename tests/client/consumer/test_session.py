"""Opening and closing of a consumer: once, drained, with one error, and without leaks."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio import create_task_group

from nsqext import Consumer, Message, Requeue
from nsqext.errors import InvalidInput
from tests.support.consumers import QUICK, eventually, publish, quick_sharing, tape
from tests.support.fake_nsqd import PLAIN, message, scripted_node

if TYPE_CHECKING:
    from nsqext.broker import Cluster

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("lanes", [False, True])
async def test_messages_of_cancelled_handlers_are_requeued_before_closing(lanes: bool) -> None:
    async with scripted_node(granted=PLAIN) as node:
        options = quick_sharing(close_timeout=0.05, key=(lambda message: b"k") if lanes else None)
        consumer = Consumer("t", "ch", nsqd=str(node), max_in_flight=4, concurrency=4, **options)
        begun: list[int] = []

        @consumer.handler
        async def handle(message: Message) -> None:
            number = message.internal_id
            begun.append(number)
            try:
                await anyio.sleep_forever()
            finally:
                if number == 2:
                    await message.finish()  # finished during the close
                if number == 3:
                    raise Requeue(7.0, backoff=False)

        async with create_task_group() as tasks:
            tasks.start_soon(consumer.serve)
            peer = await node.accept_subscribed()
            numbers = [1] if lanes else [1, 2, 3]
            await peer.raw(b"".join(map(message, numbers)))
            await eventually(lambda: len(begun) == len(numbers))
            consumer.stop()
            assert await tape(peer, 1) == ["RDY 0"]
            answers = await tape(peer, len(numbers))
            assert sorted(answers) == (["REQ 1"] if lanes else ["FIN 2", "REQ 1", "REQ 3"])
            requeued = [command.words[2] for command in peer.commands if command.words[0] == b"REQ"]
            assert sorted(requeued) == ([b"0"] if lanes else [b"0", b"7000"])
            await peer.expect("CLS")
            await peer.answer(b"CLOSE_WAIT")
        assert not consumer.backoff.level


async def test_the_batch_of_the_task_that_closes_is_requeued_behind_rdy_0() -> None:
    async with scripted_node(granted=PLAIN) as node, create_task_group() as tasks:
        consumer = Consumer("t", "ch", nsqd=str(node), max_in_flight=2, **quick_sharing())

        async def fetch() -> None:
            async with consumer:
                await consumer.fetch(2)

        tasks.start_soon(fetch)
        peer = await node.accept_subscribed()
        await peer.raw(message(1) + message(2))
        assert await tape(peer, 4) == ["RDY 0", "REQ 1", "REQ 2", "CLS"], "after RDY 2 the server would send them again"
        await peer.answer(b"CLOSE_WAIT")


async def test_the_message_of_a_loop_that_is_left_is_requeued_on_the_original_nsq() -> None:
    async with scripted_node(granted=PLAIN) as node, create_task_group() as tasks:
        consumer = Consumer("t", "ch", nsqd=str(node), max_in_flight=2, **quick_sharing())

        async def consume() -> None:
            with pytest.raises(KeyError):
                async with consumer:
                    async for received in consumer:
                        if received.attempts == 2:
                            raise KeyError
                        await received.finish()

        tasks.start_soon(consume)
        peer = await node.accept_subscribed()
        await peer.raw(message(1, text_id=True) + message(2, attempts=2, text_id=True))
        assert sorted(await tape(peer, 3)) == ["FIN 1", "RDY 0", "REQ 2"]
        assert await tape(peer, 1) == ["CLS"]
        await peer.answer(b"CLOSE_WAIT")


async def test_the_messages_behind_one_whose_key_cannot_be_read_are_requeued_on_the_original_nsq() -> None:
    def key(received: Message) -> bytes:
        if received.attempts == 2:
            raise KeyError
        return b"k"

    async with scripted_node(granted=PLAIN) as node, create_task_group() as tasks:
        consumer = Consumer("t", "ch", nsqd=str(node), max_in_flight=9, **quick_sharing(key=key))
        handled = anyio.Event()

        @consumer.handler
        async def handle(received: Message) -> None:
            handled.set()

        async def run() -> None:
            with pytest.raises(InvalidInput, match="the key function failed"):
                await consumer.serve(signals=False)

        tasks.start_soon(run)
        peer = await node.accept_subscribed()
        await peer.raw(message(1, text_id=True))
        await handled.wait()
        await peer.raw(b"".join(message(number, attempts=number, text_id=True) for number in (2, 3)))
        assert sorted(await tape(peer, 4)) == ["FIN 1", "RDY 0", "REQ 2", "REQ 3"]
        assert await tape(peer, 1) == ["CLS"]
        await peer.answer(b"CLOSE_WAIT")


async def test_a_handler_that_ignores_its_cancellation_does_not_keep_the_connection_open() -> None:
    async with scripted_node(granted=PLAIN) as node:
        consumer = Consumer("t", "ch", nsqd=str(node), **quick_sharing(close_timeout=0.05))
        started, left = anyio.Event(), anyio.Event()

        @consumer.handler
        async def handle(message: Message) -> None:
            started.set()
            with anyio.CancelScope(shield=True):
                await left.wait()

        async with create_task_group() as tasks:
            tasks.start_soon(consumer.serve)
            peer = await node.accept_subscribed()
            await peer.raw(message(1))
            await started.wait()
            consumer.stop()
            assert await tape(peer, 2) == ["RDY 0", "CLS"]
            await peer.answer(b"CLOSE_WAIT")
            await peer.expect_end()
            left.set()


async def test_the_error_of_the_body_outlives_a_cancellation(cluster: Cluster, topic: str) -> None:
    with pytest.raises(KeyError, match="mine"), anyio.CancelScope() as scope:
        async with Consumer(topic, "ch", lookupd=cluster.lookupd, **QUICK):
            scope.cancel()
            raise KeyError("mine")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("busy", [False, True])
def test_an_event_loop_ends_although_a_consumer_was_left_open(cluster: Cluster, backend: str, busy: bool) -> None:
    topic = f"left-{backend}-{busy}".lower()
    cluster.create_topic(topic, channels=["ch"])
    publish(cluster, topic, b"a")
    consumers: list[Consumer] = []

    async def leave_open() -> None:
        consumers.append(
            consumer := Consumer(topic, "ch", nsqd=cluster.nodes[cluster.leader(topic)].tcp, **quick_sharing())
        )
        began = anyio.Event()

        @consumer.handler
        async def handle(message: Message) -> None:
            began.set()
            if busy:
                await anyio.sleep_forever()

        await consumer.start()
        await began.wait()

    anyio.run(leave_open, backend=backend)
    with pytest.warns(ResourceWarning, match="was not closed"):
        consumers.clear()
        gc.collect()
