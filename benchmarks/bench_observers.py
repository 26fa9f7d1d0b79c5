"""Costs of telemetry and middleware beside a bare client: ``python -m benchmarks.bench_observers``.

CPU is user and system time of this process, against ``nsqext nsqd`` in another process; the variants take turns in each
round. The SDK of OpenTelemetry records all spans and exports none of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from statistics import median
from typing import TYPE_CHECKING

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind
from prometheus_client import CollectorRegistry

from benchmarks.report import table, write_section
from benchmarks.servers import fill, original_nsqd
from nsqext import App, Consumer, Message, Producer
from nsqext.middleware import CallNext, HandlerTimeout, Handling, Middleware, Publishing, SendNext
from nsqext.observability import LogObserver
from nsqext.observability.otel import OpenTelemetry
from nsqext.observability.prometheus import Prometheus

if TYPE_CHECKING:
    from nsqext.types import Receipt

BODY = b"x" * 200
LONE = 3_000
CONCURRENT = 12_800
CONSUMED = 12_800
RESULTS = 3_000
IN_FLIGHT = 64
_BARE = "none"

_number = count(1)


class Pass(Middleware):
    """Middleware without an effect."""

    async def publish(self, publishing: Publishing, send_next: SendNext) -> Sequence[Receipt]:
        """Publish."""
        return await send_next(publishing)

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Call the next one."""
        return await call_next(handling)


def _sdk() -> OpenTelemetry:
    return OpenTelemetry(TracerProvider(), MeterProvider([InMemoryMetricReader()]))


VARIANTS: dict[str, Callable[[], list[Middleware]]] = {
    _BARE: list,
    "a middleware without an effect": lambda: [Pass()],
    "`LogObserver`, level disabled": lambda: [LogObserver()],
    "`OpenTelemetry` without an SDK": lambda: [OpenTelemetry()],
    "`OpenTelemetry` with the SDK": lambda: [_sdk()],
    "`Prometheus`": lambda: [Prometheus(CollectorRegistry())],
    "`HandlerTimeout`": lambda: [HandlerTimeout(10)],
}
_HANDLERS_ONLY = ("`HandlerTimeout`",)


def _topic() -> str:
    return f"bench_{os.getpid()}_{next(_number)}"


async def lone(address: str, middleware: list[Middleware], amount: int) -> float:
    """Publish one by one; return µs of CPU per message."""
    async with Producer(nsqd=address, middleware=middleware) as producer:
        await producer.publish("bench_lone", BODY)
        began = time.process_time()
        for _ in range(amount):
            await producer.publish("bench_lone", BODY)
        return (time.process_time() - began) / amount * 1e6


async def concurrent(address: str, middleware: list[Middleware], amount: int) -> float:
    """Publish with some in flight; return µs of CPU per message."""
    async with Producer(nsqd=address, middleware=middleware) as producer:
        await producer.publish("bench_concurrent", BODY)

        async def some() -> None:
            for _ in range(amount // IN_FLIGHT):
                await producer.publish("bench_concurrent", BODY)

        began = time.process_time()
        await asyncio.gather(*[some() for _ in range(IN_FLIGHT)])
        return (time.process_time() - began) / amount * 1e6


async def handled(address: str, middleware: list[Middleware], amount: int) -> float:
    """Handle messages with a handler that does nothing; return µs of CPU per message."""
    topic = _topic()
    fill(address, topic, amount, BODY)
    consumer = Consumer(topic, "ch", nsqd=address, max_in_flight=200, middleware=middleware)
    done, began = 0, 0.0

    @consumer.handler
    async def handle(message: Message) -> None:
        nonlocal done, began
        began = began or time.process_time()
        done += 1
        if done == amount:
            consumer.stop()

    await consumer.serve()
    return (time.process_time() - began) / amount * 1e6


async def published_result(address: str, publishes: bool, amount: int) -> float:
    """Handle messages of an app, and publish a result for each if asked; return µs of CPU per message."""
    topic = _topic()
    fill(address, topic, amount, BODY)
    app = App(nsqd=address)
    done, began = 0, 0.0

    async def handle(message: Message) -> bytes | None:
        nonlocal done, began
        began = began or time.process_time()
        done += 1
        if done == amount:
            app.stop()
        return message.body if publishes else None

    if publishes:
        handle = app.publisher(f"{topic}_results")(handle)
    app.handler(topic, "ch", max_in_flight=200)(handle)
    await app.serve(signals=False)
    return (time.process_time() - began) / amount * 1e6


def span_alone(amount: int) -> float:
    """Record spans with attributes; return µs of CPU for one."""
    tracer = TracerProvider().get_tracer("bench")
    attributes = {"messaging.system": "nsq", "messaging.operation.name": "publish", "messaging.destination.name": "t"}
    began = time.process_time()
    for _ in range(amount):
        with tracer.start_as_current_span("publish t", kind=SpanKind.PRODUCER, attributes=attributes):
            pass
    return (time.process_time() - began) / amount * 1e6


Costs = dict[tuple[str, str], float]
"""µs of CPU per message by variant and column."""


def measure(address: str, scale: float, variants: Sequence[str]) -> Costs:
    """Measure variants once, in this process."""
    found: Costs = {}
    for name in variants:
        make = VARIANTS[name]
        if name not in _HANDLERS_ONLY:
            found[name, "lone"] = asyncio.run(lone(address, make(), int(LONE * scale)))
            found[name, "concurrent"] = asyncio.run(concurrent(address, make(), int(CONCURRENT * scale)))
        found[name, "handled"] = asyncio.run(handled(address, make(), int(CONSUMED * scale)))
    return found


def observers(address: str, scale: float, variants: Sequence[str]) -> Costs:
    """Measure variants once, in a process of their own."""
    words = ["--address", address, "--scale", str(scale), "--variants", *variants]
    command = [sys.executable, "-m", "benchmarks.bench_observers", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise SystemExit(f"telemetry failed:\n{done.stderr}")
    return {(variant, column): cost for variant, column, cost in json.loads(done.stdout.splitlines()[-1])}


def main(rounds: int, scale: float) -> None:
    """Measure and report."""
    found: dict[tuple[str, str], list[float]] = {}
    results: dict[str, list[float]] = {}
    with original_nsqd() as nsqd:
        for _ in range(rounds):
            for key, cost in measure(nsqd.tcp, scale, list(VARIANTS)).items():
                found.setdefault(key, []).append(cost)
            results.setdefault("span", []).append(span_alone(int(CONCURRENT * scale)))
            for name, publishes in (("without", False), ("with", True)):
                cost = asyncio.run(published_result(nsqd.tcp, publishes, int(RESULTS * scale)))
                results.setdefault(name, []).append(cost)
    columns = ("lone", "concurrent", "handled")
    medians = {key: median(costs) for key, costs in found.items()}
    rows = []
    for name in VARIANTS:
        cells = [name]
        for column in columns:
            measured = medians.get((name, column))
            more = "" if name == _BARE or measured is None else f" ({measured - medians[_BARE, column]:+.1f})"
            cells.append("" if measured is None else f"{measured:.1f}{more}")
        rows.append(cells)
    span, without, published = (median(results[name]) for name in ("span", "without", "with"))
    head = ("middleware", "a lone publish", f"{IN_FLIGHT} publishes in flight", "a handler")
    text = f"""µs of CPU per message of 200 bytes, and how much more than without middleware; `nsqext nsqd`, {rounds}
rounds.

{table(head, rows)}
A span with three attributes costs {span:.1f} µs by itself with the SDK. A handler of an app costs {without:.1f} µs, and
{published:.1f} µs if its result is published: {published - without:+.1f} µs.
"""
    print(text)
    write_section("Telemetry", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual number of messages")
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--variants", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.address:
        costs = measure(given.address, given.scale, given.variants)
        print(json.dumps([[*key, cost] for key, cost in costs.items()]))
    else:
        main(given.rounds, given.scale)
