"""A query whose Python processes are killed; `make spark-long` kills ten drivers with their Java."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import define, field
from pyspark.errors import StreamingQueryException

from tests.spark.exactly_once import Driver, Publishing, Result, compare, compare_counts, run
from tests.spark.exactly_once_driver import finish, start
from tests.support.spark_cluster import running_servers
from tests.support.spark_queries import after_slow_starts, wait_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_PATIENCE = 120


@define
class Query(Driver):
    """A query in the session of the tests: what is killed is the process that plans it, and its workers."""

    session: SparkSession = field(kw_only=True)

    def run_and_kill(self, chance: random.Random) -> str:
        """Start it, and kill its processes while it runs a batch."""
        query = after_slow_starts(self._start)
        before = self.done()
        try:
            self._wait(query, lambda: self._planned() > self.done() > before, "a batch is run")
            killed = kill_processes()
            with pytest.raises(StreamingQueryException):
                query.awaitTermination(_PATIENCE)
        finally:
            query.stop()
        return f"{killed} processes, {self.done() - before} batches later"

    def _start(self) -> StreamingQuery:
        query = start(self.session, self.folder, self.options, processingTime="0 seconds")
        self._wait(query, lambda: self.done() > 0, "a batch is done")
        return query

    def _wait(self, query: StreamingQuery, condition: Callable[[], bool], what: str) -> None:
        """Wait for something while the query runs; raises its error if it fails."""
        wait_for(lambda: condition() or not query.isActive, what, _PATIENCE)
        if (error := query.exception()) is not None:
            raise error

    def _planned(self) -> int:
        return sum(path.name.isdigit() for path in (self.folder / "checkpoint" / "offsets").glob("*"))

    def finish(self) -> None:
        """Read to the end."""
        finish(self.session, self.folder, self.options, {})


def kill_processes() -> int:
    """Kill -9 the processes of `tests.support.spark_python` that plan streams and run tasks; return their number.

    Those that Spark starts workers from stay, as they do when a machine is out of memory; each leads a group.
    """
    found: dict[int, tuple[int, int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        found[int(stat.parent.name)] = (int(words[1]), int(words[2]))
    (server,) = (pid for pid, (parent, _) in found.items() if parent == os.getpid() and _is_server(pid))
    below = [server]
    for pid in below:
        below += [child for child, (parent, _) in found.items() if parent == pid]
    killed = [pid for pid in below[1:] if found[pid][1] != pid]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    # Spark looks whether an idle worker is alive before it gives it a task
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in killed), "the processes have ended")
    return len(killed)


def _is_server(pid: int) -> bool:
    return b"tests.support.spark_python" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def test_every_message_is_in_parquet_once(spark: SparkSession, tmp_path: Path) -> None:
    with running_servers() as servers:
        result = run(1, 7, tmp_path, servers, kind=partial(Query, session=spark), rate=100)
    assert result.wrong == []
    assert result.numbers["rows"] >= result.numbers["messages acknowledged"] > 50


RIGHT = [["t", 0, 0, "a0", "one"], ["t", 0, 1, "a1", "two"]]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (RIGHT, ""),
        (RIGHT[:1], "1 lost: ['two']"),
        (RIGHT[:1], "1 places left out: [\"('t', 0, 1)\"]"),
        ([*RIGHT, RIGHT[0]], "3 more than once"),
        ([*RIGHT, ["t", 0, 2, "a2", "three"]], "1 never stored, and yet read: ['three']"),
        ([*RIGHT, ["t", 0, 2, "a2", "unknown"]], "1 places that are not there"),
    ],
)
def test_the_comparison_finds_lost_and_repeated_rows(rows: list[list[object]], problem: str, tmp_path: Path) -> None:
    (tmp_path / "found.json").write_text(json.dumps(rows))
    publishing = Publishing([], {}, random.Random(1), stored={"one", "two"}, unknown={"unknown"})
    wrong = compare(Driver(tmp_path, {}), publishing, {("t", 0): 2}, 0).wrong
    assert any(found.startswith(problem) for found in wrong) if problem else wrong == []


@pytest.mark.parametrize(
    ("windows", "wrong"),
    [
        ([[0, 2], [50, 1]], []),
        ([[0, 2]], ["1 windows differ: [(50, 1)]"]),
        ([[0, 2], [0, 2], [50, 1]], ["1 windows differ: [(0, 2)]"]),
        ([[0, 1], [50, 1]], ["2 windows differ: [(0, 1), (0, 2)]"]),
    ],
)
def test_the_comparison_finds_wrong_counts(windows: list[list[int]], wrong: list[str], tmp_path: Path) -> None:
    bodies = ["t 7", "t 8", "t 50", f"t {10_000_000}"]
    (tmp_path / "found.json").write_text(json.dumps([["t", 0, 0, "a", body] for body in bodies]))
    (tmp_path / "counts.json").write_text(json.dumps({"messages": 3, "windows": windows}))
    result = Result({}, [])
    compare_counts(Driver(tmp_path, {}, {"source": "t"}), result)
    assert result.wrong == wrong
