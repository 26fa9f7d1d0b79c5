"""Real processes under real faults: ``python -m tests.campaigns.soak --minutes 20``."""

from __future__ import annotations

import argparse
import itertools
import logging
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from secrets import token_hex

import anyio
from attrs import define, field

from tests.campaigns.soak.clusters import SoakCluster, new_cluster, targets
from tests.campaigns.soak.soak_round import (
    ALL,
    KEYED,
    ORIGINAL,
    RoundResult,
    Soak,
    create_topics,
    delete_topics,
    make_plan,
)

__all__ = ("Run", "main")


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@define
class Run:
    """Rounds on one kind of cluster, and their sums.

    Attributes:
        target: kind of cluster.
        seconds: of each round in which faults begin.
        every: seconds between two faults.
        settle: seconds after the last fault; 0 for the cluster's.
        shortest: seconds of the shortest fault of a node; 0 for the cluster's.
        pause: seconds of the longest pause between two publishes of a task.
        roles: publishers and consumers of each client process.
    """

    target: str
    seconds: float
    every: float
    settle: float = 0.0
    shortest: float = 0.0
    pause: float = 0.1
    roles: dict[str, tuple[list[str], list[str]]] = field(factory=lambda: ALL)
    rounds: int = 0
    faults: Counter[str] = field(factory=Counter)
    figures: Counter[str] = field(factory=Counter)
    longest: float = 0.0
    _cluster: SoakCluster | None = None
    _topics: dict[str, str] = field(factory=dict)

    def round(self, seed: int) -> RoundResult:
        """Run the round of a seed; its records are kept if it violates a guarantee."""
        folder = Path(tempfile.mkdtemp(prefix=f"soak-{self.target}-{seed}-"))
        cluster = self._cluster or new_cluster(self.target, seed, folder)
        plan = make_plan(
            seed, cluster.kinds, self.seconds, self.every, self.shortest or cluster.shortest, list(self.roles)
        )
        kept = True
        try:
            if self._cluster is None:
                cluster.start()
                token = f"_{token_hex(3)}" if self.target == "real" else ""
                kinds = ["keyed"] if self.roles is KEYED else cluster.topics
                self._topics = {kind: f"soak_{kind}{token}" for kind in kinds}
                anyio.run(create_topics, cluster.lookupd, 3 if token else plan.replicas, self._topics)
            if self.target == "real":
                self._cluster = cluster  # its topics take minutes
            settle = self.settle or cluster.settle
            result = Soak(cluster, plan, folder, self.roles, self.seconds, settle, self._topics, self.pause).run()
            kept = bool(result.violations)
        finally:
            if self._cluster is None:
                cluster.stop()
            if kept:
                say(f"records and logs: {folder}")
            else:
                shutil.rmtree(folder)
        self._add(result)
        return result

    def _add(self, result: RoundResult) -> None:
        history = result.history
        outcomes = Counter(publish.outcome for publish in history.publishes)
        first = {(found.topic, found.channel, found.body) for found in history.deliveries}
        self.rounds += 1
        self.faults += result.faults
        self.figures += Counter(
            {
                "publishes": len(history.publishes),
                "publishes of unknown outcome": outcomes["unknown"],
                "publishes that failed": outcomes["failed"],
                "publishes of killed processes": outcomes["killed"],
                "deliveries": len(history.deliveries),
                "redeliveries": len(history.deliveries) - len(first),
                "faults": result.faults.total(),
                "violations": len(result.violations),
                "seconds": round(result.seconds),
            }
        )
        ended = [publish.end - publish.begin for publish in history.publishes if publish.outcome == "stored"]
        self.longest = max([self.longest, *ended])

    def command(self, seed: int) -> str:
        """Return the command that repeats a round."""
        parts = [f"python -m tests.campaigns.soak --target {self.target} --seed {seed}"]
        parts += [f"--seconds {self.seconds:g} --every {self.every:g}"]
        parts += [f"--settle {self.settle:g}"] if self.settle else []
        parts += [f"--shortest {self.shortest:g}"] if self.shortest else []
        parts += [f"--pause {self.pause:g}"] if self.pause != 0.1 else []
        parts += ["--keyed"] if self.roles is KEYED else []
        return " ".join(parts)

    def close(self) -> None:
        """Delete the topics of a real cluster."""
        if self._cluster is not None:
            anyio.run(delete_topics, self._cluster.lookupd, self._topics)


def print_table(runs: list[Run]) -> None:
    """Print what all rounds gave."""
    names = ["rounds", "seconds", "publishes", "publishes of unknown outcome", "publishes that failed"]
    names += ["publishes of killed processes", "deliveries", "redeliveries", "faults", "violations"]
    say(f"{'':32}" + "".join(f"{run.target:>12}" for run in runs))
    for name in names:
        values = [run.rounds if name == "rounds" else run.figures[name] for run in runs]
        say(f"{name:32}" + "".join(f"{value:>12}" for value in values))
    say(f"{'longest publish, s':32}" + "".join(f"{run.longest:>12.1f}" for run in runs))
    for kind in sorted({kind for run in runs for kind in run.faults}):
        say(f"  {kind:30}" + "".join(f"{run.faults[kind]:>12}" for run in runs))


def main() -> int:
    """Run rounds until the time is over; 1 when a guarantee was violated."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="start no round after this time")
    parser.add_argument("--target", action="append", choices=targets(), help="all by default")
    parser.add_argument("--seed", type=int, help="run the round of this seed only")
    parser.add_argument("--first", type=int, help="first seed; random without it")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each round in which faults begin")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two faults")
    parser.add_argument("--settle", type=float, default=0.0, help="seconds after the last fault")
    parser.add_argument("--shortest", type=float, default=0.0, help="seconds of the shortest fault of a node")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds of the longest pause between publishes")
    parser.add_argument("--keyed", action="store_true", help="channels of type key_failover only")
    parser.add_argument("--verbose", action="store_true", help="print each fault")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO if given.verbose else logging.WARNING, format="  %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    roles = {name: KEYED if given.keyed else ORIGINAL if name == "original" else ALL for name in targets()}
    chosen = given.target or [name for name in targets() if not given.keyed or name in ("embedded", "broker")]
    times = (given.seconds, given.every, given.settle, given.shortest, given.pause)
    runs = [Run(target, *times, roles[target]) for target in chosen]
    first = given.seed or given.first or int(time.time()) % 1_000_000
    until = time.monotonic() + 60 * given.minutes
    for run, number in zip(itertools.cycle(runs), itertools.count()):
        if time.monotonic() > until or (given.seed is not None and number == len(runs)):
            break
        seed = first + number // len(runs)
        say(f"seed {seed} on {run.target} ...")
        result = run.round(seed)
        for text in result.violations:
            say(f"  {text}")
        if result.violations:
            say(f"  repeat it with: {run.command(seed)}")
        say(
            f"  {len(result.history.publishes)} publishes, {len(result.history.deliveries)} deliveries, "
            f"{result.faults.total()} faults, {len(result.violations)} violations, {result.seconds:.0f} s"
        )
    for run in runs:
        run.close()
    print_table(runs)
    return any(run.figures["violations"] for run in runs)


if __name__ == "__main__":
    sys.exit(main())
