"""Cost of an idle process with 1,000 subscribed partitions: ``python -m benchmarks.bench_idle``.

Four topics of 250 partitions on one embedded node, default settings: CPU, tasks and memory of the client, and the
functions that use the CPU.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.curves.child import child
from benchmarks.report import table, write_section
from benchmarks.servers import cluster_process


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitions", type=int, default=1000, help="a multiple of 250")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured once without and once with the profiler")
    given = parser.parse_args()
    with cluster_process(*(f"i{number}:250" for number in range(given.partitions // 250))) as (_, address):
        found = json.loads(child("idle_profile", address, given.partitions, given.seconds))
    text = (
        f"{given.partitions:,} subscribed partitions without messages, default settings, {given.seconds:g} s: "
        f"{found['cpu']:.1f} ms of CPU a second ({found['cpu'] / 10:.2f} % of a core), {found['tasks']:,} tasks, "
        f"{found['memory']:.1f} KiB of memory for each partition. There are more partitions than messages that may be "
        "in flight, so RDY takes turns over them once a second, which is most of it; the rest is heartbeats (one "
        "every 30 s and connection). The task of a partition waits and is not woken."
    )
    rows = [[f"`{name}`", f"{calls:.1f}", f"{cost:.2f}"] for name, calls, cost in found["top"]]
    profile = table(("function", "calls a second", "ms of CPU a second"), rows)
    print(f"{text} Profile, with the profiler's own cost:\n\n{profile}")
    write_section("Idle", text)


if __name__ == "__main__":
    main()
