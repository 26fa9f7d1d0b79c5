"""The process under attack: ``python -m tests.campaigns.hostile.victim`` reads its task from standard input as JSON.

A client talks to a hostile server and, beside it, to an honest one. A broker serves hostile clients and, beside them,
honest ones. At the end the process prints what it used.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import anyio
from attrs import asdict

from nsqext import Consumer, Message, Producer
from nsqext.broker import Cluster
from nsqext.errors import NsqError
from tests.campaigns.hostile.honest import HONEST_TOPIC, honest
from tests.campaigns.hostile.meter import Meter

TARGET = "target"
"""Topic that is attacked."""

_SHORT: dict[str, Any] = {"connect_timeout": 1.0, "request_timeout": 1.0}


async def _publish_forever(producer: Producer, body: bytes) -> None:
    while True:
        with suppress(NsqError):
            await producer.publish(TARGET, body)
        await anyio.sleep(0.005)


async def _publish(producer: Producer, body: bytes) -> None:
    async with producer, anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(_publish_forever, producer, body)


def _producer(**where: Any) -> Producer:
    return Producer(**where, timeout=2.0, lookup_timeout=1.0, **_SHORT)


async def publish(hostile: str, lookupd: str) -> None:
    """Publish small messages to a hostile nsqd."""
    await _publish(_producer(nsqd=hostile), b"x" * 1000)


async def publish_deflated(hostile: str, lookupd: str) -> None:
    """Publish over connections that are compressed with deflate."""
    await _publish(_producer(nsqd=hostile, deflate_level=6), b"x" * 1000)


async def publish_large(hostile: str, lookupd: str) -> None:
    """Publish messages of 1 MB to a hostile nsqd."""
    await _publish(_producer(nsqd=hostile), b"x" * 1_000_000)


async def look_up(hostile: str, lookupd: str) -> None:
    """Publish to the nodes that a hostile lookup service names."""
    producer = _producer(lookupd=hostile, lookup_request_timeout=1.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_publish, producer, b"x")
        while True:
            with suppress(NsqError):
                await producer.publish(f"t{time.monotonic_ns() % 10}", b"x")
            await anyio.sleep(0.05)


async def _handle(message: Message) -> None:
    with suppress(NsqError):
        len(message.headers)
    await anyio.sleep(0.02)


async def consume(hostile: str, lookupd: str) -> None:
    """Consume from a hostile nsqd with a slow handler."""
    consumer = Consumer(TARGET, "default", nsqd=hostile, start_timeout=1.0, close_timeout=0.5, **_SHORT)
    consumer.handler(_handle)
    await consumer.serve(signals=False)


async def consume_honest(hostile: str, lookupd: str) -> None:
    """Consume what hostile producers published to an honest node."""
    await _consume(TARGET, lookupd)


async def consume_headers(hostile: str, lookupd: str) -> None:
    """Consume messages with large headers from an honest node."""
    await _consume("headers", lookupd)


async def _consume(topic: str, lookupd: str) -> None:
    consumer = Consumer(topic, "default", lookupd=lookupd, concurrency=4, close_timeout=0.5)
    consumer.handler(_handle)
    await consumer.serve(signals=False)


SCENARIOS: dict[str, Callable[[str, str], Awaitable[None]]] = {
    one.__name__: one
    for one in (publish, publish_deflated, publish_large, look_up, consume, consume_honest, consume_headers)
}


async def _attacked(scenario: str, hostile: str, lookupd: str) -> None:
    """Run a scenario again whenever it ends with an error, as a service would."""
    while True:
        with suppress(NsqError):
            await SCENARIOS[scenario](hostile, lookupd)
        await anyio.sleep(0.05)


async def be_client(task: dict[str, Any]) -> None:
    """Talk to a hostile server for a while, then to honest ones alone."""
    meter = Meter()
    async with honest(task["lookupd"], meter.usage) as peer, anyio.create_task_group() as watching:
        meter.start()
        watching.start_soon(meter.watch)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_attacked, task["scenario"], task["hostile"], task["lookupd"])
            with anyio.move_on_after(task["seconds"] + 10):
                await peer.exchange_until(time.monotonic() + task["seconds"])
            with anyio.fail_after(25):
                tasks.cancel_scope.cancel()
                await anyio.lowlevel.checkpoint_if_cancelled()
        with anyio.move_on_after(30):
            await peer.exchange(5)
            meter.usage.recovered = True
        watching.cancel_scope.cancel()
        gc.collect()
        usage = meter.stop()
    say(asdict(usage))


def be_broker(task: dict[str, Any]) -> None:
    """Serve until standard input is closed."""
    if task.get("descriptors"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (task["descriptors"], task["descriptors"]))
    meter = Meter()
    with Cluster(nodes=1) as cluster:
        for name in (HONEST_TOPIC, TARGET):
            cluster.create_topic(name, extend=name == TARGET, channels=["default", "second"])
        (node,) = cluster.nodes.values()
        say({"lookupd": cluster.lookupd[0], "tcp": node.tcp, "http": node.http})
        sys.stdin.readline()  # the honest peers are connected
        assert cluster._portal is not None
        watch = cluster._portal.start_task_soon(meter.watch)
        meter.start()
        sys.stdin.readline()  # the attack is over
        gc.collect()
        usage = meter.stop()
        watch.cancel()
    say(asdict(usage))


def say(answer: dict[str, Any]) -> None:
    """Print a line of JSON."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    given = json.loads(sys.stdin.readline())
    if given["side"] == "client":
        anyio.run(be_client, given)
    else:
        be_broker(given)
