"""Resubscription: leaders that move, lost nodes, stale or empty lookup, topics that change."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext import Consumer, ExtFilter
from nsqext.lookup.client import LookupClient
from nsqext.types import Address
from tests.support.consumers import QUICK, depth, eventually, opened, publish, quick, take, tape
from tests.support.fake_nsqd import PLAIN, ScriptedLookup, error, message, obey, ok, scripted_lookup, scripted_node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nsqext.broker import Cluster
    from nsqext.lookup.responses import LookupAnswer


pytestmark = pytest.mark.anyio


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


async def test_an_upgrade_of_one_of_many_silent_topics_is_noticed(
    cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another tool: the server sends nothing more, and reports nothing."""
    looked_up, look_up = set[str](), LookupClient.lookup

    async def count(client: LookupClient, topic: str, access: str) -> tuple[LookupAnswer, ...]:
        looked_up.add(topic)
        return await look_up(client, topic, access)

    topics = [f"{topic}_{number}" for number in range(8)]
    for name in topics:
        cluster.create_topic(name, channels=["ch"])
    async with opened(topics, cluster, lookup_poll_interval=600.0) as consumer:
        monkeypatch.setattr(LookupClient, "lookup", count)
        cluster.upgrade_topic(topics[5])
        publish(cluster, topics[5], b"after")
        assert await take(consumer, 1) == [b"after"]
    assert looked_up == {topics[5]}


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


async def test_a_consumer_whose_chosen_partition_has_no_leader_says_so_and_waits_for_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with scripted_lookup() as lookup, scripted_node(obey({"SUB": [ok()]})) as node:
        lookup.set_leaders({0: node}, num=2)
        consumer = Consumer("t", "ch", lookupd=str(lookup), partitions=(1,), **QUICK)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(consumer.start)
            await eventually(lambda: "subscribe to: none of partitions=(1,) has a leader" in caplog.text)
            assert not node.commands
            lookup.set_leaders({0: node, 1: node}, num=2)
        await eventually(lambda: [one.partition for one in consumer.connections] == [1])
        await consumer.aclose()


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


async def test_a_topic_that_is_created_later_is_found(cluster: Cluster, topic: str) -> None:
    async with opened(topic, cluster, start_timeout=0.05) as consumer:
        cluster.create_topic(topic)
        await eventually(lambda: consumer.connections)


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


async def test_a_node_of_the_first_lookup_that_is_dead_and_removed_is_not_waited_for() -> None:
    dead = Address("127.0.0.1", 1)
    async with scripted_lookup() as lookup, scripted_node(obey(), granted=PLAIN) as node:
        lookup.set_leaders(nodes=[node, dead])
        options = quick(start_timeout=0.1, lookup_poll_interval=0.1)
        async with Consumer("t", "ch", lookupd=str(lookup), **options) as consumer:
            assert (len(consumer.connections), consumer.subscribed) == (1, False)
            lookup.set_leaders(nodes=[node])
            await eventually(lambda: consumer.subscribed)


async def more_lookups(lookup: ScriptedLookup, count: int) -> None:
    """Wait until a number of further requests about the topic were answered, and but for the last one processed."""
    asked = [target for target in lookup.questions if target.startswith("/lookup")]
    await eventually(
        lambda: len([target for target in lookup.questions if target.startswith("/lookup")]) > len(asked) + count
    )


async def test_a_topic_that_lookup_forgot_for_a_while_is_consumed_from_all_partitions_again() -> None:
    async with scripted_lookup() as lookup, scripted_node(obey()) as node, scripted_node() as other:
        lookup.set_response("/topics", {"topics": ["t"]})
        lookup.set_leaders({0: node, 1: other}, num=2)
        options = quick(start_timeout=0.1, lookup_poll_interval=0.1, lookup_max_pause=0.1)
        async with Consumer("t*", "ch", lookupd=str(lookup), **options) as consumer:
            peer = await other.accept_subscribed()
            lookup.refuse()
            await more_lookups(lookup, 2)
            await peer.close()
            await eventually(lambda: len(consumer.connections) == 1)
            await more_lookups(lookup, 2)
            lookup.set_leaders({0: node, 1: other}, num=2)
            await other.accept_subscribed()
            assert len(other.peers) == 2
