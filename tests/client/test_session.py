"""How a consumer opens and ends: once, drained, with one error, and with nothing left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest
from anyio import create_task_group, get_running_tasks

from nsqext import Consumer, Message
from nsqext.errors import InvalidState
from tests.client.consuming import QUICK, depth, eventually, publish, quick, running
from tests.client.scripted import PLAIN, message, scripted_node

if TYPE_CHECKING:
    from nsqext.broker import Cluster

pytestmark = pytest.mark.anyio


async def test_the_order_of_the_end() -> None:
    async with scripted_node(granted=PLAIN) as node:
        consumer = Consumer("t", "ch", nsqd=str(node), max_in_flight=3, options=QUICK)
        started, go_on = anyio.Event(), anyio.Event()

        @consumer.handler
        async def handle(message: Message) -> None:
            started.set()
            await go_on.wait()

        async with create_task_group() as tasks:
            tasks.start_soon(consumer.run)
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


async def test_handlers_may_end_within_the_grace_when_run_is_cancelled(cluster: Cluster, topic: str) -> None:
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, options=quick(grace=30.0))
    started, go_on, ended = anyio.Event(), anyio.Event(), anyio.Event()

    @consumer.handler
    async def handle(message: Message) -> None:
        started.set()
        await go_on.wait()
        ended.set()

    publish(cluster, topic, b"a")
    async with create_task_group() as tasks:
        tasks.start_soon(consumer.run)
        await started.wait()
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.wait_all_tasks_blocked()
            assert not ended.is_set()
            go_on.set()
    assert ended.is_set()
    await eventually(lambda: depth(cluster, topic) == 0)


async def test_handlers_that_do_not_end_are_cancelled_after_the_grace(cluster: Cluster, topic: str) -> None:
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, options=quick(grace=0.05))
    started = anyio.Event()

    @consumer.handler
    async def handle(message: Message) -> None:
        started.set()
        await anyio.sleep_forever()

    publish(cluster, topic, b"a")
    await running(consumer, started.wait)
    await eventually(lambda: depth(cluster, topic) == 1)


async def test_the_error_of_the_body_comes_out_as_it_is(cluster: Cluster, topic: str) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with Consumer(topic, "ch", lookupd=cluster.lookupd, options=QUICK):
            raise KeyError("mine")


async def test_the_error_of_the_body_outlives_a_cancellation(cluster: Cluster, topic: str) -> None:
    with pytest.raises(KeyError, match="mine"), anyio.CancelScope() as scope:
        async with Consumer(topic, "ch", lookupd=cluster.lookupd, options=QUICK):
            scope.cancel()
            raise KeyError("mine")


async def test_what_a_handler_may_not_raise_comes_out_as_it_is(
    cluster: Cluster, topic: str, anyio_backend_name: str
) -> None:
    if anyio_backend_name == "asyncio":
        return  # whose event loop ends on it
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, options=QUICK)

    @consumer.handler
    async def handle(message: Message) -> None:
        raise SystemExit(3)

    publish(cluster, topic, b"a")
    with pytest.raises(SystemExit):
        await consumer.run()


async def test_a_consumer_is_used_once(cluster: Cluster, topic: str) -> None:
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, options=QUICK)
    with pytest.raises(InvalidState, match="not open"):
        await consumer.__anext__()
    with pytest.raises(InvalidState, match="no handler"):
        await consumer.run()
    async with consumer:
        pass
    with pytest.raises(InvalidState, match="once"):
        async with consumer:
            pass


async def test_nothing_is_left_behind(cluster: Cluster, topic: str) -> None:
    before = len(get_running_tasks())
    async with Consumer(topic, "ch", lookupd=cluster.lookupd, options=QUICK):
        assert len(get_running_tasks()) > before
    assert len(get_running_tasks()) == before
