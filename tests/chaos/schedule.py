"""Running a schedule: a cluster, publishers and consumers of every kind, and the faults of a plan."""

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

from nsqext import BackoffOptions, Consumer, ConsumerOptions, FailureOptions, Message, Producer, ProducerOptions
from nsqext.broker import Cluster
from nsqext.errors import NsqError
from tests.chaos.ledger import Entry, Ledger, Outcome
from tests.chaos.plan import PARTITIONS, TOPICS, Plan, Step, World

__all__ = ("run_schedule",)

CHANNEL = "chaos"
PUBLISHING = 1.5
"""Seconds for which publishers continue."""
LEAST = 12
"""Publishes that each of them makes also where that takes longer."""
DRAINING = 20.0
"""Seconds after which what has not been consumed counts as lost."""
KEYS = 6


class HandlerFailed(Exception):
    """What handlers raise now and then."""


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


def make_consumers(cluster: Cluster, ledger: Ledger, chance: random.Random) -> list[Consumer]:
    """Return consumers of every kind, with a handler that is slow and fails now and then."""
    options = ConsumerOptions(
        failure=FailureOptions(requeue_delay=0.02),
        backoff=BackoffOptions(mode="off"),
        close_timeout=2.0,
        max_reconnect_wait=0.5,
    )

    def consumer(topic: str, **settings: Any) -> Consumer:
        made = Consumer(topic, CHANNEL, lookupd=cluster.lookupd, options=options, **settings)

        @made.handler
        async def handle(message: Message) -> None:
            if chance.random() < 0.3:
                await anyio.sleep(chance.uniform(0.0, 0.004))
            if chance.random() < 0.01:
                raise HandlerFailed
            ledger.consumed(message)

        return made

    return [
        consumer("plain", concurrency=8),
        consumer("keyed", concurrency=4, dispatch="key_failover"),
        consumer("keyed", concurrency=4, dispatch="key_failover"),
        consumer("ordered", concurrency=2),
        consumer("tagged", concurrency=4, tag="blue"),
        consumer("tagged", concurrency=4),
    ]


async def publish(producer: Producer, ledger: Ledger, topic: str, name: str, chance: random.Random) -> None:
    """Publish to a topic for a while, one after the other; keyed where order means something."""
    keyed = topic in ("keyed", "ordered")
    numbers: dict[str, int] = {}
    until = time.monotonic() + PUBLISHING
    while time.monotonic() < until or sum(numbers.values()) < LEAST:
        # a key belongs to one publisher, so that the order of its publishes is known
        key = f"{name}-{chance.randrange(KEYS)}" if keyed else name
        numbers[key] = numbers.get(key, 0) + 1
        tag = chance.choice((None, "blue")) if topic == "tagged" else None
        body, entry = ledger.begin(topic, key, numbers[key], tag)
        try:
            entry.receipt = await producer.publish(topic, body, key=key if keyed else None, tag=tag)
        except NsqError as error:
            entry.error = error
        entry.ended = time.monotonic()
        await anyio.sleep(chance.uniform(0.0, 0.01))


async def take_step(step: Step, world: World) -> None:
    """Do a step when its time has come; the cluster's calls block, so they run in a thread."""
    await anyio.sleep(step.at)
    await to_thread.run_sync(step.act, world)


async def drain(ledger: Ledger) -> None:
    """Wait until everything that was stored is consumed, and a moment more for what comes twice."""
    with anyio.move_on_after(DRAINING):
        while ledger.missing:  # noqa: ASYNC110 - the ledger is written by many handlers
            await anyio.sleep(0.01)
        await anyio.sleep(0.05)


@asynccontextmanager
async def consuming(consumers: list[Consumer]) -> AsyncIterator[None]:
    """Run consumers; stopping them at the end has to drain them."""
    async with anyio.create_task_group() as tasks:
        for consumer in consumers:
            tasks.start_soon(consumer.run)
        with anyio.fail_after(10):
            while not all(len(consumer.connections) == PARTITIONS for consumer in consumers):  # noqa: ASYNC110
                await anyio.sleep(0.01)
        yield
        with anyio.fail_after(10):
            for consumer in consumers:
                consumer.stop()
            while any(consumer.connections for consumer in consumers):  # noqa: ASYNC110 - runs end without an event
                await anyio.sleep(0.01)


async def traffic(plan: Plan, world: World, ledger: Ledger) -> None:
    """Let everything run while the plan's steps are taken; then end the faults and drain."""
    chance = random.Random(plan.seed)
    options = ProducerOptions(on_unknown=plan.on_unknown)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(consuming(make_consumers(world.cluster, ledger, chance)))
        producer = await stack.enter_async_context(Producer(world.cluster.lookupd, options=options))
        async with anyio.create_task_group() as tasks:
            for topic in TOPICS:
                for name in ("a", "b"):
                    tasks.start_soon(publish, producer, ledger, topic, name, chance)
            async with anyio.create_task_group() as steps:
                for step in plan.steps:
                    steps.start_soon(take_step, step, world)
            await to_thread.run_sync(world.mend)
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
def watching(outcome: list[str]) -> Iterator[None]:
    """Note what is left over: sockets, unclosed streams, exceptions that were not retrieved."""
    before = open_files()
    hook, unraisable = sys.unraisablehook, outcome

    def note(found: sys.UnraisableHookArgs) -> None:
        unraisable.append(f"{found.exc_value!r} in {found.object!r}")

    sys.unraisablehook = note
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
            gc.collect()
    finally:
        sys.unraisablehook = hook
    outcome += [str(warning.message) for warning in caught]
    outcome += [f"open {target}" for name, target in open_files().items() if before.get(name) != target]


async def leftover_tasks(before: set[int], outcome: list[str]) -> None:
    """Note the tasks that still run after everything was closed."""
    with anyio.move_on_after(1):
        while any(task.id not in before for task in anyio.get_running_tasks()):  # noqa: ASYNC110 - tasks end silently
            await anyio.sleep(0.01)
    outcome += [f"task {task.name}" for task in anyio.get_running_tasks() if task.id not in before]


async def run_schedule(plan: Plan, limit: float = 60.0) -> tuple[Outcome, list[Entry]]:
    """Run a schedule on a cluster of its own; returns what came of it.

    Raises:
        TimeoutError: something hangs.
    """
    ledger, leaks = Ledger(plan.on_unknown), list[str]()
    with watching(leaks):
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
    outcome = ledger.judge()
    outcome.leaks += leaks
    return outcome, list(ledger.entries.values())
