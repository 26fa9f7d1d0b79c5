"""The ways to keep the order of keys: ``python -m benchmarks.bench_key_ways``, with ``--lookupd`` at a real cluster.

One to eight consumers in one process, with eight handlers each that sleep for 25 to 75 ms; a little more messages are
published to one partition than all of them could handle, of 2,000 keys. Measured are the handlers that run at the same
time, and how many messages begin after a later one of their key has begun, or while another consumer handles one.
"""

from __future__ import annotations

import argparse
import random
import time
from secrets import token_hex
from typing import Any, NamedTuple

import anyio
from anyio import create_task_group

from benchmarks.report import table, write_section
from nsqext import Admin, Consumer, Message, OutgoingMessage, Producer
from nsqext.broker import Cluster

LANES = 8
HANDLER = 0.05
KEYS = 2_000
BUCKETS = 32
SETTLE = 6.0
BATCH = 200


class Way(NamedTuple):
    """A way to consume.

    Attributes:
        name: its name in the table.
        ordered: it needs an ordered topic.
        alone: it is for one consumer.
        embedded: only the embedded cluster has it.
        settings: of the consumers.
    """

    name: str
    settings: dict[str, Any]
    ordered: bool = False
    alone: bool = False
    embedded: bool = False


WAYS = (
    Way("ordered topic", {}, ordered=True),
    Way("shared channel, no order", {}),
    Way("lanes in one consumer (`key=`)", {"key": "##key"}, alone=True),
    Way("tags (`key_tags=32`)", {"dispatch": "key_failover", "key_tags": BUCKETS}),
    Way('command (`dispatch="key_failover"`)', {"dispatch": "key_failover"}, embedded=True),
)


class Result(NamedTuple):
    """What was measured of one way."""

    at_once: float
    out_of_order: int
    two: int


class Run:
    """The handlers of one run."""

    def __init__(self) -> None:
        self.busy = 0.0
        self.begun: dict[str, int] = {}
        self.running: dict[str, list[int]] = {}
        self.out_of_order = 0
        self.two = 0
        self.chance = random.Random(5)

    async def handle(self, consumer: int, message: Message) -> None:
        """Count a message and sleep."""
        key, number = str(message.key), int(message.body)
        self.out_of_order += number < self.begun.get(key, -1)
        self.begun[key] = max(number, self.begun.get(key, -1))
        running = self.running.setdefault(key, [])
        self.two += any(other != consumer for other in running)
        running.append(consumer)
        began = time.monotonic()
        await anyio.sleep(HANDLER * self.chance.uniform(0.5, 1.5))
        self.busy += time.monotonic() - began
        running.remove(consumer)


async def measure(lookupd: list[str], topic: str, way: Way, count: int, seconds: float) -> Result:
    """Run consumers of a new channel."""
    channel, run = f"way{token_hex(4)}", Run()
    tags = int(way.settings.get("key_tags", 0))
    async with Admin(lookupd) as admin:
        await admin.create_channel(topic, channel)
    async with create_task_group() as tasks, Producer(lookupd, key_tags=tags) as producer:

        async def publish() -> None:
            began, given = time.monotonic(), 0
            while True:
                due = int((time.monotonic() - began) * 1.05 * count * LANES / HANDLER)
                for first in range(given, due, BATCH):
                    numbers = range(first, min(first + BATCH, due))
                    drafts = [OutgoingMessage(b"%d" % one, key=f"key-{run.chance.randrange(KEYS)}") for one in numbers]
                    await producer.publish_many(topic, drafts)
                given = max(given, due)
                await anyio.sleep(0.1)

        for number in range(count):
            settings: dict[str, Any] = {"concurrency": LANES, "max_in_flight": LANES * 50, "close_timeout": 1.0}
            consumer = Consumer(topic, channel, lookupd=lookupd, **settings, **way.settings)

            @consumer.handler
            async def handle(message: Message, number: int = number) -> None:
                await run.handle(number, message)

            tasks.start_soon(consumer.serve)
        tasks.start_soon(publish)
        await anyio.sleep(SETTLE)
        before, began = run.busy, time.monotonic()
        await anyio.sleep(seconds)
        at_once = (run.busy - before) / (time.monotonic() - began)
        tasks.cancel_scope.cancel()
    async with Admin(lookupd) as admin:
        await admin.delete_channel(topic, channel)
    return Result(at_once, run.out_of_order, run.two)


async def compare(lookupd: list[str], server: str, consumers: list[int], seconds: float) -> list[list[str]]:
    """Measure all ways on a cluster; return rows of the table."""
    rows, run = [], token_hex(4)
    async with Admin(lookupd) as admin:
        await admin.create_topic(f"ways-{run}", extend=True, channels=["made"])
        await admin.create_topic(f"ways-ordered-{run}", extend=True, ordered=True, channels=["made"])
    for way in WAYS:
        if way.embedded and server != "embedded":
            continue
        results = dict[int, Result]()
        for count in consumers[:1] if way.alone else consumers:
            topic = f"ways-{'ordered-' * way.ordered}{run}"
            results[count] = await measure(lookupd, topic, way, count, seconds)
            print(way.name, server, count, results[count], flush=True)
        shares = [f"{results[count].at_once / count / LANES:.0%}" if count in results else "" for count in consumers]
        wrong = (sum(found.out_of_order for found in results.values()), sum(found.two for found in results.values()))
        rows.append([way.name, server, *shares, *map(str, wrong)])
    return rows


async def main(real: str, consumers: list[int], seconds: float) -> None:
    """Measure and report."""
    with Cluster(nodes=1) as cluster:
        rows = await compare(list(cluster.lookupd), "embedded", consumers, seconds)
    if real:
        rows += await compare([real], "real, redesigned", consumers, seconds)
    head = ("way", "server", *(f"{count} × {LANES}" for count in consumers), "out of order", "at two consumers")
    write_section(
        "Ways to keep the order of keys",
        f"""Consumers × handlers in one process, and the share of the handlers that run at the same time; each sleeps
for {HANDLER * 1000:g} ms in the mean. 5 % more messages of {KEYS:,} keys are published to one partition than they could
handle, for {seconds:g} s. A message is out of order if its handler begins after that of a later message of its key,
and at two consumers if another consumer handles one of its key at the same time.

{table(head, rows)}""",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lookupd", default="", help="a lookup node of a real redesigned cluster")
    parser.add_argument("--consumers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=8.0)
    arguments = parser.parse_args()
    anyio.run(main, arguments.lookupd, arguments.consumers, arguments.seconds)
