"""Fairness of a Key_Failover channel: ``python -m benchmarks.bench_fair_keys``.

Consumers with eight lanes start together or one by one, on a backlog or without one, and more messages are published
than they can handle. Handlers sleep for 50 ms and every message has a key of its own. Measured are the largest part of
the keys that a consumer has after ten seconds, in times of the fair share, and the handled messages of the ten seconds
after that, as a part of what all lanes could handle.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial

import anyio
from anyio import create_task_group

from benchmarks.report import write_section
from nsqext import Consumer, Message, OutgoingMessage, Producer
from nsqext.admin import Admin
from nsqext.broker import Cluster

LANES = 8
HANDLER = 0.05
SETTLE = 10.0
BATCH = 500


class Run:
    """One topic with its consumers."""

    def __init__(self, cluster: Cluster, topic: str, dispatch: str) -> None:
        self.cluster = cluster
        self.topic = topic
        self.dispatch = dispatch
        self.published = 0
        self.handled = 0
        cluster.create_topic(topic, extend=True, channels=["ch"])

    def consumer(self) -> Consumer:
        """Return a consumer that counts what it handles."""
        consumer = Consumer(
            self.topic,
            "ch",
            lookupd=self.cluster.lookupd,
            concurrency=LANES,
            dispatch=self.dispatch,
            max_in_flight=LANES * 50,
            close_timeout=1.0,
        )

        @consumer.handler
        async def handle(_: Message) -> None:
            await anyio.sleep(HANDLER)
            self.handled += 1

        return consumer

    async def publish(self, producer: Producer, count: int) -> None:
        """Publish messages with keys of their own."""
        for first in range(self.published, self.published + count, BATCH):
            numbers = range(first, min(first + BATCH, self.published + count))
            drafts = [OutgoingMessage(b"%d" % number, key=f"key-{number}") for number in numbers]
            await producer.publish_many(self.topic, drafts, partition=0)
        self.published += count

    async def feed(self, producer: Producer, rate: float) -> None:
        """Publish a little more than the consumers can handle."""
        began, given = time.monotonic(), 0
        while True:
            await anyio.sleep(0.1)
            due = int((time.monotonic() - began) * rate) - given
            await self.publish(producer, due)
            given += due

    async def largest(self) -> float:
        """Return the largest range of a consumer; 0 without ranges."""
        async with Admin(self.cluster.lookupd) as admin:
            (part,) = (await admin.stats(self.topic, "ch")).partitions
        return max((one.high - one.low for one in part.channels["ch"].key_ranges), default=0.0)


async def measure(
    cluster: Cluster, count: int, *, pause: float, backlog: int, dispatch: str, seconds: float
) -> tuple[float, float]:
    """Return the largest range in times of the fair share, and the used part of the lanes."""
    run = Run(cluster, f"fair-{dispatch}-{count}-{int(pause * 10)}-{backlog}", dispatch)
    async with create_task_group() as tasks, Producer(cluster.lookupd) as producer:
        await run.publish(producer, backlog)
        tasks.start_soon(run.feed, producer, 1.05 * count * LANES / HANDLER)
        for _ in range(count):
            tasks.start_soon(run.consumer().serve)
            await anyio.sleep(pause)
        await anyio.sleep(SETTLE)
        largest, before, began = await run.largest(), run.handled, time.monotonic()
        await anyio.sleep(seconds)
        rate = (run.handled - before) / (time.monotonic() - began)
        tasks.cancel_scope.cancel()
    return largest * count, rate / (count * LANES / HANDLER)


async def main(consumers: Sequence[int], backlogs: Sequence[int], seconds: float) -> None:
    """Measure everything and report."""
    found = list[tuple[float, float, float]]()
    with Cluster(nodes=1) as cluster:
        for count in consumers:
            for pause, start in ((0.0, "together"), (0.3, "one by one")):
                for backlog in backlogs:
                    measure_way = partial(measure, cluster, count, pause=pause, backlog=backlog, seconds=seconds)
                    largest, used = await measure_way(dispatch="key_failover")
                    _, shared = await measure_way(dispatch="shared")
                    print(count, start, backlog, f"{largest:.2f}", f"{used:.0%}", f"{shared:.0%}", flush=True)
                    found.append((largest, used, shared))
    largest_of_all, lanes, shared_lanes = zip(*found, strict=True)
    counts, waiting = ", ".join(map(str, consumers)), ", ".join(f"{backlog:,}" for backlog in backlogs)
    write_section(
        "Fair keys",
        f"""{counts} consumers of a Key_Failover channel in one process, with {LANES} lanes each, start together or one
by one, with a backlog of {waiting} messages. Handlers sleep for {HANDLER * 1000:g} ms; 5 % more messages are published
than they can handle. After {SETTLE:g} s no consumer had more than {max(largest_of_all):.2f} times its fair share of the
keys, and {min(lanes):.0%} to {max(lanes):.0%} of the lanes were used, beside {min(shared_lanes):.0%} to
{max(shared_lanes):.0%} on a shared channel without order.""",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--consumers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--backlogs", type=int, nargs="+", default=[0, 1_000, 100_000])
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the used lanes are measured")
    arguments = parser.parse_args()
    anyio.run(main, arguments.consumers, arguments.backlogs, arguments.seconds)
