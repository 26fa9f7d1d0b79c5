"""Measurements that need a fresh process: ``python -m benchmarks.curves.child NAME ARGUMENT…`` prints one number."""

from __future__ import annotations

import cProfile
import gc
import json
import os
import pstats
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

import nsqext

if TYPE_CHECKING:
    from nsqext.client.producer.settings import ProducerSettings
    from nsqext.protocol.client.body_compression import Codec

__all__ = ("VARIANTS", "child", "rss")

_HALF_RANDOM = 2
_SETTLE = 0.5
_TASKS = 64
_TURN = 100
"""Publishes of a variant before the next one."""
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "key": ("plain", {"key": "user:42"}),
    "trace id": ("plain", {"trace_id": 7}),
    "headers": ("ext", {"headers": {"user": "42", "kind": "a"}}),
    "key, kept in a header": ("ext", {"key": "user:42"}),
}
"""Topic and arguments of publishes."""


def child(name: str, *arguments: object, environment: dict[str, str] | None = None) -> str:
    """Run a measurement of this module in a new process; return its output."""
    words = [sys.executable, "-W", "ignore", "-m", "benchmarks.curves.child", name, *map(str, arguments)]
    done = subprocess.run(  # noqa: S603
        words, capture_output=True, text=True, timeout=180, check=False, env=os.environ | (environment or {})
    )
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    return done.stdout.strip()


def rss(pid: int | str = "self") -> float:
    """Return the resident memory of a process, in KiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


async def consume_partitions(address: str, topic: str, amount: int, max_in_flight: int) -> float:
    """Fill all partitions of a topic, then consume it; µs of CPU per message."""
    where = address.removeprefix("http://")
    async with nsqext.Producer(where) as producer:
        for _ in range(amount // 100):
            await producer.publish_many(topic, [b"x" * 200] * 100)
    consumer = nsqext.Consumer(topic, "ch", lookupd=where, max_in_flight=max_in_flight)
    taken = 0
    began = 0.0

    @consumer.handler
    async def handle(_: nsqext.Message) -> None:
        nonlocal taken, began
        began = began or time.process_time()
        taken += 1
        if taken >= amount // 100 * 95:
            consumer.stop()

    await consumer.serve()
    return (time.process_time() - began) / taken * 1e6


async def publish_variants(address: str, amount: int) -> str:
    """Publish with keys, trace ids and headers, and plain, alternating in one process.

    Returns:
        JSON: µs of CPU per message by variant.
    """
    spent = dict.fromkeys(VARIANTS, 0.0)
    body = b"x" * 200
    turns = max(1, amount // _TURN)
    async with nsqext.Producer(address.removeprefix("http://")) as producer:
        for topic, extra in VARIANTS.values():
            await producer.publish(topic, body, **extra)
        for _ in range(turns):
            for name, (topic, extra) in VARIANTS.items():
                began = time.process_time()
                for _ in range(_TURN):
                    await producer.publish(topic, body, **extra)
                spent[name] += time.process_time() - began
    return json.dumps({name: seconds / turns / _TURN * 1e6 for name, seconds in spent.items()})


async def publish_one_key(address: str, amount: int) -> str:
    """Publish by 64 tasks, without a key and with the same one.

    Returns:
        JSON: µs of time per message, for ``plain`` and ``key``.
    """
    spent: dict[str, float] = {}
    async with nsqext.Producer(address) as producer:

        async def some(key: str | None) -> None:
            for _ in range(amount // _TASKS):
                await producer.publish("plain", b"x" * 200, key=key)

        for name, key in (("plain", None), ("key", "user:42")):
            await producer.publish("plain", b"x" * 200, key=key)
            began = time.perf_counter()
            async with anyio.create_task_group() as tasks:
                for _ in range(_TASKS):
                    tasks.start_soon(some, key)
            spent[name] = (time.perf_counter() - began) / (amount // _TASKS * _TASKS) * 1e6
    return json.dumps(spent)


async def publish_compressed(address: str, codec: Codec, size: int, amount: int) -> float:
    """Publish compressible bodies; µs of CPU per message."""
    half = size // _HALF_RANDOM
    body = os.urandom(half) + b"x" * (size - half)
    settings: ProducerSettings = {} if codec == "none" else {"compression": codec, "compression_min": 1}
    async with nsqext.Producer(address.removeprefix("http://"), **settings) as producer:
        await producer.publish("ext", body)
        began = time.process_time()
        for _ in range(amount):
            await producer.publish("ext", body)
        return (time.process_time() - began) / amount * 1e6


async def idle_producer(address: str, topics: int, seconds: float, interval: float) -> str:
    """Only poll topics; milliseconds of CPU."""
    lookup = nsqext.Lookup(address, lookup_poll_interval=interval, lookup_max_poll_interval=interval)
    async with nsqext.Producer(lookup):
        lookups = [lookup.metadata.watch(f"t{number}", "r", lambda _: None) for number in range(topics)]
        for number in range(topics):
            await lookup.metadata.resolve(f"t{number}", "r")
        began = time.process_time()
        await anyio.sleep(seconds)
        used = time.process_time() - began
        for unwatch in lookups:
            unwatch()
    return str(used * 1e3)


async def first_lookup(address: str, nodes: int) -> float:
    """Look up a topic with a long list of lookup nodes; milliseconds of CPU."""
    lookup = nsqext.Lookup(address, lookup_max_lookup_nodes=nodes)
    began = time.process_time()
    async with nsqext.Producer(lookup):
        await lookup.metadata.resolve("t", "w")
        return (time.process_time() - began) * 1e3


async def idle_consumers(address: str, count: int) -> float:
    """Open consumers of one partition each; KiB for each of them."""
    consumers = [nsqext.Consumer("p1", f"ch{number}", lookupd=address) for number in range(count)]
    await consumers[0].start()
    before = _settled_rss()
    for consumer in consumers[1:]:
        await consumer.start()
    await anyio.sleep(_SETTLE)
    grown = (_settled_rss() - before) / max(1, count - 1)
    for consumer in consumers:
        await consumer.aclose()
    return grown


async def idle_consumers_cpu(address: str, count: int, seconds: float) -> float:
    """Open consumers of one partition without messages; milliseconds of CPU a second that all of them take."""
    consumers = [nsqext.Consumer("idle", f"ch{number}", lookupd=address) for number in range(count)]
    for consumer in consumers:
        await consumer.start()
    await anyio.sleep(2)
    began = time.process_time()
    await anyio.sleep(seconds)
    used = (time.process_time() - began) / seconds * 1e3
    for consumer in consumers:
        await consumer.aclose()
    return used


async def subscribed_partitions(address: str, partitions: int) -> float:
    """Subscribe to all partitions of a topic; KiB for each of them beyond one."""
    async with nsqext.Consumer("p1", "ch", lookupd=address):
        before = _settled_rss()
        async with nsqext.Consumer(f"p{partitions}", "ch", lookupd=address):
            await anyio.sleep(_SETTLE)
            return (_settled_rss() - before) / partitions


async def messages_in_flight(address: str, count: int) -> float:
    """Hold messages of 200 bytes without an acknowledgement; KiB for each of them."""
    held: list[nsqext.Message] = []
    async with nsqext.Producer(address) as producer:
        for _ in range(count // 100 + 1):
            await producer.publish_many("p1", [b"x" * 200] * 100)
    before = _settled_rss()
    async with nsqext.Consumer("p1", "ch", lookupd=address, max_in_flight=count) as consumer:
        async for message in consumer:
            held.append(message)
            if len(held) == min(count, 2000):
                break
        return (_settled_rss() - before) / len(held)


async def pending_publishes(address: str, count: int) -> float:
    """Start publishes of 200 bytes at the same time; KiB for each of them."""
    async with nsqext.Producer(address) as producer:
        await producer.publish("p1", b"x" * 200)
        before = _settled_rss()
        peak = 0.0
        async with anyio.create_task_group() as tasks:
            for _ in range(count):
                tasks.start_soon(producer.publish, "p1", b"x" * 200)
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            peak = rss()
        return (peak - before) / count


async def idle_profile(address: str, partitions: int, seconds: float) -> str:
    """Subscribe to all partitions of the topics i0, i1 and so on, and wait.

    Returns:
        JSON: CPU in milliseconds a second, tasks, KiB for each partition, and the functions that take most of the time.
    """
    before = _settled_rss()
    lookup = nsqext.Lookup(address)
    consumers = [nsqext.Consumer(f"i{number}", "ch", lookupd=lookup) for number in range(-(-partitions // 250))]
    for consumer in consumers:
        await consumer.start()
    await anyio.sleep(2)
    memory, tasks = (_settled_rss() - before) / partitions, len(anyio.get_running_tasks())
    began = time.process_time()
    await anyio.sleep(seconds)
    used = (time.process_time() - began) / seconds * 1e3
    profile = cProfile.Profile()
    profile.enable()
    await anyio.sleep(seconds)
    profile.disable()
    calls = sorted(pstats.Stats(profile).stats.items(), key=lambda item: -item[1][2])  # type: ignore[attr-defined]
    waiting = ("poll", "select", "epoll")
    top = [
        (f"{Path(file).name}:{name}", count / seconds, own / seconds * 1e3)
        for (file, _, name), (_, count, own, *_rest) in calls
        if not any(word in name for word in waiting)
    ][:10]
    for consumer in consumers:
        await consumer.aclose()
    return json.dumps({"cpu": used, "tasks": tasks, "memory": memory, "top": top})


def _settled_rss() -> float:
    gc.collect()
    return rss()


MEASUREMENTS: dict[str, Callable[..., Awaitable[object]]] = {
    function.__name__: function
    for function in (
        consume_partitions,
        publish_compressed,
        publish_variants,
        publish_one_key,
        first_lookup,
        idle_producer,
        idle_consumers,
        idle_consumers_cpu,
        subscribed_partitions,
        messages_in_flight,
        pending_publishes,
        idle_profile,
    )
}


def _number(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


async def _main(*words: str) -> None:
    name, *arguments = words
    print(await MEASUREMENTS[name](*map(_number, arguments)))


if __name__ == "__main__":
    anyio.run(_main, *sys.argv[1:])
