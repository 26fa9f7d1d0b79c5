"""How a producer is made, opened and closed, and what a connected one sends at once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

from nsqext import DeliveryUnknown, Lookup, Producer, Receipt
from nsqext.client.tasks import BackgroundTasks
from nsqext.errors import (
    InvalidBody,
    InvalidHeader,
    InvalidInput,
    InvalidName,
    InvalidPartition,
    InvalidSetting,
    InvalidState,
    LookupFailed,
)
from nsqext.middleware import Middleware, Publishing, SendNext
from nsqext.protocol.hashing import murmur3_partition
from tests.support.fake_lookupd import node_json
from tests.support.fake_nsqd import ScriptedNode, error, obey, ok, scripted_lookup, scripted_node, until
from tests.support.producers import bodies, bounded, producing

if TYPE_CHECKING:
    from nsqext.client.events import ClientEvent
    from nsqext.types import Address

pytestmark = pytest.mark.anyio


def test_outcomes_are_settled_with_lookup_only() -> None:
    with pytest.raises(InvalidSetting, match="needs lookupd"):
        Producer(nsqd="n:1", on_unknown="settle")


def test_middleware_knows_its_producer() -> None:
    attached: list[object] = []

    class Recorder(Middleware):
        def attach(self, client: object) -> None:
            attached.append(client)

    producer = Producer(nsqd="n:1", middleware=[Recorder(), Recorder()])
    assert attached == [producer, producer]


async def test_a_producer_uses_its_lookup_while_it_is_open_and_closes_at_once() -> None:
    lookup = Lookup("127.0.0.1:1")
    unused = Producer(lookup)
    await unused.aclose()
    with anyio.fail_after(25):
        async with Producer(lookup, close_timeout=60.0) as producer:
            assert lookup.metadata.users == 1
            assert producer.statistics().connections == 0
        with pytest.raises(InvalidState):
            await producer.start()
    assert lookup.metadata.users == 0
    for one, text in ((unused, "is not open"), (producer, "is closed")):
        for call in (one.ping(), one.meta("t"), one.publish("t", b"x"), one.publish_many("t", [])):
            with pytest.raises(InvalidState, match=text):
                await call
        with pytest.raises(InvalidState, match=text):
            one.batcher("t")


async def test_a_producer_that_is_closed_while_it_opens_uses_no_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = Lookup("127.0.0.1:1")
    producer = Producer(lookup)
    start = BackgroundTasks.start

    async def start_and_close(tasks: BackgroundTasks) -> None:
        await start(tasks)
        await producer.aclose()

    monkeypatch.setattr(BackgroundTasks, "start", start_and_close)
    with pytest.raises(InvalidState, match="closed"):
        await producer.start()
    assert lookup.metadata.users == 0


async def test_a_producer_that_cannot_connect_is_closed(closed_address: Address) -> None:
    lookup = Lookup(str(closed_address))
    producer = Producer(lookup, connect=True, lookup_timeout=0)
    with anyio.fail_after(25), pytest.raises(LookupFailed):
        await producer.start()
    assert lookup.metadata.users == 0
    with pytest.raises(InvalidState, match="closed"):
        await producer.publish("t", b"x")


async def test_a_producer_that_closes_stops_its_polls_of_a_shared_lookup() -> None:
    async with bounded(), scripted_node(obey()) as node, scripted_lookup() as server:
        server.set_leaders({0: node}, num=1)
        lookup = Lookup(str(server))
        async with Producer(lookup), Producer(lookup) as producer:
            seen: list[ClientEvent] = []
            assert producer.on_event(seen.append) == seen.append
            await producer.publish("t", b"x")
            assert lookup.metadata.cached("t", "w") is not None
            assert [event.kind for event in seen] == ["connected"]
            await producer.aclose()
            assert lookup.metadata.cached("t", "w") is None
            assert [event.kind for event in seen] == ["connected", "disconnected"]


async def test_a_ping_does_not_wait_for_a_lookup_service(closed_address: Address) -> None:
    async with Producer(str(closed_address), timeout=60.0, lookup_timeout=60.0) as producer:
        with anyio.fail_after(25), pytest.raises(LookupFailed):
            await producer.ping()


def verbs(node: ScriptedNode) -> list[str]:
    """Return the verbs of the commands that a node received."""
    return [command.words[0].decode() for command in node.commands]


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
    ],
)
async def test_an_argument_that_is_not_valid_is_refused(arguments: dict[str, Any], kind: type[InvalidInput]) -> None:
    async with producing({}, extend=True) as (producer, (node,), _):
        await producer.publish("t", b"x")
        with pytest.raises(kind):
            await producer.publish(**{"topic": "t", "body": b"y", **arguments})
        assert bodies(node) == [b"x"]
        await producer.publish("t", b"x", key="k")


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


async def test_middleware_is_not_passed_over() -> None:
    seen: list[bytes] = []

    class Recorder(Middleware):
        async def publish(self, publishing: Publishing, send_next: SendNext) -> Any:
            assert not publishing.batch
            seen.append(publishing.messages[0].body)
            return await send_next(publishing)

    async with producing({}) as (_, (node,), lookup):
        lookup.set_leaders({0: node}, num=1)
        async with Producer(str(lookup), middleware=[Recorder()]) as producer:
            for body in (b"1", b"2"):
                assert isinstance(await producer.publish("t", body), Receipt)
    assert seen == bodies(node) == [b"1", b"2"]


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("many", [False, True])
async def test_middleware_learns_about_the_topic_before_a_message_is_encoded(key: str | None, many: bool) -> None:
    seen: list[int] = []

    class Counter(Middleware):
        async def publish(self, publishing: Publishing, send_next: SendNext) -> Any:
            publishing.on_topic.append(lambda meta: seen.append(meta.partition_num))
            receipts = await send_next(publishing)
            assert publishing.receipts == receipts
            return receipts

    async with producing({}) as (_, (node,), lookup):
        lookup.set_leaders({0: node}, num=1)
        async with Producer(str(lookup), middleware=[Counter()], close_timeout=100) as producer:
            publish = partial(producer.publish_many, "t", [b"x"]) if many else partial(producer.publish, "t", b"x")
            async with anyio.create_task_group() as tasks:
                for _ in range(2):
                    tasks.start_soon(partial(publish, key=key))
            await publish(key=key)
        assert producer.statistics().stored == 3
    assert (seen, verbs(node)) == ([1] * 3, ["MPUB" if many else "PUB"] * 3)


@pytest.mark.parametrize(("topic", "body", "kind"), [("t", b"", InvalidBody), ("a b", b"x", InvalidName)])
@pytest.mark.parametrize("key", [None, "k"])
async def test_what_no_topic_accepts_is_refused_before_lookup_is_asked(
    topic: str, body: bytes, kind: type[InvalidInput], key: str | None, closed_address: Address
) -> None:
    async with Producer(str(closed_address), timeout=60.0, lookup_timeout=60.0) as producer:
        with anyio.fail_after(25), pytest.raises(kind):
            await producer.publish(topic, body, key=key)


@pytest.mark.parametrize("body", [b"y" * 100, b"y" * 101])
async def test_bodies_from_the_smallest_on_are_compressed(body: bytes) -> None:
    async with producing({}, extend=True, compression="snappy", compression_min=100) as (producer, (node,), _):
        for one in (body[:99], body[:99], body, body):
            await producer.publish("t", one)
    assert verbs(node) == ["PUB", "PUB", "PUB_EXT", "PUB_EXT"]


async def test_every_message_that_may_be_looked_for_has_a_trace_id() -> None:
    async with producing({"PUB": ok(), "PUB_TRACE": ok()}, on_unknown="settle", settle_timeout=0.01) as setup:
        producer, (node,), lookup = setup
        lookup.set_response("/nodes", {"producers": [node_json(str(node))]})
        for _ in range(2):
            with pytest.raises(DeliveryUnknown):  # the response has no trace, which ends the connection
                await producer.publish("t", b"x")
            await producer.ping()
    assert verbs(node) == ["PUB_TRACE"] * 2


@pytest.mark.parametrize("key", [None, "k"])
async def test_a_response_to_another_command_is_an_unknown_outcome(key: str | None) -> None:
    async with producing({"PUB": [ok(), ok(b"NO"), ok()]}, on_unknown="raise") as (producer, _, _):
        await producer.publish("t", b"x", key=key)
        with pytest.raises(DeliveryUnknown, match="do not match"):
            await producer.publish("t", b"y", key=key)
        statistics = producer.statistics()
        assert (statistics.stored, statistics.unknown, statistics.failed) == (1, 1, 0)
        await producer.publish("t", b"z", key=key)


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


@pytest.mark.parametrize("key", [None, "k"])
async def test_a_message_that_is_refused_is_sent_again(key: str | None) -> None:
    async with producing({"PUB": [ok(), error("E_PUB_FAILED"), ok()]}) as (producer, (node,), _):
        for body in (b"x", b"y"):
            assert (await producer.publish("t", body, key=key)).partition == 0
        assert bodies(node) == [b"x", b"y", b"y"]
        assert (producer.statistics().stored, producer.statistics().retries) == (2, 1)


async def test_stored_messages_and_their_bytes_are_counted() -> None:
    async with producing({}, close_timeout=60.0) as (producer, (node,), _):
        for _ in range(3):
            await producer.publish("t", b"x")
        assert producer.statistics().stored == 3
        assert producer.statistics().bytes_sent == 3 * len(b"PUB t 0\n\0\0\0\1x")
        assert len(node.commands) == 3
        await producer.publish_many("t", [b"x"])
        with anyio.fail_after(25):
            await producer.aclose()


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


@pytest.mark.parametrize("arguments", [{}, {"key": "k"}, {"partition": 0}])
async def test_a_topic_that_is_published_to_is_not_forgotten(arguments: dict[str, Any]) -> None:
    async with producing({}) as (producer, _, _):
        await producer.publish("t", b"x", **arguments)
        routes = producer._routes
        routes.forget_idle()
        await producer.publish("t", b"x", **arguments)
        routes.forget_idle()
        assert list(routes.by_topic) == ["t"]


async def test_a_producer_that_closes_accepts_no_more() -> None:
    async with producing({"PUB": [ok(), None]}, on_unknown="raise") as (producer, (node,), _):
        await producer.publish("t", b"x")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_unknown, producer, b"pending")
            await until(lambda: len(node.commands) == 2)
            tasks.start_soon(producer.aclose)
            await until(lambda: "closing" in repr(producer))
            await anyio.wait_all_tasks_blocked()
            assert producer.statistics().pending == 1
            with pytest.raises(InvalidState, match="closed"):
                await producer.publish("t", b"late")
            await node.peers[0].close()
    assert bodies(node) == [b"x", b"pending"]


async def _unknown(producer: Producer, body: bytes) -> None:
    with pytest.raises(DeliveryUnknown):
        await producer.publish("t", body)
