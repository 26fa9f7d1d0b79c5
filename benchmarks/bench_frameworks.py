"""Handlers and publishes beside FastStream on NATS and Redis: ``python -m benchmarks.bench_frameworks``.

Needs ``nats-server`` and ``redis-server``; a server that is missing is left out. Each measurement is a process; a
consumer starts before another process sends to it. CPU is that of the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any, NoReturn

import orjson
from attrs import frozen

from benchmarks.other_servers import installed, nats, redis
from benchmarks.report import table, write_section
from benchmarks.run_peer import available
from benchmarks.servers import original_nsqd, program_given

BODY: dict[str, Any] = {"number": 12345, "customer": "ann", "cents": 450, "items": ["coffee", "tea"], "note": "x" * 120}
COUNTS = {"lone": 2_000, "concurrent": 6_400, "handler": 6_400}
NAMES = {"lone": "a lone publish", "concurrent": "64 publishes in flight", "handler": "a handler of an app"}
_IN_FLIGHT = 64
_TOPIC = "bench"

Publish = Callable[[], Awaitable[object]]
Send = Callable[[int], Awaitable[None]]


class Meter:
    """Counts messages; the first starts the clock, and the last ends the process."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._taken, self._began = 0, 0.0

    def begin(self) -> None:
        """Start the clock."""
        self._began = time.process_time()

    def take(self) -> None:
        """Count a message."""
        if self._taken == 0:
            self.begin()
        self._taken += 1
        if self._taken == self._count:
            self.done()

    def done(self) -> NoReturn:
        """Print µs of CPU per message, and exit."""
        print(json.dumps((time.process_time() - self._began) / self._count * 1e6), flush=True)
        os._exit(0)


@frozen
class Framework:
    """What a framework does with one server.

    Attributes:
        publish: connects, and returns a function that publishes one message.
        consume: handles messages; calls the function once it receives.
    """

    publish: Callable[[str], Awaitable[Publish]]
    consume: Callable[[str, Meter, Callable[[], None]], Awaitable[None]]


async def _nsqext_publish(address: str) -> Publish:
    import nsqext

    producer = await nsqext.Producer(nsqd=address).start()
    return lambda: producer.publish(_TOPIC, orjson.dumps(BODY))


async def _nsqext_consume(address: str, meter: Meter, ready: Callable[[], None]) -> None:
    import nsqext

    app = nsqext.App(nsqd=address)

    async def handle(body: Any) -> None:
        meter.take()

    handle.__annotations__["body"] = dict[str, Any]
    app.handler(_TOPIC, "ch", max_in_flight=200)(handle)
    ready()  # nsqd keeps what is sent before
    await app.serve(signals=False)


def _nats(stream: bool) -> Framework:
    async def publish(address: str) -> Publish:
        from faststream.nats import NatsBroker

        broker = NatsBroker(address, logger=None)
        await broker.start()
        return (lambda: broker.publish(BODY, _TOPIC, stream=_TOPIC)) if stream else lambda: broker.publish(BODY, _TOPIC)

    async def consume(address: str, meter: Meter, ready: Callable[[], None]) -> None:
        from faststream.nats import NatsBroker

        broker = NatsBroker(address, logger=None)
        await _handle(broker, broker.subscriber(_TOPIC, stream=_TOPIC) if stream else broker.subscriber(_TOPIC), meter)
        ready()
        await asyncio.Event().wait()

    return Framework(publish, consume)


async def _redis_publish(address: str) -> Publish:
    from faststream.redis import RedisBroker

    broker = RedisBroker(address, logger=None)
    await broker.start()
    return lambda: broker.publish(BODY, stream=_TOPIC)


async def _redis_consume(address: str, meter: Meter, ready: Callable[[], None]) -> None:
    from faststream.redis import RedisBroker, StreamSub

    broker = RedisBroker(address, logger=None)
    stream = StreamSub(_TOPIC, group="ch", consumer="one", max_records=200, polling_interval=10)
    await _handle(broker, broker.subscriber(stream=stream), meter)
    ready()
    await asyncio.Event().wait()


async def _handle(broker: Any, subscribe: Any, meter: Meter) -> None:
    async def handle(body: Any) -> None:
        meter.take()

    handle.__annotations__["body"] = dict[str, Any]
    subscribe(handle)
    await broker.start()


FRAMEWORKS: dict[str, Framework] = {
    "nsqext, nsqd": Framework(_nsqext_publish, _nsqext_consume),
    "FastStream, NATS": _nats(stream=False),
    "FastStream, NATS JetStream": _nats(stream=True),
    "FastStream, Redis stream": Framework(_redis_publish, _redis_consume),
}


# A measurement, in a process of its own


async def child(name: str, mode: str, address: str, count: int) -> None:
    """Publish or handle messages; prints the cost, or a line once it receives and then the cost."""
    framework, meter = FRAMEWORKS[name], Meter(count)
    if mode == "handler":
        await framework.consume(address, meter, lambda: print("receives", flush=True))
        return
    publish = await framework.publish(address)
    await publish()

    async def some(amount: int) -> None:
        for _ in range(amount):
            await publish()

    meter.begin()
    tasks = _IN_FLIGHT if mode != "lone" else 1
    await asyncio.gather(*[some(count // tasks) for _ in range(tasks)])
    meter.done()


def measure(name: str, mode: str, address: str, scale: float) -> float:
    """Return µs of CPU per message."""
    count = max(_IN_FLIGHT, int(COUNTS[mode] * scale) // _IN_FLIGHT * _IN_FLIGHT)
    words = [sys.executable, "-W", "ignore", "-m", "benchmarks.bench_frameworks", "--child", name]
    with subprocess.Popen([*words, mode, address, str(count)], stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            if process.stdout is None:
                raise SystemExit("it has no stdout")
            if mode == "handler":
                process.stdout.readline()
                send = [*words, "concurrent", address, str(count + _IN_FLIGHT)]
                subprocess.run(send, check=True, stdout=subprocess.DEVNULL, timeout=120)  # noqa: S603
            found, _ = process.communicate(timeout=120)
        finally:
            process.kill()
    if process.returncode:
        raise SystemExit(f"{name} {mode} failed")
    return float(found)


@contextmanager
def servers() -> Iterator[dict[str, str]]:
    """Run servers; yields their addresses by the name of the framework."""
    with ExitStack() as stack:
        found = {"nsqext, nsqd": stack.enter_context(original_nsqd(program=program_given())).tcp}
        if available("faststream") and installed("nats-server"):
            found["FastStream, NATS"] = stack.enter_context(nats()).url
            found["FastStream, NATS JetStream"] = stack.enter_context(nats()).url
            asyncio.run(_make_stream(found["FastStream, NATS JetStream"]))
        if available("faststream") and installed("redis-server"):
            found["FastStream, Redis stream"] = stack.enter_context(redis()).url
        yield found


async def _make_stream(address: str) -> None:
    from nats import connect

    client = await connect(address)
    await client.jetstream().add_stream(name=_TOPIC, subjects=[_TOPIC])
    await client.close()


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual number of messages")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        name, mode, address, count = given.child
        asyncio.run(child(name, mode, address, int(count)))
        return
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(given.rounds):
        with servers() as addresses:  # each round begins with empty ones
            for mode in COUNTS:
                for name, address in addresses.items():
                    found.setdefault((name, mode), []).append(measure(name, mode, address, given.scale))
    names = list(dict.fromkeys(name for name, _ in found))
    rows = [[NAMES[mode], *(f"{median(found[name, mode]):.1f}" for name in names)] for mode in COUNTS]
    text = table(("µs of client CPU per message", *names), rows)
    print(text)
    write_section(
        "Beside FastStream",
        f"JSON bodies of {len(orjson.dumps(BODY))} bytes, {given.rounds} rounds; handlers receive a `dict[str, Any]`. "
        "nsqd, JetStream and the stream of Redis keep messages until they are acknowledged, which each handler does; "
        f"NATS alone keeps nothing, and a publish to it waits for no response.\n\n{text}",
    )


if __name__ == "__main__":
    main()
