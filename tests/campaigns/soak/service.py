"""Everything of a service on each cluster for hours: ``python -m tests.campaigns.soak.service --minutes 360``.

On each cluster run an outbox and delayed messages with two relays each, two consumers that share keys over tags, two
workers of Celery, and a mirror to the next cluster. Nodes and programs are killed all the time, the second program of
each kind never: from 20 samples on, its memory and descriptors may not grow. At the end every number was handled, each
key in order where that is promised, and the tables are empty.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from secrets import token_hex
from statistics import median
from typing import TYPE_CHECKING

import anyio
from attrs import define, field

from nsqext.testing.simulation import Fault
from tests.campaigns.soak.__main__ import say
from tests.campaigns.soak.clusters import new_cluster, targets
from tests.campaigns.soak.service_parts import PARTS, Part, Site
from tests.campaigns.soak.soak_round import delete_topics

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.campaigns.soak.clusters import SoakCluster

__all__ = ("Sample", "ServiceSoak", "growth", "run", "watch_all")

_DRAIN = 240.0
"""Seconds after the last fault within which everything is handled."""
_NODE_MEMORY = 8 << 20
"""Bytes of messages in a node of the embedded cluster: more would grow for an hour."""
_NODES = ("n1", "n2", "n3")
_ENOUGH = 20
"""Samples from which growth is judged."""
_FACTOR, _KILOBYTES, _DESCRIPTORS = 1.2, 8_000, 20
"""What a program may grow by."""
_WARM = 0.25
"""Part of the samples of a program in which it may still grow."""


@define(frozen=True)
class Sample:
    """What a process uses.

    Attributes:
        kilobytes: resident memory.
        descriptors: open descriptors.
    """

    kilobytes: int
    descriptors: int


def sample(pid: int) -> Sample | None:
    """Return what a process and its children use; None if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        found = Sample(pages * 4, len(list(Path(f"/proc/{pid}/fd").iterdir())))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return found


def growth(samples: list[Sample]) -> tuple[Sample, Sample]:
    """Return the medians of the second quarter, and of the last quarter, of samples."""
    quarter = max(1, int(len(samples) * _WARM))
    parts = samples[quarter : 2 * quarter] or samples[-1:], samples[-quarter:]
    first, last = (
        Sample(
            int(median(one.kilobytes for one in part)),
            int(median(one.descriptors for one in part)),
        )
        for part in parts
    )
    return first, last


@define(eq=False)
class ServiceSoak:
    """The parts on one cluster.

    Attributes:
        target: kind of the cluster.
        cluster: the cluster.
        site: what parts know of it.
        folder: for files and logs.
        parts: what runs on it.
        faults: number of faults by kind.
        samples: by program.
        rows: most rows of each table, and those at the end.
        violations: what is wrong.
    """

    target: str
    cluster: SoakCluster
    site: Site
    folder: Path
    parts: list[Part] = field(factory=list)
    faults: Counter[str] = field(factory=Counter)
    samples: dict[str, list[Sample]] = field(factory=dict)
    rows: dict[str, list[int]] = field(factory=dict)
    violations: list[str] = field(factory=list)

    def disturb(self, until: float, every: float, seed: int) -> None:
        """Kill nodes and programs until a moment; all nodes run then. An error is a violation: faults are missing."""
        try:
            self._disturb(until, every, seed)
        except BaseException as error:
            self.violations.append(f"no further faults after {error!r}")
            raise

    def _disturb(self, until: float, every: float, seed: int) -> None:
        chance = random.Random(seed)
        kinds = [kind for kind in self.cluster.kinds if kind != "kill" or not getattr(self.cluster, "forgets", False)]
        while (rest := until - time.monotonic()) > 0:
            time.sleep(min(rest, chance.uniform(0.5, 1.5) * every))
            if time.monotonic() >= until:
                return
            if chance.random() < 0.5:
                self.faults[chance.choice(self.parts).kill(chance)] += 1
                continue
            seconds = self.cluster.shortest + chance.uniform(0.5, 3.0)
            fault = Fault(chance.choice(kinds), 0.0, seconds, chance.choice(_NODES), chance.random())
            self.faults[fault.kind] += 1
            end = self.cluster.begin(fault, self.site.created)
            time.sleep(seconds)
            end()

    def watch(self, own: Mapping[str, int]) -> None:
        """Take a sample of each program that is never killed, of other processes, and of each table."""
        pids = {
            name: program.process.pid
            for part in self.parts
            for name, program in part.programs.items()
            if name.endswith("2") and program.process is not None
        }
        for name, pid in {**pids, **self.cluster.pids(), **own}.items():
            found = sample(pid)
            if found is not None:
                self.samples.setdefault(f"{self.target}: {name}", []).append(found)
        for part in self.parts:
            for name, count in part.rows().items():
                self.rows.setdefault(f"{self.target}: {name}", []).append(count)

    def judge(self) -> None:
        """Add violations of the parts; they have ended."""
        for part in self.parts:
            lost, late = part.ledger.missing(), part.ledger.total("late")
            self.violations += [f"{part.name}: {lost} numbers were lost"] if lost else []
            self.violations += [f"{part.name}: {late} numbers came late"] if late and part.ordered else []
            self.violations += part.errors
        self.violations += [f"{name}: {counts[-1]} rows are left" for name, counts in self.rows.items() if counts[-1]]
        for name, samples in self.samples.items():
            first, last = growth(samples)
            grown = last.kilobytes > _FACTOR * first.kilobytes + _KILOBYTES
            if len(samples) >= _ENOUGH and (grown or last.descriptors > first.descriptors + _DESCRIPTORS):
                self.violations.append(f"{name} has grown from {first} to {last}")


def _start(chosen: list[str], folder: Path, seed: int) -> list[ServiceSoak]:
    soaks: list[ServiceSoak] = []
    for target in chosen:
        own = folder / target
        own.mkdir()
        cluster = new_cluster(target, seed, own, memory=_NODE_MEMORY)
        cluster.start()
        replicas = 3 if target == "real" else 2
        soaks.append(
            ServiceSoak(target, cluster, Site(cluster.lookupd, target != "original", replicas, token_hex(3)), own)
        )
    return soaks


def _add_parts(soaks: list[ServiceSoak], names: list[str], pause: float) -> None:
    for number, soak in enumerate(soaks):
        other = soaks[(number + 1) % len(soaks)].site
        for name in names:
            if name == "keys over tags" and not soak.site.redesigned:
                continue
            folder = soak.folder / name.replace(" ", "_")
            folder.mkdir()
            part = PARTS[name](soak.site, other, folder)
            soak.parts.append(part)
            part.begin(pause)


def watch_all(soaks: list[ServiceSoak], disturbing: list[threading.Thread], seconds: float) -> None:
    """Take samples for a time, a dozen or one each minute, and wait until threads end.

    On a busy machine the last fault ends late. Samples of this time would be enough to judge the growth of a program
    that has just started.
    """
    between = min(60.0, seconds / 12)
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(thread.is_alive() for thread in disturbing):
        time.sleep(between)
        for number, soak in enumerate(soaks):
            soak.watch({} if number else {"producers and consumers of all clusters": os.getpid()})
    for thread in disturbing:
        thread.join()


def _drain(soaks: list[ServiceSoak]) -> None:
    parts = [part for soak in soaks for part in soak.parts]
    deadline = time.monotonic() + _DRAIN + max(soak.cluster.settle for soak in soaks)
    while time.monotonic() < deadline and any(part.ledger.missing() or any(part.rows().values()) for part in parts):
        time.sleep(0.5)
    time.sleep(2.0)  # what is delivered again is delivered now


def _end_parts(soaks: list[ServiceSoak]) -> None:
    parts = [part for soak in soaks for part in soak.parts]
    for part in parts:
        part.close()
    for part in parts:
        part.errors += part.explain()


def run(
    chosen: list[str], seconds: float, folder: Path, *, names: list[str], every: float, pause: float, seed: int
) -> list[ServiceSoak]:
    """Run the parts on clusters for a time, and judge them.

    Args:
        chosen: kinds of clusters; each mirrors to the next one, the last one to the first.
        seconds: how long.
        folder: for files and logs.
        names: of parts.
        every: seconds between two faults of a cluster, on average.
        pause: seconds between two numbers of all keys.
        seed: of faults.
    """
    soaks = _start(chosen, folder, seed)
    try:
        _add_parts(soaks, names, pause)
        until = time.monotonic() + seconds
        threads = [
            threading.Thread(target=soak.disturb, args=(until, every, seed + number))
            for number, soak in enumerate(soaks)
        ]
        for thread in threads:
            thread.start()
        watch_all(soaks, threads, seconds)
        for soak in soaks:
            for part in soak.parts:
                part.end_publishing()
        _drain(soaks)
        for soak in soaks:
            soak.watch({})
    finally:
        try:
            _end_parts(soaks)
        finally:
            for soak in soaks:
                if soak.target == "real":
                    anyio.run(delete_topics, soak.site.lookupd, {name: name for name in soak.site.created})
                soak.cluster.stop()
    for soak in soaks:
        soak.judge()
    return soaks


def print_tables(soaks: list[ServiceSoak]) -> None:
    """Print what each part did, the faults, and what programs and tables used."""
    say("| cluster | part | published | lost | out of order | repeated |\n| --- | --- | ---: | ---: | ---: | ---: |")
    for soak in soaks:
        for part in soak.parts:
            ledger = part.ledger
            late = f"{ledger.total('late')}" + ("" if part.ordered else " (not promised)")
            numbers = f"{sum(ledger.published.values())} | {ledger.missing()} | {late} | {ledger.total('repeated')}"
            say(f"| {soak.target} | {part.name} | {numbers} |")
    for soak in soaks:
        say(f"{soak.target}: " + ", ".join(f"{kind} {count}" for kind, count in sorted(soak.faults.items())))
    say("| program or table | second quarter | last quarter |\n| --- | ---: | ---: |")
    for soak in soaks:
        for name, samples in soak.samples.items():
            first, last = growth(samples)
            say(
                f"| {name} | {first.kilobytes / 1000:.1f} MB, {first.descriptors} descriptors "
                f"| {last.kilobytes / 1000:.1f} MB, {last.descriptors} descriptors |"
            )
        for name, counts in soak.rows.items():
            say(f"| {name} | {max(counts)} rows at most | {counts[-1]} rows at the end |")


def main() -> int:
    """Run the parts on all clusters at once; 1 when something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.soak.service", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument(
        "--target", action="append", choices=targets(), help="embedded, original, and real if available"
    )
    parser.add_argument("--part", action="append", choices=tuple(PARTS), help="all by default")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two faults of a cluster")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds between two numbers of all keys")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000, help="of faults; random without it")
    given = parser.parse_args()
    chosen = given.target or [name for name in targets() if name != "broker"]
    folder = Path(tempfile.mkdtemp(prefix="soak-service-"))
    say(f"seed {given.seed} on {', '.join(chosen)}, {given.minutes:g} minutes ...")
    soaks = run(
        chosen,
        60 * given.minutes,
        folder,
        names=given.part or list(PARTS),
        every=given.every,
        pause=given.pause,
        seed=given.seed,
    )
    print_tables(soaks)
    wrong = [f"{soak.target}: {text}" for soak in soaks for text in soak.violations]
    for text in wrong:
        say(f"  {text}")
    say(f"violations: {len(wrong)}")
    if wrong:
        say(f"logs: {folder}")
    else:
        shutil.rmtree(folder)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
