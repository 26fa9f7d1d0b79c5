"""A query whose driver is killed; `make spark-long` kills ten drivers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.exactly_once import Driver, Publishing, Result, compare, compare_counts, run
from tests.spark.exactly_once_driver import finish
from tests.support.spark_cluster import running_servers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.timeout(300)
def test_every_message_is_in_parquet_once(spark: SparkSession, tmp_path: Path) -> None:
    with running_servers() as servers:
        # with this seed the driver is killed soon after its first batch
        result = run(
            *(1, 7, tmp_path, servers), lambda driver: finish(spark, driver.folder, driver.options, {}), rate=100
        )
    assert result.wrong == []
    assert result.numbers["rows"] >= result.numbers["messages acknowledged"] > 300


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
