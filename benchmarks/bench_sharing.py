"""Several consumers of one channel: ``python -m benchmarks.bench_sharing``.

Key_Failover: 1, 2 and 4 consumers, each in a separate process with eight lanes, whose handlers sleep for 5 ms, like
database queries. Each message has a different key, and enough messages are published before a measurement to keep all
lanes busy: "handlers at once" is the mean over the measured time.

Fairness: a consumer starts, and a second one 0.3 s later, when the first has ``max_in_flight`` messages. Also the speed
of one consumer with an empty handler; both with a first RDY of 1, and with all of ``max_in_flight``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from statistics import median
from typing import NamedTuple

import anyio
from anyio import create_task_group, to_thread

from benchmarks.peer import BODY
from benchmarks.report import table, write_section
from nsqext import Consumer, Message, OutgoingMessage, Producer
from nsqext.broker import Cluster

LANES = 8
HANDLER = 0.005
CONSUMERS = (1, 2, 4)
MAX_IN_FLIGHT = 200
SLOW_HANDLER = 0.02
SLOW = 150
JOIN = 0.3
EMPTIED = 150_000
_SETTLE = 0.5
"""Seconds between the begin of consumption and the measurement."""


class Handled(NamedTuple):
    """A handled message."""

    number: int
    started: float
    ended: float

    def within(self, begin: float, end: float) -> float:
        """Return the seconds of its handler within a period."""
        return max(0.0, min(self.ended, end) - max(self.started, begin))


def consume(pipe: Connection, lookupd: list[str], topic: str) -> None:
    """Consume by keys in a separate process: report the subscription, wait for the end, send the handled messages."""
    anyio.run(_consume, pipe, lookupd, topic)


async def _consume(pipe: Connection, lookupd: list[str], topic: str) -> None:
    consumer = Consumer(
        topic, "ch", lookupd=lookupd, concurrency=LANES, dispatch="key_failover", max_in_flight=LANES * 50
    )
    handled: list[Handled] = []

    @consumer.handler
    async def handle(message: Message) -> None:
        started = time.monotonic()
        await anyio.sleep(HANDLER)
        handled.append(Handled(int(message.body), started, time.monotonic()))

    async with create_task_group() as tasks:
        tasks.start_soon(consumer.serve)
        while not consumer.connections:  # noqa: ASYNC110 - there is no event for an open consumer
            await anyio.sleep(0.01)
        consumer.pause()  # else messages may be used up before the last is published
        pipe.send("subscribed")
        end = await to_thread.run_sync(pipe.recv)
        consumer.resume()
        await anyio.sleep(end - time.monotonic())
        consumer.stop()
    pipe.send(handled)


async def scale(cluster: Cluster, consumers: int, seconds: float) -> tuple[float, float]:
    """Measure consumers of a key_failover channel; return messages per second and handlers at once."""
    topic = f"scale-{consumers}"
    cluster.create_topic(topic, extend=True, channels=["ch"])
    amount = int(consumers * LANES / HANDLER * (seconds + 4 * _SETTLE))
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pipes = []
        for _ in range(consumers):
            pipe, given = spawn.Pipe()
            process = spawn.Process(target=consume, args=(given, cluster.lookupd, topic))
            process.start()
            stack.callback(process.join)
            pipes.append(pipe)
        for pipe in pipes:
            await to_thread.run_sync(pipe.recv)
        async with Producer(cluster.lookupd) as producer:
            for first in range(0, amount, 500):
                batch = [OutgoingMessage(b"%d" % number, key=f"key-{number}") for number in range(first, first + 500)]
                await producer.publish_many(topic, batch, partition=0)
        begin = time.monotonic() + _SETTLE
        end = begin + seconds
        handled: list[Handled] = []
        for pipe in pipes:
            pipe.send(end)
        for pipe in pipes:
            handled += await to_thread.run_sync(pipe.recv)
    if len(handled) >= amount:
        raise SystemExit(f"{amount} messages are too few for {seconds:g} s")
    rate = sum(begin <= one.ended < end for one in handled) / seconds
    return rate, sum(one.within(begin, end) for one in handled) / seconds


async def key_failover(cluster: Cluster, seconds: float) -> str:
    """Measure 1, 2 and 4 consumers; return the table."""
    found = {consumers: await scale(cluster, consumers, seconds) for consumers in CONSUMERS}
    alone = found[CONSUMERS[0]][0]
    rows = [
        [
            f"{consumers} × {LANES}",
            f"{at_once:.1f}",
            f"{rate:,.0f}",
            f"{10_000 / rate:.2f}",
            f"{rate / alone:.2f}",
        ]
        for consumers, (rate, at_once) in found.items()
    ]
    head = ("consumers × lanes", "handlers at once", "messages a second", "seconds for 10,000", "times one consumer")
    return table(head, rows)


async def share(cluster: Cluster, initial_ready: int, number: int) -> tuple[int, float]:
    """Add a consumer to another; return the number of messages that it handled, and the seconds for all messages."""
    topic = f"share-{initial_ready}-{number}"
    cluster.create_topic(topic, channels=["ch"])
    counts = [0, 0]
    finished = anyio.Event()
    async with create_task_group() as tasks, Producer(cluster.lookupd) as producer:

        def join(position: int) -> Consumer:
            consumer = Consumer(
                topic, "ch", lookupd=cluster.lookupd, max_in_flight=MAX_IN_FLIGHT, initial_ready=initial_ready
            )

            @consumer.handler
            async def handle(_: Message) -> None:
                await anyio.sleep(SLOW_HANDLER)
                counts[position] += 1
                if sum(counts) == SLOW:
                    finished.set()

            tasks.start_soon(consumer.serve)
            return consumer

        await producer.publish_many(topic, [BODY] * SLOW, partition=0)
        consumers = [join(0)]
        began = time.monotonic()
        await anyio.sleep(JOIN)
        consumers.append(join(1))
        await finished.wait()
        seconds = time.monotonic() - began
        for consumer in consumers:
            consumer.stop()
    return counts[1], seconds


async def empty(cluster: Cluster, initial_ready: int, number: int) -> tuple[float, float]:
    """Empty a channel; return messages per second, and microseconds of client and server CPU per message."""
    topic = f"empty-{initial_ready}-{number}"
    cluster.create_topic(topic, channels=["ch"])
    async with Producer(cluster.lookupd) as producer:
        for _ in range(EMPTIED // 1000):
            await producer.publish_many(topic, [BODY] * 1000, partition=0)
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd, max_in_flight=MAX_IN_FLIGHT, initial_ready=initial_ready)
    count = 0
    began = (time.monotonic(), time.process_time())
    spent = (0.0, 0.0)

    @consumer.handler
    async def handle(_: Message) -> None:
        nonlocal count, spent
        count += 1
        if count == EMPTIED:
            spent = (time.monotonic() - began[0], time.process_time() - began[1])
            consumer.stop()

    await consumer.serve()
    return EMPTIED / spent[0], spent[1] / EMPTIED * 1e6


async def fairness(cluster: Cluster, rounds: int) -> str:
    """Measure both first RDY counts alternately; return the table."""
    rows = []
    for initial_ready, name in ((MAX_IN_FLIGHT, f"{MAX_IN_FLIGHT}, `max_in_flight`"), (1, "1, the default")):
        shares = [await share(cluster, initial_ready, number) for number in range(rounds)]
        rows.append([name, f"{median(one for one, _ in shares):.0f} of {SLOW}", f"{median(s for _, s in shares):.2f}"])
    speeds: list[list[tuple[float, float]]] = [[], []]
    for number in range(rounds):
        for found, initial_ready in zip(speeds, (MAX_IN_FLIGHT, 1), strict=True):
            found.append(await empty(cluster, initial_ready, number))
    for row, found in zip(rows, speeds, strict=True):
        row += [f"{median(rate for rate, _ in found):,.0f}", f"{median(cpu for _, cpu in found):.2f}"]
    head = (
        "first RDY",
        "messages of the late consumer",
        "seconds for all",
        "messages a second",
        "µs of CPU per message",
    )
    return table(head, rows)


async def main(seconds: float, rounds: int) -> None:
    """Measure and report."""
    with Cluster(nodes=1) as cluster:
        keyed = await key_failover(cluster, seconds)
        print(keyed, flush=True)
        fair = await fairness(cluster, rounds)
        print(fair)
    text = f"""Consumers of a Key_Failover channel, each in a process of its own with {LANES} lanes. Handlers sleep for
{HANDLER * 1000:g} ms; measured for {seconds:g} s each.

{keyed}
Two consumers of a channel, {SLOW} messages of {SLOW_HANDLER * 1000:g} ms, the second consumer starts {JOIN:g} s later
(the first three columns). One consumer empties a channel of {EMPTIED:,} messages, client and server in one process (the
last two), {rounds} rounds.

{fair}"""
    write_section("Sharing", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long key_failover is measured")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    anyio.run(main, given.seconds, given.rounds)
