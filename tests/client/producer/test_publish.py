"""Publishes to scripted servers: where a message is sent, what is sent, and what its caller receives.

The first publish of a producer connects; the following ones take a shorter way, which obeys the same rules.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.lowlevel
import pytest

from nsqext import BatchFailed, DeliveryUnknown, OutgoingMessage, Producer, PublishFailed, Receipt
from nsqext.errors import (
    DelayNotSupported,
    ExtendNotSupported,
    InvalidBody,
    InvalidHeader,
    InvalidInput,
    InvalidName,
    InvalidPartition,
    TopicNotFound,
)
from nsqext.errors.server import LeaderLost
from nsqext.middleware import Middleware, Publishing, SendNext
from nsqext.protocol.delay_record import DelayCancel, DelayedMessage, decode_delay
from nsqext.protocol.frames import encode_trace_reply
from nsqext.protocol.hashing import murmur3_partition
from nsqext.protocol.headers import decode_headers
from nsqext.protocol.messages import DUE_HEADER, TAG_HEADER
from nsqext.transport.connection import Connection
from tests.support.fake_lookupd import node_json
from tests.support.fake_nsqd import Answer, ScriptedNode, error, obey, ok, scripted_lookup, scripted_node, until
from tests.support.machine_pauses import unless_paused
from tests.support.producers import bodies, bounded, producing, publish_keyed, quick, quick_direct

if TYPE_CHECKING:
    from nsqext.types import Address


pytestmark = pytest.mark.anyio

KEYED_OR_NOT = pytest.mark.parametrize("key", [None, "k"])


def verbs(node: ScriptedNode) -> list[str]:
    """Return the verbs of the commands that a node received."""
    return [command.words[0].decode() for command in node.commands]


# Where a message is sent


async def test_partitions_take_turns_whether_or_not_they_are_connected() -> None:
    async with producing({}, {}) as (producer, _, _):
        partitions = [(await producer.publish("t", b"x")).partition for _ in range(6)]
    assert sorted(partitions[:2], key=str) == [0, 1]
    assert partitions == partitions[:2] * 3


async def test_least_pending_avoids_the_busy_node() -> None:
    async with producing({"PUB": None}, {}, balance="least_pending", close_timeout=0.0) as setup:
        producer, nodes, _ = setup
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(producer.publish, "t", b"stuck", partition=0))
            await until(lambda: nodes[0].commands)
            receipts = [await producer.publish("t", b"x", partition=1)]
            receipts += [await producer.publish("t", b"x") for _ in range(6)]
            assert {receipt.partition for receipt in receipts} == {1}
            tasks.cancel_scope.cancel()


async def test_publishes_follow_a_leader_before_its_former_node_refuses_them() -> None:
    async with producing({}, {}, lookup_poll_interval=0.05) as (producer, nodes, lookup):
        await producer.publish("t", b"x", partition=0)
        lookup.set_leaders({0: nodes[1], 1: nodes[1]}, num=2)
        while (await producer.publish("t", b"x", partition=0)).node != str(nodes[1]):  # noqa: ASYNC110 - no event
            await anyio.sleep(0.01)


async def test_a_partition_that_refused_is_avoided_for_a_while() -> None:
    async def attempt(number: int) -> None:
        async with producing({"PUB": error("E_FAILED_ON_NOT_WRITABLE")}, {}) as (producer, nodes, _):
            for _ in range(6):
                assert (await producer.publish("t", b"x")).partition == 1
            assert [len(bodies(node)) for node in nodes] == [1, 6]

    await unless_paused(attempt, 0.2)


@pytest.mark.parametrize("choice", ["partition", "key"])
async def test_a_chosen_partition_does_not_take_the_turn_of_another_one(choice: str) -> None:
    async with producing({}, {}) as (producer, _, _):
        first = (await producer.publish("t", b"x")).partition
        assert first is not None
        other = 1 - first
        key = next(f"k{number}" for number in range(99) if murmur3_partition(b"k%d" % number, 2) == other)
        arguments: dict[str, Any] = {"partition": other} if choice == "partition" else {"key": key}
        assert (await producer.publish("t", b"x", **arguments)).partition == other, "it connects to the other node"
        assert [(await producer.publish("t", b"x")).partition for _ in range(4)] == [other, first] * 2


@pytest.mark.parametrize("choice", [{"key": "user:42"}, {"partition": 1}])
async def test_a_keyed_or_pinned_message_waits_for_its_partition(choice: dict[str, Any]) -> None:
    refusals: list[Answer] = [error("E_FAILED_ON_NOT_LEADER"), error("E_FAILED_ON_NOT_WRITABLE"), ok()]
    async with producing({}, {"PUB": refusals}) as (producer, nodes, lookup):
        await producer.publish_many("t", [b"first"], **choice)
        assert (await producer.publish("t", b"x", **choice)).partition == 1
        assert [len(bodies(node)) for node in nodes] == [0, 3]
        assert len([path for path in lookup.questions if path.startswith("/lookup")]) >= 2


async def test_a_chosen_partition_without_a_leader_is_waited_for() -> None:
    async with producing({}) as (producer, (node,), lookup):
        lookup.set_leaders({0: node}, num=2)
        await producer.publish("t", b"x", partition=0)
        asked = len(lookup.questions)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(producer.publish, "t", b"y", partition=1))
            await until(lambda: len(lookup.questions) > asked)
            lookup.set_leaders({0: node, 1: node}, num=2)
        assert bodies(node) == [b"x", b"y"]


async def test_a_publish_waits_for_a_leader_while_no_partition_has_one() -> None:
    async with producing({}) as (producer, (node,), lookup):
        lookup.set_leaders({}, num=1)
        async with anyio.create_task_group() as early:
            early.start_soon(producer.publish, "t", b"early")
            assert (await producer.meta("t")).partition_num == 1
            early.cancel_scope.cancel()
        asked = len(lookup.questions)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(producer.publish, "t", b"late")
            await until(lambda: len(lookup.questions) > asked)
            lookup.set_leaders({0: node}, num=1)
        assert bodies(node) == [b"late"]


async def test_nothing_is_connected_early_and_a_restarted_node_is_found(closed_address: Address) -> None:
    async def attempt(number: int) -> None:
        async with bounded(), Producer(nsqd=str(closed_address), **quick_direct(timeout=0.5)) as producer:
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


@pytest.mark.parametrize("arguments", [{}, {"key": "k"}, {"partition": 0}])
async def test_a_topic_that_is_published_to_is_not_forgotten(arguments: dict[str, Any]) -> None:
    async with producing({}) as (producer, _, _):
        await producer.publish("t", b"x", **arguments)
        routes = producer._routes
        routes.forget_idle()
        await producer.publish("t", b"x", **arguments)
        routes.forget_idle()
        assert list(routes.by_topic) == ["t"]


# What is sent


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"via": "postman"}, InvalidInput),
        ({"identity": "a"}, InvalidInput),
        ({"delay": -1.0}, InvalidInput),
        ({"body": bytearray(b"x")}, InvalidBody),
        ({"body": "x"}, InvalidBody),
        ({"body": b""}, InvalidBody),
        ({"headers": {"a b": "c"}}, InvalidHeader),
        ({"tag": "no tag!"}, InvalidInput),
        ({"trace_id": -1}, InvalidInput),
        ({"key": ""}, InvalidInput),
        ({"key": 1.5}, InvalidInput),
        ({"key": "k", "partition": 0}, InvalidPartition),
        *[({"partition": wrong}, InvalidPartition) for wrong in (True, 0.0, "0", -1, 1)],
    ],
)
async def test_an_argument_that_is_not_valid_is_refused(arguments: dict[str, Any], kind: type[InvalidInput]) -> None:
    async with producing({}, extend=True) as (producer, (node,), _):
        await producer.publish("t", b"x", partition=0)
        with pytest.raises(kind):
            await producer.publish(**{"topic": "t", "body": b"y", **arguments})
        assert bodies(node) == [b"x"]
        await producer.publish("t", b"x", key="k")


async def test_a_partition_beside_a_key_is_refused_while_another_publish_of_the_key_is_in_flight() -> None:
    async with (
        producing({"PUB": None}, close_timeout=0.0) as (producer, (node,), _),
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(publish_keyed, producer, b"stuck")
        await until(lambda: node.commands)
        with anyio.fail_after(5), pytest.raises(InvalidPartition, match="both given"):
            await producer.publish("t", b"x", key="k", partition=0)
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(("topic", "body", "kind"), [("t", b"", InvalidBody), ("a b", b"x", InvalidName)])
@KEYED_OR_NOT
async def test_what_no_topic_accepts_is_refused_before_lookup_is_asked(
    topic: str, body: bytes, kind: type[InvalidInput], key: str | None, closed_address: Address
) -> None:
    async with Producer(str(closed_address), timeout=60.0, lookup_timeout=60.0) as producer:
        with anyio.fail_after(25), pytest.raises(kind):
            await producer.publish(topic, body, key=key)


@pytest.mark.parametrize(
    ("arguments", "header"),
    [
        ({"headers": {"a": "b"}}, '{"a":"b"}'),
        ({"tag": "red"}, '{"##client_dispatch_tag":"red"}'),
        ({"key": "k"}, '{"##key":"k"}'),
        ({"delay": 0.0}, None),
    ],
)
async def test_each_argument_has_its_effect(arguments: dict[str, Any], header: str | None) -> None:
    async with producing({}, extend=True) as (producer, (node,), _):
        for _ in range(2):
            await producer.publish("t", b"x", **arguments)
    expected = b"x" if header is None else len(header).to_bytes(2, "big") + header.encode() + b"x"
    assert bodies(node, "PUB" if header is None else "PUB_EXT") == [expected] * 2


async def test_tags_of_keys_are_sent_without_a_key_as_well() -> None:
    async with producing({}, extend=True, key_tags=16) as (producer, (node,), _):
        for _ in range(2):
            await producer.publish("t", b"x")
    first, second = bodies(node, "PUB_EXT")
    assert first == second


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


@pytest.mark.parametrize("body", [b"y" * 100, b"y" * 101])
async def test_bodies_from_the_smallest_on_are_compressed(body: bytes) -> None:
    async with producing({}, extend=True, compression="snappy", compression_min=100) as (producer, (node,), _):
        for one in (body[:99], body[:99], body, body):
            await producer.publish("t", one)
    assert verbs(node) == ["PUB", "PUB", "PUB_EXT", "PUB_EXT"]


@pytest.mark.parametrize(
    ("part", "header"),
    [
        ({"headers": {"a": "b"}}, b'"a":"b"'),
        ({"tag": "red"}, b'"##client_dispatch_tag":"red"'),
        ({"trace_id": 7}, b'"##trace_id":"7"'),
    ],
)
async def test_a_message_that_waits_for_its_key_keeps_its_parts(part: dict[str, Any], header: bytes) -> None:
    async with bounded(), scripted_node() as node, scripted_lookup() as lookup:
        lookup.set_leaders({0: node}, num=1, extend=True)
        async with Producer(str(lookup), **quick()) as producer, anyio.create_task_group() as tasks:
            tasks.start_soon(publish_keyed, producer, b"connects")
            peer = await node.accept()
            await peer.expect("PUB_EXT")
            await peer.answer()
            await until(lambda: producer.statistics().stored)
            tasks.start_soon(publish_keyed, producer, b"first")
            await peer.expect("PUB_EXT")
            tasks.start_soon(partial(producer.publish, "t", b"second", key="k", **part))
            await anyio.wait_all_tasks_blocked()
            await peer.answer()
            assert header in ((await peer.expect("PUB_EXT")).body or b"")
            await peer.raw(ok(encode_trace_reply(2, 7, 0, 36) if "trace_id" in part else b"OK"))


async def test_every_message_that_may_be_looked_for_has_a_trace_id() -> None:
    async with producing({"PUB": ok(), "PUB_TRACE": ok()}, on_unknown="settle", settle_timeout=0.01) as setup:
        producer, (node,), lookup = setup
        lookup.set_response("/nodes", {"producers": [node_json(str(node))]})
        for _ in range(2):
            with pytest.raises(DeliveryUnknown):  # the response has no trace, which ends the connection
                await producer.publish("t", b"x")
            await producer.ping()
    assert verbs(node) == ["PUB_TRACE"] * 2


async def test_a_delayed_message_of_the_redesigned_nsq_says_when_it_is_due() -> None:
    before = time.time()
    async with producing({}, extend=True) as (producer, (node,), _):
        await producer.publish("t", b"x", delay=60, headers={"a": "b"}, tag="blue")
    (delayed,) = bodies(node, "PUB_EXT")
    headers = decode_headers(delayed[2 : 2 + int.from_bytes(delayed[:2], "big")])
    assert before + 60 <= int(headers.pop(DUE_HEADER)) / 1000 <= time.time() + 60.001
    assert headers == {"a": "b", TAG_HEADER: "blue"}


async def test_a_relay_receives_delayed_messages_of_topics_that_accept_them() -> None:
    async with producing({}, delay_via="relay", delay_topic="later") as (producer, (node,), _):
        await producer.publish("t", b"x", delay=5.0, identity="a")
        await producer.publish("t", b"y", delay=0.0)
        await producer.cancel_delayed("a")
        with pytest.raises(InvalidPartition):
            await producer.publish("t", b"x", delay=5.0, key="k", partition=0)
        for refused in ({"headers": {"a": "b"}}, {"tag": "a"}, {"header": b'{"a":"b"}'}):
            with pytest.raises(ExtendNotSupported):
                await producer.publish("t", b"x", delay=5.0, **cast("Any", refused))
        with pytest.raises(DelayNotSupported):
            await producer.publish("t", b"x", delay=5.0, via="consumer")
    topics = [command.words[1] for command in node.commands]
    delayed, plain, cancelled = bodies(node)
    assert (topics, plain) == ([b"later", b"t", b"later"], b"y")
    record, body = decode_delay(delayed)
    assert isinstance(record, DelayedMessage)
    assert (record.topic, record.identity, body) == ("t", "a", b"x")
    assert isinstance(decode_delay(cancelled)[0], DelayCancel)


# Outcomes


async def test_a_trace_gives_a_full_receipt() -> None:
    async with producing({"PUB_TRACE": ok(encode_trace_reply(7, 5, 100, 31))}) as (producer, nodes, _):
        expected = Receipt("t", 0, str(nodes[0]), 7, 5, 100, 31)
        choices: list[dict[str, Any]] = [{}, {}, {"key": "k"}, {"partition": 0}]
        assert [await producer.publish("t", b"x", trace_id=5, **choice) for choice in choices] == [expected] * 4


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


@KEYED_OR_NOT
async def test_a_response_to_another_command_is_an_unknown_outcome(key: str | None) -> None:
    async with producing({"PUB": [ok(), ok(b"NO"), ok()]}, on_unknown="raise") as (producer, _, _):
        await producer.publish("t", b"x", key=key)
        with pytest.raises(DeliveryUnknown, match="do not match"):
            await producer.publish("t", b"y", key=key)
        statistics = producer.statistics()
        assert (statistics.stored, statistics.unknown, statistics.failed) == (1, 1, 0)
        await producer.publish("t", b"z", key=key)


@KEYED_OR_NOT
async def test_a_message_that_is_refused_is_sent_again(key: str | None) -> None:
    async with producing({"PUB": [ok(), error("E_PUB_FAILED"), ok()]}) as (producer, (node,), _):
        for body in (b"x", b"y"):
            assert (await producer.publish("t", body, key=key)).partition == 0
        assert bodies(node) == [b"x", b"y", b"y"]
        assert (producer.statistics().stored, producer.statistics().retries) == (2, 1)


@KEYED_OR_NOT
async def test_a_lead_may_be_lost_after_a_single_message_is_written(key: str | None) -> None:
    """The redesigned server writes a single message before it answers so, and checks a batch before it writes it."""
    refusal: list[Answer] = [error("E_FAILED_ON_NOT_LEADER"), ok()]
    options = quick(on_unknown="raise")
    async with producing({"PUB": list(refusal), "MPUB": [ok(), *refusal]}, **options) as (producer, nodes, _):
        await producer.publish_many("t", [b"first"], key=key)
        with pytest.raises(DeliveryUnknown) as caught:
            await producer.publish("t", b"x", key=key)
        assert type(caught.value.attempts[-1]) is LeaderLost
        assert [bodies(nodes[0]).count(b"x"), producer.statistics().unknown] == [1, 1]
        await producer.publish_many("t", [b"y", b"z"], key=key)
        assert producer.statistics().retries == 1


async def test_an_error_in_an_extended_batch_closes_the_connection() -> None:
    answers: list[Answer] = [error("E_INVALID_JSON_HEADER x"), ok()]
    async with producing({"MPUB_EXT": answers}, extend=True) as (producer, nodes, _):
        with pytest.raises(BatchFailed):
            await producer.publish_many("t", [OutgoingMessage(b"x", headers={"a": "b"}), b"y"])
        receipts = await producer.publish_many(
            "t", [OutgoingMessage(b"x", headers={"a": "b"}), OutgoingMessage(b"y", trace_id=3)]
        )
        assert [receipt.trace_id for receipt in receipts] == [0, 3]
        assert len(nodes[0].peers) == 2


# Time


async def test_no_answer_in_time_is_an_unknown_outcome() -> None:
    async def attempt(number: int) -> None:
        async with producing({"PUB": None}, timeout=0.3, close_timeout=0.0) as (producer, nodes, _):
            for partition in (None, 0):
                with pytest.raises(DeliveryUnknown):
                    await producer.publish("t", b"x", partition=partition)
            assert len(bodies(nodes[0])) == 2

    await unless_paused(attempt, 0.05)


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


# Middleware


@KEYED_OR_NOT
@pytest.mark.parametrize("many", [False, True])
async def test_middleware_learns_about_the_topic_before_a_message_is_encoded(key: str | None, many: bool) -> None:
    seen: list[int] = []

    class Counter(Middleware):
        async def publish(self, publishing: Publishing, send_next: SendNext) -> Any:
            publishing.on_topic.append(lambda meta: seen.append(meta.partition_num))
            receipts = await send_next(publishing)
            assert (publishing.batch, publishing.receipts) == (many, receipts)
            return receipts

    async with producing({}) as (_, (node,), lookup):
        async with Producer(str(lookup), middleware=[Counter()], close_timeout=100) as producer:
            publish = partial(producer.publish_many, "t", [b"x"]) if many else partial(producer.publish, "t", b"x")
            lookup.refuse()
            with pytest.raises(TopicNotFound):  # leaves its place among the messages of the key
                await publish(key=key)
            lookup.set_leaders({0: node}, num=1)
            async with anyio.create_task_group() as tasks:
                for _ in range(2):
                    tasks.start_soon(partial(publish, key=key))
            await publish(key=key)
        assert producer.statistics().stored == 3
    assert (seen, verbs(node)) == ([1] * 3, ["MPUB" if many else "PUB"] * 3)
