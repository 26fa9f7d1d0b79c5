"""The order of keys on a cluster, while consumers join, leave and die, connections are cut, and leaders are killed.

Other channels and servers: `tests/contract`.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict

import anyio
import pytest
from anyio import create_task_group

from nsqext import Consumer, Message, OutgoingMessage, Producer
from nsqext.broker import Cluster
from nsqext.errors import MessageNotInFlight
from tests.support import plain_http
from tests.support.consumers import depth, eventually, quick
from tests.support.lost_connections import LossyConsumers, backward_steps, lossy, numbered, relayed_connections

NODES = 2

pytestmark = pytest.mark.anyio


@pytest.fixture
def topic(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    """An extend topic of the test's own with two partitions and a channel."""
    name = f"t{abs(hash(request.node.nodeid)) % 10**12}"
    cluster.create_topic(name, partitions=2, extend=True, channels=["ch"])
    return name


def drafts(count: int, keys: int, seed: int = 1) -> tuple[list[OutgoingMessage], dict[str, list[int]]]:
    """Return messages with numbers as bodies and random keys, and the numbers of each key."""
    chance = random.Random(seed)
    made, numbers = [], defaultdict(list)
    for number in range(count):
        key = f"key-{chance.randrange(keys)}"
        made.append(OutgoingMessage(b"%d" % number, key=key))
        numbers[key].append(number)
    return made, dict(numbers)


def firsts(seen: list[tuple[str, int]]) -> dict[str, list[int]]:
    """Return the numbers of each key in the order of their first deliveries."""
    found: dict[str, dict[int, None]] = defaultdict(dict)
    for key, number in seen:
        found[key].setdefault(number)
    return {key: list(numbers) for key, numbers in found.items()}


async def test_later_messages_of_a_key_wait_for_a_delayed_one(cluster: Cluster, topic: str) -> None:
    arrived: list[tuple[bytes, int]] = []
    times: dict[bytes, float] = {}
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, dispatch="key_failover")

    @consumer.handler
    async def handle(message: Message) -> None:
        arrived.append((message.body, message.attempts))
        times[message.body] = time.time()

    async with consumer, Producer(cluster.lookupd) as producer:
        due = time.time() + 0.5
        await producer.publish(topic, b"delayed", key="k", delay=0.5)
        await producer.publish(topic, b"behind", key="k")
        await producer.publish(topic, b"other", key="j")
        await eventually(lambda: len(arrived) == 3)
    assert [one for one in arrived if one[0] != b"other"] == [(b"delayed", 1), (b"behind", 1)]
    assert arrived[0] == (b"other", 1) or times[b"other"] > due, "a slow machine handles it when the first one is due"


class Chaos:
    """Consumers that join, leave and die, and the messages that they received."""

    def __init__(self, cluster: Cluster, topic: str, seed: int, *, cuts: bool = False) -> None:
        self.cluster = cluster
        self.cuts = cuts
        self.topic = topic
        self.chance = random.Random(seed)
        self.seen: list[tuple[str, int]] = []
        self.finished: set[int] = set()
        self.holders: dict[str, set[int]] = defaultdict(set)
        self.names = 0

    async def consume(self, stop: anyio.Event, *, dies: bool) -> None:
        """Consume without a handler until the stop; a consumer that dies leaves its messages unanswered."""
        self.names += 1
        name, chance = self.names, random.Random(self.names)
        consumer = Consumer(
            self.topic,
            "ch",
            lookupd=self.cluster.lookupd,
            dispatch="key_failover",
            max_in_flight=chance.choice([2, 5, 20]),
            **quick(backoff="off"),
        )
        async with create_task_group() as tasks, consumer:
            tasks.start_soon(self._stop, stop, consumer)
            async for message in consumer:
                key, number = str(message.key), int(message.body)
                self.seen.append((key, number))
                # the broker detects a broken connection first, and assigns the key to another consumer
                assert self.cuts or not self.holders[key] - {name}, "two consumers hold a key"
                self.holders[key].add(name)
                await anyio.sleep(chance.random() * 0.003)
                if stop.is_set() and dies:
                    break  # with this message and all later ones in flight
                self.holders[key].discard(name)
                try:
                    if chance.random() < 0.05:
                        await message.requeue()
                    else:
                        await message.finish()
                        self.finished.add(number)
                except MessageNotInFlight:
                    assert self.cuts
            for holders in self.holders.values():
                holders.discard(name)
            tasks.cancel_scope.cancel()

    def cut(self) -> None:
        """Break the connection of some consumer in the middle of the next frame."""
        for node in self.cluster.nodes.values():
            params = {"format": "json", "topic": self.topic, "leaderOnly": "true"}
            topics = plain_http.get(f"http://{node.http}/stats", params=params).json()["data"]["topics"]
            # there are no key ranges before the first subscription
            consumers = [one for entry in topics for one in entry["channels"][0].get("key_ranges", [])]
            found = [one["remote_address"] for one in consumers]
            if found:
                self.cluster.faults.cut(node.name, peer=self.chance.choice(found))

    async def _stop(self, stop: anyio.Event, consumer: Consumer) -> None:
        await stop.wait()
        consumer.stop()


@pytest.mark.parametrize("cuts", [False, True], ids=["leaving", "breaking"])
async def test_chaos(cluster: Cluster, topic: str, cuts: bool) -> None:
    """For every key the first deliveries are in order, one consumer at a time has its messages, and none is lost."""
    chaos = Chaos(cluster, topic, 3, cuts=cuts)
    made, numbers = drafts(1500, 40)
    async with create_task_group() as tasks, Producer(cluster.lookupd) as producer:
        stops: list[anyio.Event] = []
        for turn in range(12):
            await producer.publish_many(topic, made[turn * 125 : turn * 125 + 125])
            stop = anyio.Event()
            stops.append(stop)
            tasks.start_soon(lambda stop, dies: chaos.consume(stop, dies=dies), stop, bool(turn % 2))
            await anyio.sleep(0.05 + chaos.chance.random() * 0.05)
            if cuts and turn % 2:
                chaos.cut()
            if len(stops) > 3:
                stops.pop(chaos.chance.randrange(3)).set()
        await eventually(lambda: len(chaos.finished) == 1500 and depth(cluster, topic) == 0, patience=60.0)
        for stop in stops:
            stop.set()
    cluster.faults.heal()
    assert firsts(chaos.seen) == numbers


def test_a_step_backward_is_found() -> None:
    assert backward_steps([("a", 1), ("b", 0), ("a", 1), ("a", 3), ("a", 2), ("b", 1)]) == [("a", 2, 3)]


async def test_key_failover_delivers_first_in_order(
    cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two consumers, a message may be handled twice, but never for the first time after a later one."""
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
