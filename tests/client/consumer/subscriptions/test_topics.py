"""Consumers of several topics: names and patterns, topics that are created and deleted, one shared max_in_flight."""

from __future__ import annotations

from collections import Counter
from secrets import token_hex
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio import create_task_group

from nsqext import Admin, Consumer, Message, Position, Producer
from nsqext.broker import Cluster
from nsqext.client.consumer.subscriptions.topics import TopicSelection
from nsqext.errors import InvalidName, InvalidSetting
from nsqext.protocol.names import is_valid_topic
from tests.support.consumers import eventually, quick, quick_sharing, running, take, tape
from tests.support.fake_nsqd import PLAIN, message, scripted_node

if TYPE_CHECKING:
    from collections.abc import Iterator

_POLLED = quick(lookup_poll_interval=0.1, lookup_max_pause=0.1, backoff="off")
# Names and patterns


def test_patterns_and_names() -> None:
    selection = TopicSelection(["orders.*", "refunds", "orders.*", "v?"], excluded="orders.dead")
    assert selection.given == ("orders.*", "refunds", "v?")
    assert (selection.names, selection.patterns, str(selection)) == (
        ("refunds",),
        ("orders.*", "v?"),
        "orders.*,refunds,v?",
    )
    found = ["orders", "orders.", "orders.eu.paid", "orders.dead", "ordersXpaid", "refunds", "v1", "v12"]
    assert [name for name in found if selection.matches(name)] == ["orders.", "orders.eu.paid", "refunds", "v1"]
    assert all(map(is_valid_topic, found))
    assert not selection.matches("orders.eu#ephemeral")
    assert TopicSelection("orders.*#ephemeral").matches("orders.eu#ephemeral")
    assert TopicSelection("orders").single
    assert not TopicSelection("orders*").single


@pytest.mark.parametrize("topics", ["orders/*", "orders.[ab]*", "*|a", "", ["a", ""], ["a", 1], "?" * 65, "*#other"])
def test_an_invalid_name_or_pattern_is_refused_at_once(topics: str) -> None:
    with pytest.raises(InvalidName, match=r"not valid|longer than any name"):
        Consumer(topics, "ch", lookupd="127.0.0.1:1")


@pytest.mark.parametrize("topics", [5, b"a", {"a": 1}, None])
def test_what_is_neither_a_topic_nor_a_list_of_topics_is_refused(topics: object) -> None:
    with pytest.raises(InvalidSetting, match="is neither a topic nor a list of topics"):
        TopicSelection(topics)  # type: ignore[arg-type]


def test_settings_of_one_topic_are_those_of_a_name_or_of_a_list_with_one_name() -> None:
    for topics in ("a", ["a"], ["a", "a"]):
        assert Consumer(topics, "ch", lookupd="127.0.0.1:1", partitions=(1,)).topics == ("a",)
    for settings in ({}, {"start": Position.earliest()}):
        assert Consumer(["a", "b*"], "ch", lookupd="127.0.0.1:1", **settings).topics == ("a", "b*")  # type: ignore[arg-type]


def test_settings_of_a_single_topic_are_refused_for_several() -> None:
    with pytest.raises(InvalidSetting, match="leaves nothing to consume"):
        Consumer([], "ch", lookupd="127.0.0.1:1")
    with pytest.raises(InvalidSetting, match=r"pattern 'a\*' needs a list of topics.*give lookupd"):
        Consumer("a*", "ch", nsqd="127.0.0.1:1")
    with pytest.raises(InvalidSetting, match="partitions are chosen, and there are several topics"):
        Consumer(["a", "b"], "ch", lookupd="127.0.0.1:1", partitions=(1,))
    with pytest.raises(InvalidSetting, match="partitions are chosen, and there are several topics"):
        Consumer("a*", "ch", lookupd="127.0.0.1:1", start={0: Position.earliest()})


# On clusters of both generations


@pytest.fixture(scope="module", params=["redesigned", "original"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two nodes of a generation."""
    with Cluster(nodes=2, generation=request.param) as cluster:
        yield cluster


@pytest.fixture
def prefix() -> str:
    """A prefix of names that no other test uses."""
    return f"t{token_hex(4)}."


async def send(cluster: Cluster, topic: str, *bodies: bytes) -> None:
    """Publish messages."""
    async with Producer(cluster.lookupd) as producer:
        await producer.publish_many(topic, bodies)


def topics_of(consumer: Consumer) -> set[str]:
    """Return the topics of the open connections."""
    return {connection.topic for connection in consumer.connections}


@pytest.mark.anyio
async def test_new_topics_are_consumed_and_deleted_ones_are_not(cluster: Cluster, prefix: str) -> None:
    names = [prefix + name for name in ("a", "b", "c")]
    for name in names[:2]:
        cluster.create_topic(name, channels=["ch"])
    async with Consumer(f"{prefix}*", "ch", lookupd=cluster.lookupd, **_POLLED) as consumer:
        assert (consumer.topics, topics_of(consumer)) == ((f"{prefix}*",), set(names[:2]))
        cluster.create_topic(names[2], channels=["ch"])
        await eventually(lambda: topics_of(consumer) == set(names))
        for name in names:
            await send(cluster, name, name.encode())
        assert sorted(await take(consumer, 3)) == [name.encode() for name in names]
        async with Admin(cluster.lookupd) as admin:
            await admin.delete_topic(names[0])
        await eventually(lambda: topics_of(consumer) == set(names[1:]))
        async with Producer(cluster.lookupd) as producer, Admin(cluster.lookupd) as admin:
            await producer.ping()
            assert names[0] not in await admin.topics(), "a consumer must not create the topic again"
        cluster.create_topic(names[0], channels=["ch"])
        await eventually(lambda: topics_of(consumer) == set(names))
        await send(cluster, names[0], b"again")
        assert await take(consumer, 1) == [b"again"]
        statistics = consumer.statistics()
    assert (statistics.finished, statistics.in_flight) == (4, 0)


@pytest.mark.anyio
async def test_a_topic_is_left_when_its_messages_in_flight_are_answered() -> None:
    async with scripted_node(granted=PLAIN) as node, create_task_group() as tasks:
        consumer = Consumer(["a", "b"], "ch", nsqd=str(node), max_in_flight=4, **quick_sharing(close_timeout=60.0))
        tasks.start_soon(consumer.start)
        peers = {}
        for _ in range(2):
            peer = await node.accept()
            peers[(await peer.expect("SUB")).words[1]] = peer
            await peer.answer()
            await peer.expect("RDY")
        peer = peers[b"a"]
        await peer.raw(message(1, text_id=True) + message(2, text_id=True))
        received = [await consumer.__anext__() for _ in range(2)]
        consumer.topics = "b"
        while (await peer.expect("RDY")).words[1] != b"0":
            pass
        for each in received:
            await each.finish()
        assert await tape(peer, 3) == ["FIN 1", "FIN 2", "CLS"]
        await peer.answer(b"CLOSE_WAIT")
        await peer.expect_end()
        await eventually(lambda: len(consumer.connections) == 1)
        await peers[b"b"].close()
        await consumer.aclose()


@pytest.mark.anyio
async def test_a_topic_that_is_left_is_closed_with_the_consumer() -> None:
    async with scripted_node(granted=PLAIN) as node, create_task_group() as tasks:
        consumer = Consumer("a", "ch", nsqd=str(node), max_in_flight=4, **quick_sharing(close_timeout=0.05))
        tasks.start_soon(consumer.start)
        peer = await node.accept_subscribed()
        await peer.raw(message(1, text_id=True))
        await consumer.__anext__()
        consumer.topics = "b"
        await (await node.accept()).expect("SUB")
        tasks.start_soon(consumer.aclose)
        first, *more = await tape(peer, 3)
        assert first == "RDY 0"
        assert sorted(more) == ["CLS", "REQ 1"]  # CLS is first where the time for the answer passed before the close
        await peer.answer(b"CLOSE_WAIT")
        await peer.expect_end()


@pytest.mark.anyio
async def test_a_topic_that_is_left_while_it_connects_is_not_consumed() -> None:
    async with scripted_node(granted=PLAIN) as node, create_task_group() as tasks:
        consumer = Consumer("a", "ch", nsqd=str(node), **quick_sharing())
        tasks.start_soon(consumer.start)
        first = await node.accept()
        await first.expect("SUB")
        consumer.topics = "b"
        second = await node.accept()
        await second.expect("SUB")
        await first.answer()
        assert await tape(first, 1) == ["CLS"]
        await first.answer(b"CLOSE_WAIT")
        await first.expect_end()
        await second.close()
        await consumer.aclose()


# On the redesigned NSQ


@pytest.fixture(scope="module")
def redesigned() -> Iterator[Cluster]:
    """Two nodes."""
    with Cluster(nodes=2) as cluster:
        yield cluster


@pytest.mark.anyio
async def test_one_budget_is_shared_by_all_topics(redesigned: Cluster, prefix: str) -> None:
    busy, quiet = f"{prefix}busy", f"{prefix}quiet"
    for name in (busy, quiet):
        redesigned.create_topic(name, channels=["ch"])
    await send(redesigned, busy, *[b"busy"] * 100)
    await send(redesigned, quiet, *[b"quiet"] * 10)
    consumer = Consumer([busy, quiet], "ch", lookupd=redesigned.lookupd, max_in_flight=4, **_POLLED)
    most, seen = 0, list[bytes]()
    done = anyio.Event()

    @consumer.handler
    async def handle(message: Message) -> None:
        nonlocal most
        most = max(most, sum(connection.ready for connection in consumer.connections))
        await anyio.sleep(0.01)  # the busy topic lasts longer than its servers take to read a lower RDY count
        seen.append(message.body)
        if len(seen) == 110:
            done.set()

    with anyio.fail_after(25):
        await running(consumer, done.wait)
    assert most <= 4
    assert Counter(seen[:80])[b"quiet"] == 10, "the busy topic must not delay the other one"


@pytest.mark.anyio
async def test_dead_letters_are_not_received_by_the_pattern_that_matches_their_topic(
    redesigned: Cluster, prefix: str
) -> None:
    for name in ("a", "dead"):
        redesigned.create_topic(prefix + name, channels=["ch"])
    settings = {**_POLLED, "max_attempts": 1, "dead_letter": f"{prefix}dead"}
    consumer = Consumer(f"{prefix}*", "ch", lookupd=redesigned.lookupd, **settings)
    seen: list[str] = []
    await send(redesigned, f"{prefix}a", b"one")

    @consumer.handler
    async def handle(message: Message) -> None:
        seen.append(message.topic)
        raise ValueError("bad")

    async def read_letter() -> None:
        async with Consumer(f"{prefix}dead", "ch", lookupd=redesigned.lookupd, **_POLLED) as letters:
            assert await take(letters, 1) == [b"one"]

    await running(consumer, read_letter)
    assert seen == [f"{prefix}a"]
