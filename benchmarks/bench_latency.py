"""End-to-end latency with default settings: ``python -m benchmarks.bench_latency``.

A producer publishes 200 B at a steady rate, and the handler of a consumer notes the age of each message. Then a burst
after a silence, and the CPU of the consumer meanwhile. The servers are embedded and of both generations, and real where
NSQEXT_TEST_LOOKUPD (redesigned) and NSQEXT_TEST_NSQ_LOOKUPD (original) name them. Rates and servers alternate. A server
that buffers nothing (``output_buffer_timeout=0``) shows what the machine itself adds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import anyio

import nsqext
from benchmarks.report import table, write_section
from benchmarks.servers import cluster_process, original_nsqd

RATES = (10, 100, 1000, 5000)
_BURST = 9_000  # an ephemeral channel of the original NSQ keeps 10,000 messages
_SLICE = 0.02
_BODY = b"x" * 192


def percentiles(ages: list[float]) -> dict[str, float]:
    """Return the median, p99 and p99.9 in milliseconds."""
    ordered = sorted(ages)
    found = {"median": 0.5, "p99": 0.99, "p99.9": 0.999}
    return {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] * 1e3 for name, share in found.items()}


async def publish(where: dict[str, Any], topic: str, rate: int, seconds: float) -> None:
    """Publish messages that begin with the time, at a steady rate."""
    producer = producer_of(where)

    async def publish_now() -> None:
        await producer.publish(topic, time.monotonic_ns().to_bytes(8, "big") + _BODY)

    async with producer:
        await publish_now()
        began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            for number in range(1, int(rate * seconds)):
                if (pause := began + number / rate - time.monotonic()) > 0:
                    await anyio.sleep(pause)
                tasks.start_soon(publish_now)


def producer_of(where: dict[str, Any]) -> nsqext.Producer:
    """Return a producer for the servers of a consumer."""
    return nsqext.Producer(**{name: where[name] for name in ("lookupd", "nsqd") if name in where})


class Run:
    """A consumer of one topic, and its producer."""

    def __init__(self, where: dict[str, Any], topic: str) -> None:
        self.ages: list[float] = []
        self.times: list[float] = []
        self._where = where
        self._producer = producer_of(where)
        self._consumer = nsqext.Consumer(topic, f"c{uuid4().hex[:8]}#ephemeral", **where)
        self._topic = topic

        @self._consumer.handler
        async def handle(message: nsqext.Message) -> None:
            now = time.monotonic_ns()
            self.ages.append((now - int.from_bytes(message.body[:8], "big")) / 1e9)
            self.times.append(now / 1e9)

    async def _all(self, count: int) -> None:
        with anyio.fail_after(30):
            while len(self.ages) < count:  # noqa: ASYNC110 - an event would cost each message
                await anyio.sleep(0.01)

    async def steady(self, rate: int, seconds: float) -> dict[str, float]:
        """Publish at a rate in another process; return the percentiles of the second half of the time."""
        words = (json.dumps(self._where), self._topic, str(rate), str(seconds))
        await anyio.run_process([sys.executable, "-m", "benchmarks.bench_latency", "--publish", *words])
        await self._all(int(rate * seconds))
        return percentiles(self.ages[len(self.ages) // 2 :])

    async def burst(self) -> dict[str, float]:
        """Publish many messages at once after a silence.

        Returns:
            ``full``: milliseconds from the first message to the first slice of 20 ms with half of the usual rate.
            ``cpu``: microseconds of CPU a message, of the consumer.
        """
        await anyio.sleep(0.5)
        self.times.clear()
        self.ages.clear()
        self._consumer.pause()
        await anyio.sleep(0.3)
        for _ in range(_BURST // 100):
            await self._producer.publish_many(self._topic, [time.monotonic_ns().to_bytes(8, "big") + _BODY] * 100)
        before = time.process_time()
        self._consumer.resume()
        await self._all(_BURST)
        used, first = time.process_time() - before, self.times[0]
        counts: dict[int, int] = {}
        for at in self.times:
            counts[int((at - first) / _SLICE)] = counts.get(int((at - first) / _SLICE), 0) + 1
        usual = statistics.median(counts.values())
        reached = min(number for number, count in sorted(counts.items()) if count >= usual / 2)
        return {"full": reached * _SLICE * 1e3, "cpu": used / len(self.times) * 1e6}

    async def measure(self, rate: int, seconds: float) -> dict[str, float]:
        """Measure a rate, or with 0 a burst."""
        async with self._producer, self._consumer:
            return await (self.steady(rate, seconds) if rate else self.burst())


async def create_topic(lookupd: str, topic: str) -> None:
    """Create a topic of a real cluster, which may exist."""
    async with nsqext.Admin(lookupd) as admin:
        await admin.create_topic(topic, exist_ok=True, channels=["unread#ephemeral"])


@contextmanager
def servers() -> Iterator[dict[str, tuple[dict[str, Any], str]]]:
    """Yield settings of the consumer and the topic, by the name of the server."""
    redesigned, original = os.environ.get("NSQEXT_TEST_LOOKUPD"), os.environ.get("NSQEXT_TEST_NSQ_LOOKUPD")
    real: dict[str, tuple[dict[str, Any], str]] = {}
    if redesigned:
        real["real redesigned"] = ({"lookupd": redesigned}, "bench_latency")
        anyio.run(create_topic, redesigned, "bench_latency")
    if original:
        topic = f"bench_latency_{uuid4().hex[:8]}"
        anyio.run(create_topic, original, topic)
        real["real original"] = ({"lookupd": original}, topic)
        real["real original, no buffer"] = ({"lookupd": original, "output_buffer_timeout": 0}, topic)
    with cluster_process("latency") as (_, address), original_nsqd() as nsqd:
        yield {
            "redesigned": ({"lookupd": address}, "latency"),
            "original": ({"nsqd": nsqd.tcp}, "latency"),
            **real,
        }


def measure(where: dict[str, Any], topic: str, rate: int, seconds: float) -> dict[str, float]:
    """Measure in a process of its own."""
    words = (json.dumps(where), topic, str(rate), str(seconds))
    command = [sys.executable, "-m", "benchmarks.bench_latency", "--child", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--publish", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.publish:
        where, topic, rate, seconds = given.publish
        anyio.run(publish, json.loads(where), topic, int(rate), float(seconds))
        return
    if given.child:
        where, topic, rate, seconds = given.child
        print(json.dumps(anyio.run(Run(json.loads(where), topic).measure, int(rate), float(seconds))))
        return
    found: dict[tuple[str, int, str], list[float]] = {}
    with servers() as named:
        for _ in range(given.rounds):
            for name, (where, topic) in named.items():
                for rate in (*RATES, 0):
                    for figure, value in measure(where, topic, rate, given.seconds).items():
                        found.setdefault((name, rate, figure), []).append(value)
        names = list(named)

    def shown(name: str, rate: int, *figures: str) -> str:
        return " / ".join(f"{statistics.median(found[name, rate, figure]):.1f}" for figure in figures)

    rows = [[f"{rate:,}", *(shown(name, rate, "median", "p99", "p99.9") for name in names)] for rate in RATES]
    rows.append(["burst: ms until full speed", *(shown(name, 0, "full") for name in names)])
    rows.append(["burst: µs of CPU a message", *(shown(name, 0, "cpu") for name in names)])
    text = table(("messages a second", *names), rows)
    print(text)
    write_section("Latency", f"{_NOTE.format(given.seconds, given.rounds)}\n{text}")


_NOTE = """\
Default settings, 200 B, {0:g} s, the second half counts; milliseconds from publish to handler: median / p99 / p99.9.
Producer and consumer are in two processes, {1} rounds: `python -m benchmarks.bench_latency`. "No buffer" is
`output_buffer_timeout=0`, with which a server sends each message at once: what the machine itself adds.
"""


if __name__ == "__main__":
    main()
