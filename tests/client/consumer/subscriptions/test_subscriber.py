"""Resubscription: leaders that move, lost nodes, stale or empty lookup, topics that change."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Never, cast

import anyio
import pytest
from tenacity.wait import wait_base

from nsqext import Consumer, ExtFilter, Position
from nsqext.client.consumer.options import ConsumerOptions
from nsqext.client.consumer.subscriptions import subscriber as subscriber_module
from nsqext.client.consumer.subscriptions.assignment import Assignment, SubscriberContext
from nsqext.client.consumer.subscriptions.subscriber import Subscriber
from nsqext.client.consumer.subscriptions.subscription_group import SubscriptionGroup
from nsqext.errors import InvalidPartition, InvalidSetting, InvalidState
from nsqext.errors.server import BadTopic, InvalidCommand
from nsqext.lookup.partition_map import PartitionMap
from tests.support.consumers import QUICK, depth, eventually, opened, publish, quick, take, tape
from tests.support.fake_nsqd import PLAIN, error, message, obey, ok, scripted_lookup, scripted_node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tenacity import RetryCallState

    from nsqext.broker import Cluster
    from nsqext.lookup.metadata import MetadataCache
    from tests.support.fake_nsqd import ScriptedLookup


pytestmark = pytest.mark.anyio

_EARLIEST = Position.earliest()


@pytest.fixture
def topic(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A topic name for this test only; faults of the cluster end after the test."""
    yield f"t{abs(hash(request.node.nodeid)) % 10**12}"
    cluster.faults.heal()


async def take_until(consumer: Consumer, body: bytes) -> None:
    """Finish messages until one has this body; earlier ones may be redelivered, if their FIN was lost."""
    while await take(consumer, 1) != [body]:
        pass


async def test_a_leader_that_moves_is_followed(cluster: Cluster, topic: str) -> None:
    cluster.create_topic(topic, replicas=2, channels=["ch"])
    options = quick(lookup_poll_interval=0.1)
    async with opened(topic, cluster, **options) as consumer:
        publish(cluster, topic, b"before")
        assert await take(consumer, 1) == [b"before"]
        old = cluster.leader(topic)
        new = next(name for name in cluster.in_sync(topic) if name != old)
        cluster.move_leader(topic, 0, new)
        publish(cluster, topic, b"after")
        await take_until(consumer, b"after")
        assert [one.node for one in consumer.connections] == [cluster.nodes[new].tcp]


async def test_a_node_that_is_killed_is_replaced(cluster: Cluster, topic: str) -> None:
    cluster.create_topic(topic, replicas=3, channels=["ch"])
    async with opened(topic, cluster) as consumer:
        publish(cluster, topic, b"before")
        assert await take(consumer, 1) == [b"before"]
        old = cluster.leader(topic)
        cluster.kill(old)
        try:
            cluster.wait_writable(topic)
            publish(cluster, topic, b"after")
            await take_until(consumer, b"after")
        finally:
            cluster.restart(old)


async def test_a_restarted_node_is_subscribed_again(cluster: Cluster, topic: str) -> None:
    cluster.create_topic(topic, channels=["ch"])
    async with opened(topic, cluster) as consumer:
        name = cluster.leader(topic)
        cluster.kill(name)
        await eventually(lambda: not consumer.connections)
        cluster.restart(name)
        cluster.wait_writable(topic)
        publish(cluster, topic, b"after")
        assert await take(consumer, 1) == [b"after"]


async def test_an_empty_lookup_answer_removes_nothing(cluster: Cluster, topic: str) -> None:
    cluster.create_topic(topic, partitions=2, channels=["ch"])
    options = quick(lookup_poll_interval=0.05)
    async with opened(topic, cluster, **options) as consumer:
        cluster.faults.empty_lookup()
        await anyio.sleep(0.3)
        publish(cluster, topic, b"a", partition=0)
        publish(cluster, topic, b"b", partition=1)
        assert sorted(await take(consumer, 2)) == [b"a", b"b"]


async def test_an_upgrade_of_one_of_many_silent_topics_is_noticed(cluster: Cluster, topic: str) -> None:
    """By another tool: the server sends nothing more, and reports nothing."""
    topics = [f"{topic}_{number}" for number in range(30)]
    for name in topics:
        cluster.create_topic(name, channels=["ch"])
    async with opened(topics, cluster, lookup_poll_interval=600.0) as consumer:
        refreshers = consumer._metadata._refreshers
        before = {key: one._rounds for key, one in refreshers.items()}
        cluster.upgrade_topic(topics[17])
        publish(cluster, topics[17], b"after")
        assert await take(consumer, 1) == [b"after"]
        lookups = {key: one._rounds - before[key] for key, one in refreshers.items()}
    assert [topic for (topic, access), rounds in lookups.items() if rounds] == [topics[17]]


async def test_a_topic_upgraded_to_extend_is_subscribed_again(cluster: Cluster, topic: str) -> None:
    cluster.create_topic(topic, channels=["ch"])
    options = quick(lookup_poll_interval=0.1)
    async with opened(topic, cluster, **options) as consumer:
        publish(cluster, topic, b"before")
        assert await take(consumer, 1) == [b"before"]
        cluster.upgrade_topic(topic)
        await eventually(lambda: consumer._metadata.cached(topic, "r").meta.extend_support)  # type: ignore[union-attr]
        publish(cluster, topic, b"after", ext='{"a":"b"}')
        with anyio.fail_after(25):
            message = await consumer.__anext__()
        assert (message.body, dict(message.headers)) == (b"after", {"a": "b"})
        await message.finish()


async def test_a_missing_heartbeat_makes_the_consumer_look_the_topic_up(
    cluster: Cluster, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create_topic(topic, channels=["ch"])
    caplog.set_level(logging.INFO, "nsqext.consumer")
    async with opened(topic, cluster, **quick(heartbeat_interval=2.0, lookup_poll_interval=600.0)) as consumer:
        cluster.upgrade_topic(topic)
        publish(cluster, topic, b"after", ext='{"a":"b"}')  # the server is silent from now on
        assert await take(consumer, 1) == [b"after"]
    assert "the topic was changed" in caplog.text
    assert "received nothing from the server" not in caplog.text


async def test_a_subset_of_partitions(cluster: Cluster, topic: str) -> None:
    cluster.create_topic(topic, partitions=3, channels=["ch"])
    async with opened(topic, cluster, partitions=(0, 2)) as consumer:
        assert {one.partition for one in consumer.connections} == {0, 2}
        for partition in range(3):
            publish(cluster, topic, b"%d" % partition, partition=partition)
        assert sorted(await take(consumer, 2)) == [b"0", b"2"]


@pytest.mark.parametrize(("partitions", "wrong"), [(2, 7), (2, 2), (1, 1)])
async def test_a_missing_partition(cluster: Cluster, topic: str, partitions: int, wrong: int) -> None:
    cluster.create_topic(topic, partitions=partitions, channels=["ch"])
    with pytest.raises(InvalidPartition, match=f"partition {wrong} does not exist: the topic has {partitions}"):
        async with opened(topic, cluster, partitions=(0, wrong)):
            raise AssertionError("it opened")


class Pauses(wait_base):
    """Records the number of each failed attempt, and pauses for a turn of the event loop."""

    def __init__(self) -> None:
        self.attempts: list[int] = []

    def __call__(self, retry_state: RetryCallState) -> float:
        self.attempts.append(retry_state.attempt_number)
        return 0.0


async def test_each_question_for_the_first_partition_waits_longer() -> None:
    pauses = Pauses()
    options = quick(start_timeout=0.0)
    del options["max_reconnect_wait"]
    options["reconnect_wait"] = pauses
    async with (
        scripted_lookup() as lookup,
        scripted_node(granted=PLAIN) as node,
        Consumer("t", "ch", lookupd=str(lookup), **options) as consumer,
    ):
        await eventually(lambda: len(pauses.attempts) >= 3)
        assert pauses.attempts[:3] == [1, 2, 3]
        lookup.set_leaders({0: node}, num=1)
        peer = await node.accept()
        await peer.expect("SUB")
        await peer.answer()
        await eventually(lambda: len(consumer.connections) == 1)
        await peer.close()


@pytest.mark.parametrize(("stable", "attempts"), [(60.0, [2, 3, 4]), (-1.0, [1, 1, 1])])
async def test_pauses_between_connections_grow_until_one_was_stable(
    monkeypatch: pytest.MonkeyPatch, stable: float, attempts: list[int]
) -> None:
    monkeypatch.setattr(subscriber_module, "STABLE", stable)
    pauses = Pauses()
    options = quick(start_timeout=0.0)
    del options["max_reconnect_wait"]
    options["reconnect_wait"] = pauses
    async with scripted_node(granted=PLAIN) as node, Consumer("t", "ch", nsqd=str(node), **options):
        for _ in attempts:
            peer = await node.accept()
            await peer.expect("SUB")
            await peer.answer()
            await peer.close()
        await eventually(lambda: len(pauses.attempts) >= len(attempts))
    assert pauses.attempts[: len(attempts)] == attempts


@pytest.mark.parametrize(
    ("wanted", "bodies"),
    [
        (ExtFilter(1, "colour", "red"), [b"red"]),
        (ExtFilter(1, "colour", "red", inverse=True), [b"blue", b"plain"]),
        (ExtFilter(2, "colour", "^b"), [b"blue"]),
        (ExtFilter(3, "colour", "?ed"), [b"red"]),
        (ExtFilter(4, "any", pairs=(("colour", "red"), ("size", "9"))), [b"red", b"blue"]),
        (ExtFilter(4, "all", pairs=(("colour", "blue"), ("size", "9"))), [b"blue"]),
        (ExtFilter(4, "all", pairs=(("colour", "red"), ("size", "9")), inverse=True), [b"red", b"blue", b"plain"]),
    ],
)
async def test_a_filter_is_applied(cluster: Cluster, topic: str, wanted: ExtFilter, bodies: list[bytes]) -> None:
    cluster.create_topic(topic, extend=True, channels=["ch"])
    async with opened(topic, cluster, ext_filter=wanted) as consumer:
        publish(cluster, topic, b"red", ext='{"colour":"red"}')
        publish(cluster, topic, b"blue", ext='{"colour":"blue","size":"9"}')
        publish(cluster, topic, b"plain")
        assert await take(consumer, len(bodies)) == bodies
        await eventually(lambda: not depth(cluster, topic))


@pytest.mark.parametrize(
    ("code", "listed", "second", "extend"),
    [
        ("E_SUB_EXTEND_NEED", False, b"SUB", True),
        ("E_SUB_EXTEND_FORBIDDON", True, b"SUB", False),
        ("E_SUB_ORDER_IS_MUST", False, b"SUB_ORDERED", False),
    ],
)
async def test_a_topic_that_differs_from_lookup_is_subscribed_as_its_server_demands(
    caplog: pytest.LogCaptureFixture, code: str, listed: bool, second: bytes, extend: bool
) -> None:
    """Lookup is queried again, and does not say so either: an old one lists two members of the meta only."""
    async with scripted_lookup() as lookup, scripted_node(obey({"SUB": [error(code), ok()]})) as node:
        lookup.set_leaders({0: node}, num=1, extend=listed)
        async with Consumer("t", "ch", lookupd=str(lookup), **QUICK) as consumer:
            await eventually(lambda: consumer.connections)
            assert len(lookup.questions) >= 2
    assert [word for word in (one.words[0] for one in node.commands) if word.startswith(b"SUB")] == [b"SUB", second]
    assert [bool(peer.identify.get("extend_support")) for peer in node.peers] == [listed, extend]
    assert "the server requires what lookup does not report" in caplog.text


async def test_a_topic_that_must_be_ordered_refuses_a_consumer_that_must_not() -> None:
    async with scripted_lookup() as lookup, scripted_node(obey({"SUB": error("E_SUB_ORDER_IS_MUST")})) as node:
        lookup.set_leaders({0: node}, num=1, ordered=True)
        with pytest.raises(InvalidSetting, match="leave out ordered=False"):
            async with Consumer("t", "ch", lookupd=str(lookup), **quick(ordered=False)):
                await anyio.sleep(25)


async def test_lanes_warn_once_of_other_connections_on_their_channel(
    cluster: Cluster, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create_topic(topic, partitions=2, channels=["ch"])
    async with opened(topic, cluster, key="k"):
        await anyio.sleep(0.1)
        assert "further connections" not in caplog.text
        async with opened(topic, cluster, key="k"):
            await eventually(lambda: caplog.text.count("1 further connections consume") == 1)
    ordered = f"{topic}_ordered"
    cluster.create_topic(ordered, ordered=True, channels=["ch"])
    async with opened(ordered, cluster, key="k"), opened(ordered, cluster, key="k"), opened(topic, cluster):
        await anyio.sleep(0.1)
    assert caplog.text.count("further connections") == 1


async def test_a_node_that_is_not_leader_is_retried_with_a_delay() -> None:
    options = quick(reconnect_wait=0.05, max_reconnect_wait=0.2, start_timeout=0.6, lookup_max_pause=0.2)
    async with scripted_lookup() as lookup, scripted_node(obey({"SUB": error("E_FAILED_ON_NOT_LEADER")})) as node:
        lookup.set_leaders({0: node}, num=1)
        async with Consumer("t", "ch", lookupd=str(lookup), **options):
            assert len(node.peers) <= 20
            assert len(lookup.questions) <= 30
            await eventually(lambda: len(node.peers) >= 2)


async def test_a_leader_that_only_a_later_answer_names() -> None:
    async with (
        scripted_lookup() as lookup,
        scripted_node(obey({"SUB": error("E_FAILED_ON_NOT_LEADER")})) as old,
        scripted_node(obey()) as new,
    ):
        lookup.set_leaders({0: old}, num=1)
        async with Consumer("t", "ch", lookupd=str(lookup), **quick(start_timeout=0.05)) as consumer:
            lookup.set_leaders({0: new}, num=1)
            await eventually(lambda: [one.node for one in consumer.connections] == [str(new)])


async def test_a_topic_name_that_the_server_refuses_is_raised() -> None:
    async with scripted_node(obey({"SUB": error("E_BAD_TOPIC no")}), granted=PLAIN) as node:
        with pytest.raises(BadTopic):
            async with Consumer("t", "ch", nsqd=str(node), **QUICK):
                raise AssertionError("it opened")


async def test_a_topic_that_is_created_later_is_found(cluster: Cluster, topic: str) -> None:
    async with opened(topic, cluster, start_timeout=0.05) as consumer:
        cluster.create_topic(topic)
        await eventually(lambda: consumer.connections)


async def test_a_node_of_the_original_that_leaves_lookup_is_forgotten() -> None:
    options = quick(lookup_poll_interval=0.05)
    async with (
        scripted_lookup() as lookup,
        scripted_node(obey(), granted=PLAIN) as one,
        scripted_node(obey(), granted=PLAIN) as two,
    ):
        lookup.set_leaders(nodes=[one, two])
        async with Consumer("t", "ch", lookupd=str(lookup), **options) as consumer:
            assert len(consumer.connections) == 2
            lookup.set_leaders(nodes=[one])
            await eventually(lambda: consumer._metadata.cached("t", "r").nodes == (one.address,))  # type: ignore[union-attr]
            for peer in two.peers:
                await peer.close()
            await eventually(lambda: len(consumer._topics._subscribers["t"]._assignments) == 1)
            assert [place.node for place in consumer.connections] == [str(one)]


async def test_an_ordered_channel_asks_for_one_message_at_a_time() -> None:
    async with scripted_lookup() as lookup, scripted_node() as node:
        lookup.set_leaders({0: node}, num=1, ordered=True)
        async with Consumer("t", "ch", lookupd=str(lookup), **quick(start_timeout=0.0)):
            peer = await node.accept()
            assert await tape(peer, 1) == ["SUB_ORDERED t ch 0"]
            await peer.answer()
            assert await tape(peer, 1) == ["RDY 1"]
            await peer.close()


async def test_broken_order_restarts_the_subscription(caplog: pytest.LogCaptureFixture) -> None:
    async with scripted_lookup() as lookup, scripted_node() as node:
        lookup.set_leaders({0: node}, num=1, ordered=True)
        async with Consumer("t", "ch", lookupd=str(lookup), **quick(start_timeout=0.0)) as consumer:
            peer = await node.accept()
            await peer.expect("SUB_ORDERED")
            await peer.answer()
            await peer.expect("RDY")
            await peer.raw(message(5, position=bytes(7) + b"\x50" + bytes(4)))
            first = await consumer.__anext__()
            await first.finish()
            await peer.expect("FIN")
            with caplog.at_level(logging.WARNING, "nsqext.consumer"):
                await peer.raw(message(4, position=bytes(7) + b"\x40" + bytes(4)))
                await peer.expect_end()
                peer = await node.accept()
            assert "id 4 at offset 64 was received after id 5 at offset 80" in caplog.text
            await peer.expect("SUB_ORDERED")
            await peer.answer()
            await peer.expect("RDY")
            await peer.raw(message(4, position=bytes(7) + b"\x40" + bytes(4)))
            assert (await consumer.__anext__()).internal_id == 4, "no message was skipped"
            await peer.close()


async def test_settings_that_the_server_refuses_are_raised() -> None:
    async with scripted_node(obey({"SUB": error("E_INVALID no")}), granted=PLAIN) as node:
        with pytest.raises(InvalidCommand):
            async with Consumer("t", "ch", nsqd=str(node), **QUICK):
                raise AssertionError("it opened")


async def test_settings_accepted_once_are_tried_again() -> None:
    async with (
        scripted_node(obey({"SUB": [ok(), error("E_INVALID no"), ok()]}), granted=PLAIN) as node,
        Consumer("t", "ch", nsqd=str(node), **QUICK) as consumer,
    ):
        await node.peers[0].close()
        await eventually(lambda: len(node.peers) == 3 and consumer.connections)


async def test_a_node_that_never_answers_sub_is_tried_again() -> None:
    async with scripted_node(obey({"SUB": [None, ok()]})) as node, scripted_lookup() as lookup:
        lookup.set_leaders({0: node}, num=1)
        options = quick(request_timeout=0.1)
        async with Consumer("t", "ch", lookupd=str(lookup), **options) as consumer:
            await eventually(lambda: consumer.connections)
        assert len(node.peers) >= 2


async def test_a_consumer_that_waits_for_its_topic_outlives_a_lookup_that_fails() -> None:
    async with (
        scripted_node(obey()) as node,
        scripted_lookup() as lookup,
        Consumer("t", "ch", lookupd=str(lookup), **quick(start_timeout=0.01)) as consumer,
    ):
        asked = partial(_times_asked, lookup)
        await eventually(lambda: asked() > 1)  # so that the first answer has been processed
        lookup.refuse(500, "no leader among the lookup nodes")
        before = asked()
        await eventually(lambda: asked() > before + 1)
        lookup.set_leaders({0: node}, num=1)
        await eventually(lambda: consumer.connections)


class _ClosingMetadata:
    """Metadata that is closed while a subscriber waits for its response."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.subscriber: Subscriber | None = None

    def cached(self, topic: str, access: str) -> None:
        return None

    def watch(self, topic: str, access: str, callback: object) -> Callable[[], None]:
        return lambda: None

    async def resolve(self, topic: str, access: str) -> Never:
        self._close("resolve")

    async def refresh(self, topic: str, access: str, failed: object, partition: object) -> Never:
        self._close("refresh")

    def _close(self, call: str) -> Never:
        assert self.subscriber is not None
        self.subscriber.closing = True
        self.asked.append(call)
        raise InvalidState("the lookup client is closed")


async def test_metadata_that_is_closed_with_the_consumer_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    consumer = Consumer("t", "ch", lookupd="127.0.0.1:1", **QUICK)
    metadata = _ClosingMetadata()
    group = SubscriptionGroup(ConsumerOptions(), cast("MetadataCache", metadata), consumer._events, consumer._tasks)
    context = SubscriberContext("ch", group, consumer._receiver)
    metadata.subscriber = subscriber = Subscriber("t", context, consumer._fail)
    await subscriber.run()
    subscriber.closing = False
    await subscriber._refresh(Assignment(0), PartitionMap("t", "r"), 0, None)
    assert (metadata.asked, caplog.messages) == (["resolve", "refresh"], [])


def _times_asked(lookup: ScriptedLookup) -> int:
    return sum(question.startswith("/lookup?") for question in lookup.questions)
