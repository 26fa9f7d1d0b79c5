"""Received messages, and the effect of FIN, REQ and TOUCH."""

from __future__ import annotations

import time

import anyio
import pytest

from nsqext import Admin, Consumer, ConsumerSettings, Message, Producer, Receipt
from nsqext.errors import InvalidState, MessageNotInFlight
from tests.support.blocked_loop import handled_by_a_blocking_handler
from tests.support.cluster import PARTITIONS, ClusterUnderTest
from tests.support.machine_pauses import unless_paused
from tests.support.messages import DEADLINE, finish_all, nothing_for, subscribed, take
from tests.support.tcp_relay import relaying

pytestmark = pytest.mark.anyio

QUICK: ConsumerSettings = {"requeue_delay": 0.1, "backoff": "off"}


async def test_a_plain_message(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    before = time.time_ns()
    async with Consumer(topic, channel, lookupd=lookupd) as consumer, Producer(lookupd) as producer:
        receipt = await producer.publish(topic, b"hi")
        message = (await finish_all(consumer, 1))[0]
    assert (message.topic, message.partition, message.node) == (topic, receipt.partition, receipt.node)
    assert (message.body, message.attempts, message.trace_id) == (b"hi", 1, 0)
    assert (dict(message.headers), message.tag, message.offset, message.size) == ({}, None, -1, 0)
    assert len(message.id) == 16
    assert message.internal_id >> 50 == message.partition
    assert before <= message.timestamp <= time.time_ns()


@pytest.mark.parametrize("topic", ["plain", "extend", "ordered"])
async def test_the_same_settings_serve_every_kind_of_topic(
    cluster_under_test: ClusterUnderTest, channel: str, topic: str
) -> None:
    name: str = getattr(cluster_under_test, topic)
    lookupd = cluster_under_test.lookupd
    async with Consumer(name, channel, lookupd=lookupd) as consumer, Producer(lookupd) as producer:
        await producer.publish(name, b"hi", key="k", trace_id=2**64 - 1)
        message = (await finish_all(consumer, 1))[0]
    assert (message.body, message.trace_id) == (b"hi", 2**64 - 1)


async def test_headers_tag_and_trace_arrive_as_they_were_published(
    cluster_under_test: ClusterUnderTest, channel: str
) -> None:
    topic, lookupd = cluster_under_test.extend, cluster_under_test.lookupd
    headers = {"user": "42", "a.b-c_d": "", "text": 'ä "quoted" \\ \n \U0001f642'}
    async with Consumer(topic, channel, lookupd=lookupd) as consumer, Producer(lookupd) as producer:
        await producer.publish(topic, b"\x00\xff\n", headers=headers, tag="canary", trace_id=7)
        message = (await finish_all(consumer, 1))[0]
    assert (message.body, message.headers, message.tag, message.trace_id) == (b"\x00\xff\n", headers, "canary", 7)
    assert message.reserved_headers == {"##client_dispatch_tag": "canary", "##trace_id": "7"}


@pytest.mark.parametrize("topic", ["plain", "extend", "ordered"])
async def test_a_message_is_stored_where_its_receipt_says(
    cluster_under_test: ClusterUnderTest, channel: str, topic: str
) -> None:
    name: str = getattr(cluster_under_test, topic)
    lookupd = cluster_under_test.lookupd
    async with Consumer(name, channel, lookupd=lookupd, queue_position=True) as consumer, Producer(lookupd) as producer:
        receipts = [await producer.publish(name, b"hi", partition=1, trace_id=number) for number in range(3)]
        messages = await finish_all(consumer, 3)
    assert [(message.partition, message.internal_id, message.offset, message.size) for message in messages] == [
        (receipt.partition, receipt.message_id, receipt.offset, receipt.size) for receipt in receipts
    ]


@pytest.mark.parametrize("topic", ["plain", "extend", "ordered"])
async def test_messages_of_a_key_that_wait_for_each_other_are_stored_where_their_receipts_say(
    cluster_under_test: ClusterUnderTest, channel: str, topic: str
) -> None:
    name: str = getattr(cluster_under_test, topic)
    lookupd = cluster_under_test.lookupd
    receipts: dict[int, Receipt] = {}

    async def publish(number: int) -> None:
        receipts[number] = await producer.publish(name, b"%d" % number, key="k", trace_id=number)

    async with Consumer(name, channel, lookupd=lookupd, queue_position=True) as consumer, Producer(lookupd) as producer:
        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(publish, number)
        messages = await finish_all(consumer, 20)
    stored = {int(each.body): (each.trace_id, each.internal_id, each.offset, each.size) for each in messages}
    assert stored == {
        number: (number, receipt.message_id, receipt.offset, receipt.size) for number, receipt in receipts.items()
    }


async def test_a_channel_delivers_messages_published_without_consumers(cluster_under_test: ClusterUnderTest) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    channel = await cluster_under_test.make_channel(topic)
    async with Producer(lookupd) as producer:
        await producer.publish(topic, b"hi")
    async with Consumer(topic, channel, lookupd=lookupd) as consumer:
        assert [message.body for message in await finish_all(consumer, 1)] == [b"hi"]


async def test_every_channel_gets_every_message(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    first = Consumer(topic, channel, lookupd=lookupd)
    second = Consumer(topic, f"{channel}-2", lookupd=lookupd)
    async with subscribed(first, second), Producer(lookupd) as producer:
        await producer.publish(topic, b"hi")
        assert [message.body for message in await finish_all(first, 1)] == [b"hi"]
        assert [message.body for message in await finish_all(second, 1)] == [b"hi"]


async def test_a_finished_message_is_not_redelivered(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    async with Consumer(topic, channel, lookupd=lookupd) as consumer, Producer(lookupd) as producer:
        await producer.publish(topic, b"first", partition=0)
        await finish_all(consumer, 1)
    async with Consumer(topic, channel, lookupd=lookupd) as consumer, Producer(lookupd) as producer:
        await producer.publish(topic, b"second", partition=0)
        assert [message.body for message in await finish_all(consumer, 1)] == [b"second"]


async def test_a_requeued_message_is_redelivered_with_one_attempt_more(
    cluster_under_test: ClusterUnderTest, channel: str
) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    async with Consumer(topic, channel, lookupd=lookupd) as consumer, Producer(lookupd) as producer:
        await producer.publish(topic, b"hi", trace_id=3)
        first = (await take(consumer, 1))[0]
        await first.requeue()
        second = (await finish_all(consumer, 1))[0]
    assert (first.attempts, second.attempts) == (1, 2)
    assert (first.id, first.body, first.timestamp) == (second.id, second.body, second.timestamp)


async def test_a_requeued_message_is_redelivered_no_sooner_than_requested(
    cluster_under_test: ClusterUnderTest, channel: str
) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    async with Consumer(topic, channel, lookupd=lookupd) as consumer, Producer(lookupd) as producer:
        await producer.publish(topic, b"hi")
        message = (await take(consumer, 1))[0]
        started = time.monotonic()
        await message.requeue(0.6)
        message = (await finish_all(consumer, 1))[0]
        assert time.monotonic() - started >= 0.55
    assert message.attempts == 2


async def test_a_message_from_the_delayed_queue_has_its_offset(
    cluster_under_test: ClusterUnderTest, channel: str
) -> None:
    """An inbox knows by the offset what was handled."""
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    async with Producer(lookupd) as producer, Admin(lookupd) as admin:
        async with Consumer(topic, channel, lookupd=lookupd, queue_position=True) as consumer:
            receipt = await producer.publish(topic, b"later", trace_id=1)
            (message,) = await take(consumer, 1)
            assert (message.offset, message.size) == (receipt.offset, receipt.size)
            await message.requeue(1200)
        async with Consumer(topic, channel, lookupd=lookupd, queue_position=True) as consumer:
            await admin.deliver_delayed(topic, channel)
            (again,) = await finish_all(consumer, 1)
    assert (again.id, again.attempts) == (message.id, 2)
    assert (again.offset, again.size) == (message.offset, message.size)


async def test_a_message_that_is_not_answered_in_time_is_redelivered(
    cluster_under_test: ClusterUnderTest, channel: str
) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    options: ConsumerSettings = {"msg_timeout": 1.0, "auto_touch": False}

    async def attempt(number: int) -> None:
        name = f"{channel}_{number}"
        async with Consumer(topic, name, lookupd=lookupd, **options) as consumer, Producer(lookupd) as producer:
            await producer.publish(topic, b"hi")
            first = (await take(consumer, 1))[0]
            assert not first.expired
            second = (await finish_all(consumer, 1))[0]
        assert (second.id, second.attempts) == (first.id, 2)

    await unless_paused(attempt, 0.3)


async def test_a_touched_message_stays_in_flight(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    options: ConsumerSettings = {"msg_timeout": 1.0, "auto_touch": False}

    async def attempt(number: int) -> None:
        name = f"{channel}_{number}"
        async with Consumer(topic, name, lookupd=lookupd, **options) as consumer, Producer(lookupd) as producer:
            await producer.publish(topic, b"hi")
            message = (await take(consumer, 1))[0]
            for _ in range(3):
                await message.touch()
                assert await nothing_for(consumer, 0.4)
            assert not message.expired
            await message.finish()
            assert await nothing_for(consumer, 1.2)

    await unless_paused(attempt, 0.2)


async def test_a_message_with_a_slow_handler_is_touched(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    async def attempt(number: int) -> None:
        await _handled_for_long(cluster_under_test, f"{channel}_{number}")

    await unless_paused(attempt, 0.2)


async def _handled_for_long(cluster: ClusterUnderTest, channel: str) -> None:
    consumer = Consumer(cluster.plain, channel, lookupd=cluster.lookupd, msg_timeout=1.0, concurrency=2)
    attempts: list[int] = []

    @consumer.handler
    async def handle(message: Message) -> None:
        attempts.append(message.attempts)
        await anyio.sleep(2.0)
        consumer.stop()

    await prepare(cluster, channel, [b"1"])
    with anyio.fail_after(DEADLINE):
        await consumer.serve(signals=False)
    assert attempts == [1]
    assert await left_over(cluster, channel) == []


async def test_messages_of_a_closed_consumer_are_redelivered_to_the_next_one(
    cluster_under_test: ClusterUnderTest, channel: str
) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    async with Producer(lookupd) as producer:
        async with Consumer(topic, channel, lookupd=lookupd) as consumer:
            await producer.publish_many(topic, [b"1", b"2", b"3", b"4"])
            messages = await take(consumer, 4)
            await messages[1].finish()
        with pytest.raises(MessageNotInFlight):
            await messages[0].finish()
        async with Consumer(topic, channel, lookupd=lookupd) as consumer:
            again = await finish_all(consumer, 3)
    assert sorted(message.body for message in again) == [b"1", b"3", b"4"]
    assert {message.attempts for message in again} == {1}


async def test_messages_are_redelivered_after_a_lost_connection(
    cluster_under_test: ClusterUnderTest, channel: str
) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    async with Producer(lookupd) as producer:
        leader = (await producer.publish(topic, b"elsewhere", partition=0)).node
        async with relaying(leader) as relay, Consumer(topic, channel, nsqd=relay.address) as consumer:
            await producer.publish_many(topic, [b"1", b"2", b"3"], partition=0)
            first = await take(consumer, 3)
            await first[1].finish()
            await nothing_for(consumer, 0.1)
            relay.cut()
            again = await finish_all(consumer, 2)
            for message in (first[0], first[2]):
                with pytest.raises(MessageNotInFlight):
                    await message.finish()
            assert relay.connections == 2
    assert sorted((message.body, message.attempts) for message in again) == [(b"1", 1), (b"3", 1)]


async def test_two_consumers_share_a_channel(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    bodies = [b"%d" % number for number in range(12)]
    one = Consumer(topic, channel, lookupd=lookupd, max_in_flight=2)
    other = Consumer(topic, channel, lookupd=lookupd)
    async with subscribed(one, other), Producer(lookupd) as producer:
        for body in bodies:
            await producer.publish(topic, body)
        held = await take(one, 2)
        rest = await finish_all(other, 10)
        for message in held:
            await message.finish()
    assert sorted(message.body for message in held + rest) == sorted(bodies)


async def test_no_more_than_allowed_is_in_flight(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    consumer = Consumer(topic, channel, lookupd=lookupd, max_in_flight=3)
    async with consumer, Producer(lookupd) as producer:
        await producer.publish_many(topic, [b"x"] * 10, partition=0)
        await producer.publish_many(topic, [b"x"] * 10, partition=1)
        messages = await take(consumer, 3)
        assert await nothing_for(consumer, 0.5)
        for message in messages:
            await message.finish()
        await finish_all(consumer, 17)


async def test_more_partitions_than_may_be_in_flight_take_turns(
    cluster_under_test: ClusterUnderTest, channel: str
) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    async with Consumer(topic, channel, lookupd=lookupd, max_in_flight=1) as consumer, Producer(lookupd) as producer:
        for partition in range(PARTITIONS):
            await producer.publish(topic, b"hi", partition=partition)
        messages = await finish_all(consumer, PARTITIONS)
    assert {message.partition for message in messages} == set(range(PARTITIONS))


async def test_a_message_is_answered_once(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    async with Consumer(topic, channel, lookupd=lookupd) as consumer, Producer(lookupd) as producer:
        await producer.publish(topic, b"hi")
        message = (await finish_all(consumer, 1))[0]
        for answer in (message.finish, message.requeue, message.touch):
            with pytest.raises(InvalidState, match="finished or requeued already"):
                await answer()


async def test_a_handler_that_returns_finishes(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    handled: list[bytes] = []
    consumer = Consumer(topic, channel, lookupd=lookupd)

    @consumer.handler
    async def handle(message: Message) -> None:
        handled.append(message.body)
        if len(handled) == 3:
            consumer.stop()

    await prepare(cluster_under_test, channel, [b"1", b"2", b"3"])
    with anyio.fail_after(DEADLINE):
        await consumer.serve(signals=False)
    assert handled == [b"1", b"2", b"3"]
    assert await left_over(cluster_under_test, channel) == []


async def test_a_message_whose_handler_raises_is_redelivered(
    cluster_under_test: ClusterUnderTest, channel: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    handled: list[tuple[bytes, int]] = []
    consumer = Consumer(topic, channel, lookupd=lookupd, **QUICK)

    @consumer.handler
    async def handle(message: Message) -> None:
        handled.append((message.body, message.attempts))
        if message.body == b"bad" and message.attempts == 1:
            raise LookupError("this handler fails once")
        if len(handled) == 3:
            consumer.stop()

    await prepare(cluster_under_test, channel, [b"bad", b"good"])
    with anyio.fail_after(DEADLINE):
        await consumer.serve(signals=False)
    assert sorted(handled) == [(b"bad", 1), (b"bad", 2), (b"good", 1)]
    assert "this handler fails once" in caplog.text
    assert await left_over(cluster_under_test, channel) == []


async def test_closing_waits_for_the_handler_and_requeues_the_rest(
    cluster_under_test: ClusterUnderTest, channel: str
) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    bodies = [b"%d" % number for number in range(8)]
    handled: list[bytes] = []
    consumer = Consumer(topic, channel, lookupd=lookupd)

    @consumer.handler
    async def handle(message: Message) -> None:
        consumer.stop()
        await anyio.sleep(0.1)
        handled.append(message.body)

    await prepare(cluster_under_test, channel, bodies)
    with anyio.fail_after(DEADLINE):
        await consumer.serve(signals=False)
    assert handled == [b"0"]
    assert await left_over(cluster_under_test, channel) == bodies[1:]


async def test_running_handlers_end_after_a_cancellation(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    began, ended = anyio.Event(), anyio.Event()
    consumer = Consumer(topic, channel, lookupd=lookupd)

    @consumer.handler
    async def handle(message: Message) -> None:
        began.set()
        await anyio.sleep(0.1)
        ended.set()

    await prepare(cluster_under_test, channel, [b"1", b"2"])
    with anyio.fail_after(DEADLINE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consumer.serve)
            await began.wait()
            tasks.cancel_scope.cancel()
    assert ended.is_set()
    assert await left_over(cluster_under_test, channel) == [b"2"]


async def test_handlers_run_concurrently_if_requested(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    topic, lookupd = cluster_under_test.plain, cluster_under_test.lookupd
    together = anyio.Event()
    running = 0
    consumer = Consumer(topic, channel, lookupd=lookupd, concurrency=4)

    @consumer.handler
    async def handle(message: Message) -> None:
        nonlocal running
        running += 1
        if running == 4:
            together.set()
            consumer.stop()
        await together.wait()

    await prepare(cluster_under_test, channel, [b"1", b"2", b"3", b"4"])
    with anyio.fail_after(DEADLINE):
        await consumer.serve(signals=False)
    assert await left_over(cluster_under_test, channel) == []


async def prepare(cluster: ClusterUnderTest, channel: str, bodies: list[bytes]) -> None:
    """Create a channel of the plain topic, and publish to one partition."""
    async with Consumer(cluster.plain, channel, lookupd=cluster.lookupd), Producer(cluster.lookupd) as producer:
        pass
    async with Producer(cluster.lookupd) as producer:
        await producer.publish_many(cluster.plain, bodies, partition=0)


async def left_over(cluster: ClusterUnderTest, channel: str) -> list[bytes]:
    """Return the unfinished messages of a channel of the plain topic in partition 0, in order of publishing.

    It publishes one more message: when that is received and all earlier ones are finished, no other can follow.
    """
    found: dict[int, bytes] = {}
    async with (
        Consumer(cluster.plain, channel, lookupd=cluster.lookupd) as consumer,
        Producer(cluster.lookupd) as producer,
    ):
        last = await producer.publish(cluster.plain, b"the last", partition=0, trace_id=1)
        while last.message_id not in found:
            message = (await finish_all(consumer, 1))[0]
            found[message.internal_id] = message.body
        quiet = await nothing_for(consumer, 0.2)
    assert quiet, "a message was received after the last one"
    del found[last.message_id]
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize("topic", ["plain", "extend"])
async def test_a_batch_is_finished_in_part_and_its_rest_is_delivered_again(
    cluster_under_test: ClusterUnderTest, channel: str, topic: str
) -> None:
    name: str = getattr(cluster_under_test, topic)
    lookupd = cluster_under_test.lookupd
    bodies = [b"%d" % number for number in range(20)]
    async with Consumer(name, channel, lookupd=lookupd) as consumer, Producer(lookupd) as producer:
        await producer.publish_many(name, bodies, partition=0)
        with anyio.fail_after(DEADLINE):
            async for batch in consumer.batches(max_count=20, max_wait=5.0):
                assert [message.body for message in batch] == bodies[: len(batch)]
                first = len(batch)
                await batch.finish_up_to(first // 2)
                break
            rest: list[bytes] = []
            while len(rest) < 20 - first // 2 - 1:
                again = await consumer.fetch(20, 1.0)
                rest += [message.body for message in again]
                await again.finish()
    assert sorted(rest) == sorted(bodies[first // 2 + 1 :])


async def test_an_answer_is_sent_before_its_handler_blocks_the_event_loop(
    cluster_under_test: ClusterUnderTest, channel: str
) -> None:
    topic = cluster_under_test.plain
    await cluster_under_test.make_named_channel(topic, channel)
    handled = await handled_by_a_blocking_handler(cluster_under_test.lookupd, topic, channel)
    assert sorted(handled) == [b"1", b"2", b"last"]
