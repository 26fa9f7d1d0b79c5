"""Compare this version with the committed baseline: ``python -m benchmarks.bench_check``, or ``make bench-check``.

CPU and rates of different machines cannot be compared, so the baseline contains ratios of one run: the client's CPU per
message to that of a raw blocking socket, for small and large bodies, a mix of both, and the blocking client; and that
of publishes with keys, headers and trace ids to plain ones. The command fails if a ratio is more than its tolerance
above the baseline; ``--update`` writes the baseline again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

from benchmarks.bench_client import COUNTS, NAMES, measure_clients, measure_variants
from benchmarks.curves.child import VARIANTS
from benchmarks.report import table
from benchmarks.run_peer import new_topic, run_peer
from benchmarks.servers import fill, original_nsqd

BASELINE = Path(__file__).with_name("baseline.json")
TOLERANCE = {"client": 1.35, "size": 1.5, "blocking": 1.5, "variant": 1.15}
"""Largest accepted factors above the baseline. Repeated runs on two shared cores differ by up to 1.25 and 1.1."""
ROUNDS = 5


SIZES = {
    "publish 20 kB": ("pubc", "pubc", 20_000, 3200),
    "publish 1 MB": ("pubc", "pubc", 1_000_000, 256),
    "publish 100 B and 200 kB in turn": ("mix", "pubc", 100_000, 1024),
    "consume 20 kB": ("sub", "sub", 20_000, 3200),
    "consume 1 MB": ("sub", "sub", 1_000_000, 256),
}
"""Mode, mode of the raw socket, bytes of a body, and number of messages."""
BLOCKING = {
    "publish": ("pub", "pub", 200, 3200),
    "handler": ("sub", "sub", 200, 12_800),
    "iteration": ("iterate", "iterate", 200, 12_800),
}


def to_raw(client: str, rows: dict[str, tuple[str, str, int, int]], rounds: int, scale: float) -> dict[str, float]:
    """Return the client's CPU per message as a multiple of the raw socket's, both measured in turn."""
    found: dict[str, list[float]] = {name: [] for name in rows}
    with original_nsqd() as nsqd:
        for _ in range(rounds):
            for name, (mode, raw_mode, size, count) in rows.items():
                amount = max(256, int(count * scale) // 256 * 256)
                cpu = []
                for peer, its_mode in ((client, mode), ("raw", raw_mode)):
                    topic = new_topic()
                    if mode in ("sub", "iterate"):
                        fill(nsqd.tcp, topic, amount + 300, b"x" * size)
                    cpu.append(run_peer(peer, its_mode, amount, nsqd.tcp, topic, size=size)["cpu"])
                    nsqd.delete(topic)
                found[name].append(cpu[0] / cpu[1])
    return {name: median(values) for name, values in found.items()}


def ratios(rounds: int, scale: float) -> dict[str, dict[str, float]]:
    """Measure the ratios and return them by kind and name."""
    found = measure_clients(("raw", "nsqext"), rounds, scale)
    variants = measure_variants(rounds, scale)
    return {
        "client": {NAMES[mode]: found[mode, "nsqext"]["cpu"] / found[mode, "raw"]["cpu"] for mode in COUNTS},
        "size": to_raw("nsqext", SIZES, rounds, scale),
        "blocking": to_raw("blocking", BLOCKING, rounds, scale),
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
            unit = "plain publish" if kind == "variant" else "raw socket"
            shown = f"blocking {name}" if kind == "blocking" else name
            rows.append([shown, unit, f"{before:.2f}", f"{now:.2f}", f"{limit:.2f}", "" if now <= limit else "slower"])
            if now > limit:
                slower.append(name)
    print(table(("CPU per message", "times that of a", "baseline", "now", "limit", ""), rows))
    if slower:
        sys.exit(f"slower than the baseline allows: {', '.join(slower)}")


if __name__ == "__main__":
    main()
