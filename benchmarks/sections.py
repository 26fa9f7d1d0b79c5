"""The sections of the page of benchmarks: their programs, and how long they take."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

__all__ = ("CURVES", "SECTIONS", "Section", "fitting", "planned")


@frozen
class Section:
    """A program whose results are a section of the page.

    Attributes:
        title: heading of the section; of a curve, its name in the run.
        module: the program, below ``benchmarks``.
        fixed: seconds that it takes without its rounds, on two cores.
        each: seconds of a round.
        rounds: most rounds; 0 if it has no option ``--rounds``.
        words: its other options.
        quick: options instead of these, to test the program itself.
        real: options if a redesigned cluster is given; ``{}`` is the address of its lookup node.
        go: the option that names the peer in Go for the redesigned NSQ.
    """

    title: str
    module: str
    fixed: float
    each: float = 0.0
    rounds: int = 0
    words: Sequence[str] = ()
    quick: Sequence[str] = ()
    real: Sequence[str] = ()
    go: str = ""

    def seconds(self, rounds: int) -> float:
        """Return how long it takes with at most a number of rounds."""
        return self.fixed + self.each * min(rounds, self.rounds)


CURVES = "Curves"
"""Title of the section that is drawn from the results of all curves."""


def _curve(names: str, each: float) -> Section:
    return Section(f"curves: {names}", "curves", 0, each, rounds=1, words=names.split())


SECTIONS = (
    Section("Client", "bench_client", 5, 20, rounds=5, quick=("--scale", "0.5")),
    Section("Every path", "bench_check", 10, 95, rounds=5, words=("--page",), quick=("--page", "--scale", "0.1")),
    Section("Telemetry", "bench_observers", 3, 27, rounds=5, quick=("--scale", "0.05")),
    Section("Functions of a lone publish", "bench_functions", 5, 8, rounds=5),
    Section("Batches", "bench_batches", 2, 3, rounds=5, quick=("--count", "1000")),
    Section("Latency", "bench_latency", 5, 130, rounds=2, words=("--seconds", "4"), quick=("--seconds", "0.5")),
    Section("Keys and ordered consumption", "bench_ordered", 5, 160, rounds=2, real=("--lookupd", "{}"), go="--go"),
    Section("Services", "bench_services", 5, 35, rounds=3, quick=("--count", "1000")),
    Section("Beside FastStream", "bench_frameworks", 3, 45, rounds=3, quick=("--scale", "0.1")),
    Section(
        "Celery beside Redis and RabbitMQ",
        "bench_tasks",
        5,
        80,
        rounds=2,
        words=("--tasks", "5000"),
        quick=("--tasks", "100"),
    ),
    Section("Transactions", "bench_transactions", 10, 80, rounds=2, quick=("--count", "50")),
    Section("Broker", "bench_broker", 3, 7, rounds=5),
    Section("After a leader was killed", "bench_failover", 2, 4, rounds=5),
    Section("Sharing", "bench_sharing", 25, 25, rounds=2, quick=("--seconds", "1")),
    Section(
        "Ways to keep the order of keys",
        "bench_key_ways",
        190,
        words=("--consumers", "1", "8", "--seconds", "4"),
        quick=("--consumers", "1", "--seconds", "1"),
        real=("--lookupd", "{}"),
    ),
    Section(
        "Fair keys",
        "bench_fair_keys",
        140,
        words=("--consumers", "8", "--backlogs", "0", "10000", "--seconds", "5"),
        quick=("--consumers", "2", "--backlogs", "0", "--seconds", "1"),
    ),
    Section("Idle", "bench_idle", 50, words=("--seconds", "20"), quick=("--seconds", "1", "--partitions", "250")),
    Section("Idle cluster", "bench_idle_cluster", 40, quick=("--seconds", "1")),
    Section("Scale", "scale", 70, quick=("--nodes", "10", "--topics", "4", "--partitions", "4", "--idle", "10")),
    Section("Spark", "bench_spark", 60, 60, rounds=2, quick=("--rows", "20000")),
    Section(
        "Spark by rows and partitions",
        "bench_spark_scale",
        140,
        words=("--rows", "200000"),
        quick=("--rows", "2000"),
        real=("--lookupd", "{}"),
    ),
    _curve("body_size_publish", 20),
    _curve("body_size_consume", 20),
    _curve("topics", 25),
    _curve("connections", 25),
    _curve("handlers", 8),
    _curve("partitions", 75),
    _curve("headers", 10),
    _curve("compression", 10),
    _curve("client_memory", 35),
    _curve("broker_memory", 15),
    _curve("polling_cpu polling_bytes", 120),
    _curve("listed_nodes", 10),
    _curve("start", 7),
)
"""All sections in the order of the page; curves make one section together."""


def planned(only: Sequence[str]) -> list[Section]:
    """Return the sections whose titles or modules contain one of the words; all without words."""
    return [
        section
        for section in SECTIONS
        if not only or any(word.lower() in f"{section.title} {section.module}".lower() for word in only)
    ]


def fitting(sections: Sequence[Section], seconds: float) -> int:
    """Return the largest number of rounds with which sections take at most this time, and at least one."""
    rounds = 1
    for more in range(2, max((section.rounds for section in sections), default=1) + 1):
        if sum(section.seconds(more) for section in sections) > seconds:
            break
        rounds = more
    return rounds
