"""Runs many schedules and prints a table: ``python -m tests.chaos --schedules 200``."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter

import anyio

from tests.chaos.ledger import Outcome
from tests.chaos.plan import make_plan
from tests.chaos.schedule import run_schedule

BACKENDS = ("asyncio", "asyncio+uvloop", "trio")


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run_one(seed: int, backend: str) -> tuple[Outcome, int]:
    """Run the schedule of a seed; returns what came of it, and how many faults it has."""
    plan = make_plan(seed)
    options = {} if backend == "trio" else {"use_uvloop": backend.endswith("uvloop")}
    try:
        outcome, _ = anyio.run(run_schedule, plan, backend=backend.partition("+")[0], backend_options=options)
    except TimeoutError as error:
        outcome = Outcome(leaks=[f"hangs: {error!r}"])
    return outcome, plan.faults


def print_table(outcomes: dict[int, tuple[Outcome, int]], seconds: float) -> None:
    """Print what came of all schedules."""
    results = [outcome for outcome, _ in outcomes.values()]
    total: Counter[str] = Counter()
    for outcome in results:
        for name in ("published", "unknown", "failed", "twice_stored", "redelivered"):
            total[name] += getattr(outcome, name)
        for name in ("lost", "reordered", "unexplained", "phantoms", "leaks"):
            total[name] += len(getattr(outcome, name))
    rows = {
        "schedules": len(results),
        "faults": sum(faults for _, faults in outcomes.values()),
        "messages published": total["published"],
        "publishes of unknown fate": total["unknown"],
        "publishes that failed": total["failed"],
        "lost": total["lost"],
        "reordered": total["reordered"],
        "duplicates: stored twice": total["twice_stored"],
        "duplicates: redelivered": total["redelivered"],
        "duplicates: unexplained": total["unexplained"],
        "failed, yet consumed": total["phantoms"],
        "leaks and hangs": total["leaks"],
        "longest publish, s": round(max(outcome.publish_stall for outcome in results), 2),
        "longest wait of a consumer, s": round(max(outcome.consume_stall for outcome in results), 2),
        "seconds": round(seconds),
    }
    for name, value in rows.items():
        say(f"{name:32} {value:>10}")


def main() -> int:
    """Run the schedules that the command line asks for; 1 when anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument("--backend", choices=BACKENDS, help="all in turns without it")
    parser.add_argument("--verbose", action="store_true", help="show the faults of each schedule")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    outcomes: dict[int, tuple[Outcome, int]] = {}
    began = time.monotonic()
    for seed in range(given.first, given.first + given.schedules):
        backend = given.backend or BACKENDS[seed % len(BACKENDS)]
        if given.verbose:
            for step in make_plan(seed).steps:
                say(f"  {step.at:.2f} s  {step.name}")
        outcomes[seed] = run_one(seed, backend)
        outcome = outcomes[seed][0]
        if given.verbose or outcome.faults_found:
            say(f"seed {seed} on {backend}: published {outcome.published}, {outcome.faults_found or 'all is well'}")
    print_table(outcomes, time.monotonic() - began)
    return any(outcome.faults_found for outcome, _ in outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
