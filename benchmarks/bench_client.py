"""Client CPU per message, compared with other clients and a raw socket: ``python -m benchmarks.bench_client``.

Everything takes turns in one run, against ``nsqext nsqd`` or against the nsqd program whose path NSQEXT_BENCH_NSQD is.
Keys, trace ids and extend headers are measured beside plain publishes on a cluster of
one redesigned node. go-nsq takes part where Go is installed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from statistics import median

from benchmarks.curves.child import VARIANTS, child
from benchmarks.peer import BODY
from benchmarks.report import output, table, write_section
from benchmarks.run_peer import CLIENTS, available, new_topic, run_peer
from benchmarks.servers import fill, original_nsqd, program_given, redesigned_cluster

COUNTS = {"pub": 3200, "pubc": 9600, "mpub": 48_000, "sub": 12_800}
NAMES = {"pub": "one in flight", "pubc": "64 in flight", "mpub": "batches of 100", "sub": "consume and finish"}
AIMS = {"pub": 0.60, "pubc": 0.70, "mpub": 0.40, "sub": 0.20}

Found = dict[tuple[str, str], dict[str, float]]
"""Median of each figure by mode and client."""


def measure_clients(clients: Sequence[str], rounds: int, scale: float = 1.0, program: str | None = None) -> Found:
    """Measure all modes of clients, alternating between clients.

    Args:
        clients: names of the clients.
        rounds: number of rounds.
        scale: share of the default number of messages.
        program: path of an nsqd to use instead of this package's.
    """
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with original_nsqd(program=program) as nsqd:
        for _ in range(rounds):
            for mode, most in COUNTS.items():
                amount = int(most * scale) // 1600 * 1600  # a multiple of the batch size and of the 64 publishers
                for client in clients:
                    topic = new_topic()
                    if mode == "sub":
                        fill(nsqd.tcp, topic, amount + 1000, BODY)
                    found.setdefault((mode, client), []).append(run_peer(client, mode, amount, nsqd.tcp, topic))
                    nsqd.delete(topic)
    return {
        key: {figure: median(one[figure] for one in values) for figure in ("rate", "cpu")}
        for key, values in found.items()
    }


def measure_variants(rounds: int, scale: float = 1.0) -> dict[str, float]:
    """Measure publishes with keys, trace ids and headers, and plain ones; return µs of CPU per message."""
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with redesigned_cluster() as address:
        for _ in range(rounds):
            measured: dict[str, float] = json.loads(child("publish_variants", address, int(COUNTS["pub"] * scale)))
            for name, cpu in measured.items():
                found[name].append(cpu)
    return {name: median(values) for name, values in found.items()}


def write_results(found: Found) -> None:
    """Write the figures to a file for docs/pictures/draw_benchmarks.py, in a run of all benchmarks."""
    by_mode: dict[str, dict[str, dict[str, float]]] = {}
    for (mode, client), figures in found.items():
        by_mode.setdefault(mode, {})[client] = {name: round(value, 3) for name, value in figures.items()}
    if folder := output("results"):
        (folder / "client.json").write_text(json.dumps(by_mode, indent=1) + "\n", encoding="utf-8")


def report(found: Found, clients: Sequence[str]) -> str:
    """Return the tables of CPU per message and of the rate of a lone publish."""
    rows = []
    for mode, name in NAMES.items():
        share = found[mode, "nsqext"]["cpu"] / found[mode, "asyncnsq"]["cpu"]
        figures = [f"{found[mode, client]['cpu']:.2f}" for client in clients]
        rows.append([name, *figures, f"{share:.2f}", f"{AIMS[mode]:.2f}"])
    cost = table(("µs of CPU per message", *clients, "nsqext / asyncnsq", "aim"), rows)
    rates = [["one in flight", *(f"{found['pub', client]['rate']:,.0f}" for client in clients)]]
    return f"{cost}\n{table(('messages a second', *clients), rates)}"


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the usual number of messages")
    given = parser.parse_args()
    clients = [client for client in CLIENTS if available(client)]
    program = program_given()
    found = measure_clients(clients, given.rounds, given.scale, program)
    write_results(found)
    beside = report(found, clients)
    print(beside)
    variants = measure_variants(given.rounds, given.scale)
    rows = [[name, f"{cpu:.1f}", f"{cpu / variants['plain']:.2f}"] for name, cpu in variants.items()]
    other = table(("one publish in flight", "µs of CPU per message", "times plain"), rows)
    print(other)
    server = "another nsqd" if program else "`nsqext nsqd`"
    text = f"Bodies of 200 bytes, {server}, {given.rounds} rounds. Aims are shares of asyncnsq.\n\n"
    write_section("Client", f"{text}{beside}\nOn a redesigned node:\n\n{other}")


if __name__ == "__main__":
    main()
