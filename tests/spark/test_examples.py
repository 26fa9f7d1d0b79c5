"""The Spark examples as programs, in the session of the tests; `make spark-cluster` starts them with ``--master``."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.conftest import ROOT
from tests.support.spark_queries import after_slow_starts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.spark_cluster import Servers

ROWS = 200


@pytest.fixture
def run_example(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs an example and returns what it prints; its session is the running one, which it does not stop."""
    monkeypatch.setattr(type(spark), "stop", lambda session: None)

    def run(name: str, *arguments: str) -> str:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", [name, "--master", "local[2, 2]", *arguments])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_write_stream_and_read(
    run_example: Callable[..., str], spark: SparkSession, servers: Servers, tmp_path: Path
) -> None:
    topic = servers.make_topic("orders", 2)
    where = ("--lookupd", servers.options["lookupd"], "--topic", topic)
    assert run_example("spark_write.py", *where, "--rows", str(ROWS)) == f"{ROWS} messages are stored\n"
    after_slow_starts(lambda: run_example("spark_stream.py", *where, "--out", str(tmp_path), "--once"))
    table = run_example("spark_read.py", *where)
    counts = [int(line.split("|")[2]) for line in table.splitlines() if line.startswith(("|0 ", "|1 "))]
    assert sum(counts) == ROWS + 2 * servers.first
    found = [bytes(row.value) for row in spark.read.parquet(str(tmp_path / "rows")).collect()]
    assert sorted(found)[-ROWS:] == sorted(b'{"id":%d}' % number for number in range(ROWS))
    assert len(found) == ROWS + 2 * servers.first
