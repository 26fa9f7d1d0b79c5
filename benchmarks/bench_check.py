"""Compare this version with the committed baseline: ``python -m benchmarks.bench_check``, or ``make bench-check``.

CPU and rates of different machines cannot be compared, so the baseline contains ratios of one run: the client's CPU per
message to that of a raw blocking socket, and that of publishes with keys, headers and trace ids to plain ones. The
command fails if a ratio is more than its tolerance above the baseline; ``--update`` writes the baseline again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.bench_client import COUNTS, NAMES, measure_clients, measure_variants
from benchmarks.curves.child import VARIANTS
from benchmarks.report import table

BASELINE = Path(__file__).with_name("baseline.json")
TOLERANCE = {"client": 1.35, "variant": 1.15}
"""Largest accepted factors above the baseline. Repeated runs on two shared cores differ by up to 1.25 and 1.1."""
ROUNDS = 5


def ratios(rounds: int, scale: float) -> dict[str, dict[str, float]]:
    """Measure the ratios and return them by kind and name."""
    found = measure_clients(("raw", "nsqext"), rounds, scale)
    variants = measure_variants(rounds, scale)
    return {
        "client": {NAMES[mode]: found[mode, "nsqext"]["cpu"] / found[mode, "raw"]["cpu"] for mode in COUNTS},
        "variant": {name: variants[name] / variants["plain"] for name in VARIANTS if name != "plain"},
    }


def main() -> None:
    """Measure, compare, and exit with 1 if a ratio is too high."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual number of messages")
    parser.add_argument("--update", action="store_true", help="write the baseline")
    given = parser.parse_args()
    measured = ratios(given.rounds, given.scale)
    if given.update:
        rounded = {kind: {name: round(ratio, 2) for name, ratio in by.items()} for kind, by in measured.items()}
        BASELINE.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
    baseline: dict[str, dict[str, float]] = json.loads(BASELINE.read_text(encoding="utf-8"))
    rows, slower = [], []
    for kind, by in baseline.items():
        for name, before in by.items():
            now, limit = measured[kind][name], before * TOLERANCE[kind]
            unit = "raw socket" if kind == "client" else "plain publish"
            rows.append([name, unit, f"{before:.2f}", f"{now:.2f}", f"{limit:.2f}", "" if now <= limit else "slower"])
            if now > limit:
                slower.append(name)
    print(table(("CPU per message", "times that of a", "baseline", "now", "limit", ""), rows))
    if slower:
        sys.exit(f"slower than the baseline allows: {', '.join(slower)}")


if __name__ == "__main__":
    main()
