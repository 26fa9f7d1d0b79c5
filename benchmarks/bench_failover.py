"""Pauses of publishing and consuming after a leader is killed: ``python -m benchmarks.bench_failover``.

An embedded cluster of three nodes, one partition with three replicas, default settings. One publisher, one message in
flight; one consumer.
"""

from __future__ import annotations

import argparse
import logging
import time
from itertools import pairwise
from statistics import median

import anyio
from anyio import to_thread

from benchmarks.report import table, write_section
from nsqext import Consumer, Message, Producer
from nsqext.broker import Cluster

BEFORE, AFTER = 0.5, 2.5


def longest_gap(moments: list[float], killed: float) -> float:
    """Return the longest pause that ends after the kill, in seconds."""
    return max(late - early for early, late in pairwise(moments) if late > killed)


async def stall() -> tuple[float, float]:
    """Kill a leader; return the pauses of the producer and of the consumer, in seconds."""
    published: list[float] = []
    consumed: list[float] = []
    with Cluster(nodes=3) as cluster:
        cluster.create_topic("t", replicas=3, channels=["ch"])
        consumer = Consumer("t", "ch", lookupd=cluster.lookupd)

        @consumer.handler
        async def handle(_: Message) -> None:
            consumed.append(time.perf_counter())

        async def publish(producer: Producer) -> None:
            while True:
                await producer.publish("t", b"x" * 200)
                published.append(time.perf_counter())

        async with anyio.create_task_group() as tasks, Producer(cluster.lookupd) as producer:
            tasks.start_soon(consumer.serve)
            tasks.start_soon(publish, producer)
            while not (published and consumed):  # noqa: ASYNC110 - on a busy machine they start late
                await anyio.sleep(0.01)
            await anyio.sleep(BEFORE)
            killed = time.perf_counter()
            await to_thread.run_sync(cluster.kill, cluster.leader("t"))
            await anyio.sleep(AFTER)
            tasks.cancel_scope.cancel()
    return longest_gap(published, killed), longest_gap(consumed, killed)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    results = [anyio.run(stall) for _ in range(given.rounds)]
    rows = [
        [name, f"{median(values):.2f}", f"{max(values):.2f}", "2.00"]
        for name, values in zip(("producer", "consumer"), zip(*results, strict=True), strict=True)
    ]
    text = table(("seconds without a message", "median", "longest", "aim: under"), rows)
    print(text)
    head = f"Default settings, a lease of 0.3 s of the dead leader included, {given.rounds} kills.\n\n"
    write_section("After a leader was killed", head + text)


if __name__ == "__main__":
    main()
