"""Several topics in one process share lookups, and can switch to another lookup service at run time."""

from __future__ import annotations

from collections import Counter
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import pytest
from anyio import create_task_group

from nsqext import Consumer, Lookup, Producer
from nsqext.broker import Cluster
from nsqext.errors import InvalidSetting
from nsqext.lookup.responses import LookupHttp
from tests.support.consumers import PATIENT_LOOKUP, depth, eventually, publish, quick_sharing, take

NODES = 2

if TYPE_CHECKING:
    from nsqext.types import Address

pytestmark = pytest.mark.anyio

_TOPICS = 20


class Asked:
    """Counts the requests to lookup nodes, and their connection pools."""

    def __init__(self) -> None:
        self.questions: Counter[tuple[str, str, str]] = Counter()
        self.pools = 0
        self.open_pools = 0

    def lists(self) -> int:
        """Number of requests for the list of lookup nodes."""
        return self.questions["/listlookup", "", ""]

    def topics(self, access: str) -> dict[str, int]:
        """Number of requests by topic."""
        return {topic: count for (_, topic, kind), count in self.questions.items() if kind == access}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Start counting."""
    counted = Asked()
    fetch, close = LookupHttp.fetch, LookupHttp.aclose
    used, closed = set[LookupHttp](), set[LookupHttp]()

    async def count(self: LookupHttp, address: Address, path: str, params: dict[str, Any], *rest: Any) -> Any:
        counted.questions[path, params.get("topic", ""), params.get("access", "")] += 1
        used.add(self)
        note()
        return await fetch(self, address, path, params, *rest)

    async def count_close(self: LookupHttp) -> None:
        await close(self)
        closed.add(self)
        note()

    def note() -> None:
        counted.pools, counted.open_pools = len(used), len(used - closed)

    monkeypatch.setattr(LookupHttp, "fetch", count)
    monkeypatch.setattr(LookupHttp, "aclose", count_close)
    return counted


def topics_of(cluster: Cluster, count: int) -> list[str]:
    """Return fresh topics."""
    names = [f"t{number}_{token_hex(4)}" for number in range(count)]
    for name in names:
        cluster.create_topic(name, channels=["ch"])
    return names


async def test_consumers_and_producers_of_twenty_topics_ask_once(cluster: Cluster, asked: Asked) -> None:
    lookup = Lookup(cluster.lookupd, lookup_max_pause=0.1, **PATIENT_LOOKUP)
    topics = topics_of(cluster, _TOPICS)
    ready = 0
    bodies: list[bytes] = []

    async def consume(topic: str) -> None:
        nonlocal ready
        async with Consumer(topic, "ch", lookupd=lookup, **quick_sharing()) as consumer:
            ready += 1
            bodies.extend(await take(consumer, 2))

    async with create_task_group() as tasks:
        for topic in topics:
            tasks.start_soon(consume, topic)
        await eventually(lambda: ready == _TOPICS)
        async with Producer(lookup) as first, Producer(lookup) as second:
            for topic in topics:
                await first.publish(topic, topic.encode())
                await second.publish(topic, topic.encode())
    assert sorted(bodies) == sorted(topic.encode() for topic in topics * 2)
    assert asked.lists() == 1
    assert asked.topics("r") == asked.topics("w") == dict.fromkeys(topics, 1)
    assert (asked.pools, asked.open_pools) == (1, 0)
    assert not any(lookup.metadata.cached(topic, access) for topic in topics for access in "rw")


async def test_addresses_that_are_switched_move_all_connections(cluster: Cluster) -> None:
    topic_a, topic_b = topics_of(cluster, 2)
    with Cluster(nodes=1) as other:
        for name in (topic_a, topic_b):
            other.create_topic(name, partitions=2, channels=["ch"])
        lookup = Lookup(cluster.lookupd, lookup_max_pause=0.1, **PATIENT_LOOKUP)
        async with (
            Producer(lookup) as producer,
            Consumer(topic_b, "ch", lookupd=lookup, **quick_sharing()) as consumer,
        ):
            here = {str(node.tcp) for node in cluster.nodes.values()}
            there = {str(node.tcp) for node in other.nodes.values()}
            assert (await producer.publish(topic_a, b"here")).node in here
            lookup.switch(other.lookupd)
            await eventually(lambda: {one.node for one in consumer.connections} == there)
            await eventually(lambda: {one.partition for one in consumer.connections} == {0, 1})
            writable = partial(lookup.metadata.cached, topic_a, "w")  # each topic is looked up by itself
            await eventually(lambda: {str(leader) for leader in writable().leaders.values()} == there)  # type: ignore[union-attr]
            assert (await producer.publish(topic_a, b"there")).node in there
            await eventually(lambda: producer.statistics().connections == len(there))
            publish(other, topic_b, b"moved")
            assert await take(consumer, 1) == [b"moved"]
        assert depth(other, topic_a) == 1


async def test_settings_take_a_shared_lookup_in_place_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = Lookup("127.0.0.1:1")
    monkeypatch.setenv("ORDERS_URL", "nsq://127.0.0.1:2?timeout=3")
    producer = Producer(lookup, env="ORDERS_")
    assert "lookupd='127.0.0.1:1'" in repr(producer)
    assert producer.settings["timeout"] == 3
    assert "lookupd='127.0.0.1:1'" in repr(Consumer("t", "ch", lookup))
    with pytest.raises(InvalidSetting, match="lookup_poll_interval is given for a client that shares a Lookup"):
        Producer(lookup, lookup_poll_interval=7.0)
