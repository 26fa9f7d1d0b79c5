"""Throughput of the broker on one core: ``python -m benchmarks.bench_broker``.

A raw client on the other cores publishes and consumes. If NSQEXT_BENCH_NSQD is the path of another nsqd program, both
are measured alternately.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from statistics import median

from benchmarks.peer import BODY
from benchmarks.report import table, write_section
from benchmarks.run_peer import new_topic, run_peer
from benchmarks.servers import fill, original_nsqd, program_given

COUNTS = {"pubc": 32_000, "mpub": 100_000, "sub": 40_000}
NAMES = {"pubc": "published one by one, 64 in flight", "mpub": "published in batches of 100", "sub": "delivered"}
AIMS = {"pubc": 20_000, "mpub": 100_000, "sub": 40_000}


def rate(mode: str, address: str) -> float:
    """Return messages per second."""
    topic = new_topic()
    if mode == "sub":
        fill(address, topic, COUNTS[mode] + 1000, BODY)
    return run_peer("raw", mode, COUNTS[mode], address, topic)["rate"]


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    program = program_given()
    found: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        servers = {"nsqext nsqd": stack.enter_context(original_nsqd(core=0)).tcp}
        if program:
            servers["the nsqd given"] = stack.enter_context(original_nsqd(core=0, program=program)).tcp
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
