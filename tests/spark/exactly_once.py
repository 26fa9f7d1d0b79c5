"""Kills a streaming query repeatedly, and compares its output: ``python -m tests.spark.exactly_once --kills 10``.

A driver streams topics of all kinds into Parquet (Delta with ``--delta``), while messages are published and nodes are
killed and leaders moved at random. The whole driver (Python, Java, workers) is ended by kill -9 at random moments and
started again. At the end every message must be in the output once. A second query counts the messages of a topic by
windows and publishes the counts to another topic: at the end each window must be there with its count, once after
`nsqext.spark.dedupe`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from attrs import define, field

from nsqext.errors import DeliveryUnknown, NsqError
from nsqext.spark.cluster.admin import SourceAdmin
from nsqext.spark.cluster.client_config import ClientConfig
from nsqext.sync import Producer
from tests.spark.exactly_once_driver import WINDOW
from tests.support.spark_cluster import Servers, running_servers
from tests.support.spark_queries import starting, wait_for

if TYPE_CHECKING:
    from nsqext.broker import Cluster

ROOT = Path(__file__).parent.parent.parent
_DRIVER = "tests.spark.exactly_once_driver"
_LAST = 10_000_000
"""Number of a last message, which completes all windows."""
_RATE = 400
_PATIENCE = 150.0
_SMALL = {"maxOffsetsPerTrigger": "700", "maxRecordsPerPartition": "200"}
"""Small batches of many tasks."""
_AT_LAST = {"maxOffsetsPerTrigger": "50000", "maxRecordsPerPartition": "50000"}
"""Batches for the remaining messages after the last fault."""


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@define
class Publishing:
    """Publishes numbered messages from a thread, and records the outcome of each.

    Attributes:
        lookupd: lookup addresses.
        topics: number of partitions by topic.
        rate: messages a second, at most.
        stored: bodies that were acknowledged.
        unknown: bodies that may be stored.
        refused: bodies that are not.
    """

    lookupd: list[str]
    topics: dict[str, int]
    chance: random.Random
    rate: float = _RATE
    stored: set[str] = field(factory=set)
    unknown: set[str] = field(factory=set)
    refused: set[str] = field(factory=set)

    def run(self, stop: threading.Event) -> None:
        """Publish until ``stop`` is set."""
        names = sorted(self.topics)
        with Producer(self.lookupd, on_unknown="raise") as producer:
            number = 0
            while not stop.wait(1 / self.rate):
                number += 1
                topic = self.chance.choice(names)
                body = f"{topic} {number}"
                try:
                    producer.publish(topic, body.encode(), partition=self.chance.randrange(self.topics[topic]))
                except DeliveryUnknown:
                    self.unknown.add(body)
                except NsqError:
                    self.refused.add(body)
                else:
                    self.stored.add(body)

    def close(self, topic: str) -> None:
        """Publish a last message, after which all windows are complete."""
        with Producer(self.lookupd) as producer:
            producer.publish(topic, f"{topic} {_LAST}".encode())
        self.stored.add(f"{topic} {_LAST}")


@define
class Trouble:
    """Kills nodes and moves leaders of the embedded cluster from a thread.

    Attributes:
        cluster: the cluster.
        topics: number of partitions by topic.
        killed: how often a node was killed.
        moved: how often a leader was moved.
    """

    cluster: Cluster
    topics: dict[str, int]
    chance: random.Random
    killed: int = 0
    moved: int = 0

    def run(self, stop: threading.Event) -> None:
        """Cause faults until ``stop`` is set; then repair everything."""
        while not stop.wait(self.chance.uniform(1, 4)):
            topic = self.chance.choice(sorted(self.topics))
            partition = self.chance.randrange(self.topics[topic])
            leader = self.cluster.leader(topic, partition)
            if self.chance.random() < 0.5:
                self.cluster.kill(leader)
                stop.wait(self.chance.uniform(0.5, 3))
                self.cluster.restart(leader)
                self.killed += 1
            else:
                others = [name for name in self.cluster.in_sync(topic, partition) if name != leader]
                self.cluster.move_leader(topic, partition, self.chance.choice(others))
                self.moved += 1
            wait_for(self._whole, "the cluster is whole again", timeout=60)

    def _whole(self) -> bool:
        return all(
            len(self.cluster.in_sync(topic, partition)) == len(self.cluster.nodes)
            for topic, partitions in self.topics.items()
            for partition in range(partitions)
        )


@define
class Driver:
    """The program that is killed.

    Attributes:
        folder: where it keeps everything.
        options: of the source.
        counts: topics ``source`` and ``target`` of the query that counts, and ``lookupd``; empty without it.
        delta: Maven coordinate of Delta, to write that instead of Parquet.
    """

    folder: Path
    options: dict[str, str]
    counts: dict[str, str] = field(factory=dict)
    delta: str = ""

    def start(self, mode: str) -> subprocess.Popen[bytes]:
        """Start it, in a session of its own: everything that it starts can be found by that."""
        environment = os.environ | {
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        given = (json.dumps(self.options), json.dumps(self.counts), self.delta)
        command = [sys.executable, "-m", _DRIVER, mode, str(self.folder), *given]
        with (self.folder / "driver.log").open("ab") as log:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def done(self) -> int:
        """Return how many batches are done."""
        return sum(path.name.isdigit() for path in (self.folder / "checkpoint" / "commits").glob("*"))

    def run_and_kill(self, chance: random.Random) -> str:
        """Start it and kill it at some moment; returns when that was."""
        before, process = self.done(), self.start("run")
        try:
            early = chance.random() < 0.25
            if not early:
                wait_for(lambda: self.done() > before or process.poll() is not None, "a batch is done", _PATIENCE)
            pause = chance.uniform(0, 12 if early else 4)
            time.sleep(pause)
            if process.poll() is not None:
                raise AssertionError(f"the driver ended by itself, see {self.folder / 'driver.log'}")
        finally:
            kill_session(process.pid)
            process.wait()
        return (
            f"{pause:.1f} s after {'its start' if early else 'the first batch'}, {self.done() - before} batches later"
        )

    def finish(self) -> None:
        """Start it to read to the end."""
        process = self.start("finish")
        try:
            if process.wait(_PATIENCE):
                raise AssertionError(f"the driver failed, see {self.folder / 'driver.log'}")
        finally:
            kill_session(process.pid)


def kill_session(session: int) -> None:
    """Kill -9 every process of a session."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                os.kill(int(entry.name), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended just now


@define
class Result:
    """Result of a run: numbers, and errors."""

    numbers: dict[str, int]
    wrong: list[str]


@contextmanager
def running(*programs: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run programs in threads, and stop them in the end; what one of them raised is raised."""
    stop = threading.Event()
    with ThreadPoolExecutor(len(programs)) as threads:
        futures = [threads.submit(program, stop) for program in programs]
        try:
            yield
        finally:
            stop.set()
    for future in futures:
        future.result()


def run(
    kills: int,
    seed: int,
    folder: Path,
    servers: Servers,
    *,
    kind: Callable[..., Driver] = Driver,
    rate: float = _RATE,
    count: bool = False,
    delta: str = "",
) -> Result:
    """Publish, cause faults, kill; then compare.

    Args:
        kills: how often the driver is killed.
        seed: of everything that is left to chance.
        folder: where the driver keeps everything.
        servers: the cluster.
        kind: the class of the driver.
        rate: messages that are published a second, at most.
        count: also count the messages of a topic, and publish the counts.
        delta: Maven coordinate of Delta, to write that instead of Parquet.
    """
    began, chance = time.monotonic(), random.Random(seed)
    extend = servers.make_topic("extend", 1, extend=True, replicas=3)
    topics = {
        servers.make_topic("plain", 2, replicas=3): 2,
        extend: 1,
        servers.make_topic("ordered", 2, ordered=True, replicas=3): 2,
    }
    driver = kind(
        folder,
        servers.options
        | {
            "subscribe": ",".join(topics),
            "channel": "spark",
            "startingOffsets": starting(servers.first, topics),
            "readTimeoutMs": "90000",  # a new leader has to be found within that, on a busy machine too
        }
        | _SMALL,
        delta=delta,
    )
    if count:
        target = servers.make_topic("counts", extend=True, replicas=3)
        driver.counts = {"source": extend, "target": target, "lookupd": servers.options["lookupd"]}
    publishing = Publishing(list(servers.lookupd), topics, random.Random(seed + 1), rate)
    trouble = Trouble(servers.cluster, topics, random.Random(seed + 2)) if servers.cluster is not None else None
    with running(publishing.run, *([trouble.run] if trouble else [])):
        for number in range(1, kills + 1):
            say(f"kill {number}: {driver.run_and_kill(chance)}")
    driver.options |= _AT_LAST
    publishing.close(extend)
    driver.finish()
    result = compare(driver, publishing, anyio.run(ends, servers, topics), servers.first)
    if count:
        compare_counts(driver, result)
    result.numbers |= {
        "kills of the driver": kills,
        "nodes killed": trouble.killed if trouble else 0,
        "leaders moved": trouble.moved if trouble else 0,
        "batches": driver.done(),
        "seconds": round(time.monotonic() - began),
    }
    return result


async def ends(servers: Servers, topics: dict[str, int]) -> dict[tuple[str, int], int]:
    """Return where the partitions end, as the servers say."""
    async with SourceAdmin(ClientConfig(tuple(servers.lookupd))) as admin:
        return {
            (topic, partition): (await admin.bounds(topic, partition)).end
            for topic, partitions in topics.items()
            for partition in range(partitions)
        }


def compare(driver: Driver, publishing: Publishing, ends: dict[tuple[str, int], int], first: int) -> Result:
    """Compare rows with messages: by their bodies, their ids, and their places in the partitions."""
    rows: list[tuple[str, int, int, str, str]] = json.loads((driver.folder / "found.json").read_text())
    bodies = Counter(body for *_, body in rows)
    ids = Counter((topic, identity) for topic, _, _, identity, _ in rows)
    places = Counter((topic, partition, offset) for topic, partition, offset, _, _ in rows)
    expected = {(*key, offset) for key, end in ends.items() for offset in range(first, end)}
    lost = publishing.stored - bodies.keys()
    phantom = bodies.keys() - publishing.stored - publishing.unknown
    twice = [what for what, count in (bodies + ids + places).items() if count > 1]
    wrong = [
        f"{len(found)} {what}: {sorted(map(str, found))[:5]}"
        for what, found in (
            ("lost", lost),
            ("never stored, and yet read", phantom),
            ("more than once", twice),
            ("places left out", expected - places.keys()),
            ("places that are not there", places.keys() - expected),
        )
        if found
    ]
    numbers = {
        "messages acknowledged": len(publishing.stored),
        "publishes of unknown fate": len(publishing.unknown),
        "publishes that failed": len(publishing.refused),
        "rows": len(rows),
        "lost": len(lost),
        "duplicated": len(twice),
    }
    return Result(numbers, wrong)


def compare_counts(driver: Driver, result: Result) -> None:
    """Compare the published counts with the rows, and add what is wrong to the result."""
    rows = json.loads((driver.folder / "found.json").read_text())
    numbers = [int(body.split()[1]) for topic, *_, body in rows if topic == driver.counts["source"]]
    expected = Counter(number - number % WINDOW for number in numbers if number < _LAST)
    counts = json.loads((driver.folder / "counts.json").read_text())
    found = Counter((first, count) for first, count in counts["windows"])
    windows = Counter(expected.items())
    result.numbers |= {"windows": len(found), "windows published twice": counts["messages"] - found.total()}
    if different := sorted((found - windows) + (windows - found)):
        result.wrong.append(f"{len(different)} windows differ: {different[:5]}")


def main() -> int:
    """Run what the command line asks for; 1 when anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.spark.exactly_once", description=__doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="kept, with the driver's log; a temporary one without it")
    parser.add_argument(
        "--delta",
        default="",
        metavar="COORDINATE",
        help="write Delta instead of Parquet, for example io.delta:delta-spark_4.2_2.13:4.4.0 with PySpark 4.2",
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, running_servers() as servers:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        result = run(given.kills, given.seed, folder, servers, count=not given.delta, delta=given.delta)
    for name, number in result.numbers.items():
        say(f"{name:32} {number:>10}")
    for problem in result.wrong:
        say(f"WRONG: {problem}")
    return bool(result.wrong)


if __name__ == "__main__":
    sys.exit(main())
