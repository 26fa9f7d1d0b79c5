"""Publishes with keys and ordered consumption: ``python -m benchmarks.bench_ordered``.

Each measurement is a process; variants take turns in each round. ``--lookupd`` names a real cluster, and ``--go
PROGRAM`` is `benchmarks/go_peer_redesigned`, built with the Go client of the redesigned NSQ.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from secrets import token_hex
from statistics import median
from typing import Any

import anyio

from benchmarks.report import table, write_section
from benchmarks.servers import cluster_process
from nsqext import Admin, Consumer, Message, Producer
from nsqext.errors import NsqError

BODY = b"x" * 200
CHANNEL = "ch"
CONCURRENT = 64
WARM_UP = 200
COUNT = 9_600
CONSUMED = 6_000
KEYS = 1_000
ROWS = {
    "keys": "1,000 keys, 64 in flight",
    "keysext": "1,000 keys with header and trace id, 64 in flight",
    "onekey": "one key, 64 in flight",
    "onekeyext": "one key with header and trace id, 64 in flight",
    "ordered": "consume an ordered topic of two partitions",
}
"""What is measured, by the mode of the peers."""

FLOOR = ("onekeyext", "ordered")
"""Modes in which a client waits for the server after each message, which `benchmarks.floor` does, too."""


# A measurement, in a process of its own


async def publish(mode: str, lookupd: str, topic: str, count: int) -> dict[str, float]:
    """Publish with keys."""
    extended = mode.endswith("ext")
    async with Producer(lookupd) as producer:

        async def one(number: int) -> None:
            key = f"key-{number % KEYS}" if mode.startswith("keys") else "key"
            more: dict[str, Any] = {"headers": {"name": "value"}, "trace_id": number + 1} if extended else {}
            await producer.publish(topic, BODY, key=key, **more)

        async def some(task: int) -> None:
            for number in range(task, count, CONCURRENT):
                await one(number)

        for number in range(WARM_UP):
            await one(number)
        began, used = time.perf_counter(), time.process_time()
        async with anyio.create_task_group() as tasks:
            for task in range(CONCURRENT):
                tasks.start_soon(some, task)
        return _result(began, used, count)


async def consume(_mode: str, lookupd: str, topic: str, count: int) -> dict[str, float]:
    """Consume in order."""
    consumer = Consumer(topic, CHANNEL, lookupd, ordered=True, max_in_flight=200)
    taken, began, used = 0, 0.0, 0.0

    @consumer.handler
    async def handle(message: Message) -> None:
        nonlocal taken, began, used
        taken += 1
        if taken == WARM_UP:
            began, used = time.perf_counter(), time.process_time()
        if taken == count:
            consumer.stop()

    await consumer.serve()
    return _result(began, used, count - WARM_UP)


def _result(began: float, used: float, count: int) -> dict[str, float]:
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    return {"rate": count / seconds, "cpu": cpu / count * 1e6}


def child(client: str, mode: str, lookupd: str, topic: str, count: int) -> None:
    """Measure, and print the result."""
    work: Callable[..., Awaitable[dict[str, float]]] = consume if mode == "ordered" else publish
    options = {"use_uvloop": client == "uvloop"}
    print(json.dumps(anyio.run(work, mode, lookupd, topic, count, backend_options=options)))


# All measurements


@contextmanager
def new_topic(lookupd: str, mode: str) -> Iterator[str]:
    """Make a topic, filled for a consumer, and delete it afterwards."""
    topic = f"bench_{token_hex(4)}"

    async def make() -> None:
        async with Admin(lookupd) as admin:
            ordered, extend = mode == "ordered", mode.endswith("ext")
            await admin.create_topic(topic, partitions=2, ordered=ordered, extend=extend, channels=[CHANNEL])
        async with Producer(lookupd, timeout=60) as producer:
            amount = CONSUMED if mode == "ordered" else 1
            for partition in range(2):
                bodies = [BODY] * (amount // 2 or 1)
                with anyio.fail_after(90):
                    await producer.publish_many(topic, bodies, partition=partition)

    async def delete() -> None:
        async with Admin(lookupd) as admin:
            await admin.delete_topic(topic)

    anyio.run(make)
    try:
        yield topic
    finally:
        try:
            anyio.run(delete)
        except NsqError as error:  # the next topic has another name
            print(error, file=sys.stderr)


def measure(client: str, mode: str, lookupd: str, program: str) -> dict[str, float]:
    """Return ``rate`` and ``cpu`` of a client."""
    count = CONSUMED if mode == "ordered" else COUNT
    with new_topic(lookupd, mode) as topic:
        words = [mode, str(count), lookupd, topic]
        if client == "asyncio alone":
            command = [sys.executable, "-m", "benchmarks.floor", mode, lookupd, topic, str(count // 2)]
        elif client == "go-nsq":
            command = [program, *words]
        else:
            command = [sys.executable, "-m", "benchmarks.bench_ordered", "--child", client, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)  # noqa: S603
        if done.returncode or not done.stdout:
            raise SystemExit(f"{client} {mode} failed:\n{done.stderr}")
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found


def compare(lookupd: str, server: str, rounds: int, program: str) -> None:
    """Measure all rows, and write the page."""
    clients = ("nsqext", "uvloop", "asyncio alone", *(("go-nsq",) if program else ()))
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for mode in ROWS:
            for client in clients:
                if client == "asyncio alone" and mode not in FLOOR:
                    continue
                cost = measure(client, mode, lookupd, program)["cpu"]
                found.setdefault((mode, client), []).append(cost)
                print(client, mode, f"{cost:.1f}", flush=True)
    costs = {key: median(values) for key, values in found.items()}
    rows = []
    for mode, name in ROWS.items():
        cells = [f"{costs[mode, client]:.1f}" if (mode, client) in costs else "–" for client in clients]
        share = [f"{costs[mode, 'nsqext'] / costs[mode, 'go-nsq']:.2f}"] if program else []
        rows.append([name, *cells, *share])
    head = ("µs of CPU a message", *clients, *(("nsqext / go-nsq",) if program else ()))
    text = f"""Bodies of 200 bytes, topics of two partitions, {server}, {rounds} rounds; go-nsq is the client of the
redesigned NSQ, which sends a key's messages without waiting for earlier ones. Here messages of one key wait for each
other, and become batches where their receipts allow it: the response to a batch with headers has no position, so that
messages of one key with header and trace id are sent one by one. "asyncio alone" is `benchmarks/floor.py`, a client of
asyncio that parses and checks nothing, but waits for the server after each message, too.

{table(head, rows)}"""
    print(text)
    write_section("Keys and ordered consumption", text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lookupd", default="", help="a lookup node of a real redesigned cluster")
    parser.add_argument("--go", default="", metavar="PROGRAM", help="benchmarks/go_peer_redesigned, built")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", nargs=5, metavar=("CLIENT", "MODE", "COUNT", "LOOKUPD", "TOPIC"), help="one process")
    given = parser.parse_args()
    if given.child:
        name, kind, amount, address, used_topic = given.child
        child(name, kind, address, used_topic, int(amount))
    elif given.lookupd:
        compare(given.lookupd, "a real cluster of three nodes", given.rounds, given.go)
    else:
        with cluster_process(nodes=2) as (_, embedded):
            compare(embedded, "an embedded cluster of two nodes", given.rounds, given.go)
