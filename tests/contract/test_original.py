"""The original NSQ: shared features work in the same way, and others are refused with a clear error."""

from __future__ import annotations

import time
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from nsqext import Admin, Consumer, ConsumerSettings, Message, NsqError, OutgoingMessage, Position, Producer
from nsqext.errors import (
    ExtendNotSupported,
    InvalidBody,
    InvalidInput,
    InvalidName,
    InvalidPartition,
    InvalidSetting,
    MessageNotInFlight,
)
from tests.support.blocked_loop import handled_by_a_blocking_handler
from tests.support.consumers import eventually
from tests.support.lost_connections import LossyConsumers, backward_steps, lossy, numbered, relayed_connections
from tests.support.machine_pauses import unless_paused
from tests.support.messages import DEADLINE, finish_all, nothing_for, subscribed, take
from tests.support.transports import http_of_original, over_tcp_and_http

if TYPE_CHECKING:
    from tests.support.cluster import Original
    from tests.support.transports import Transport

pytestmark = pytest.mark.anyio

_POLLING: ConsumerSettings = {"lookup_poll_interval": 0.5}
"""Time for topics on several nodes: each node registers a new topic with lookup after a moment."""


@pytest.fixture
def topic() -> str:
    """A topic that does not exist yet."""
    return f"contract_{token_hex(4)}"


@over_tcp_and_http
async def test_an_uncreated_topic_is_published_by_lookup(original: Original, topic: str, transport: Transport) -> None:
    before = time.time_ns()
    async with Producer(original.lookupd, transport=transport) as producer:
        receipt = await producer.publish(topic, b"hi")
    async with Consumer(topic, "ch", lookupd=original.lookupd) as consumer:
        message = (await finish_all(consumer, 1))[0]
    assert (receipt.topic, receipt.partition, receipt.message_id, receipt.offset) == (topic, None, None, None)
    assert receipt.node in original.nodes
    assert (message.topic, message.partition, message.node) == (topic, None, receipt.node)
    assert (message.body, message.attempts, message.trace_id, message.offset) == (b"hi", 1, 0, -1)
    assert (dict(message.headers), message.tag, len(message.id)) == ({}, None, 16)
    assert before <= message.timestamp <= time.time_ns()


async def test_nodes_are_used_without_lookup(original: Original, topic: str) -> None:
    count = len(original.nodes)
    async with Consumer(topic, "ch", nsqd=original.nodes) as consumer, Producer(nsqd=original.nodes) as producer:
        receipts = [await producer.publish(topic, b"%d" % number) for number in range(2 * count)]
        messages = await finish_all(consumer, 2 * count)
    assert sorted(receipt.node for receipt in receipts) == sorted(original.nodes * 2), "nodes take turns"
    assert sorted(message.body for message in messages) == [b"%d" % number for number in range(2 * count)]
    assert {message.node for message in messages} == set(original.nodes)


async def test_nodes_are_published_to_over_http_without_lookup(original: Original, topic: str) -> None:
    http = await http_of_original(original)
    async with (
        Consumer(topic, "ch", nsqd=original.nodes) as consumer,
        Producer(nsqd=http, transport="http") as producer,
    ):
        receipts = [await producer.publish(topic, b"hi") for _ in http]
        assert messages_of(await finish_all(consumer, len(receipts))) == [b"hi"] * len(receipts)
    assert sorted(receipt.node for receipt in receipts) == sorted(http)


async def test_lookup_leads_consumers_to_every_node_of_a_topic(original: Original, topic: str) -> None:
    async with Producer(nsqd=original.nodes) as producer:
        for node in original.nodes:
            await producer.publish(topic, node.encode())
    async with Consumer(topic, "ch", lookupd=original.lookupd, **_POLLING) as consumer:
        messages = await finish_all(consumer, len(original.nodes))
    assert sorted(message.body.decode() for message in messages) == sorted(original.nodes)


async def test_a_consumer_started_before_the_topic_finds_it(original: Original, topic: str) -> None:
    async with Consumer(topic, "ch", lookupd=original.lookupd, lookup_poll_interval=0.5, start_timeout=0.1) as consumer:
        async with Producer(original.lookupd) as producer:
            await producer.publish(topic, b"hi")
        assert [message.body for message in await finish_all(consumer, 1)] == [b"hi"]


@over_tcp_and_http
async def test_many_bodies_are_one_batch(original: Original, topic: str, transport: Transport) -> None:
    bodies = [b"%d" % number for number in range(100)]
    async with Producer(original.lookupd, transport=transport) as producer:
        assert await producer.publish_many(topic, []) == []
        receipts = await producer.publish_many(topic, bodies)
    async with Consumer(topic, "ch", lookupd=original.lookupd) as consumer:
        messages = await finish_all(consumer, 100)
    assert len(receipts) == 100
    assert len({receipt.node for receipt in receipts}) == 1
    assert sorted(messages_of(messages)) == sorted(bodies)


async def test_every_channel_gets_every_message(original: Original, topic: str) -> None:
    first = Consumer(topic, "first", nsqd=original.nodes)
    second = Consumer(topic, "second", nsqd=original.nodes)
    async with subscribed(first, second), Producer(original.lookupd) as producer:
        await producer.publish(topic, b"hi")
        assert messages_of(await finish_all(first, 1)) == [b"hi"]
        assert messages_of(await finish_all(second, 1)) == [b"hi"]


@over_tcp_and_http
async def test_a_delayed_message_is_delivered_no_sooner(original: Original, topic: str, transport: Transport) -> None:
    async with (
        Consumer(topic, "ch", nsqd=original.nodes) as consumer,
        Producer(original.lookupd, transport=transport) as producer,
    ):
        started = time.monotonic()
        await producer.publish(topic, b"later", delay=0.5)
        await producer.publish(topic, b"now")
        published = time.monotonic()
        messages = await finish_all(consumer, 2)
        assert time.monotonic() - started >= 0.45
    assert sorted(messages_of(messages)) == [b"later", b"now"]
    assert messages_of(messages)[0] == b"now" or published - started > 0.4


async def test_a_requeued_message_is_redelivered_and_a_finished_one_is_not(original: Original, topic: str) -> None:
    async with Consumer(topic, "ch", nsqd=original.nodes) as consumer, Producer(original.lookupd) as producer:
        await producer.publish(topic, b"hi")
        first = (await take(consumer, 1))[0]
        await first.requeue()
        second = (await take(consumer, 1))[0]
        started = time.monotonic()
        await second.requeue(0.4)
        third = (await finish_all(consumer, 1))[0]
        assert time.monotonic() - started >= 0.35
        assert await nothing_for(consumer, 0.2)
    assert [message.attempts for message in (first, second, third)] == [1, 2, 3]
    assert {message.id for message in (first, second, third)} == {first.id}


async def test_a_topic_that_was_created_again_gives_no_message_an_id_again(original: Original, topic: str) -> None:
    ids, node = [], original.nodes[0]  # each node counts its own ids
    async with Producer(nsqd=node) as producer, Admin(original.lookupd) as admin:
        for _ in range(2):
            await producer.publish(topic, b"hi")
            async with Consumer(topic, "ch", nsqd=node) as consumer:
                ids += [message.id for message in await finish_all(consumer, 1)]
            await admin.delete_topic(topic)
    assert len(set(ids)) == 2


async def test_a_touched_message_stays_in_flight(original: Original, topic: str) -> None:
    options: ConsumerSettings = {"msg_timeout": 1.0, "auto_touch": False}

    async def attempt(number: int) -> None:
        async with Consumer(f"{topic}_{number}", "ch", nsqd=original.nodes, **options) as consumer:
            async with Producer(original.lookupd) as producer:
                await producer.publish(f"{topic}_{number}", b"hi")
            message = (await take(consumer, 1))[0]
            for _ in range(3):
                await message.touch()
                assert await nothing_for(consumer, 0.4)
            assert not message.expired
            await message.finish()

    await unless_paused(attempt, 0.2)


async def test_two_consumers_share_a_channel(original: Original, topic: str) -> None:
    node = original.nodes[0]
    one = Consumer(topic, "ch", nsqd=node, max_in_flight=2)
    other = Consumer(topic, "ch", nsqd=node)
    bodies = [b"%02d" % number for number in range(12)]
    async with subscribed(one, other), Producer(nsqd=node) as producer:
        for body in bodies:
            await producer.publish(topic, body)
        held = await take(one, 2)
        rest = await finish_all(other, 10)
        for message in held:
            await message.finish()
    assert sorted(messages_of(held + rest)) == bodies


async def test_closing_waits_for_the_handler_and_requeues_the_rest(original: Original, topic: str) -> None:
    handled: list[bytes] = []
    consumer = Consumer(topic, "ch", lookupd=original.lookupd)

    @consumer.handler
    async def handle(message: Message) -> None:
        consumer.stop()
        await anyio.sleep(0.1)
        handled.append(message.body)

    async with Producer(original.lookupd) as producer:
        await producer.publish_many(topic, [b"%d" % number for number in range(8)])
    with anyio.fail_after(DEADLINE):
        await consumer.serve(signals=False)
    async with Consumer(topic, "ch", lookupd=original.lookupd) as successor:
        rest = await finish_all(successor, 7)
        assert await nothing_for(successor, 0.2)
    assert len(handled) == 1
    assert sorted(handled + messages_of(rest)) == [b"%d" % number for number in range(8)]


async def test_messages_that_no_handler_began_with_are_redelivered_while_a_handler_runs(
    original: Original, topic: str
) -> None:
    begun, end = anyio.Event(), anyio.Event()
    consumer = Consumer(topic, "ch", lookupd=original.lookupd, initial_ready=8)

    @consumer.handler
    async def handle(message: Message) -> None:
        begun.set()
        await end.wait()

    async with Producer(original.lookupd) as producer:
        await producer.publish_many(topic, [b"%d" % number for number in range(8)])
    with anyio.fail_after(DEADLINE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(consumer.serve, signals=False))
            await begun.wait()
            await eventually(lambda: consumer.statistics().received == 8)
            consumer.stop()
            async with Consumer(topic, "ch", lookupd=original.lookupd) as successor:
                rest = await finish_all(successor, 7)
                end.set()
                assert await nothing_for(successor, 0.2)
    assert len(set(messages_of(rest))) == 7


async def test_the_message_that_a_loop_left_unanswered_is_redelivered_after_closing(
    original: Original, topic: str
) -> None:
    async with Producer(original.lookupd) as producer:
        await producer.publish_many(topic, [b"%d" % number for number in range(4)])
    with anyio.fail_after(DEADLINE):  # less than the timeout of messages
        async with Consumer(topic, "ch", lookupd=original.lookupd) as consumer:
            (message,) = await take(consumer, 1)
        with pytest.raises(MessageNotInFlight):
            await message.finish()
        async with Consumer(topic, "ch", lookupd=original.lookupd) as successor:
            rest = await finish_all(successor, 4)
            assert await nothing_for(successor, 0.2)
    assert sorted(messages_of(rest)) == [b"0", b"1", b"2", b"3"]


REFUSED: list[tuple[dict[str, Any], type[InvalidInput]]] = [
    ({"body": b""}, InvalidBody),
    ({"body": "text"}, InvalidBody),
    ({"body": b"x" * (1024 * 1024 + 1)}, InvalidBody),
    ({"topic": "a b"}, InvalidName),
    ({"headers": {"a": "1"}}, ExtendNotSupported),
    ({"tag": "canary"}, ExtendNotSupported),
    ({"trace_id": 7}, InvalidInput),
    ({"key": "k"}, InvalidPartition),
    ({"partition": 0}, InvalidPartition),
    ({"delay": -1}, InvalidInput),
]


@pytest.mark.parametrize("direct", [False, True], ids=["lookup", "nsqd"])
@over_tcp_and_http
async def test_unsupported_features_are_refused_before_sending(
    original: Original, topic: str, transport: Transport, direct: bool
) -> None:
    nodes = original.nodes if transport == "tcp" else await http_of_original(original)
    where: dict[str, Any] = {"nsqd": nodes} if direct else {"lookupd": original.lookupd}
    async with Producer(**where, transport=transport) as producer:
        await producer.publish(topic, b"first")
        for given, error in REFUSED:
            raised = InvalidSetting if direct and error is InvalidPartition else error
            with anyio.fail_after(DEADLINE), pytest.raises(raised):
                await producer.publish(**{"topic": topic, "body": b"hi", **given})
        with pytest.raises(NsqError, match="header"):
            await producer.publish_many(topic, [OutgoingMessage(b"hi", headers={"a": "1"})])
        await producer.publish(topic, b"last")
    async with Consumer(topic, "ch", lookupd=original.lookupd, **_POLLING) as consumer:
        assert sorted(messages_of(await finish_all(consumer, 2))) == [b"first", b"last"]
        assert await nothing_for(consumer, 0.1)


@pytest.mark.parametrize("settings", [{"partitions": (0,)}, {"start": Position.earliest()}])
async def test_a_consumer_without_the_requested_ability_gets_an_error(
    original: Original, topic: str, settings: ConsumerSettings
) -> None:
    async with Producer(original.lookupd) as producer:
        await producer.publish(topic, b"hi")
    with anyio.fail_after(DEADLINE), pytest.raises(InvalidInput, match="the original NSQ has no"):
        async with Consumer(topic, "ch", lookupd=original.lookupd, **settings) as consumer:
            await anext(consumer)


@pytest.mark.parametrize(
    "settings",
    [
        {"output_buffer_timeout": 0},
        {"output_buffer_timeout": 0.001, "output_buffer_size": 64},
        {"output_buffer_timeout": None, "output_buffer_size": 65536},
    ],
)
async def test_every_setting_of_the_output_buffer_is_applied(
    original: Original, topic: str, settings: ConsumerSettings
) -> None:
    async with Consumer(topic, "ch", nsqd=original.nodes, **settings) as consumer:
        async with Producer(original.lookupd) as producer:
            await producer.publish(topic, b"hi")
        assert messages_of(await finish_all(consumer, 1)) == [b"hi"]


def messages_of(messages: list[Message]) -> list[bytes]:
    """Return the bodies."""
    return [message.body for message in messages]


async def test_lanes_keep_the_order_of_received_messages_when_connections_are_cut(
    original: Original, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server redelivers the messages of a lost connection when they have timed out."""
    received: dict[bytes, int] = {}

    def key_of(message: Message) -> bytes:
        received.setdefault(message.body, len(received))
        return message.body.partition(b":")[0]

    node = original.nodes[0]
    options = lossy(key=key_of, msg_timeout=1.0)
    consumer = Consumer(topic, "ch", nsqd=node, concurrency=4, max_in_flight=20, **options)
    faulty = LossyConsumers([consumer], 3, cuts=1)
    messages: dict[int | None, list[bytes]] = {None: [message.body for message in numbered(1, 6, 60, 3)[0]]}
    async with Producer(nsqd=node) as producer, relayed_connections(monkeypatch) as relays:
        await faulty.run(relays, producer, topic, messages)
    begun = [(name, received[f"{name}:{number}".encode()]) for name, number in faulty.begun]
    assert backward_steps(begun) == []
    assert sorted(faulty.done) == sorted(set(faulty.done)), "no message is handled again because its FIN was lost"


async def test_an_answer_is_sent_before_its_handler_blocks_the_event_loop(original: Original, topic: str) -> None:
    handled = await handled_by_a_blocking_handler(original.lookupd, topic, "ch")
    assert sorted(handled) == [b"1", b"2", b"last"]
