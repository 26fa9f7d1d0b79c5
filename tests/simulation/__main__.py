"""Run many seeds on all cores and print a table: ``python -m tests.simulation --seeds 500``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from random import Random, SystemRandom

from attrs import frozen

from nsqext.testing.simulation import Fault, FaultOptions, NetworkOptions, Run, run_seed
from nsqext.testing.simulation.faults import draw_faults
from nsqext.testing.simulation.runner import shrink
from tests.simulation.mutations import MUTATIONS
from tests.simulation.workload import histories, run_schedule

NODES = ("n1", "n2", "n3")
LOOKUPDS = ("l1", "l2")
MOST_TURNS = 200_000
"""A schedule takes 10,000 to 20,000."""
DISK = 0.4
"""Share of the schedules in which nodes store messages on a disk."""
REAL_HTTP = 0.03
"""Share of the schedules in which HTTP runs in httpx and uvicorn, which costs twice the time."""
OPTIONS = FaultOptions(count=(0, 12), seconds=(0.05, 6.0))


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
    warnings.simplefilter("ignore")  # tasks of killed servers that never started


def run_one(seed: int, faults: Sequence[Fault] | None = None, *, keep_trace: bool = False) -> Run:
    """Run the schedule of a seed."""
    histories.clear()
    chosen = draw_faults(seed, OPTIONS, NODES, LOOKUPDS) if faults is None else faults
    slowest = Random(f"latency {seed}").choice((0.0015, 0.0015, 0.02, 0.1))
    network = NetworkOptions(latency=(0.00005, slowest))
    settings = Random(f"settings {seed}")
    disk, real_http = settings.random() < DISK, settings.random() < REAL_HTTP
    return run_seed(
        *(run_schedule, seed, chosen),
        network=network,
        keep_trace=keep_trace,
        most_turns=MOST_TURNS,
        disk=disk,
        real_http=real_http,
    )


def text_of(error: BaseException | None) -> str:
    """Return what a run found."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return "" if error is None else f"{type(error).__name__}: {error}"


def measure(seed: int, mutation: str = "") -> Figures:
    """Run the schedule of a seed, with a bug put in if one is named."""
    began = time.process_time()
    if mutation:
        with MUTATIONS[mutation].applied():
            run = run_one(seed)
    else:
        run = run_one(seed)
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


def print_table(found: list[Figures], seconds: float) -> None:
    """Print what all seeds gave."""
    cpu = sum(one.cpu for one in found)
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


def explain(seed: int) -> None:
    """Run one seed and print its faults, its last events and what was found, with as few faults as fail."""
    run = run_one(seed, keep_trace=True)
    say(f"seed {seed}: trace {run.trace}, {run.seconds:.3f} virtual s")
    if run.error is not None:
        run = shrink(run, lambda faults: run_one(seed, faults, keep_trace=True))
        for line in run.lines[-40:]:
            say(f"  {line}")
    for fault in run.faults:
        say(f"  {fault}")
    say(text_of(run.error) or "nothing was found")


def main() -> int:
    """Run the seeds that the command line asks for; 1 when anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument("--fresh", action="store_true", help="begin at a random seed, which is printed")
    parser.add_argument("--seed", type=int, help="run one seed, and show its faults and events")
    parser.add_argument("--seconds", type=float, default=0.0, help="start no more seeds after this time")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    quiet()
    if given.seed is not None:
        explain(given.seed)
        return 0
    if given.fresh:
        given.first = SystemRandom().randrange(10**6, 10**9)
        say(f"first seed: {given.first}")
    found: list[Figures] = []
    began = last = time.monotonic()
    with ProcessPoolExecutor(given.processes, initializer=quiet) as pool:
        waiting = {pool.submit(measure, seed) for seed in range(given.first, given.first + given.seeds)}
        for done in as_completed(waiting):
            if done.cancelled():
                continue
            figures = done.result()
            found.append(figures)
            if figures.error:
                say(f"seed {figures.seed}: {figures.error}")
                say(f"  repeat it with: python -m tests.simulation --seed {figures.seed}")
            if time.monotonic() - last > 10:
                last = time.monotonic()
                say(f"{len(found)} of {given.seeds} seeds, {sum(bool(one.error) for one in found)} failed")
            if given.seconds and time.monotonic() - began > given.seconds:
                for one in waiting:
                    one.cancel()
    print_table(found, time.monotonic() - began)
    return any(one.error for one in found)


if __name__ == "__main__":
    sys.exit(main())
