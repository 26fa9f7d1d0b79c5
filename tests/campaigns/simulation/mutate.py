"""Measure how many seeds each mutation takes: ``python -m tests.campaigns.simulation.mutate``."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from functools import partial
from typing import TYPE_CHECKING

from attrs import frozen

from tests.campaigns.simulation.__main__ import measure, new_pool, say
from tests.campaigns.simulation.mutations import MUTATIONS

if TYPE_CHECKING:
    from tests.campaigns.simulation.plan import Size


@frozen
class Search:
    """Search for a mutation.

    Attributes:
        name: of the mutation.
        seeds: seeds until one failed; 0 if none of them did.
        cpu: seconds of processor time.
        how: what was found.
    """

    name: str
    seeds: int
    cpu: float
    how: str


GARBAGE = 50
"""Schedules between two collections of garbage, which is 0.6 MB for each of them."""


def find(name: str, most: int, size: Size | None) -> Search:
    """Run seeds with a mutation until one fails."""
    cpu = 0.0
    for seed in range(1, most + 1):
        found = measure(seed, name, size, MUTATIONS[name].features)
        cpu += found.cpu
        if seed % GARBAGE == 0:
            gc.collect()
        if found.error:
            return Search(name, seed, cpu, found.error.partition("\n")[0])
    return Search(name, 0, cpu, f"not found in {most} seeds")


def main() -> int:
    """Run the mutations and print a table; 1 when one of them is not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.simulation.mutate", description=__doc__)
    parser.add_argument("--most", type=int, default=1000, help="seeds for each mutation")
    parser.add_argument("--size", choices=("short", "long"), help="only schedules of this size")
    parser.add_argument("names", nargs="*", help="mutations; all by default")
    given = parser.parse_args()
    searches: list[Search] = []
    say(f"{'':64} {'seeds':>5} {'CPU s':>7}")
    with new_pool(os.cpu_count() or 1, 1) as pool:
        for search in pool.imap(partial(find, most=given.most, size=given.size), given.names or list(MUTATIONS)):
            searches.append(search)
            say(f"{search.name:64} {search.seeds or '-':>5} {search.cpu:7.1f}  {search.how[:110]}")
    missed = sum(not search.seeds for search in searches)
    say(f"{len(searches) - missed} of {len(searches)} found, {sum(search.cpu for search in searches):.0f} CPU s")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
