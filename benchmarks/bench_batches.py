"""Client CPU per message: batches compared with handlers of single messages: ``python -m benchmarks.bench_batches``.

All ways to consume alternate in one run, each on a topic filled before, against ``nsqext nsqd`` in another process. CPU
is user and system time of this process.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Awaitable, Callable
from itertools import count
from statistics import median

import anyio

from benchmarks.peer import BODY
from benchmarks.report import table, write_section
from benchmarks.servers import fill, original_nsqd
from nsqext import Consumer, Message, MessageBatch

COUNT = 20_000
BATCH = 500
MAX_IN_FLIGHT = 1000

_number = count(1)

Consume = Callable[[Consumer, int], Awaitable[float]]


async def single_handlers(consumer: Consumer, amount: int) -> float:
    """Consume with a handler of single messages; return the CPU time at its first message."""
    began = 0.0
    handled = 0

    @consumer.handler
    async def handle(_: Message) -> None:
        nonlocal handled, began
        began = began or time.process_time()
        handled += 1
        if handled == amount:
            consumer.stop()

    await consumer.serve()
    return began


async def batch_handlers(consumer: Consumer, amount: int) -> float:
    """Consume with a batch handler."""
    began = 0.0
    handled = 0

    @consumer.batch_handler(max_count=BATCH)
    async def handle(batch: MessageBatch) -> None:
        nonlocal handled, began
        began = began or time.process_time()
        for _ in batch:
            handled += 1
        if handled == amount:
            consumer.stop()

    await consumer.serve()
    return began


async def batch_loop(consumer: Consumer, amount: int) -> float:
    """Consume with a loop over batches."""
    began = 0.0
    handled = 0
    async with consumer:
        async for batch in consumer.batches(max_count=BATCH):
            began = began or time.process_time()
            for _ in batch:
                handled += 1
            await batch.finish()
            if handled == amount:
                break
    return began


async def single_loop(consumer: Consumer, amount: int) -> float:
    """Consume with a loop over single messages."""
    began = 0.0
    handled = 0
    async with consumer:
        async for message in consumer:
            began = began or time.process_time()
            await message.finish()
            handled += 1
            if handled == amount:
                break
    return began


VARIANTS: dict[str, tuple[Consume, Consume]] = {
    "handler": (single_handlers, batch_handlers),
    "loop": (single_loop, batch_loop),
}
"""Ways to consume single messages and batches."""


def measure(address: str, consume: Consume, amount: int) -> float:
    """Return microseconds of client CPU per message."""
    topic = f"bench_{os.getpid()}_{next(_number)}"
    fill(address, topic, amount, BODY)
    consumer = Consumer(topic, "ch", nsqd=address, max_in_flight=MAX_IN_FLIGHT)
    began = anyio.run(consume, consumer, amount)
    return (time.process_time() - began) / amount * 1e6


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=COUNT, help="messages of each measurement")
    given = parser.parse_args()
    amount = max(BATCH, given.count // BATCH * BATCH)
    found: dict[tuple[str, int], list[float]] = {}
    with original_nsqd() as nsqd:
        for _ in range(given.rounds):
            for name, ways in VARIANTS.items():
                for number, consume in enumerate(ways):
                    found.setdefault((name, number), []).append(measure(nsqd.tcp, consume, amount))
    rows = []
    for name in VARIANTS:
        single, batch = median(found[name, 0]), median(found[name, 1])
        rows.append([name, f"{single:.2f}", f"{batch:.2f}", f"{batch / single:.2f}"])
    text = table(("µs of CPU per message", "single messages", f"batches of {BATCH}", "batches / single"), rows)
    print(text)
    write_section("Batches", f"Bodies of 200 bytes, `nsqext nsqd`, {given.rounds} rounds.\n\n{text}")


if __name__ == "__main__":
    main()
