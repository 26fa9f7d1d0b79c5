"""Costs of services compared with plain handlers: typed bodies, middleware, and worker processes.

``python -m benchmarks.bench_services``. CPU is user and system time of this process, against ``nsqext nsqd`` in another
process. Worker processes are measured in finished messages per second; their handler computes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from statistics import median
from typing import Any

import anyio
import orjson

from benchmarks.report import table, write_section
from benchmarks.run_peer import new_topic, run_peer
from benchmarks.servers import fill, original_nsqd, program_given, redesigned_cluster
from nsqext import Admin, App, Consumer, Message, Position, Producer
from nsqext.middleware import CallNext, HandlerTimeout, Handling, Middleware

COUNT = 20_000
MAX_IN_FLIGHT = 1000
BODY = orjson.dumps(
    {"number": 12345, "customer": "ann", "cents": 450, "items": ["coffee", "tea", "cake"], "note": "x" * 100}
)

_number = count(1)


@dataclass
class Order:
    """The body of a message."""

    number: int
    customer: str
    cents: int
    items: list[str]
    note: str


class Pass(Middleware):
    """Middleware without an effect."""

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Call the next one."""
        return await call_next(handling)


class Meter:
    """Counts handled messages, and stops the consumer after the last one."""

    def __init__(self, amount: int) -> None:
        self.amount = amount
        self.began = 0.0
        self.handled = 0
        self.consumer: Consumer | None = None

    def count(self) -> None:
        """Count a message."""
        self.began = self.began or time.process_time()
        self.handled += 1
        if self.handled == self.amount and self.consumer is not None:
            self.consumer.stop()


Handler = Callable[..., Awaitable[None]]


def raw(meter: Meter) -> Handler:
    """Do not decode."""

    async def handle(message: Message) -> None:
        meter.count()

    return handle


def values_by_hand(meter: Meter) -> Handler:
    """Decode to JSON values by hand."""

    async def handle(message: Message) -> None:
        orjson.loads(message.body)
        meter.count()

    return handle


def dataclass_by_hand(meter: Meter) -> Handler:
    """Decode to a dataclass by hand; the types of its members are not checked."""

    async def handle(message: Message) -> None:
        Order(**orjson.loads(message.body))
        meter.count()

    return handle


def typed_values(meter: Meter) -> Handler:
    """Receive JSON values."""

    async def handle(order: Any) -> None:
        meter.count()

    handle.__annotations__ = {"order": dict[str, Any], "return": None}
    return handle


def typed_dataclass(meter: Meter) -> Handler:
    """Receive a dataclass; the types of its members are checked."""

    async def handle(order: Order) -> None:
        meter.count()

    handle.__annotations__ = {"order": Order, "return": None}
    return handle


BODIES: dict[str, Callable[[Meter], Handler]] = {
    "the message, not decoded": raw,
    "`orjson.loads` by hand": values_by_hand,
    "`body: dict[str, Any]`": typed_values,
    "`Order(**orjson.loads(…))` by hand": dataclass_by_hand,
    "`order: Order`, a dataclass, checked": typed_dataclass,
}
MIDDLEWARE: dict[str, tuple[Middleware, ...] | None] = {
    "`Consumer`": None,
    "a consumer without middleware": (),
    "1 middleware": (Pass(),),
    "3 middleware": (Pass(), Pass(), Pass()),
    "`HandlerTimeout`": (HandlerTimeout(10),),
}


def measure(
    address: str, make: Callable[[Meter], Handler], around: tuple[Middleware, ...] | None, amount: int
) -> float:
    """Return microseconds of client CPU per message."""
    topic = f"bench_{os.getpid()}_{next(_number)}"
    fill(address, topic, amount, BODY)
    meter = Meter(amount)
    given: dict[str, Any] = {"nsqd": address, "max_in_flight": MAX_IN_FLIGHT}
    consumer = Consumer(topic, "ch", **given)
    if around is not None:
        consumer = Consumer(topic, "ch", middleware=around, **given)
    meter.consumer = consumer
    consumer.handler(make(meter))
    consumer.run()
    return (time.process_time() - meter.began) / amount * 1e6


def handlers(rounds: int, amount: int) -> tuple[str, str]:
    """Measure typed bodies and middleware; return their tables."""
    bodies: dict[str, list[float]] = {name: [] for name in BODIES}
    middleware: dict[str, list[float]] = {name: [] for name in MIDDLEWARE}
    with original_nsqd() as nsqd:
        for _ in range(rounds):
            for name, make in BODIES.items():
                bodies[name].append(measure(nsqd.tcp, make, None, amount))
            for name, around in MIDDLEWARE.items():
                middleware[name].append(measure(nsqd.tcp, raw, around, amount))
    decoded = [[name, f"{median(found):.2f}"] for name, found in bodies.items()]
    plain = median(middleware["`Consumer`"])
    surrounded = [[name, f"{median(found):.2f}", f"{median(found) - plain:+.2f}"] for name, found in middleware.items()]
    return (
        table(("the handler receives", "µs of CPU per message"), decoded),
        table(("middleware", "µs of CPU per message", "more than `Consumer`"), surrounded),
    )


# Workers: ``nsqext run benchmarks.bench_services:app``

app = App(os.environ.get("BENCH_LOOKUPD", "127.0.0.1:4161"), start=Position.earliest())


@app.handler("plain", "ch", max_in_flight=MAX_IN_FLIGHT)
async def compute(message: Message) -> None:
    """Compute for about a quarter of a millisecond."""
    digest = message.body
    for _ in range(300):
        digest = hashlib.sha256(digest).digest()


async def finished_per_second(lookupd: str, amount: int) -> float:
    """Return finished messages per second, between the first and the last tenth of the messages."""
    marks: list[tuple[float, int]] = []
    async with Admin(lookupd) as admin:
        while True:
            stats = (await admin.stats("plain")).channels["ch"]
            marks.append((time.monotonic(), stats.lag))
            if stats.lag <= amount // 10:
                break
            await anyio.sleep(0.05)
    middle = [(at, lag) for at, lag in marks if lag <= amount * 9 // 10]
    (first, most), (last, least) = middle[0], middle[-1]
    return (most - least) / (last - first)


async def fill_plain(lookupd: str, amount: int) -> None:
    """Publish the messages that the workers handle."""
    async with Producer(lookupd) as producer:
        await producer.publish_many("plain", [BODY] * amount)


def workers_rate(number: int, amount: int) -> float:
    """Return the messages that worker processes handle in a second."""
    with redesigned_cluster() as lookupd:
        anyio.run(fill_plain, lookupd, amount)
        words = ("run", "benchmarks.bench_services:app", "--workers", str(number))
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "nsqext", *words],
            env={**os.environ, "BENCH_LOOKUPD": lookupd},
            stderr=subprocess.DEVNULL,
        )
        try:
            return anyio.run(finished_per_second, lookupd, amount)
        finally:
            process.terminate()
            process.wait(30)


def producers(address: str, number: int, amount: int) -> tuple[float, float]:
    """Publish with processes that have 64 in flight each.

    Returns:
        The messages of all in a second, and µs of CPU per message.
    """
    with ThreadPoolExecutor(number) as threads:
        running = [threads.submit(run_peer, "nsqext", "pubc", amount, address, new_topic()) for _ in range(number)]
        found = [one.result() for one in running]
    return sum(one["rate"] for one in found), sum(one["cpu"] for one in found) / number


def _producers_rate(address: str, number: int, amount: int) -> float:
    return producers(address, number, amount)[0]


def processes(rounds: int, amount: int) -> str:
    """Measure 1 and 2 producers, and 1 and 2 worker processes; return the table."""
    kinds: dict[str, list[Callable[[], float]]] = {}
    with original_nsqd(program=program_given()) as nsqd:
        kinds["producers, 64 in flight each"] = [partial(_producers_rate, nsqd.tcp, one, 3 * amount) for one in (1, 2)]
        kinds["`nsqext run --workers`"] = [partial(workers_rate, one, amount) for one in (1, 2)]
        found: dict[tuple[str, int], list[float]] = {}
        for _ in range(rounds):
            for kind, measures in kinds.items():
                for number, rate in enumerate(measures, 1):
                    found.setdefault((kind, number), []).append(rate())
    rows = []
    for kind in kinds:
        one, two = median(found[kind, 1]), median(found[kind, 2])
        rows.append([kind, f"{one:,.0f}", f"{two:,.0f}", f"{two / one / 2:.2f}"])
    return table(("messages a second", "1 process", "2 processes", "share of twice one"), rows)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=COUNT, help="messages of each measurement")
    given = parser.parse_args()
    bodies, middleware = handlers(given.rounds, given.count)
    print(bodies, middleware, sep="\n", flush=True)
    several = processes(min(3, given.rounds), given.count)
    print(several)
    text = f"JSON bodies of {len(BODY)} bytes, `nsqext nsqd`, {given.rounds} rounds.\n\n{bodies}\n{middleware}\n"
    text += (
        "Worker processes share a topic of the embedded cluster; their handler computes for about a quarter of a "
        f"millisecond. Producers publish 200 bytes to {'another nsqd' if program_given() else '`nsqext nsqd`'}. The "
        f"server shares the {os.cpu_count()} cores with them.\n\n{several}"
    )
    write_section("Services", text)


if __name__ == "__main__":
    main()
