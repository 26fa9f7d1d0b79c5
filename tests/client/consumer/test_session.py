"""Opening and closing of a consumer: once, drained, with one error, and without leaks."""

from __future__ import annotations

from functools import partial
from struct import pack

import anyio
import pytest
from anyio import create_task_group, get_running_tasks

from nsqext import Consumer, Message, Producer, Requeue
from nsqext.broker import Cluster
from nsqext.errors import InvalidInput, InvalidState, MessageNotInFlight
from tests.support.consumers import QUICK, depth, eventually, publish, quick, running, tape
from tests.support.fake_nsqd import PLAIN, REDESIGNED, message, scripted_lookup, scripted_node
from tests.support.messages import take

pytestmark = pytest.mark.anyio


async def test_the_order_of_the_end() -> None:
    async with scripted_node(granted=REDESIGNED) as node:
        consumer = Consumer("t", "ch", nsqd=str(node), max_in_flight=3, **QUICK)
        started, go_on = anyio.Event(), anyio.Event()

        @consumer.handler
        async def handle(message: Message) -> None:
            started.set()
            await go_on.wait()

        async with create_task_group() as tasks:
            tasks.start_soon(consumer.serve)
            peer = await node.accept()
            await peer.expect("SUB")
            await peer.answer()
            assert (await peer.expect("RDY")).words == [b"RDY", b"3"]
            await peer.raw(message(1) + message(2))
            await started.wait()
            consumer.stop()
            assert (await peer.expect("RDY")).words == [b"RDY", b"0"]
            go_on.set()
            assert (await peer.expect("FIN")).words[1][7] == 1
            await peer.expect("CLS")
            await peer.answer(b"CLOSE_WAIT")
            await peer.expect_end()


async def test_handlers_may_end_within_close_timeout_when_run_is_cancelled(cluster: Cluster, topic: str) -> None:
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, **quick(close_timeout=30.0))
    started, go_on, ended = anyio.Event(), anyio.Event(), anyio.Event()

    @consumer.handler
    async def handle(message: Message) -> None:
        started.set()
        await go_on.wait()
        ended.set()

    publish(cluster, topic, b"a")
    async with create_task_group() as tasks:
        tasks.start_soon(consumer.serve)
        await started.wait()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()
            assert not ended.is_set()
            go_on.set()
    assert ended.is_set()
    await eventually(lambda: depth(cluster, topic) == 0)


async def test_handlers_that_do_not_end_are_cancelled_after_close_timeout(cluster: Cluster, topic: str) -> None:
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, **quick(close_timeout=0.05))
    started = anyio.Event()

    @consumer.handler
    async def handle(message: Message) -> None:
        started.set()
        await anyio.sleep_forever()

    publish(cluster, topic, b"a")
    await running(consumer, started.wait)
    await eventually(lambda: depth(cluster, topic) == 1)


@pytest.mark.parametrize("lanes", [False, True])
async def test_messages_of_cancelled_handlers_are_requeued_before_closing(lanes: bool) -> None:
    async with scripted_node(granted=PLAIN) as node:
        options = quick(close_timeout=0.05, key=(lambda message: b"k") if lanes else None)
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


async def test_an_ordered_message_is_requeued_by_the_end_of_the_connection() -> None:
    async with scripted_node() as node, scripted_lookup() as lookup:
        lookup.set_leaders({0: node}, num=1, ordered=True)
        consumer = Consumer("t", "ch", lookupd=str(lookup), **quick(close_timeout=0.05))
        started = anyio.Event()

        @consumer.handler
        async def handle(message: Message) -> None:
            started.set()
            await anyio.sleep_forever()

        async with create_task_group() as tasks:
            tasks.start_soon(consumer.serve)
            peer = await node.accept()
            await peer.expect("SUB_ORDERED")
            await peer.answer()
            await peer.expect("RDY")
            await peer.raw(message(1, position=pack(">QI", 0, 34)))
            await started.wait()
            consumer.stop()
            assert await tape(peer, 2) == ["RDY 0", "CLS"]
            await peer.answer(b"CLOSE_WAIT")


async def test_the_batch_of_the_task_that_closes_is_requeued_behind_rdy_0() -> None:
    async with scripted_node(granted=PLAIN) as node, create_task_group() as tasks:
        consumer = Consumer("t", "ch", nsqd=str(node), max_in_flight=2, **QUICK)

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
        consumer = Consumer("t", "ch", nsqd=str(node), max_in_flight=2, **QUICK)

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


async def test_all_messages_that_a_loop_left_unanswered_are_requeued_on_the_original_nsq() -> None:
    """The server would redeliver them after their timeout (captured behaviour of the original server)."""
    async with scripted_node(granted=PLAIN) as node, create_task_group() as tasks:
        consumer = Consumer("t", "ch", nsqd=str(node), max_in_flight=9, **QUICK)
        first: list[Message] = []
        sent = anyio.Event()

        def received(count: int) -> bool:
            return consumer.statistics().received == count

        async def consume() -> None:
            async with consumer:
                first.extend(await take(consumer, 7))
                for one in first[2:6]:
                    await one.finish()
                await sent.wait()

        tasks.start_soon(consume)
        peer = await node.accept_subscribed()
        for number in range(1, 9):  # more reads than are kept after their messages are answered
            await peer.raw(message(number, text_id=True))
            await eventually(partial(received, number))
        sent.set()
        assert sorted(await tape(peer, 9)) == [
            "FIN 3",
            "FIN 4",
            "FIN 5",
            "FIN 6",
            "RDY 0",
            "REQ 1",
            "REQ 2",
            "REQ 7",
            "REQ 8",
        ]
        assert await tape(peer, 1) == ["CLS"]
        await peer.answer(b"CLOSE_WAIT")
    for one in (first[0], first[6]):
        with pytest.raises(MessageNotInFlight):
            await one.finish()


async def test_the_messages_behind_one_whose_key_cannot_be_read_are_requeued_on_the_original_nsq() -> None:
    def key(received: Message) -> bytes:
        if received.attempts == 2:
            raise KeyError
        return b"k"

    async with scripted_node(granted=PLAIN) as node, create_task_group() as tasks:
        consumer = Consumer("t", "ch", nsqd=str(node), max_in_flight=9, **quick(key=key))
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


@pytest.mark.parametrize("generation", ["original", "redesigned"])
async def test_messages_of_cancelled_handlers_are_redelivered_at_once(generation: str) -> None:
    with Cluster(nodes=1, generation=generation) as cluster, anyio.fail_after(25):
        cluster.create_topic("t", channels=["ch"])
        async with Producer(cluster.lookupd) as producer:
            await producer.publish("t", b"a")
        consumer = Consumer("t", "ch", lookupd=cluster.lookupd, **quick(close_timeout=0.05))

        @consumer.handler
        async def handle(message: Message) -> None:
            consumer.stop()
            await anyio.sleep_forever()

        await consumer.serve(signals=False)
        async with Consumer("t", "ch", lookupd=cluster.lookupd, **QUICK) as successor:
            again = await successor.__anext__()
            assert (again.body, again.attempts) == (b"a", 2)
            await again.finish()


async def test_a_handler_that_ignores_its_cancellation_does_not_keep_the_connection_open() -> None:
    async with scripted_node(granted=PLAIN) as node:
        consumer = Consumer("t", "ch", nsqd=str(node), **quick(close_timeout=0.05))
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


async def test_the_error_of_the_body_is_raised_unchanged(cluster: Cluster, topic: str) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with Consumer(topic, "ch", lookupd=cluster.lookupd, **QUICK):
            raise KeyError("mine")


async def test_the_error_of_the_body_outlives_a_cancellation(cluster: Cluster, topic: str) -> None:
    with pytest.raises(KeyError, match="mine"), anyio.CancelScope() as scope:
        async with Consumer(topic, "ch", lookupd=cluster.lookupd, **QUICK):
            scope.cancel()
            raise KeyError("mine")


async def test_errors_that_a_handler_may_not_raise_are_raised_unchanged(
    cluster: Cluster, topic: str, anyio_backend_name: str
) -> None:
    if anyio_backend_name == "asyncio":
        return  # it ends the event loop
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, **QUICK)

    @consumer.handler
    async def handle(message: Message) -> None:
        raise SystemExit(3)

    publish(cluster, topic, b"a")
    with pytest.raises(SystemExit):
        await consumer.serve()


async def test_a_consumer_is_used_once(cluster: Cluster, topic: str) -> None:
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, **QUICK)
    with pytest.raises(InvalidState, match="not open"):
        await consumer.__anext__()
    with pytest.raises(InvalidState, match="no handler"):
        await consumer.serve()
    async with consumer:
        pass
    with pytest.raises(InvalidState, match="once"):
        async with consumer:
            pass


async def test_no_resource_stays_open(cluster: Cluster, topic: str) -> None:
    before = len(get_running_tasks())
    async with Consumer(topic, "ch", lookupd=cluster.lookupd, **QUICK):
        assert len(get_running_tasks()) > before
    assert len(get_running_tasks()) == before
