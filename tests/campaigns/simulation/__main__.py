"""Run many seeds on all cores and print a table: ``python -m tests.campaigns.simulation --seeds 500``."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from multiprocessing.pool import Pool
from random import SystemRandom

from attrs import frozen

from nsqext.testing.simulation import Fault, Run, run_seed
from nsqext.testing.simulation.runner import shrink
from tests.campaigns.simulation.bank import run_bank
from tests.campaigns.simulation.flow import run_flow
from tests.campaigns.simulation.mutations import MUTATIONS
from tests.campaigns.simulation.plan import (
    BANK,
    FEATURES,
    FLOW,
    JOINS,
    KEY_TAGS,
    LATE,
    SHARES,
    TRIPLE,
    Plan,
    Size,
    draw_plan,
)
from tests.campaigns.simulation.workload import histories, run_schedule

MOST_TURNS, LATE_TURNS = 200_000, 2_000_000
"""A long schedule takes 10,000 to 20,000, one in which messages wait for long delays ten times as many."""
LIMIT, LATE_LIMIT = 600.0, 5000.0
"""Virtual seconds of a schedule; the second, if messages wait for long delays."""
CHUNK = 8
"""Schedules that a process takes at a time."""
CHUNKS = 5
"""Chunks of a process, which then ends: this costs less than to collect its garbage, 0.6 MB for each schedule."""


@frozen
class Figures:
    """What one seed gave.

    Attributes:
        seed: the seed.
        trace: digest of its events.
        error: what was found; empty if nothing.
        faults: number of faults.
        operations: publishes and deliveries.
        cpu: seconds of processor time.
        virtual: virtual seconds.
        unknown: publishes with unknown outcome.
        failed: publishes that failed.
        again: deliveries of a message beyond the first on its channel.
    """

    seed: int
    trace: str
    error: str
    faults: int
    operations: int
    cpu: float
    virtual: float
    unknown: int
    failed: int
    again: int


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def quiet() -> None:
    """Show no log: clients report each injected fault. Schedules read the warnings of consumers."""
    for name in ("nsqext", "asyncio", "uvicorn", "httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    consumers = logging.getLogger("nsqext.consumer")
    consumers.setLevel(logging.WARNING)
    consumers.propagate = False
    consumers.addHandler(logging.NullHandler())  # without one, logging prints to standard error
    warnings.simplefilter("ignore")  # tasks of killed servers that never started


def prepare() -> None:
    """Load what schedules need, for processes that collect no garbage and end soon."""
    quiet()
    run_one(0)
    gc.collect()
    gc.freeze()
    gc.disable()


def new_pool(processes: int, tasks: int) -> Pool:
    """Return processes that are forked from this one, each for a number of tasks."""
    prepare()
    return get_context("fork").Pool(processes, maxtasksperchild=tasks)


def run_one(
    seed: int,
    faults: Sequence[Fault] | None = None,
    *,
    size: Size | None = None,
    features: Sequence[str] | None = None,
    keep_trace: bool = False,
) -> Run:
    """Run the schedule of a seed."""
    return run_plan(draw_plan(seed, size, faults, features), keep_trace=keep_trace)


def run_plan(plan: Plan, *, keep_trace: bool = False) -> Run:
    """Run a schedule."""
    histories.clear()
    scenario = run_bank if BANK in plan.features else run_flow if FLOW in plan.features else run_schedule
    return run_seed(
        *(partial(scenario, plan=plan), plan.seed, plan.faults),
        network=plan.network,
        keep_trace=keep_trace,
        most_turns=LATE_TURNS if LATE in plan.features else MOST_TURNS,
        time_limit=LATE_LIMIT if LATE in plan.features else LIMIT,
        disk=plan.disk or False,
    )


def text_of(error: BaseException | None) -> str:
    """Return what a run found."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return "" if error is None else f"{type(error).__name__}: {error}"


def measure(seed: int, mutation: str = "", size: Size | None = None, features: Sequence[str] | None = None) -> Figures:
    """Run the schedule of a seed, with a bug put in if one is named."""
    began = time.process_time()
    with MUTATIONS[mutation].applied() if mutation else nullcontext():
        run = run_one(seed, size=size, features=features)
    cpu = time.process_time() - began
    publishes = histories[-1].publishes if histories else []
    deliveries = histories[-1].deliveries if histories else []
    outcomes = [publish.outcome for publish in publishes]
    first = {(found.topic, found.channel, found.partition, found.message_id) for found in deliveries}
    return Figures(
        seed,
        run.trace,
        text_of(run.error),
        len(run.faults),
        len(publishes) + len(deliveries),
        cpu,
        run.seconds,
        outcomes.count("unknown"),
        outcomes.count("failed"),
        len(deliveries) - len(first),
    )


def print_table(found: list[Figures], seconds: float, cpu: float) -> None:
    """Print what all seeds gave; ``cpu`` includes the start and end of processes."""
    rows = {
        "schedules": len(found),
        "operations": sum(one.operations for one in found),
        "faults": sum(one.faults for one in found),
        "publishes of unknown outcome": sum(one.unknown for one in found),
        "publishes that failed": sum(one.failed for one in found),
        "redeliveries": sum(one.again for one in found),
        "schedules that failed": sum(bool(one.error) for one in found),
        "virtual seconds": round(sum(one.virtual for one in found)),
        "seconds": round(seconds),
        "CPU seconds": round(cpu),
        "schedules per CPU second": round(len(found) / max(cpu, 1e-9), 2),
        "operations per CPU second": round(sum(one.operations for one in found) / max(cpu, 1e-9)),
    }
    for name, value in rows.items():
        say(f"{name:32} {value:>12}")


def explain(seed: int, size: Size | None, features: Sequence[str] | None) -> None:
    """Run one seed and print its faults, its last events and what was found, with as few faults as fail."""
    run = run_one(seed, size=size, features=features, keep_trace=True)
    say(f"seed {seed}: trace {run.trace}, {run.seconds:.3f} virtual s")
    if run.error is not None:
        run = shrink(run, lambda faults: run_one(seed, faults, size=size, features=features, keep_trace=True))
        for line in run.lines[-40:]:
            say(f"  {line}")
    for fault in run.faults:
        say(f"  {fault}")
    say(text_of(run.error) or "nothing was found")


def main() -> int:
    """Run the seeds that the command line asks for; 1 when anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument("--fresh", action="store_true", help="begin at a random seed, which is printed")
    parser.add_argument("--seed", type=int, help="run one seed, and show its faults and events")
    parser.add_argument("--size", choices=("short", "long"), help="only schedules of this size")
    parser.add_argument(
        "--features",
        nargs="*",
        choices=(*FEATURES, TRIPLE, KEY_TAGS, JOINS, *SHARES, BANK, FLOW),
        help="what all clients use, instead of a few by seed",
    )
    parser.add_argument("--seconds", type=float, default=0.0, help="start no more seeds after this time")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    option = f" --size {given.size}" if given.size else ""
    if given.features is not None:
        option += " ".join((" --features", *given.features))
    if given.seed is not None:
        quiet()
        explain(given.seed, given.size, given.features)
        return 0
    if given.fresh:
        given.first = SystemRandom().randrange(10**6, 10**9)
        say(f"first seed: {given.first}")
    found: list[Figures] = []
    began = last = time.monotonic()
    seeds = range(given.first, given.first + given.seeds)
    with new_pool(given.processes, CHUNKS) as pool:
        for figures in pool.imap(partial(measure, size=given.size, features=given.features), seeds, CHUNK):
            found.append(figures)
            if figures.error:
                say(f"seed {figures.seed}: {figures.error}")
                say(f"  repeat it with: python -m tests.campaigns.simulation --seed {figures.seed}{option}")
            if time.monotonic() - last > 10:
                last = time.monotonic()
                say(f"{len(found)} of {given.seeds} seeds, {sum(bool(one.error) for one in found)} failed")
            if given.seconds and time.monotonic() - began > given.seconds:
                break
    pool.join()
    print_table(found, time.monotonic() - began, sum(os.times()[:4]))
    return any(one.error for one in found)


if __name__ == "__main__":
    sys.exit(main())
