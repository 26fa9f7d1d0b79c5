"""Reads, writes and streams on a standalone Spark cluster while its processes are killed: ``make spark-cluster``.

Starts an NSQ cluster of three nodes, a Spark master and two workers. The environment is delivered with
``spark.archives``, packed by venv-pack. Kills an executor during a batch write, lets a task of a stream run twice at
the same time, and kills a worker and the driver during another stream; then compares the contents, kills a leader,
which loses messages that the stream has read, and runs the Spark programs of ``examples``. ``--short`` delivers a link
to this interpreter instead of a packed environment.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
from attrs import frozen

from nsqext.broker import Cluster
from nsqext.sync import Producer
from tests.spark.cluster_driver import HESITATION
from tests.support.spark_standalone import (
    JAVA_OPTIONS,
    SESSION,
    Standalone,
    archive_of_link,
    archive_of_venv,
    standalone,
)

ROOT = Path(__file__).parent.parent.parent
PARTITIONS = 4
_BATCHES = 20
"""Batches of the stream."""
_DEADLINE = 200.0
_LOST = 50
"""Messages that the leader loses."""


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


@frozen
class Driver:
    """A running driver, which does one job after the other."""

    process: subprocess.Popen[str]
    errors: Path

    def result(self) -> object:
        """Wait until the next job has ended, and return what the driver printed about it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.errors.read_text()[-5000:]
        return json.loads(line)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition while the driver runs."""
        deadline = time.monotonic() + _DEADLINE
        while not condition():
            assert self.process.poll() is None, self.errors.read_text()[-5000:]
            assert time.monotonic() < deadline, self.errors.read_text()[-5000:]
            time.sleep(0.02)

    def kill(self) -> None:
        """End the driver and its Java process by SIGKILL."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@frozen
class Run:
    """A run.

    Attributes:
        spark: the Spark cluster.
        lookupd: lookup address of the NSQ cluster.
        topic: an empty topic.
        archive: the environment of workers.
        folder: for files.
        rows: number of messages.
    """

    spark: Standalone
    lookupd: str
    topic: str
    archive: Path
    folder: Path
    rows: int

    def _conf(self) -> dict[str, Any]:
        return SESSION | {
            "spark.archives": f"{self.archive}#environment",
            "spark.driver.memory": "768m",
            "spark.executor.extraJavaOptions": JAVA_OPTIONS,
            "spark.executor.memory": "512m",
            "spark.log.level": "WARN",
            # a task that takes longer than the others did runs a second time on another host
            "spark.speculation": "true",
            "spark.speculation.interval": "100ms",
            "spark.speculation.quantile": "0.5",
            "spark.speculation.minTaskRuntime": "1s",
            "spark.task.maxFailures": "8",
        }

    def options(self) -> dict[str, str]:
        """Return the options of jobs."""
        return {
            "lookupd": self.lookupd,
            "topic": self.topic,
            "rows": str(self.rows),
            "batch": str(max(self.rows // _BATCHES, 1)),
            "folder": str(self.folder),
        }

    def _environment(self) -> dict[str, str]:
        own = {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": "./environment/bin/python", "SPARK_LOCAL_IP": "127.0.0.1"}
        return os.environ | own

    def _home(self) -> Path:
        home = self.folder / "driver"
        home.mkdir(exist_ok=True)
        return home

    @contextmanager
    def driver(self, *jobs: str) -> Iterator[Driver]:
        """Run a driver."""
        options = self.options() | {"master": self.spark.url, "conf": self._conf()}
        errors = self.folder / f"{'-'.join(jobs)}.log"
        with errors.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.cluster_driver", ",".join(jobs), json.dumps(options)],
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=self._environment(),
                cwd=self._home(),
                start_new_session=True,
            )
        driver = Driver(process, errors)
        try:
            yield driver
        finally:
            if process.poll() is None:
                driver.kill()

    def example(self, name: str, *arguments: str) -> str:
        """Run an example on the Spark cluster; returns what it prints."""
        conf = [f"--conf {shlex.quote(f'{option}={value}')}" for option, value in self._conf().items()]
        command = [sys.executable, str(ROOT / "examples" / name), "--lookupd", self.lookupd, "--master", self.spark.url]
        done = subprocess.run(
            [*command, *arguments],
            env=self._environment() | {"PYSPARK_SUBMIT_ARGS": f"{' '.join(conf)} pyspark-shell"},
            cwd=self._home(),
            capture_output=True,
            text=True,
            timeout=_DEADLINE,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-5000:]
        return done.stdout

    def batches(self) -> int:
        """Return the number of completed batches of the stream."""
        return len(list(self.folder.glob("streamed/checkpoint/commits/[0-9]*")))

    def write_and_read(self, driver: Driver) -> int:
        """Publish while an executor is killed, and read; returns the number of messages."""
        driver.wait_for((self.folder / "writing").exists)
        driver.wait_for(lambda: self.spark.kill_executor(0))
        say("executor killed")
        assert driver.result() == self.rows
        found = driver.result()
        assert isinstance(found, list)
        total, ids, values = found
        say(f"batch: {total} messages, {ids} ids, {values} values of {self.rows} rows")
        assert ids == values == self.rows, "the ids tell duplicates apart, and nothing is missing"
        assert total >= self.rows
        return int(total)

    def kill_during_stream(self, driver: Driver) -> None:
        """Kill a worker and then the driver, each in the middle of the stream."""
        driver.wait_for(lambda: self.batches() >= 2)
        self.spark.kill_worker(1)
        say("worker killed")
        before = self.batches()
        driver.wait_for(lambda: self.batches() >= before + 2)
        driver.kill()
        say(f"driver killed after {self.batches()} batches")
        assert self.batches() < _BATCHES, "messages are left"

    def contents(self, name: str) -> Counter[tuple[int, int, bytes]]:
        """Return how often each message is in the files of a stream: partition, offset and body."""
        table = ds.dataset(committed_files(self.folder / name / "rows"), format="parquet").to_table()
        columns = (table[column].to_pylist() for column in ("partition", "offset", "value"))
        return Counter(zip(*columns, strict=True))


def committed_files(folder: Path) -> list[str]:
    """Return the files that Spark's file sink has committed."""
    names: list[str] = []
    for log in (folder / "_spark_metadata").glob("[0-9]*"):
        lines = log.read_text().splitlines()[1:]
        names += [json.loads(line)["path"].removeprefix("file://") for line in lines]
    return sorted(set(names))


def check(run: Run) -> None:
    """Write, read and stream while processes are killed; raises AssertionError if the contents differ.

    Another driver reads the rest of the stream whose driver was killed.
    """
    with run.driver("write", "read", "speculate", "stream") as driver:
        total = run.write_and_read(driver)
        driver.result()
        slow = (run.folder / HESITATION).read_text()
        attempts = sorted(path.name for path in run.folder.glob(f"attempt-{slow}-*"))
        say(f"attempts of the task that hesitated: {attempts}")
        assert len(attempts) > 1, "an attempt waited for ever, and another one completed the task"
        run.kill_during_stream(driver)
    with run.driver("stream") as driver:
        driver.result()
    speculated, streamed = run.contents("speculated"), run.contents("streamed")
    for counts in (speculated, streamed):
        say(f"stream: {len(counts)} messages, {sum(counts.values())} rows")
        assert len(counts) == sum(counts.values()), "every message once"
        assert len(counts) >= total, "a killed attempt of the write may have stored messages later"
        assert has_no_gap(counts)
        assert {int(body) for _, _, body in counts} == set(range(run.rows))
    assert speculated <= streamed, "both streams read the same"


def check_truncation(run: Run, nsq: Cluster) -> None:
    """Let a leader lose messages that the stream has read, and continue the stream; raises AssertionError.

    Args:
        run: a run whose stream has read everything.
        nsq: its NSQ cluster.
    """
    end = max(offset for partition, offset, _ in run.contents("streamed") if partition == 0) + 1
    leader = nsq.leader(run.topic)
    nsq.kill(leader)
    nsq.restart(leader)
    nsq.wait_writable(run.topic, 0)
    nsq.faults.truncate(run.topic, 0, end - _LOST)
    new = [b"new %d" % number for number in range(_LOST + 10)]
    with Producer(nsq.lookupd) as producer:
        producer.publish_many(run.topic, new, partition=0)
    with run.driver("truncated") as driver:
        found = driver.result()
    assert isinstance(found, list)
    cause, rows = found
    say(f"after a truncation: {cause}; then {rows} rows")
    assert cause.startswith(f"DataLoss: message {end - 1}, the last message read, was the message with id")
    read = {(offset, body): count for (_, offset, body), count in run.contents("streamed").items() if b"new" in body}
    assert read == {(end - _LOST + number, body): 1 for number, body in enumerate(new)}, "every new message once"
    assert rows == len(new)


def has_no_gap(messages: Iterable[tuple[int, int, bytes]]) -> bool:
    """Return whether the offsets of each partition are consecutive numbers."""
    offsets: dict[int, set[int]] = {}
    for partition, offset, _ in messages:
        offsets.setdefault(partition, set()).add(offset)
    return all(max(found) - min(found) + 1 == len(found) for found in offsets.values())


def check_examples(run: Run, topic: str) -> None:
    """Write, stream and read with the example programs."""
    out = run.folder / "orders"
    run.example("spark_write.py", "--topic", topic, "--rows", "1000")
    run.example("spark_stream.py", "--topic", topic, "--out", str(out), "--once")
    table = run.example("spark_read.py", "--topic", topic)
    rows = ds.dataset(committed_files(out / "rows"), format="parquet").to_table(["value"])["value"].to_pylist()
    assert sorted(rows) == sorted(b'{"id":%d}' % number for number in range(1000))
    say(table)


def main() -> None:
    """Run, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--short", action="store_true", help="do not pack an environment")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spark") as name, Cluster(nodes=3) as nsq:
        folder = Path(name)
        nsq.create_topic("numbers", PARTITIONS, extend=True, replicas=2, channels=["keep"])
        archive = archive_of_link(folder, ROOT) if given.short else archive_of_venv(folder, ROOT)
        say(f"environment: {archive.stat().st_size / 1e6:.1f} MB")
        with standalone(folder / "spark") as spark:
            say(f"Spark at {spark.url}")
            run = Run(spark, nsq.lookupd[0], "numbers", archive, folder, given.rows)
            check(run)
            check_truncation(run, nsq)
            nsq.create_topic("orders", 2, channels=["keep"])
            check_examples(run, "orders")
    say("contents equal")


if __name__ == "__main__":
    main()
