"""Batches of messages with keys: the order of each key, across requeues, on a cluster."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from nsqext import Consumer, MessageBatch, OutgoingMessage, Producer
from nsqext.broker import Cluster
from tests.support.consumers import eventually, quick, running

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.anyio

MESSAGES = 400
KEYS = 12


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A node, shared by the tests of this module."""
    with Cluster(nodes=1) as cluster:
        yield cluster


@pytest.fixture
def topic(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    """An extend topic of the test's own."""
    name = f"t{abs(hash(request.node.nodeid)) % 10**12}"
    cluster.create_topic(name, extend=True, channels=["ch"])
    return name


@pytest.mark.parametrize(
    "settings", [{"key": "##key"}, {"dispatch": "key_failover"}, {"dispatch": "key_failover", "key_tags": 4}]
)
@pytest.mark.parametrize("fails", ["never", "raises", "requeues"])
async def test_batches_keep_the_order_of_each_key(
    cluster: Cluster, topic: str, settings: dict[str, Any], fails: str
) -> None:
    """A third of the batches fails once, as a whole, or by requeuing what is left behind its first message."""
    consumer = Consumer(
        topic, "ch", lookupd=cluster.lookupd, concurrency=3, **settings, **quick(requeue_delay=0.02, requeue_jitter=0)
    )
    numbers: dict[str, list[int]] = defaultdict(list)
    drafts = []
    for number in range(MESSAGES):
        key = f"key-{number * 7 % KEYS}"
        numbers[key].append(number)
        drafts.append(OutgoingMessage(b"%d" % number, key=key))
    done: dict[str, list[int]] = defaultdict(list)
    running_now: set[str] = set()
    sizes: list[int] = []
    chance = random.Random(4)
    attempts: dict[int, int] = {}

    @consumer.batch_handler(max_count=20, max_wait=0.02)
    async def handle(batch: MessageBatch) -> None:
        keys = {str(message.key) for message in batch}
        assert not keys & running_now, "a key is in two batches"
        running_now.update(keys)
        await anyio.sleep(chance.random() * 0.003)
        running_now.difference_update(keys)
        sizes.append(len(batch))
        for message in batch:
            attempts[int(message.body)] = max(attempts.get(int(message.body), 0), message.attempts)
        fresh = max(message.attempts for message in batch) == 1
        finished = list(batch)
        if fails != "never" and fresh and chance.random() < 0.3:
            if fails == "raises":
                raise OSError("not now")
            finished = [batch[0]]
            await batch.requeue(batch[1:], 0.02)
        for message in finished:
            done[str(message.key)].append(int(message.body))

    async with Producer(cluster.lookupd, key_tags=settings.get("key_tags", 0)) as producer:
        await producer.publish_many(topic, drafts)
    await running(consumer, lambda: eventually(lambda: sum(map(len, done.values())) >= MESSAGES, patience=30.0))
    assert done == numbers
    assert max(sizes) > 1
    assert (max(attempts.values()) > 1) == (fails != "never")
