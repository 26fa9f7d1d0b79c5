"""Pausing one topic of several, and whether a consumer is starved."""

from __future__ import annotations

from secrets import token_hex
from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext import Consumer, Message, sync
from nsqext.errors import InvalidName
from tests.support.consumers import QUICK, eventually, publish

if TYPE_CHECKING:
    from nsqext.broker import Cluster

pytestmark = pytest.mark.anyio


@pytest.fixture
def topics(cluster: Cluster) -> tuple[str, str]:
    """Two topics, which sort by name."""
    names = f"a_{token_hex(4)}", f"b_{token_hex(4)}"
    for name in names:
        cluster.create_topic(name, partitions=2, channels=["ch"])
    return names


async def test_one_topic_of_several_is_paused(cluster: Cluster, topics: tuple[str, str]) -> None:
    first, second = topics
    consumer = Consumer(topics, "ch", cluster.lookupd, **QUICK)
    seen: list[tuple[str, bytes]] = []

    @consumer.handler
    async def handle(message: Message) -> None:
        seen.append((message.topic, message.body))

    consumer.pause(first)
    async with consumer:
        publish(cluster, first, b"1", b"2", partition=0)
        publish(cluster, second, b"3", b"4", partition=0)
        await eventually(lambda: len(seen) == 2)
        await anyio.sleep(0.2)
        assert sorted(seen) == [(second, b"3"), (second, b"4")]
        assert not consumer.paused
        assert consumer.paused_topics == {first}
        # a connection that was opened later gets RDY as soon as the servers of the others have read a lower count
        await eventually(lambda: all(one.ready for one in consumer.statistics().connections if one.topic == second))
        assert {one.ready for one in consumer.statistics().connections if one.topic == first} == {0}

        consumer.pause()
        consumer.resume(first)
        assert {one.ready for one in consumer.statistics().connections} == {0}
        consumer.resume()
        await eventually(lambda: len(seen) == 4)
        assert consumer.paused_topics == set()
        with pytest.raises(InvalidName):
            consumer.pause("no topic")


async def test_a_consumer_is_starved_when_all_that_it_may_have_is_in_flight(
    cluster: Cluster, topics: tuple[str, str]
) -> None:
    async with Consumer(topics[0], "ch", cluster.lookupd, partitions=(0,), max_in_flight=2, **QUICK) as consumer:
        assert not consumer.is_starved
        publish(cluster, topics[0], b"1", b"2", b"3", partition=0)
        first = await anext(consumer)
        second = await anext(consumer)
        assert consumer.is_starved
        await first.finish()
        await second.finish()
        third = await anext(consumer)
        await third.finish()
        await eventually(lambda: not consumer.is_starved)


def test_a_blocking_consumer_pauses_one_topic(cluster: Cluster, topics: tuple[str, str]) -> None:
    publish(cluster, topics[0], b"1", partition=0)
    publish(cluster, topics[1], b"2", partition=0)
    with sync.Consumer(topics, "ch", cluster.lookupd) as consumer:
        consumer.pause(topics[0])
        assert consumer.paused_topics == {topics[0]}
        seen = next(consumer)
        while seen.topic == topics[0]:  # received before the pause
            seen.finish()
            seen = next(consumer)
        assert seen.body == b"2"
        assert consumer.is_starved
        seen.finish()
        consumer.resume(topics[0])
        assert not consumer.paused
