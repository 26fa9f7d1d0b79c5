"""Keyed parallelism compared with one ordered consumer and a shared channel, and a join under skewed keys.

Run it with ``python -m benchmarks.bench_key_failover``. Handlers sleep for 5 ms on average (2.5 to 7.5), like database
queries. All variants run one after the other in this process, each on a topic with one partition, on an embedded
cluster.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import accumulate
from typing import Any

import anyio
from anyio import create_task_group

from nsqext import Consumer, Message, OutgoingMessage, Producer
from nsqext.broker import Cluster

LANES = 8
HANDLER = 0.005
KEYS = 1000
SETTINGS: dict[str, Any] = {"reconnect_wait": 0.01, "close_timeout": 1.0}

Handle = Callable[[Message], Awaitable[None]]


def make_drafts(count: int, weights: list[float]) -> list[OutgoingMessage]:
    """Return messages whose keys are drawn with these weights."""
    rng = random.Random(7)
    keys = rng.choices(range(len(weights)), cum_weights=list(accumulate(weights)), k=count)
    return [OutgoingMessage(b"%d" % number, key=f"key-{key}") for number, key in enumerate(keys)]


def out_of_order(done: list[tuple[str, int]]) -> int:
    """Return the number of messages that were handled before an earlier one of their key."""
    last: dict[str, int] = {}
    wrong = 0
    for key, number in done:
        wrong += number < last.get(key, -1)
        last[key] = max(number, last.get(key, -1))
    return wrong


async def measure(
    cluster: Cluster, name: str, drafts: list[OutgoingMessage], make: Callable[[], list[Consumer]]
) -> float:
    """Consume all messages with these consumers; print and return messages per second."""
    done: list[tuple[str, int]] = []
    finished = anyio.Event()
    rng = random.Random(11)
    started = time.perf_counter()

    async def handle(message: Message) -> None:
        await anyio.sleep(HANDLER * rng.uniform(0.5, 1.5))
        done.append((str(message.key), int(message.body)))
        if len(done) == len(drafts):
            finished.set()

    consumers = make()
    async with create_task_group() as tasks, Producer(cluster.lookupd) as producer:
        for consumer in consumers:
            consumer.handler(handle)
            tasks.start_soon(consumer.serve)
        with anyio.fail_after(10):
            for consumer in consumers:
                while not consumer.connections:  # noqa: ASYNC110 - there is no event for an open consumer
                    await anyio.sleep(0.01)
        started = time.perf_counter()
        await producer.publish_many(consumers[0].topics[0], drafts, partition=0)
        with anyio.fail_after(120):
            await finished.wait()
        seconds = time.perf_counter() - started
        for consumer in consumers:
            consumer.stop()
    rate = len(drafts) / seconds
    print(f"{name:44} {rate:8.0f} messages/s   out of order {out_of_order(done):4}", flush=True)
    return rate


async def throughput(cluster: Cluster, count: int) -> None:
    """Compare the ways to consume."""
    drafts = make_drafts(count, [1.0] * KEYS)
    for topic in ("ordered", "shared", "lanes", "keyed"):
        cluster.create_topic(topic, extend=True, ordered=topic == "ordered", channels=["ch"])

    def one(topic: str, **given: Any) -> Callable[[], list[Consumer]]:
        many = int(given.pop("consumers", 1))
        settings = {**SETTINGS, **given}
        return lambda: [Consumer(topic, "ch", lookupd=cluster.lookupd, **settings) for _ in range(many)]

    ordered = await measure(cluster, "one ordered consumer", drafts, one("ordered"))
    shared = one("shared", concurrency=LANES)
    await measure(cluster, f"shared channel, {LANES} handlers", drafts, shared)
    keys = one("lanes", concurrency=LANES, key="##key", max_in_flight=1000)
    lanes = await measure(cluster, f"shared channel, {LANES} lanes by key", drafts, keys)
    each = one("keyed", consumers=LANES, dispatch="key_failover", max_in_flight=50)
    keyed = await measure(cluster, f"key_failover channel, {LANES} consumers", drafts, each)
    print(f"lanes: {lanes / ordered:.1f} times the ordered consumer, key_failover: {keyed / ordered:.1f} times\n")


async def skew(cluster: Cluster, seconds: float) -> None:
    """Add a consumer to four others under Zipf keys, and count the messages of each before and after."""
    cluster.create_topic("skewed", extend=True, channels=["ch"])
    drafts = make_drafts(200_000, [1 / rank for rank in range(1, KEYS + 1)])
    counts: Counter[int] = Counter()
    consumers: list[Consumer] = []

    def join() -> Consumer:
        number = len(consumers)
        consumer = Consumer(
            "skewed", "ch", lookupd=cluster.lookupd, dispatch="key_failover", max_in_flight=200, **SETTINGS
        )

        @consumer.handler
        async def handle(_: Message) -> None:
            counts[number] += 1

        consumers.append(consumer)
        return consumer

    async def feed(producer: Producer) -> None:
        for first in range(0, len(drafts), 50):
            await producer.publish_many("skewed", drafts[first : first + 50], partition=0)
            await anyio.sleep(0.05)  # about 1,000 a second: this measures shares, not speed

    def report(text: str) -> None:
        total = sum(counts.values())
        shares = sorted((count / total for count in counts.values()), reverse=True)
        print(f"{text}: {total} messages, shares {' '.join(f'{share:.0%}' for share in shares)}", flush=True)
        counts.clear()

    async with create_task_group() as tasks, Producer(cluster.lookupd) as producer:
        tasks.start_soon(feed, producer)
        for _ in range(4):
            tasks.start_soon(join().serve)
            await anyio.sleep(seconds / 4)  # rates are known when the next consumer joins
        counts.clear()
        await anyio.sleep(seconds)
        report(f"Zipf over {KEYS} keys, four consumers")
        tasks.start_soon(join().serve)
        await anyio.sleep(1.0)
        counts.clear()
        await anyio.sleep(seconds)
        report("after a fifth has joined             ")
        tasks.cancel_scope.cancel()


async def main(count: int, seconds: float) -> None:
    """Run everything."""
    with Cluster(nodes=1) as cluster:
        await throughput(cluster, count)
        await skew(cluster, seconds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=4000, help="messages of each variant")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long shares are counted")
    given = parser.parse_args()
    anyio.run(main, given.count, given.seconds)
