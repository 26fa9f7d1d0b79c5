"""Reads, writes and streams on a standalone Spark cluster while its processes are killed: ``make spark-cluster``.

Starts an NSQ cluster of three nodes, a Spark master and two workers. The environment is delivered with
``spark.archives``, packed by venv-pack. Kills an executor during a batch write, and a worker and the driver during a
stream; then compares the contents. ``--short`` delivers a link to this interpreter instead of a packed environment.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pyarrow.dataset as ds
from attrs import frozen

from nsqext.broker import Cluster
from tests.support.spark_standalone import Standalone, archive_of_link, archive_of_venv, standalone

ROOT = Path(__file__).parent.parent.parent
TOPIC = "numbers"
PARTITIONS = 4
_DEADLINE = 400.0


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stdout.flush()


@frozen
class Job:
    """A driver that was started."""

    process: subprocess.Popen[str]
    errors: Path

    def result(self) -> object:
        """Wait for the end, and return what the driver printed."""
        out, _ = self.process.communicate(timeout=_DEADLINE)
        assert self.process.returncode == 0, self.errors.read_text()[-5000:]
        return json.loads(out.splitlines()[-1])


@frozen
class Run:
    """A run.

    Attributes:
        spark: the Spark cluster.
        lookupd: lookup address of the NSQ cluster.
        archive: the environment of workers.
        folder: for files.
        rows: number of messages.
    """

    spark: Standalone
    lookupd: str
    archive: Path
    folder: Path
    rows: int

    def start(self, job: str, **given: object) -> Job:
        """Start a driver."""
        conf = {
            "spark.archives": f"{self.archive}#environment",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "WARN",
            "spark.executor.memory": "512m",
            "spark.sql.shuffle.partitions": "2",
            "spark.task.maxFailures": "8",
        }
        options = {"master": self.spark.url, "conf": conf, "lookupd": self.lookupd, "topic": TOPIC, **given}
        home = self.folder / "driver"
        home.mkdir(exist_ok=True)
        errors = self.folder / f"{job}.log"
        env = os.environ | {
            "PYTHONPATH": str(ROOT),
            "PYSPARK_PYTHON": "./environment/bin/python",
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        with errors.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.cluster_driver", job, json.dumps(options)],
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=env,
                cwd=home,
                start_new_session=True,
            )
        return Job(process, errors)

    def write(self) -> None:
        """Publish while an executor is killed."""
        job = self.start("write", rows=self.rows, tasks=8)
        self._wait(lambda: self.spark.executors(0), job)
        time.sleep(3)
        say(f"executor killed: {self.spark.kill_executor(0)}")
        job.result()

    def read(self) -> list[int]:
        """Return the numbers of messages, ids and values."""
        found = self.start("read").result()
        assert isinstance(found, list)
        return found

    def stream(self) -> Counter[tuple[int, int]]:
        """Stream while a worker and the driver are killed; returns how often each message was written."""
        out = self.folder / "out"
        batch = {"out": str(out), "batch": max(self.rows // 20, 1)}
        job = self.start("stream", **batch)
        self._wait(lambda: len(list(out.glob("checkpoint/commits/[0-9]*"))) >= 2, job)
        self.spark.kill_worker(1)
        say("worker killed")
        self._wait(lambda: len(list(out.glob("checkpoint/commits/[0-9]*"))) >= 5, job)
        os.killpg(job.process.pid, signal.SIGKILL)
        job.process.communicate()
        say("driver killed")
        self.spark.start_worker()
        self.start("stream", **batch).result()
        files = _committed(out / "rows")
        table = ds.dataset(files, format="parquet").to_table(columns=["partition", "offset"])
        return Counter(zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True))

    def _wait(self, condition, job: Job) -> None:  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + _DEADLINE
        while not condition():
            assert job.process.poll() is None, job.errors.read_text()[-5000:]
            assert time.monotonic() < deadline, job.errors.read_text()[-5000:]
            time.sleep(0.05)


def _committed(folder: Path) -> list[str]:
    """Return the files that Spark's file sink has committed."""
    names: list[str] = []
    for log in (folder / "_spark_metadata").glob("[0-9]*"):
        lines = log.read_text().splitlines()[1:]
        names += [json.loads(line)["path"].removeprefix("file://") for line in lines]
    return sorted(set(names))


def run(rows: int, *, short: bool) -> None:
    """Run everything; raises AssertionError if the contents differ."""
    with tempfile.TemporaryDirectory(prefix="spark") as name, Cluster(nodes=3) as nsq:
        folder = Path(name)
        nsq.create_topic(TOPIC, PARTITIONS, extend=True, replicas=2, channels=["keep"])
        archive = archive_of_link(folder, ROOT) if short else archive_of_venv(folder, ROOT)
        say(f"environment: {archive.stat().st_size / 1e6:.1f} MB")
        with standalone(folder) as spark:
            say(f"Spark at {spark.url}")
            job = Run(spark, nsq.lookupd[0], archive, folder, rows)
            job.write()
            total, ids, values = job.read()
            say(f"batch: {total} messages, {ids} ids, {values} values of {rows} rows")
            assert ids == values == rows, "the ids tell duplicates apart, and nothing is missing"
            assert total >= rows
            counts = job.stream()
            say(f"stream: {len(counts)} messages, {sum(counts.values())} rows")
            assert len(counts) == sum(counts.values()) == total, "every message once"


def main() -> None:
    """Run, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--short", action="store_true", help="do not pack an environment")
    given = parser.parse_args()
    run(given.rows, short=given.short)
    say("contents equal")


if __name__ == "__main__":
    main()
