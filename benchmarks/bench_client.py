"""Client CPU per message, beside other clients and a raw socket; run it with ``python -m benchmarks.bench_client``.

Everything takes turns in one run, against ``nsqext nsqd`` or against the nsqd that NSQEXT_BENCH_NSQD names
(``host:port`` of its TCP side). Trace ids and extend headers are measured beside plain publishes on a cluster of one
redesigned node.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from itertools import count
from statistics import median

from benchmarks.peer import BODY
from benchmarks.report import table, write_section
from benchmarks.servers import fill, original_nsqd, redesigned_cluster

CLIENTS = ("raw", "nsqext", "asyncnsq", "pynsq")
COUNTS = {"pub": 3200, "pubc": 9600, "mpub": 48_000, "sub": 12_800}
NAMES = {"pub": "one in flight", "pubc": "64 in flight", "mpub": "batches of 100", "sub": "consume and finish"}
VARIANTS = {"plain": ("pub", "plain"), "trace id": ("trace", "plain"), "headers": ("ext", "ext")}
AIMS = {"pub": 0.60, "pubc": 0.70, "mpub": 0.40, "sub": 0.20}

_number = count(1)


def measure(client: str, mode: str, amount: int, address: str, topic: str) -> float:
    """Return microseconds of client CPU per message."""
    words = (client, mode, str(amount), address, topic)
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-W", "ignore", "-m", "benchmarks.peer", *words],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    if done.returncode or not done.stdout:
        raise SystemExit(f"{client} {mode} failed:\n{done.stderr}")
    return float(json.loads(done.stdout.splitlines()[-1])["cpu"])


def clients(rounds: int, scale: float) -> str:
    """Measure all clients; returns the table."""
    given = os.environ.get("NSQEXT_BENCH_NSQD")
    found: dict[tuple[str, str], list[float]] = {}
    with nullcontext(given) if given else original_nsqd() as address:
        for _ in range(rounds):
            for mode, most in COUNTS.items():
                amount = int(most * scale) // 1600 * 1600  # whole batches, and as many for each of 64
                for client in CLIENTS:
                    topic = f"bench_{os.getpid()}_{next(_number)}"
                    if mode == "sub":
                        fill(address, topic, amount + 1000, BODY)
                    found.setdefault((mode, client), []).append(measure(client, mode, amount, address, topic))
    rows = []
    for mode, name in NAMES.items():
        medians = {client: median(found[mode, client]) for client in CLIENTS}
        share = medians["nsqext"] / medians["asyncnsq"]
        rows.append([name, *(f"{medians[client]:.2f}" for client in CLIENTS), f"{share:.2f}", f"{AIMS[mode]:.2f}"])
    return table(("µs of CPU per message", *CLIENTS, "nsqext / asyncnsq", "aim"), rows)


def variants(rounds: int, scale: float) -> str:
    """Measure publishes with trace ids and headers beside plain ones; returns the table."""
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with redesigned_cluster() as address:
        for _ in range(rounds):
            for name, (mode, topic) in VARIANTS.items():
                found[name].append(measure("nsqext", mode, int(COUNTS["pub"] * scale), address, topic))
    plain = median(found["plain"])
    rows = [[name, f"{median(values):.1f}", f"{median(values) / plain:.2f}"] for name, values in found.items()]
    return table(("one publish in flight", "µs of CPU per message", "times plain"), rows)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual number of messages")
    given = parser.parse_args()
    beside = clients(given.rounds, given.scale)
    print(beside)
    other = variants(given.rounds, given.scale)
    print(other)
    server = "another nsqd" if os.environ.get("NSQEXT_BENCH_NSQD") else "`nsqext nsqd`"
    text = f"Bodies of 200 bytes, asyncio's own loop, {server}, {given.rounds} rounds. Aims are shares of asyncnsq.\n\n"
    write_section("Client", f"{text}{beside}\nOn a redesigned node:\n\n{other}")


if __name__ == "__main__":
    main()
