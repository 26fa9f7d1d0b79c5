"""Jobs on a standalone Spark cluster; `make spark-cluster` also delivers a packed environment and runs the examples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.cluster_run import PARTITIONS, Run, check
from tests.spark.conftest import ROOT, java_version
from tests.spark.speculating import SLOW
from tests.support.spark_standalone import Standalone, archive_of_link, interpreter, standalone

if TYPE_CHECKING:
    from tests.support.spark_cluster import Servers

_MESSAGES = 600
_PARTITIONS = 2

pytestmark = [
    pytest.mark.skipif(java_version() < 17, reason="Java 17 is missing"),
    pytest.mark.timeout(240),
]


@pytest.fixture(scope="module")
def standalone_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """A master and two workers on two hosts."""
    with standalone(tmp_path_factory.mktemp("standalone")) as spark:
        yield spark


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of workers: Spark does not give them the path of the driver."""
    return interpreter(tmp_path_factory.mktemp("python"), ROOT)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs more than one loopback address")
def test_a_task_that_runs_twice_at_once(
    standalone_spark: Standalone, python: Path, servers: Servers, tmp_path: Path
) -> None:
    topic = servers.make_topic("speculated", _PARTITIONS, extend=False)
    wanted = []
    for partition in range(_PARTITIONS):
        bodies = [b"%d-%d" % (partition, number) for number in range(_MESSAGES)]
        servers.publish(topic, bodies, partition)
        wanted += [[partition, servers.first + number, body.decode()] for number, body in enumerate(bodies)]
    start = json.dumps({topic: {str(partition): servers.first for partition in range(_PARTITIONS)}})
    options = {"subscribe": topic, "channel": "spark", "minPartitions": "4", "arrowBatchRows": "50"}
    given = json.dumps(servers.options | options | {"startingOffsets": start})
    program = subprocess.run(
        [sys.executable, "-m", "tests.spark.speculating", standalone_spark.url, str(tmp_path), given],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": str(python), "SPARK_LOCAL_IP": "127.0.0.1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert program.returncode == 0, program.stderr[-5000:]
    attempts = {path.name for path in tmp_path.glob(f"attempt-{SLOW}-*")}
    assert attempts == {f"attempt-{SLOW}-0", f"attempt-{SLOW}-1"}
    assert sorted(json.loads((tmp_path / "found.json").read_text())) == wanted


@pytest.mark.timeout(400)
def test_contents_are_equal_after_kills(standalone_spark: Standalone, servers: Servers, tmp_path: Path) -> None:
    assert servers.cluster is not None, "the topic must be new"
    topic = servers.make_topic("numbers", PARTITIONS, extend=True, replicas=2)
    archive = archive_of_link(tmp_path, ROOT)
    check(Run(standalone_spark, servers.options["lookupd"], topic, archive, tmp_path, 6000))
