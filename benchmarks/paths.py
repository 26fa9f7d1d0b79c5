"""The paths that `benchmarks.bench_check` measures: their costs, beside other clients and beside a raw socket."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from attrs import frozen

from benchmarks.bench_observers import observers
from benchmarks.bench_services import producers, workers_rate
from benchmarks.curves.child import VARIANTS, child
from benchmarks.curves.start import PROGRAMS, commands, program_cpu, server_cpu, words_cpu
from benchmarks.run_peer import available, new_topic, run_peer
from benchmarks.servers import Nsqd, fill, original_nsqd, redesigned_cluster

__all__ = ("CPU", "LIBRARIES", "OTHERS", "ROWS", "Costs", "Row", "probes")

Costs = Mapping[tuple[str, str], float]
"""Costs by row and client."""

OTHERS = ("uvloop", "go-nsq", "gnsq", "pynsq")
LIBRARIES = "import attrs, anyio, orjson"

CPU = "µs of CPU a message"
"""The unit of most paths."""
_EACH = "µs a message"
_CONSUME, _LONE = "consume, 200 B", "publish one by one, 200 B"
_FAST = ("uvloop", "go-nsq")
_CONSUMING = ("sub", "iterate", "timeout", "result")
_PARTITIONS = (1, 8, 64, 254)
_IDLE = 100
_IDLE_SECONDS = 5.0
_TELEMETRY = 0.25
_PRODUCED = 32_000
_WORKED = 10_000


@frozen
class Row:
    """A path, and what its cost is compared with.

    Attributes:
        group: kind of the path; rows of a group have one tolerance.
        unit: of its cost.
        client: ``nsqext``, or ``blocking`` for `nsqext.sync`.
        mode: see `benchmarks.peer`; empty for a path that no other client has.
        size: bytes of a body.
        count: messages.
        threads: that publish; other clients have 64 publishes in flight.
        tls: whether the connection is encrypted, for all clients.
        others: clients beside it.
        reference: row and client whose cost is the measure of the baseline; ``raw`` in the same row by default.
    """

    group: str
    unit: str = CPU
    client: str = "nsqext"
    mode: str = ""
    size: int = 200
    count: int = 3200
    others: Sequence[str] = ("go-nsq",)
    threads: int = 1
    tls: bool = False
    reference: tuple[str, str] | None = None


def _size_rows() -> Iterator[tuple[str, Row]]:
    amounts = {"20 B": (20, 12_800), "20 kB": (20_000, 3200), "100 kB": (100_000, 1600), "1 MB": (1_000_000, 256)}
    for verb, mode in (("publish", "pubc"), ("batches", "mpub"), ("consume", "sub")):
        for text, (size, count) in amounts.items():
            # a batch of small messages takes a few microseconds; how a server divides large ones varies from run to run
            more = 4 if mode == "mpub" and size < 100_000 else 1
            group = "large" if mode == "sub" and size >= 100_000 else "size"
            yield f"{verb}, {text}", Row(group, mode=mode, size=size, count=count * more, others=_FAST)


_OBSERVED = {"lone": "publish one by one", "concurrent": "publish, 64 in flight", "handled": "handler"}
_OBSERVERS = {
    "`OpenTelemetry` without an SDK": "OpenTelemetry without an SDK",
    "`OpenTelemetry` with the SDK": "OpenTelemetry with the SDK",
    "`Prometheus`": "Prometheus",
}


def _telemetry_rows() -> Iterator[tuple[str, Row]]:
    for observer in _OBSERVERS.values():
        for path in _OBSERVED.values():
            yield f"{path}, {observer}", Row("telemetry", reference=(f"{path}, no middleware", "nsqext"))


def _threads(count: int) -> Row:
    reference = ("blocking: publish", "raw")
    return Row("blocking", client="blocking", mode="pubt", count=6400, threads=count, reference=reference)


ROWS: dict[str, Row] = {
    _LONE: Row("client", mode="pub", others=_FAST),
    "publish, 64 in flight, 200 B": Row("client", mode="pubc", count=9600, others=_FAST),
    "batches of 100, 200 B": Row("client", mode="mpub", count=48_000, others=_FAST),
    _CONSUME: Row("client", mode="sub", count=12_800, others=_FAST),
    **dict(_size_rows()),
    "100 B and 200 kB in turn, 256 in flight": Row("size", mode="mix", size=100_000, count=1024),
    "blocking: publish": Row("blocking", client="blocking", mode="pub", others=OTHERS),
    "blocking: publish, 16 threads": _threads(16),
    "blocking: publish, 64 threads": _threads(64),
    "blocking: batches of 100": Row("blocking", client="blocking", mode="mpub", count=48_000),
    "blocking: handler": Row("blocking", client="blocking", mode="sub", count=12_800, others=OTHERS),
    "blocking: iteration": Row("blocking", client="blocking", mode="iterate", count=12_800, others=OTHERS),
    "publish one by one, TLS": Row("tls", mode="pub", tls=True, others=_FAST),
    "publish, 64 in flight, TLS": Row("tls", mode="pubc", count=9600, tls=True, others=_FAST),
    "handler with `HandlerTimeout`": Row(
        "client", mode="timeout", count=12_800, others=(), reference=(_CONSUME, "raw")
    ),
    "handler whose result is published": Row("client", mode="result", others=(), reference=(_LONE, "raw")),
    **dict(_telemetry_rows()),
    "two producers, each 64 in flight": Row("processes", reference=("one producer, 64 in flight", "nsqext")),
    "`nsqext run --workers 2`": Row("processes", _EACH, reference=("`nsqext run --workers 1`", "nsqext")),
    **{
        f"publish with {name}": Row("variant", reference=("plain publish", "nsqext"))
        for name in VARIANTS
        if name != "plain"
    },
    "one key, 64 in flight": Row("key", _EACH, reference=("64 in flight", "nsqext")),
    **{f"consume {count} partitions": Row("partitions", reference=(_CONSUME, "raw")) for count in _PARTITIONS},
    "an idle consumer": Row("idle", "µs of CPU a second", reference=(_CONSUME, "raw")),
    **{
        name: Row("start", "ms of CPU", reference=(LIBRARIES, "nsqext"))
        for name in (
            "import nsqext; nsqext.Producer",
            "nsqext pub --help",
            "nsqext pub, one message",
            "nsqext topic list",
            "Cluster(nodes=3)",
            "nsqext nsqd, start and stop",
        )
    },
    "nsqext nsqd, stop": Row("stop", "ms", reference=(LIBRARIES, "nsqext")),
}
"""All paths by name."""


def _peers(nsqd: Nsqd, name: str, others: Sequence[str], scale: float) -> dict[tuple[str, str], float]:
    """Measure a path beside a raw socket and the other clients that have it."""
    row = ROWS[name]
    found = {}
    for peer in (*(() if row.reference else ("raw",)), row.client, *(peer for peer in row.others if peer in others)):
        mode = row.mode
        if (peer, mode) == ("raw", "mix") or (mode == "pubt" and peer != "blocking"):
            mode = "pubc"
        elif mode == "iterate" and peer in OTHERS:
            mode = "sub"
        amount = max(256, int(row.count * scale) // 256 * 256)
        topic = new_topic()
        if mode in _CONSUMING:
            fill(nsqd.tcp, topic, amount + 300, b"x" * row.size)
        cost = run_peer(peer, mode, amount, nsqd.tcp, topic, size=row.size, threads=row.threads, tls=int(row.tls))[
            "cpu"
        ]
        nsqd.delete(topic)
        found[name, "nsqext" if peer == "blocking" else peer] = cost
    return found


def _variants(cluster: str, scale: float) -> dict[tuple[str, str], float]:
    found: dict[str, float] = json.loads(child("publish_variants", cluster, int(3200 * scale)))
    return {("plain publish" if name == "plain" else f"publish with {name}", "nsqext"): found[name] for name in found}


def _one_key(cluster: str, scale: float) -> dict[tuple[str, str], float]:
    found: dict[str, float] = json.loads(child("publish_one_key", cluster, int(6400 * scale)))
    return {("64 in flight", "nsqext"): found["plain"], ("one key, 64 in flight", "nsqext"): found["key"]}


def _partitions(cluster: str, count: int) -> dict[tuple[str, str], float]:
    return {
        (f"consume {count} partitions", "nsqext"): float(
            child("consume_partitions", cluster, f"p{count}", 25_400, 2540)
        )
    }


def _idle(cluster: str) -> dict[tuple[str, str], float]:
    used = float(child("idle_consumers_cpu", cluster, _IDLE, _IDLE_SECONDS))
    return {("an idle consumer", "nsqext"): used / _IDLE * 1e3}


def _telemetry(nsqd: Nsqd, scale: float) -> dict[tuple[str, str], float]:
    names = {"none": "no middleware", **_OBSERVERS}
    return {
        (f"{_OBSERVED[column]}, {names[variant]}", "nsqext"): cost
        for (variant, column), cost in observers(nsqd.tcp, scale * _TELEMETRY, list(names)).items()
    }


def _producers(nsqd: Nsqd, scale: float) -> dict[tuple[str, str], float]:
    found = {}
    for count, name in ((1, "one producer, 64 in flight"), (2, "two producers, each 64 in flight")):
        _, found[name, "nsqext"] = producers(nsqd.tcp, count, int(_PRODUCED * scale) // 64 * 64)
    return found


def _workers(scale: float) -> dict[tuple[str, str], float]:
    amount = int(_WORKED * scale)
    return {(f"`nsqext run --workers {count}`", "nsqext"): 1e6 / workers_rate(count, amount) for count in (1, 2)}


def _start(nsqd: Nsqd, cluster: str, cache: str) -> dict[tuple[str, str], float]:
    found = {(name, "nsqext"): program_cpu(name, cache) for name in PROGRAMS if name in ROWS or name == LIBRARIES}
    for name, words in commands(nsqd.tcp, cluster).items():
        found[name, "nsqext"] = words_cpu(words, cache)
    cpu, stop = server_cpu(cache)
    return {**found, ("nsqext nsqd, start and stop", "nsqext"): cpu, ("nsqext nsqd, stop", "nsqext"): stop}


@contextmanager
def probes(others: Sequence[str], scale: float, program: str | None) -> Iterator[list[Callable[[], Costs]]]:
    """Start servers, and yield functions that measure all rows; each call of all of them is a round.

    Args:
        others: clients to measure beside this one; those that cannot run here are left out.
        scale: share of the usual number of messages.
        program: path of an nsqd to use instead of this package's.
    """
    found = [peer for peer in others if available(peer)]
    with ExitStack() as stack:
        nsqd = stack.enter_context(original_nsqd(program=program, tls=True))
        topics = (f"p{count}:{count}" for count in _PARTITIONS)
        cluster = stack.enter_context(redesigned_cluster("plain", "ext:1:ext", "idle", *topics)).removeprefix("http://")
        cache = stack.enter_context(tempfile.TemporaryDirectory())
        _start(nsqd, cluster, cache)  # writes the compiled modules
        yield [
            *(partial(_peers, nsqd, name, found, scale) for name, row in ROWS.items() if row.mode),
            partial(_variants, cluster, scale),
            partial(_one_key, cluster, scale),
            *(partial(_partitions, cluster, count) for count in _PARTITIONS),
            partial(_idle, cluster),
            partial(_telemetry, nsqd, scale),
            partial(_producers, nsqd, scale),
            partial(_workers, scale),
            partial(_start, nsqd, cluster, cache),
        ]
