"""The consumer on a cluster: handlers, iteration, draining, cancellation."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio import create_task_group

from nsqext import Consumer, Message
from nsqext.errors import InvalidState, LookupFailed, MessageNotInFlight
from nsqext.errors.server import ChannelNotRegistered
from tests.support.consumers import QUICK, depth, eventually, publish, quick, running
from tests.support.fake_nsqd import PLAIN, message, scripted_node
from tests.support.machine_pauses import unless_paused

if TYPE_CHECKING:
    from nsqext.broker import Cluster
    from nsqext.types import Address

pytestmark = pytest.mark.anyio


async def test_a_handler_gets_everything_from_all_partitions(cluster: Cluster, topic: str) -> None:
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, **QUICK)
    seen: list[tuple[int | None, bytes]] = []

    @consumer.handler
    async def handle(message: Message) -> None:
        seen.append((message.partition, message.body))

    publish(cluster, topic, b"a", b"b", partition=0)
    publish(cluster, topic, b"c", partition=1)

    await running(consumer, lambda: eventually(lambda: len(seen) == 3))
    assert sorted(seen) == [(0, b"a"), (0, b"b"), (1, b"c")]
    await eventually(lambda: depth(cluster, topic) == 0)


async def test_answers_by_iteration(cluster: Cluster, topic: str) -> None:
    publish(cluster, topic, b"a", b"b")
    async with Consumer(topic, "ch", lookupd=cluster.lookupd, **QUICK) as consumer:
        attempts: list[tuple[bytes, int]] = []
        async for message in consumer:
            attempts.append((message.body, message.attempts))
            if message.attempts == 1:
                await message.requeue()
            else:
                await message.finish()
            assert message.answered
            with pytest.raises(InvalidState):
                await message.finish()
            with pytest.raises(InvalidState):
                await message.touch()
            if len(attempts) == 4:
                break
    assert sorted(attempts) == [(b"a", 1), (b"a", 2), (b"b", 1), (b"b", 2)]
    await eventually(lambda: depth(cluster, topic) == 0)


async def test_two_tasks_may_iterate(cluster: Cluster, topic: str) -> None:
    async with Consumer(topic, "ch", lookupd=cluster.lookupd, **QUICK) as consumer:
        seen: list[bytes] = []

        async def take() -> None:
            message = await consumer.__anext__()
            seen.append(message.body)
            await message.finish()

        async with create_task_group() as tasks:
            tasks.start_soon(take)
            tasks.start_soon(take)
            await anyio.wait_all_tasks_blocked()
            publish(cluster, topic, b"a", b"b")
    assert sorted(seen) == [b"a", b"b"]


async def test_several_handlers_at_a_time(cluster: Cluster, topic: str) -> None:
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, concurrency=3, **QUICK)
    inside = 0
    together = anyio.Event()

    @consumer.handler
    async def handle(message: Message) -> None:
        nonlocal inside
        inside += 1
        if inside == 3:
            together.set()
        await together.wait()

    publish(cluster, topic, b"a", b"b", b"c")
    await running(consumer, together.wait)
    await eventually(lambda: depth(cluster, topic) == 0)


async def test_stop_from_a_handler(cluster: Cluster, topic: str) -> None:
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, **QUICK)

    @consumer.handler
    async def handle(message: Message) -> None:
        consumer.stop()

    publish(cluster, topic, b"a", b"b")
    with anyio.fail_after(25):
        await consumer.serve()
    await eventually(lambda: depth(cluster, topic) == 1)


async def test_dead_letters_are_published_to_a_topic(cluster: Cluster, topic: str) -> None:
    cluster.create_topic(f"{topic}_dead", channels=["ch"])
    consumer = Consumer(
        topic,
        "ch",
        lookupd=cluster.lookupd,
        **quick(backoff="off", requeue_delay=0.0, max_attempts=2, dead_letter=f"{topic}_dead"),
    )

    @consumer.handler
    async def handle(message: Message) -> None:
        raise ValueError("bad")

    publish(cluster, topic, b"bad")
    found: list[bytes] = []

    async def read() -> None:
        async with Consumer(f"{topic}_dead", "ch", lookupd=cluster.lookupd, **QUICK) as dead:
            message = await dead.__anext__()
            found.append(message.body)
            await message.finish()

    await running(consumer, read)
    assert found == [b"bad"]


async def test_a_missing_lookup_service_raises(closed_address: Address) -> None:
    with pytest.raises(LookupFailed):
        async with Consumer("t", "ch", lookupd=str(closed_address), **quick(lookup_timeout=0.0)):
            raise AssertionError("it opened")


async def test_a_channel_that_is_not_registered_is_raised(cluster: Cluster, topic: str) -> None:
    name = f"{topic}_reg"
    cluster.create_topic(name, channels=["known"], register_channels=True)
    consumer = Consumer(name, "unknown", lookupd=cluster.lookupd, **QUICK)
    consumer.handler(_ignore)
    with anyio.fail_after(25), pytest.raises(ChannelNotRegistered):
        await consumer.serve()


async def _ignore(message: Message) -> None:
    pass


async def test_an_object_with_an_async_call_is_a_handler() -> None:
    class Handler:
        async def __call__(self, message: Message) -> None:
            pass

    given = Handler()
    assert Consumer("t", "ch", nsqd="127.0.0.1:1").handler(given) is given


async def test_finished_messages_are_sent_while_a_handler_is_slow() -> None:
    async with scripted_node(granted=PLAIN) as node:
        consumer = Consumer("t", "ch", nsqd=str(node), concurrency=2, **QUICK)
        release = anyio.Event()

        @consumer.handler
        async def handle(message: Message) -> None:
            if message.body == b"slow":
                await release.wait()

        async def body() -> None:
            peer = await node.accept_subscribed()
            await peer.raw(message(1, b"slow") + message(2))
            assert (await peer.expect("FIN")).words[1][7] == 2
            await peer.heartbeat()
            await peer.expect_nop()
            release.set()
            assert (await peer.expect("FIN")).words[1][7] == 1

        await running(consumer, body, node)


async def test_handlers_that_never_wait_do_not_delay_answers_or_heartbeats() -> None:
    async with scripted_node(granted=PLAIN) as node:
        consumer = Consumer("t", "ch", nsqd=str(node), **QUICK)
        handled = 0

        @consumer.handler
        async def handle(message: Message) -> None:
            nonlocal handled
            handled += 1
            blocker.wait(0.03)

        blocker = threading.Event()

        async def body() -> None:
            peer = await node.accept_subscribed()
            await peer.raw(b"".join(message(number) for number in range(1, 21)))
            await peer.expect("FIN")
            assert handled < 10
            blocker.set()

        await running(consumer, body, node)


async def test_a_message_of_a_lost_connection_raises() -> None:
    async with (
        scripted_node(granted=PLAIN) as node,
        Consumer("t", "ch", nsqd=str(node), **quick(start_timeout=0.0)) as consumer,
    ):
        peer = await node.accept_subscribed()
        await peer.raw(message(1) + message(2))
        mine = await consumer.__anext__()
        assert not mine.expired
        await peer.close()
        await eventually(lambda: mine.expired)
        with pytest.raises(MessageNotInFlight, match="connection was closed"):
            await mine.finish()
        assert not mine.answered
        peer = await node.accept_subscribed()
        await peer.raw(message(3))
        assert (await consumer.__anext__()).id[7] == 3  # number 2 is handled at its next delivery
        await peer.close()


async def test_without_auto_finish_a_message_is_finished_by_another_task(cluster: Cluster, topic: str) -> None:
    options = quick(partitions=(0,))
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, max_in_flight=2, **options)
    received: list[Message] = []

    @consumer.handler(auto_finish=False)
    async def handle(message: Message) -> None:
        received.append(message)

    publish(cluster, topic, b"a", b"b", b"c", b"d")
    await consumer.start()
    async with create_task_group() as tasks:
        await eventually(lambda: len(received) == 2)
        await anyio.wait_all_tasks_blocked()
        assert len(received) == consumer.statistics().in_flight == 2, "unfinished messages count for max_in_flight"
        await received[0].finish()
        await received[1].requeue()
        await eventually(lambda: len(received) == 4)
        tasks.start_soon(consumer.aclose)
        await anyio.wait_all_tasks_blocked()
        assert consumer.connections, "closing waits for the responses"
        await received[2].finish()
        await received[3].finish()
    async with Consumer(topic, "ch", lookupd=cluster.lookupd, **options) as other:
        (left,) = await other.fetch(1, 10.0)
        await left.finish()
    assert sorted([received[0].body, received[2].body, received[3].body, left.body]) == [b"a", b"b", b"c", b"d"]
    await eventually(lambda: depth(cluster, topic) == 0)


async def test_without_auto_finish_messages_are_touched_until_they_are_answered(cluster: Cluster, topic: str) -> None:
    async def attempt(number: int) -> None:
        name = f"{topic}_{number}"
        cluster.create_topic(name, channels=["ch"])
        consumer = Consumer(name, "ch", lookupd=cluster.lookupd, **quick(msg_timeout=1.0))
        received: list[Message] = []

        @consumer.handler(auto_finish=False)
        async def handle(message: Message) -> None:
            received.append(message)

        publish(cluster, name, b"a")
        async with consumer:
            await eventually(lambda: received)
            at = received[0].received
            await eventually(lambda: received[0].received > at + 1.0)
            assert not received[0].expired
            await received[0].finish()
        assert len(received) == 1
        await eventually(lambda: depth(cluster, name) == 0)

    await unless_paused(attempt, 0.3)
