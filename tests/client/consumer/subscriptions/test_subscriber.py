"""Resubscription on clusters and scripted nodes: topics that were changed or forgotten, partitions without leader."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext import Consumer
from nsqext.lookup.client import LookupClient
from tests.support.consumers import QUICK, eventually, opened, publish, quick, take
from tests.support.fake_nsqd import ScriptedLookup, obey, ok, scripted_lookup, scripted_node

if TYPE_CHECKING:
    from nsqext.broker import Cluster
    from nsqext.lookup.responses import LookupAnswer


pytestmark = pytest.mark.anyio


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic name for this test only."""
    return f"t{abs(hash(request.node.nodeid)) % 10**12}"


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
