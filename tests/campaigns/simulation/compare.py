"""Compare simulated schedules with those of tests/campaigns/chaos: ``python -m tests.campaigns.simulation.compare``.

Both have the same topics and partitions, consumers and publishers of the same kinds, the average number of faults of
tests/campaigns/chaos, and about as many publishes and deliveries. Printed are the CPU time of schedules, the time of
simulated schedules by layer, and the user time of a publish or delivery without simulation and faults.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from types import FrameType

import anyio
from attrs import evolve, frozen

from nsqext import Consumer, Message, Producer
from nsqext.broker import Cluster
from nsqext.testing.simulation import FaultOptions
from nsqext.testing.simulation.faults import KINDS, draw_faults
from tests.campaigns.chaos import schedule as chaos
from tests.campaigns.chaos.plan import PARTITIONS, TOPICS, make_plan
from tests.campaigns.simulation.__main__ import prepare, run_plan, say, text_of
from tests.campaigns.simulation.plan import DISK_FAULTS, LOOKUPDS, NODES, Plan, draw_plan
from tests.campaigns.simulation.workload import histories

_SAMPLE = 0.001
"""CPU seconds between two samples of the stack."""
_MOST = 40
"""Simulated schedules without a collection of garbage, as in a process of ``make simulate``."""


@frozen
class Size:
    """How much both publish.

    Attributes:
        name: what the tables call it.
        publishing: seconds for which publishers of tests/campaigns/chaos run at least.
        least: publishes of each of them at least.
        seconds: virtual seconds for which simulated publishers run.
        pause: longest pause between two of their publishes.
    """

    name: str
    publishing: float
    least: int
    seconds: float
    pause: float


SIZES = (Size("few", 0.0, 5, 1.6, 0.45), Size("as make chaos", 1.5, 12, 1.2, 0.003))


@frozen
class Cost:
    """What schedules cost on average.

    Attributes:
        cpu: CPU seconds of a schedule.
        operations: publishes and deliveries of a schedule.
    """

    cpu: float
    operations: float


def like_chaos(seed: int, size: Size, faults: int) -> Plan:
    """Return a simulated schedule with the topics, clients and number of faults of tests/campaigns/chaos."""
    kinds = [kind for kind in KINDS if kind not in {"upgrade", "recreate", *DISK_FAULTS}]
    options = FaultOptions(kinds=kinds, count=(faults, faults), duration=1.0, seconds=(0.05, 0.9))
    return evolve(
        draw_plan(seed, "short", (), ()),
        topics=TOPICS,
        single=TOPICS,
        batches=TOPICS,
        batch=1,
        producers=1,
        seconds=size.seconds,
        rest=1.0,
        pause=size.pause,
        partitions=PARTITIONS,
        replicas=Random(f"replicas {seed}").choice((2, 3)),
        guests=False,
        doomed=False,
        faults=tuple(draw_faults(seed, options, NODES, LOOKUPDS)),
        latency=0.0015,
        disk=None,
        habits=(),
        come_and_go=False,
    )


def run_chaos(schedules: int, size: Size) -> Cost:
    """Run schedules of tests/campaigns/chaos on asyncio.

    Raises:
        AssertionError: a schedule violates a guarantee.
    """
    chaos.PUBLISHING, chaos.LEAST = size.publishing, size.least
    operations = 0
    began = time.process_time()
    for seed in range(1, schedules + 1):
        outcome, entries = anyio.run(chaos.run_schedule, make_plan(seed))
        if outcome.violations:
            raise AssertionError(f"chaos, seed {seed}: {outcome.violations}")
        operations += len(entries) + sum(len(entry.seen) for entry in entries)
    return Cost((time.process_time() - began) / schedules, operations / schedules)


def run_simulated(schedules: int, size: Size, faults: int) -> Cost:
    """Run simulated schedules.

    Raises:
        AssertionError: a schedule violates a guarantee.
    """
    operations, cpu = 0, 0.0
    for seed in range(1, schedules + 1):
        if seed % _MOST == 0:
            gc.collect()
        began = time.process_time()
        run = run_plan(like_chaos(seed, size, faults))
        cpu += time.process_time() - began
        if run.error is not None:
            raise AssertionError(f"simulation, seed {seed}: {text_of(run.error)}")
        operations += len(histories[-1].publishes) + len(histories[-1].deliveries)
    return Cost(cpu / schedules, operations / schedules)


def run_without_faults(publishes: int) -> Cost:
    """Publish with receipts to a topic of two replicas and consume it, over sockets, in this process.

    The cost is user time, without the kernel's, and without the start and end of the cluster and the clients.
    """

    async def main(cluster: Cluster) -> Cost:
        received = anyio.Event()
        missing = publishes
        consumer = Consumer("plain", "a", lookupd=cluster.lookupd)

        @consumer.handler
        async def handle(message: Message) -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                received.set()

        async with consumer, Producer(cluster.lookupd) as producer:
            missing += 1
            await producer.publish("plain", b"first")  # connects
            began = os.times().user
            async with anyio.create_task_group() as tasks:
                for _ in range(8):
                    tasks.start_soon(publish, producer, publishes // 8)
            await received.wait()
            return Cost(os.times().user - began, 2 * publishes)

    async def publish(producer: Producer, count: int) -> None:
        for _ in range(count):
            await producer.publish("plain", b"message")

    with Cluster(nodes=3, lookupds=2) as cluster:
        cluster.create_topic("plain", partitions=PARTITIONS, replicas=2, channels=["a"])
        return anyio.run(main, cluster)


def layer_of(frame: FrameType | None) -> str:
    """Return the layer that a stack belongs to: that of the innermost frame of this project."""
    while frame is not None:
        path = frame.f_code.co_filename
        if "/tests/campaigns/simulation/" in path:
            return "publishers, handlers, history, checkers"
        if "/nsqext/testing/simulation/" in path:
            return f"simulated {path.rpartition('/')[2].removesuffix('.py')}"
        if "/nsqext/" in path:
            room, *rest = path.rpartition("/nsqext/")[2].split("/")
            return f"nsqext.{room}.{rest[0]}" if room == "broker" and len(rest) > 1 else f"nsqext.{room}"
        frame = frame.f_back
    return "other"


def sampled(work: Callable[[], Cost]) -> tuple[Cost, Counter[str]]:
    """Run something and count samples of its stack by layer."""
    found: Counter[str] = Counter()
    before = signal.signal(signal.SIGPROF, lambda _, frame: found.update([layer_of(frame)]))
    signal.setitimer(signal.ITIMER_PROF, _SAMPLE, _SAMPLE)
    try:
        return work(), found
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.simulation.compare", description=__doc__)
    parser.add_argument("--schedules", type=int, default=20, help="of each kind and size")
    schedules = parser.parse_args().schedules
    logging.disable(logging.CRITICAL)
    faults = round(sum(make_plan(seed).faults for seed in range(1, 201)) / 200)
    say(f"{schedules} schedules with {faults} faults each, CPU milliseconds:")
    real = [run_chaos(schedules, size) for size in SIZES]
    floor = run_without_faults(4000)
    logging.disable(logging.NOTSET)
    prepare()
    for size, cost in zip(SIZES, real, strict=True):
        found = run_simulated(schedules, size, faults)
        for name, one in (("chaos", cost), ("simulation", found)):
            each = one.cpu / one.operations
            say(
                f"{size.name:14} {name:11} {1e3 * one.cpu:7.1f} {one.operations:7.0f} operations {1e3 * each:7.3f} each"
            )
        per_operation = cost.cpu / cost.operations * found.operations / found.cpu
        say(f"{size.name:14} ratio: {cost.cpu / found.cpu:.1f} per schedule, {per_operation:.1f} per operation")
    for size in SIZES:
        cost, layers = sampled(lambda size=size: run_simulated(schedules, size, faults))  # type: ignore[misc]
        say(f"{size.name}, {1e3 * cost.cpu:.1f} ms for {cost.operations:.0f} operations, by layer:")
        for layer, samples in layers.most_common():
            share = samples / layers.total()
            say(f"  {layer:40} {100 * share:5.1f} % {1e6 * share * cost.cpu / cost.operations:7.0f} µs each")
    say(f"without simulation and faults: {1e6 * floor.cpu / floor.operations:.0f} µs each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
