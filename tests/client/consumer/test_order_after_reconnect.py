"""First deliveries are in order while connections are cut and leaders are killed; others: `tests/contract`."""

from __future__ import annotations

import random
from secrets import token_hex

import pytest

from nsqext import Consumer, Producer
from nsqext.broker import Cluster
from tests.support.lost_connections import LossyConsumers, backward_steps, lossy, numbered, relayed_connections

NODES = 2


pytestmark = pytest.mark.anyio


def test_a_step_backward_is_found() -> None:
    assert backward_steps([("a", 1), ("b", 0), ("a", 1), ("a", 3), ("a", 2), ("b", 1)]) == [("a", 2, 3)]


async def test_key_failover_delivers_first_in_order(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two consumers, a message may be handled twice, but never for the first time after a later one."""
    topic = f"t_{token_hex(4)}"
    cluster.create_topic(topic, partitions=2, extend=True, channels=["ch"])
    options = lossy(key="of", dispatch="key_failover")
    consumers = [
        Consumer(topic, "ch", lookupd=cluster.lookupd, concurrency=4, max_in_flight=20, **options) for _ in range(2)
    ]
    faulty = LossyConsumers(consumers, 1)
    async with Producer(cluster.lookupd) as producer, relayed_connections(monkeypatch) as relays:
        await faulty.run(relays, producer, topic, numbered(2, 6, 200, 1))
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
