"""Run many schedules and print a table: ``python -m tests.campaigns.chaos --schedules 200``."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter

import anyio

from tests.campaigns.chaos.ledger import Outcome
from tests.campaigns.chaos.plan import make_plan
from tests.campaigns.chaos.schedule import run_schedule

BACKENDS = ("asyncio", "asyncio+uvloop", "trio")


def print_line(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run_one(seed: int, backend: str) -> tuple[Outcome, int]:
    """Run the schedule of a seed; return its outcome and its number of faults."""
    plan = make_plan(seed)
    options = {} if backend == "trio" else {"use_uvloop": backend.endswith("uvloop")}
    try:
        outcome, _ = anyio.run(run_schedule, plan, backend=backend.partition("+")[0], backend_options=options)
    except TimeoutError as error:
        outcome = Outcome(leaks=[f"hangs: {error!r}"])
    return outcome, plan.faults


def print_table(outcomes: dict[int, tuple[Outcome, int]], seconds: float) -> None:
    """Print the totals of all schedules."""
    results = [outcome for outcome, _ in outcomes.values()]
    total: Counter[str] = Counter()
    for outcome in results:
        for name in ("published", "unknown", "failed", "twice_stored", "redelivered"):
            total[name] += getattr(outcome, name)
        for name in ("lost", "reordered", "unexplained", "stored_after_failure", "leaks"):
            total[name] += len(getattr(outcome, name))
    rows = {
        "schedules": len(results),
        "faults": sum(faults for _, faults in outcomes.values()),
        "messages published": total["published"],
        "publishes with unknown outcome": total["unknown"],
        "failed publishes": total["failed"],
        "lost": total["lost"],
        "reordered": total["reordered"],
        "duplicates: stored twice": total["twice_stored"],
        "duplicates: redelivered": total["redelivered"],
        "duplicates: unexplained": total["unexplained"],
        "failed, but consumed": total["stored_after_failure"],
        "leaks and hangs": total["leaks"],
        "longest publish, s": round(max(outcome.publish_stall for outcome in results), 2),
        "longest time to consumption, s": round(max(outcome.consume_stall for outcome in results), 2),
        "seconds": round(seconds),
    }
    for name, value in rows.items():
        print_line(f"{name:32} {value:>10}")


def main() -> int:
    """Run the schedules selected by the command line; return 1 if any violates a guarantee."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.chaos", description=__doc__)
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument("--backend", choices=BACKENDS, help="default: each in turn")
    parser.add_argument("--verbose", action="store_true", help="show the faults of each schedule")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    outcomes: dict[int, tuple[Outcome, int]] = {}
    started = time.monotonic()
    for seed in range(arguments.first, arguments.first + arguments.schedules):
        backend = arguments.backend or BACKENDS[seed % len(BACKENDS)]
        if arguments.verbose:
            for step in make_plan(seed).steps:
                print_line(f"  {step.at:.2f} s  {step.name}")
        outcomes[seed] = run_one(seed, backend)
        outcome = outcomes[seed][0]
        if arguments.verbose or outcome.violations:
            print_line(
                f"seed {seed} on {backend}: published {outcome.published}, {outcome.violations or 'no violations'}"
            )
    print_table(outcomes, time.monotonic() - started)
    return any(outcome.violations for outcome, _ in outcomes.values())


if __name__ == "__main__":
    sys.exit(main())
