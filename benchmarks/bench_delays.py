"""Messages that wait for their delay: lateness, memory and CPU of the client, the relay and the servers.

    python -m benchmarks.bench_delays consumer --lookupd 127.0.0.1:4161 --pids "$(pidof nsqd)" --delay 960

Delays of up to 15 minutes wait in the memory of the redesigned nsqd, at most about 500 for each partition: give longer
ones to measure ``consumer``. The client publishes and consumes; ``relay`` runs ``nsqext delay run`` beside it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import anyio

from benchmarks.servers import cpu_of
from nsqext import Admin, Consumer, Message, Producer

_AT_ONCE = 64
_IDLE = 30.0


def usage(pid: int) -> str:
    """Return memory and CPU of a process as text."""
    (memory,) = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in line]
    return f"{int(memory) // 1024} MB {cpu_of(pid):.1f} s"


def report(phase: str, pids: dict[str, int]) -> None:
    """Print memory and CPU of all processes."""
    print(f"{phase:12}", ", ".join(f"{name} {usage(pid)}" for name, pid in pids.items()), flush=True)


async def start_relay(stack: AsyncExitStack, lookupd: str, topic: str) -> int:
    """Start a relay; return its process id."""
    store = Path(stack.enter_context(TemporaryDirectory())) / "store"
    words = ["-m", "nsqext", "delay", "run", "--store", str(store), "--topic", topic, "--lookupd", lookupd]
    process = await stack.enter_async_context(await anyio.open_process([sys.executable, *words]))
    stack.callback(process.terminate)
    if process.stdout is not None:
        await process.stdout.receive()  # it is ready
    return process.pid


async def measure(way: str, lookupd: str, count: int, delay: float, spread: float, pids: dict[str, int]) -> None:
    """Publish delayed messages, wait until all are handled, and print the figures."""
    topic, delayed = f"bench_delays_{os.getpid()}", f"bench_delayed_{os.getpid()}"
    late: list[float] = []
    attempts: Counter[int] = Counter()
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(Admin(lookupd))
        await admin.create_topic(topic, extend=True, channels=["ch"])
        if way == "relay":
            pids["relay"] = await start_relay(stack, lookupd, delayed)
        pids["client"] = os.getpid()
        consumer = Consumer(topic, "ch", lookupd=lookupd, max_in_flight=1000)

        @consumer.handler
        async def handle(message: Message) -> None:
            late.append(time.time() - float(message.body))
            attempts[message.attempts] += 1

        await stack.enter_async_context(consumer)
        via: Literal["consumer", "relay"] = "relay" if way == "relay" else "consumer"
        producer = await stack.enter_async_context(Producer(lookupd, delay_via=via, delay_topic=delayed))
        report("start", pids)
        left = iter(range(count))

        async def publish() -> None:
            for _ in left:
                chosen = delay + random.random() * spread
                await producer.publish(topic, repr(time.time() + chosen).encode(), delay=chosen)

        async with anyio.create_task_group() as tasks:
            for _ in range(_AT_ONCE):
                tasks.start_soon(publish)
        report("published", pids)
        while way == "consumer" and consumer.statistics().requeued < count:  # noqa: ASYNC110 - there is no event
            await anyio.sleep(1)
        report("all wait", pids)
        await anyio.sleep(_IDLE)
        report(f"{_IDLE:g} s later", pids)
        while len(late) < count:  # noqa: ASYNC110 - as above
            await anyio.sleep(1)
        report("handled", pids)
    late.sort()
    shown = ", ".join(f"p{share:g} {late[int(count * share / 100)]:.3f} s" for share in (0, 50, 99))
    print(
        f"{count} messages, early {sum(one < 0 for one in late)}, late {shown}, max {late[-1]:.3f} s, {dict(attempts)}"
    )


def main() -> None:
    """Read the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=["consumer", "relay"])
    parser.add_argument("--lookupd", required=True)
    parser.add_argument("--pids", default="", help="process ids of the servers")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--delay", type=float, default=200.0, help="shortest delay, in seconds")
    parser.add_argument("--spread", type=float, default=60.0, help="seconds to the longest delay")
    given = parser.parse_args()
    pids = {f"nsqd{number}": int(pid) for number, pid in enumerate(given.pids.split(), 1)}
    anyio.run(measure, given.way, given.lookupd, given.count, given.delay, given.spread, pids)


if __name__ == "__main__":
    main()
