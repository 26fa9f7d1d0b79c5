"""What the broker carries on one core; run it with ``python -m benchmarks.bench_broker``.

A raw client on the other cores publishes and consumes. Where NSQEXT_BENCH_NSQD names an nsqd (``host:port`` of its TCP
side), the two are measured in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from itertools import count
from statistics import median

from benchmarks.peer import BODY
from benchmarks.report import table, write_section
from benchmarks.servers import fill, original_nsqd

COUNTS = {"pubc": 32_000, "mpub": 100_000, "sub": 40_000}
NAMES = {"pubc": "published one by one, 64 in flight", "mpub": "published in batches of 100", "sub": "delivered"}
AIMS = {"pubc": 20_000, "mpub": 100_000, "sub": 40_000}

_number = count(1)


def rate(mode: str, address: str) -> float:
    """Return messages a second."""
    topic = f"broker_{os.getpid()}_{next(_number)}"
    if mode == "sub":
        fill(address, topic, COUNTS[mode] + 1000, BODY)
    words = ("raw", mode, str(COUNTS[mode]), address, topic)
    command = [sys.executable, "-m", "benchmarks.peer", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)  # noqa: S603
    return float(json.loads(done.stdout)["rate"])


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    other = os.environ.get("NSQEXT_BENCH_NSQD")
    found: dict[tuple[str, str], list[float]] = {}
    with original_nsqd(core=0) as ours:
        servers = {"nsqext nsqd": ours} | ({"the nsqd given": other} if other else {})
        for _ in range(given.rounds):
            for mode in COUNTS:
                for name, address in servers.items():
                    found.setdefault((mode, name), []).append(rate(mode, address))
    rows = [
        [NAMES[mode], *(f"{median(found[mode, name]):,.0f}" for name in servers), f"{AIMS[mode]:,}"] for mode in COUNTS
    ]
    text = table(("messages a second", *servers, "aim"), rows)
    print(text)
    write_section("Broker", f"On one core, bodies of 200 bytes, a raw client, {given.rounds} rounds.\n\n{text}")


if __name__ == "__main__":
    main()
