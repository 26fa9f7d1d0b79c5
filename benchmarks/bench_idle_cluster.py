"""Cost of many topics in an idle embedded cluster: ``python -m benchmarks.bench_idle_cluster``.

Three nodes, topics of four partitions with two replicas, no clients and no messages: CPU of the idle process, and the
time to create a topic when that many exist.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from benchmarks.report import table, write_section
from nsqext.broker import Cluster

TOPICS = (10, 100, 1000)
_LAST = 10
"""Creations whose median counts."""


def measure(topics: int, seconds: float) -> tuple[float, float]:
    """Return the CPU of the idle cluster in percent of a core, and the milliseconds to create a topic."""
    with Cluster(nodes=3) as cluster:
        took = []
        for number in range(topics):
            began = time.perf_counter()
            cluster.create_topic(f"t{number}", partitions=4, replicas=2)
            took.append(time.perf_counter() - began)
        began, cpu = time.perf_counter(), time.process_time()
        time.sleep(seconds)
        used = (time.process_time() - cpu) / (time.perf_counter() - began)
    return used * 100, median(took[-_LAST:]) * 1000


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    rows = []
    for topics in TOPICS:
        idle, create = measure(topics, given.seconds)
        rows.append([f"{topics:,}", f"{idle:.2f}", f"{create:.2f}"])
    text = table(("topics", "CPU, % of a core", "ms to create one more"), rows)
    print(text)
    about = "Three nodes, topics of four partitions with two replicas, no clients."
    write_section("Idle cluster", f"{about}\n\n{text}")


if __name__ == "__main__":
    main()
