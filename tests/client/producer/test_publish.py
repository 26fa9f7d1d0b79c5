"""Publishes to scripted servers: routing, encoding, outcomes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

from nsqext import BatchFailed, DeliveryUnknown, OutgoingMessage, Producer, PublishFailed, Receipt
from nsqext.errors import (
    DelayNotSupported,
    ExtendNotSupported,
    InvalidBody,
    InvalidPartition,
    InvalidSetting,
)
from nsqext.protocol.client.body_compression import COMPRESS_HEADER, decompress_body
from nsqext.protocol.delay_record import DelayCancel, DelayedMessage, decode_delay
from nsqext.protocol.frames import encode_trace_reply
from nsqext.protocol.headers import decode_headers
from nsqext.protocol.messages import DUE_HEADER, TAG_HEADER
from nsqext.transport.connection import Connection
from tests.support.fake_nsqd import PLAIN, Answer, error, obey, ok, scripted_lookup, scripted_node, until
from tests.support.machine_pauses import unless_paused
from tests.support.producers import bodies, bounded, producing, publish_keyed, quick

if TYPE_CHECKING:
    from nsqext.types import Address


pytestmark = pytest.mark.anyio


async def test_partitions_take_turns() -> None:
    async with producing({}, {}) as (producer, nodes, _):
        receipts = [await producer.publish("t", b"x") for _ in range(6)]
        assert Counter(receipt.partition for receipt in receipts) == {0: 3, 1: 3}
        assert receipts[0].partition != receipts[1].partition
        assert {receipt.node for receipt in receipts} == {str(node) for node in nodes}


async def test_least_pending_avoids_the_busy_node() -> None:
    async with producing({"PUB": None}, {}, balance="least_pending", close_timeout=0.0) as setup:
        producer, nodes, _ = setup
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_swallow, producer, 0)
            await until(lambda: nodes[0].commands)
            receipts = [await producer.publish("t", b"x", partition=1)]
            receipts += [await producer.publish("t", b"x") for _ in range(6)]
            assert {receipt.partition for receipt in receipts} == {1}
            tasks.cancel_scope.cancel()


async def _swallow(producer: Producer, partition: int) -> None:
    with anyio.CancelScope():
        await producer.publish("t", b"stuck", partition=partition)


async def test_a_key_keeps_its_partition_and_a_chosen_one_is_kept() -> None:
    async with producing({}, {}) as (producer, _, _):
        keyed = {(await producer.publish("t", b"x", key="user:42")).partition for _ in range(4)}
        assert keyed == {1}
        assert (await producer.publish("t", b"x", partition=0)).partition == 0
        with pytest.raises(InvalidPartition):
            await producer.publish("t", b"x", partition=2)
        with pytest.raises(InvalidPartition):
            await producer.publish("t", b"x", partition=0, key="k")


async def test_a_key_needs_partitions() -> None:
    async with bounded(), scripted_node(obey(), granted=PLAIN) as node, Producer(nsqd=str(node)) as producer:
        with pytest.raises(InvalidSetting, match=r"number of partitions.*lookupd="):
            await producer.publish("t", b"x", key="k")


async def test_nothing_is_connected_early_and_a_restarted_node_is_found(closed_address: Address) -> None:
    async def attempt(number: int) -> None:
        async with bounded(), Producer(nsqd=str(closed_address), **quick(timeout=0.5)) as producer:
            for body in (b"first", b"again"):
                with pytest.raises((PublishFailed, DeliveryUnknown)) as caught:
                    await producer.publish("t", b"lost")
                assert caught.value.attempts
                async with scripted_node(obey(), port=closed_address.port) as node:
                    await anyio.wait_all_tasks_blocked()
                    assert not node.peers
                    await producer.publish("t", body)
                    assert bodies(node) == [body]
                    assert len(node.peers) == 1

    await unless_paused(attempt, 0.05)


async def test_a_trace_gives_a_full_receipt() -> None:
    async with producing({"PUB_TRACE": ok(encode_trace_reply(7, 5, 100, 31))}) as (producer, nodes, _):
        receipt = await producer.publish("t", b"x", trace_id=5)
        assert receipt == Receipt("t", 0, str(nodes[0]), 7, 5, 100, 31)
        assert await producer.publish("t", b"y", trace_id=5) == receipt  # over the existing connection
        assert await producer.publish("t", b"z", trace_id=5, key="k") == receipt
        assert await producer.publish("t", b"z", trace_id=5, partition=0) == receipt


@pytest.mark.parametrize(
    ("reply", "many"),
    [
        (ok(), False),
        (ok(b"NO" + bytes(28)), False),
        (ok(encode_trace_reply(7, 5, 100, 31) + b"x"), False),
        (ok(encode_trace_reply(7, 6, 100, 31)), False),  # the response to another publish
        (ok(encode_trace_reply(7, 5, 100, 31)), True),  # the response to a batch has the trace id 0
    ],
)
async def test_a_response_without_the_trace_is_an_unknown_outcome_and_ends_the_connection(
    reply: bytes, many: bool
) -> None:
    options = quick(on_unknown="raise")
    async with producing({"PUB_TRACE": reply, "MPUB_TRACE": reply}, **options) as (producer, _, _):
        for _ in range(2):
            await producer.publish("t", b"x")  # connects
            assert producer.statistics().connections == 1
            if many:
                with pytest.raises(BatchFailed) as caught:
                    await producer.publish_many("t", [OutgoingMessage(b"x", trace_id=5)])
                assert [type(outcome) for outcome in caught.value.outcomes] == [DeliveryUnknown]
            else:
                with pytest.raises(DeliveryUnknown, match="trace"):
                    await producer.publish("t", b"x", trace_id=5)
            assert producer.statistics().connections == 0


async def test_an_error_in_an_extended_batch_closes_the_connection() -> None:
    answers: list[Answer] = [error("E_INVALID_JSON_HEADER x"), ok()]
    async with producing({"MPUB_EXT": answers}, extend=True) as (producer, nodes, _):
        with pytest.raises(BatchFailed):
            await producer.publish_many("t", [OutgoingMessage(b"x", headers={"a": "b"}), b"y"])
        receipts = await producer.publish_many(
            "t", [OutgoingMessage(b"x", headers={"a": "b"}), OutgoingMessage(b"y", trace_id=3)]
        )
        assert [receipt.trace_id for receipt in receipts] == [0, 3]
        assert b'{"##trace_id":"3"}' in bodies(nodes[0], "MPUB_EXT")[1]
        assert len(nodes[0].peers) == 2


@pytest.mark.parametrize("extend", [False, True])
async def test_bodies_are_compressed_where_headers_are_supported(extend: bool) -> None:
    options = quick(compression="snappy", compression_min=100)
    body = b"all work and no play " * 50
    async with producing({}, extend=extend, **options) as (producer, nodes, _):
        await producer.publish("t", body)
        await producer.publish("t", body[:50])
        await producer.publish_many("t", [body, b"small"])
        sent = nodes[0].commands
        assert sent[1].words[0] == b"PUB"
        if not extend:
            assert sent[0].body == body
            return
        packed = sent[0].body or b""
        size = int.from_bytes(packed[:2], "big")
        headers = decode_headers(packed[2 : 2 + size])
        assert headers[COMPRESS_HEADER] == "2"
        assert decompress_body(headers, packed[2 + size :]) == body
        assert [command.words[0] for command in sent] == [b"PUB_EXT", b"PUB", b"MPUB_EXT"]


async def test_the_original_nsq_delays_publishes_without_headers() -> None:
    async with bounded(), scripted_node(obey(), granted=PLAIN) as node, Producer(nsqd=str(node)) as producer:
        await producer.publish("t", b"x", delay=1.5)
        assert node.commands[0].words == [b"DPUB", b"t", b"1500"]
        with pytest.raises(DelayNotSupported):
            await producer.publish("t", b"x", delay=1, trace_id=1)
        with pytest.raises(DelayNotSupported, match="3600 s at most"):
            await producer.publish("t", b"x", delay=3601)
        assert (len(node.commands), producer.statistics().connections) == (1, 1)
    assert producer.statistics().connections == 0


async def test_a_delayed_message_of_the_redesigned_nsq_says_when_it_is_due() -> None:
    before = time.time()
    async with producing({}, extend=True) as (producer, nodes, _):
        await producer.publish("t", b"x", delay=60, headers={"a": "b"}, tag="blue")
        await producer.publish("t", b"x", delay=0)
        delayed, ready = nodes[0].commands
    assert ready.words[0] == b"PUB"
    assert delayed.words[0] == b"PUB_EXT"
    size = int.from_bytes((delayed.body or b"")[:2], "big")
    headers = decode_headers((delayed.body or b"")[2 : 2 + size])
    assert before + 60 <= int(headers.pop(DUE_HEADER)) / 1000 <= time.time() + 60.001
    assert headers == {"a": "b", TAG_HEADER: "blue"}


async def test_a_relay_receives_delayed_messages_of_topics_that_accept_them() -> None:
    async with producing({}, delay_via="relay", delay_topic="later") as (producer, (node,), _):
        await producer.publish("t", b"x", delay=5.0, identity="a")
        await producer.publish("t", b"y", delay=0.0)
        await producer.cancel_delayed("a")
        with pytest.raises(InvalidPartition):
            await producer.publish("t", b"x", delay=5.0, key="k", partition=0)
        with pytest.raises(ExtendNotSupported):
            await producer.publish("t", b"x", delay=5.0, headers={"a": "b"})
        with pytest.raises(DelayNotSupported):
            await producer.publish("t", b"x", delay=5.0, via="consumer")
    topics = [command.words[1] for command in node.commands]
    delayed, plain, cancelled = bodies(node)
    assert (topics, plain) == ([b"later", b"t", b"later"], b"y")
    record, body = decode_delay(delayed)
    assert isinstance(record, DelayedMessage)
    assert (record.topic, record.identity, body) == ("t", "a", b"x")
    assert isinstance(decode_delay(cancelled)[0], DelayCancel)


async def test_consumers_of_a_topic_without_headers_cannot_delay() -> None:
    async with producing({}) as (producer, nodes, _):
        with pytest.raises(DelayNotSupported, match="does not support extend headers"):
            await producer.publish("t", b"x", delay=1)
        assert nodes[0].commands == []


async def test_the_time_of_a_publish_runs_while_it_waits_for_its_turn(deadlines: list[float]) -> None:
    async with bounded(), scripted_node() as node, scripted_lookup() as lookup:
        lookup.set_leaders({0: node}, num=1)
        async with Producer(str(lookup), **quick(timeout=30.0)) as producer, anyio.create_task_group() as tasks:
            tasks.start_soon(publish_keyed, producer, b"x")
            peer = await node.accept()
            await peer.expect("PUB")
            tasks.start_soon(publish_keyed, producer, b"y")
            await anyio.wait_all_tasks_blocked()
            await anyio.sleep(0.01)
            await peer.answer()
            await peer.expect("PUB")
            assert deadlines[-1] <= 30.0 - 0.01
            await peer.answer()


@pytest.mark.parametrize("extend", [False, True])
async def test_a_connected_producer_sends_bodies_up_to_the_limit(extend: bool) -> None:
    async with producing({}, extend=extend, max_message_size=100) as (producer, (node,), _):
        sizes = [1, 99, *([100] if not extend else [])]  # records of extend topics need one more byte
        for size in sizes:
            await producer.publish("t", b"x" * size)
        for body in (b"x" * (100 if extend else 101), b"x" * 102, b""):
            with pytest.raises(InvalidBody):
                await producer.publish("t", body)
        assert [len(body) for body in bodies(node)] == sizes


async def test_a_publish_waits_for_a_leader_while_no_partition_has_one() -> None:
    async with producing({}) as (producer, (node,), lookup), anyio.create_task_group() as tasks:
        lookup.set_leaders({}, num=1)
        async with anyio.create_task_group() as early:
            early.start_soon(producer.publish, "t", b"early")
            assert (await producer.meta("t")).partition_num == 1
            early.cancel_scope.cancel()
        asked = len(lookup.questions)

        async def lead() -> None:
            await until(lambda: len(lookup.questions) > asked)
            lookup.set_leaders({0: node}, num=1)

        tasks.start_soon(lead)
        await producer.publish("t", b"late")
        assert bodies(node) == [b"late"]


@pytest.fixture
def deadlines(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the publishes end that are sent, in seconds from now."""
    left: list[float] = []
    send = Connection.request

    def record(connection: Connection, command: Any, deadline: float = 0.0, **settings: Any) -> Awaitable[bytes]:
        if bytes(command).startswith((b"PUB", b"MPUB")):
            left.append(deadline - time.monotonic())
        return send(connection, command, deadline, **settings)

    monkeypatch.setattr(Connection, "request", record)
    return left


async def test_each_request_may_take_the_whole_timeout(deadlines: list[float]) -> None:
    async with producing({}, timeout=60.0) as (producer, _, _):
        for key in (None, "k"):  # the first one connects
            await producer.publish("t", b"x", key=key)
            await producer.publish("t", b"x", key=key)
            await producer.publish_many("t", [b"y", b"z"], key=key)
    assert len(deadlines) == 6
    assert all(30.0 < seconds <= 60.0 for seconds in deadlines)


async def test_a_connected_producer_refuses_a_partition_that_is_no_number() -> None:
    async with producing({}) as (producer, _, _):
        for partition in (0, None):
            await producer.publish("t", b"x", partition=partition)
        for wrong in (True, 0.0, "0", -1, 1):
            with pytest.raises(InvalidPartition):
                await producer.publish("t", b"x", partition=wrong)  # type: ignore[arg-type]
