"""Compare this version with the committed baseline: ``python -m benchmarks.bench_check``, or ``make bench-check``.

CPU of different machines cannot be compared, so the baseline contains ratios of one run: the cost of each path to that
of a raw blocking socket (publishes with keys and headers: to plain ones; start: to the import of libraries). The
command fails if a ratio is more than its tolerance above the baseline; ``--update`` writes the baseline again.
``--page`` also measures the other clients, and never fails; NSQEXT_BENCH_NSQD may name another nsqd.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from benchmarks.paths import CPU, OTHERS, ROWS, Costs, probes
from benchmarks.report import table, write_section
from benchmarks.servers import program_given

BASELINE = Path(__file__).with_name("baseline.json")
TOLERANCE = {
    "client": 1.35,
    "size": 1.5,
    "large": 2.0,
    "tls": 1.5,
    "telemetry": 1.5,
    "processes": 1.5,
    "blocking": 1.5,
    "variant": 1.15,
    "key": 1.5,
    "partitions": 1.5,
    "idle": 3.0,
    "start": 1.25,
    "stop": 3.0,
}
"""Largest accepted factors above the baseline, by the noise of repeated runs on two shared cores."""
ROUNDS = 5


def measure(rounds: int, scale: float, others: tuple[str, ...], program: str | None) -> Costs:
    """Return the medians of all costs; rows and clients take turns in each round."""
    found: dict[tuple[str, str], list[float]] = {}
    with probes(others, scale, program) as functions:
        for _ in range(rounds):
            for function in functions:
                for key, cost in function().items():
                    found.setdefault(key, []).append(cost)
    return {key: median(costs) for key, costs in found.items()}


def ratios(costs: Costs) -> dict[str, float]:
    """Return the cost of each row as a multiple of its reference."""
    return {name: costs[name, "nsqext"] / costs[row.reference or (name, "raw")] for name, row in ROWS.items()}


def compared(found: Mapping[str, float], baseline: Mapping[str, float]) -> tuple[str, list[str]]:
    """Return a table of ratios beside the baseline, and the rows that are slower than it allows."""
    lines, slower = [], []
    for name, ratio in found.items():
        before, limit = baseline[name], baseline[name] * TOLERANCE[ROWS[name].group]
        if ratio > limit:
            slower.append(name)
        reference = (ROWS[name].reference or ("", "raw socket"))[0] or "raw socket"
        shown = (f"{before:.2f}", f"{ratio:.2f}", f"{limit:.2f}", "slower" if ratio > limit else "")
        lines.append([name, reference, *shown])
    return table(("path", "cost as a multiple of", "baseline", "now", "limit", ""), lines), slower


def beside_others(costs: Costs) -> str:
    """Return tables of the rows in µs of CPU per message, beside a raw socket and other clients, and of other units."""
    messages, others = list[list[str]](), list[list[str]]()
    for name, row in ROWS.items():
        own = costs[name, "nsqext"]
        peers = [f"{own / costs[name, peer]:.2f}" if (name, peer) in costs else "" for peer in ("raw", *OTHERS)]
        if row.unit == CPU:
            messages.append([name, f"{own:.1f}", *peers])
        else:
            others.append([name, f"{own:.1f} {row.unit}"])
    head = ("µs of CPU a message", "nsqext", "× raw socket", *(f"× {peer}" for peer in OTHERS))
    return f"{table(head, messages)}\n{table(('other paths', 'nsqext'), others)}"


def main() -> None:
    """Measure, compare, and exit with 1 if a ratio is too high."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual number of messages")
    parser.add_argument("--update", action="store_true", help="write the baseline")
    parser.add_argument("--page", action="store_true", help="measure other clients too, and never fail")
    given = parser.parse_args()
    program = program_given()
    costs = measure(given.rounds, given.scale, OTHERS if given.page else (), program)
    found = ratios(costs)
    if given.update:
        rounded = {name: round(ratio, 2) for name, ratio in found.items()}
        BASELINE.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
    text, slower = compared(found, json.loads(BASELINE.read_text(encoding="utf-8")))
    if given.page:
        shown = beside_others(costs)
        print(shown)
        note = _NOTE.format("another nsqd" if program else "`nsqext nsqd`", given.rounds)
        note += f"Slower than the baseline allows: {'; '.join(slower)}.\n\n" if slower else ""
        write_section("Every path", note + shown)
    print(text)
    if slower and not given.page:
        sys.exit(f"slower than the baseline allows: {'; '.join(slower)}")


_NOTE = """\
Against {0}, {1} rounds. Publishes of sizes have 64 in flight, batches have 100 messages or 4 MB; consuming has
`max_in_flight` 200, with partitions 2,540 in all. "×" is the cost as a multiple of the other one's.

"""


if __name__ == "__main__":
    main()
