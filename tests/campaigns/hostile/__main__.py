"""Runs hostile servers and clients against this package and prints a table: ``python -m tests.campaigns.hostile``.

Ends with status 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import logging
import sys

from tests.campaigns.hostile.attacks import ATTACKS, Attack, Result, honest_cluster, run

_HEAD = ("attack", "tried", "bound", "seen")


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _bound(attack: Attack) -> str:
    bounds = attack.bounds
    return f"{bounds.rss:.0f} MiB, turn {bounds.block:g} s, wait {bounds.wait:g} s"


def _seen(result: Result) -> str:
    usage, broken = result.usage, result.broken()
    text = (
        f"{usage.rss:.0f} MiB, turn {usage.block:.2f} s, wait {usage.wait:.2f} s, {usage.log_lines} log lines,"
        f" {usage.descriptors} descriptors, {usage.served} served"
    )
    return f"{text}; BROKEN: {'; '.join(broken)}" if broken else text


def _row(result: Result) -> tuple[str, str, str, str]:
    attack = result.attack
    tried = f"{attack.tried}: {result.connections} connections, {result.sent / 1e6:.0f} MB in {result.seconds:g} s"
    return attack.name, tried, _bound(attack), _seen(result)


def main() -> int:
    """Run the attacks that the command line asks for; 1 if a bound is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.hostile", description=__doc__)
    parser.add_argument("attack", nargs="*", help="all without one")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each attack")
    given = parser.parse_args()
    unknown = set(given.attack) - {attack.name for attack in ATTACKS}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(attack.name for attack in ATTACKS)}")
    logging.disable(logging.CRITICAL)
    broken = 0
    say(f"| {' | '.join(_HEAD)} |\n|{'---|' * len(_HEAD)}")
    with honest_cluster() as cluster:
        for attack in ATTACKS:
            if given.attack and attack.name not in given.attack:
                continue
            result = run(attack, cluster, given.seconds)
            broken += bool(result.broken())
            say(f"| {' | '.join(_row(result))} |")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
