"""Run a schedule: a cluster, publishers and consumers of every kind, and the faults of a plan."""

from __future__ import annotations

import gc
import random
import sys
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from nsqext import Consumer, Message, Producer
from nsqext.broker import Cluster
from nsqext.errors import NsqError
from tests.campaigns.chaos.ledger import Entry, Ledger, Outcome
from tests.campaigns.chaos.plan import PARTITIONS, TOPICS, Plan, Step, World

__all__ = ("run_schedule",)

CHANNEL = "chaos"
PUBLISHING = 1.5
"""Seconds for which each publisher publishes."""
LEAST = 12
"""Number of publishes by each publisher, even if they take longer."""
DRAINING = 20.0
"""Seconds after which messages that have not been consumed count as lost."""
KEYS = 6


class HandlerFailed(Exception):
    """Raised by 1% of the calls of handlers."""


def make_topics(cluster: Cluster, replicas: int) -> None:
    """Create a topic of each kind, with its channel."""
    for topic in TOPICS:
        cluster.create_topic(
            topic,
            partitions=PARTITIONS,
            replicas=replicas,
            extend=topic in ("keyed", "tagged"),
            ordered=topic == "ordered",
            channels=[] if topic == "keyed" else [CHANNEL],
        )


def make_consumers(cluster: Cluster, ledger: Ledger, rng: random.Random) -> list[Consumer]:
    """Return consumers of every kind, whose handler sometimes sleeps or fails."""
    options: dict[str, Any] = {
        "requeue_delay": 0.02,
        "backoff": "off",
        "close_timeout": 2.0,
        "max_reconnect_wait": 0.5,
    }

    def make_consumer(topic: str, **settings: Any) -> Consumer:
        consumer = Consumer(topic, CHANNEL, lookupd=cluster.lookupd, **options, **settings)

        @consumer.handler
        async def handle(message: Message) -> None:
            if rng.random() < 0.3:
                await anyio.sleep(rng.uniform(0.0, 0.004))
            if rng.random() < 0.01:
                raise HandlerFailed
            ledger.consumed(message)

        return consumer

    return [
        make_consumer("plain", concurrency=8),
        make_consumer("keyed", concurrency=4, dispatch="key_failover"),
        make_consumer("keyed", concurrency=4, dispatch="key_failover"),
        make_consumer("ordered", concurrency=2),
        make_consumer("tagged", concurrency=4, tag="blue"),
        make_consumer("tagged", concurrency=4),
    ]


async def publish(producer: Producer, ledger: Ledger, topic: str, name: str, rng: random.Random) -> None:
    """Publish to a topic one message after the other, with keys if the topic keeps their order."""
    keyed = topic in ("keyed", "ordered")
    numbers: dict[str, int] = {}
    until = time.monotonic() + PUBLISHING
    while time.monotonic() < until or sum(numbers.values()) < LEAST:
        # a key belongs to one publisher, so that the order of its publishes is known
        key = f"{name}-{rng.randrange(KEYS)}" if keyed else name
        numbers[key] = numbers.get(key, 0) + 1
        tag = rng.choice((None, "blue")) if topic == "tagged" else None
        body, entry = ledger.begin(topic, key, numbers[key], tag)
        try:
            entry.receipt = await producer.publish(topic, body, key=key if keyed else None, tag=tag)
        except NsqError as error:
            entry.error = error
        entry.ended = time.monotonic()
        await anyio.sleep(rng.uniform(0.0, 0.01))


async def take_step(step: Step, world: World) -> None:
    """Perform a step at its time, in a thread because the cluster's calls block."""
    await anyio.sleep(step.at)
    await to_thread.run_sync(step.act, world)


async def drain(ledger: Ledger) -> None:
    """Wait until every acknowledged message is consumed, and 50 ms longer for duplicates."""
    with anyio.move_on_after(DRAINING):
        while ledger.missing:  # noqa: ASYNC110 - the ledger is written by many handlers
            await anyio.sleep(0.01)
        await anyio.sleep(0.05)


@asynccontextmanager
async def consuming(consumers: list[Consumer]) -> AsyncIterator[None]:
    """Run consumers; at the end stop them and wait until they have closed their connections."""
    async with anyio.create_task_group() as tasks:
        for consumer in consumers:
            tasks.start_soon(consumer.serve)
        with anyio.fail_after(25):
            while not all(len(consumer.connections) == PARTITIONS for consumer in consumers):  # noqa: ASYNC110
                await anyio.sleep(0.01)
        yield
        with anyio.fail_after(25):
            for consumer in consumers:
                consumer.stop()
            while any(consumer.connections for consumer in consumers):  # noqa: ASYNC110 - runs end without an event
                await anyio.sleep(0.01)


async def traffic(plan: Plan, world: World, ledger: Ledger) -> None:
    """Publish and consume during the steps of the plan; then end the faults and drain."""
    rng = random.Random(plan.seed)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(consuming(make_consumers(world.cluster, ledger, rng)))
        producer = await stack.enter_async_context(Producer(world.cluster.lookupd, on_unknown=plan.on_unknown))
        async with anyio.create_task_group() as tasks:
            for topic in TOPICS:
                for name in ("a", "b"):
                    tasks.start_soon(publish, producer, ledger, topic, name, rng)
            async with anyio.create_task_group() as steps:
                for step in plan.steps:
                    steps.start_soon(take_step, step, world)
            await to_thread.run_sync(world.heal)
        await drain(ledger)


def open_files() -> dict[str, str]:
    """Return what is open in this process; nothing where the system does not tell."""
    folder = Path("/proc/self/fd")
    found = {}
    for link in folder.iterdir() if folder.exists() else ():
        try:
            found[link.name] = str(link.readlink())
        except FileNotFoundError:  # the folder itself, while it was read
            continue
    return {name: target for name, target in found.items() if target.startswith("socket:")}


@contextmanager
def recording_leaks(leaks: list[str]) -> Iterator[None]:
    """Record leaks: sockets, unclosed streams, exceptions that were not retrieved."""
    before = open_files()
    hook = sys.unraisablehook

    def note(found: sys.UnraisableHookArgs) -> None:
        leaks.append(f"{found.exc_value!r} in {found.object!r}")

    sys.unraisablehook = note
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
            gc.collect()
    finally:
        sys.unraisablehook = hook
    leaks += [str(warning.message) for warning in caught]
    leaks += [f"open {target}" for name, target in open_files().items() if before.get(name) != target]


async def leftover_tasks(before: set[int], leaks: list[str]) -> None:
    """Record the tasks that still run after clients and cluster have been closed."""
    with anyio.move_on_after(10):
        while any(task.id not in before for task in anyio.get_running_tasks()):  # noqa: ASYNC110 - tasks end silently
            await anyio.sleep(0.01)
    leaks += [f"task {task.name}" for task in anyio.get_running_tasks() if task.id not in before]


async def run_schedule(plan: Plan, limit: float = 60.0) -> tuple[Outcome, list[Entry]]:
    """Run a schedule on a cluster of its own; return its outcome and its entries.

    Raises:
        TimeoutError: it takes more than ``limit`` seconds, so a task hangs.
    """
    ledger, leaks = Ledger(plan.on_unknown), list[str]()
    with recording_leaks(leaks):
        cluster = Cluster(nodes=3, lookupds=2)
        await to_thread.run_sync(cluster.start)
        try:
            await to_thread.run_sync(make_topics, cluster, plan.replicas)
            tasks = {task.id for task in anyio.get_running_tasks()}
            with anyio.fail_after(limit):
                await traffic(plan, World(cluster), ledger)
            await leftover_tasks(tasks, leaks)
        finally:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(cluster.stop)
    outcome = ledger.outcome()
    outcome.leaks += leaks
    return outcome, list(ledger.entries.values())
