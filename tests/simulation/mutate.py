"""Measure how many seeds each mutation takes: ``python -m tests.simulation.mutate``."""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.__main__ import measure, quiet, say
from tests.simulation.mutations import MUTATIONS


def find(name: str, most: int) -> tuple[int, str]:
    """Return the number of seeds until a mutation is found, and what found it; 0 if none of them did."""
    for seed in range(1, most + 1):
        found = measure(seed, name)
        if found.error:
            return seed, found.error.partition("\n")[0]
    return 0, f"not found in {most} seeds"


def main() -> int:
    """Run the mutations and print a table; 1 when one of them is not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutate", description=__doc__)
    parser.add_argument("--most", type=int, default=100, help="seeds for each mutation")
    parser.add_argument("names", nargs="*", help="mutations; all by default")
    given = parser.parse_args()
    names = given.names or list(MUTATIONS)
    missed = 0
    with ProcessPoolExecutor(os.cpu_count() or 1, initializer=quiet) as pool:
        for name, (seeds, how) in zip(names, pool.map(find, names, [given.most] * len(names)), strict=True):
            missed += not seeds
            say(f"{name:56} {seeds or '-':>4}  {how[:110]}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
