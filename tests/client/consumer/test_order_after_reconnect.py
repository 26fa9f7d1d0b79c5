"""All guarantees of order while the consumer's connections are cut with messages in flight."""

from __future__ import annotations

import random
from secrets import token_hex

import pytest

from nsqext import Consumer, Producer
from nsqext.broker import Cluster
from tests.support.lost_connections import LossyConsumers, backward_steps, lossy, numbered, relayed_connections

NODES = 2


pytestmark = pytest.mark.anyio


def topic_of(cluster: Cluster, *, partitions: int = 2, extend: bool = True, ordered: bool = False) -> str:
    """Return a fresh topic with the channel ``ch``."""
    name = f"t_{token_hex(4)}"
    cluster.create_topic(name, partitions=partitions, extend=extend, ordered=ordered, channels=["ch"])
    return name


def test_a_step_backward_is_found() -> None:
    assert backward_steps([("a", 1), ("b", 0), ("a", 1), ("a", 3), ("a", 2), ("b", 1)]) == [("a", 2, 3)]


@pytest.mark.parametrize("seed", range(2))
async def test_lanes_never_repeat_an_earlier_message(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    topic = topic_of(cluster)
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, key="of", concurrency=4, max_in_flight=20, **lossy())
    faulty = LossyConsumers([consumer], seed)
    async with Producer(cluster.lookupd) as producer, relayed_connections(monkeypatch) as relays:
        await faulty.run(relays, producer, topic, numbered(2, 6, 200, seed))
    assert backward_steps(faulty.begun) == []


@pytest.mark.parametrize("seed", range(1))
async def test_an_ordered_partition_never_repeats_an_earlier_message(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    topic = topic_of(cluster, ordered=True, extend=False)
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, concurrency=4, **lossy())
    faulty = LossyConsumers([consumer], seed)
    messages = {
        partition: [type(one)(one.body) for one in given] for partition, given in numbered(2, 1, 40, seed).items()
    }
    async with Producer(cluster.lookupd) as producer, relayed_connections(monkeypatch) as relays:
        await faulty.run(relays, producer, topic, messages)
    assert backward_steps(faulty.begun) == []
    assert backward_steps(faulty.done) == []


@pytest.mark.parametrize("seed", range(2))
async def test_key_failover_delivers_first_in_order(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """With two consumers, a message may be handled twice, but never for the first time after a later one."""
    topic = topic_of(cluster)
    options = lossy(key="of", dispatch="key_failover")
    consumers = [
        Consumer(topic, "ch", lookupd=cluster.lookupd, concurrency=4, max_in_flight=20, **options) for _ in range(2)
    ]
    faulty = LossyConsumers(consumers, seed)
    async with Producer(cluster.lookupd) as producer, relayed_connections(monkeypatch) as relays:
        await faulty.run(relays, producer, topic, numbered(2, 6, 200, seed))
    assert backward_steps(dict.fromkeys(faulty.begun)) == []


class Leaders:
    """Kills the leader of a topic, and restarts the node that was killed before."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self._killed: str | None = None

    def cut(self, chance: random.Random) -> None:
        """Kill the leader, or start it again."""
        if self._killed is None:
            self._killed = self._cluster.leader(self._topic)
            self._cluster.kill(self._killed)
        else:
            self._cluster.restart(self._killed)
            self._killed = None


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("dispatch", [None, "key_failover"])
async def test_keys_keep_their_order_when_leaders_die(dispatch: str | None) -> None:
    """A new leader may redeliver recently finished messages, but first deliveries are in order."""
    with Cluster(nodes=3) as cluster:
        cluster.create_topic("t", replicas=3, extend=True, channels=["ch"])
        options = lossy(key="of", dispatch=dispatch)
        consumer = Consumer("t", "ch", lookupd=cluster.lookupd, concurrency=4, max_in_flight=20, **options)
        faulty = LossyConsumers([consumer], 1)
        async with Producer(cluster.lookupd) as producer:
            await faulty.run(Leaders(cluster, "t"), producer, "t", numbered(1, 6, 200, 1))
    assert backward_steps(dict.fromkeys(faulty.begun)) == []
