"""Jobs on a standalone Spark cluster; `make spark-cluster` also delivers a packed environment and runs the examples."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.spark.cluster_driver import stream
from tests.spark.cluster_run import PARTITIONS, Run, check
from tests.spark.conftest import ROOT
from tests.support.spark_standalone import archive_of_link, standalone

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.spark_cluster import Servers


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs more than one loopback address")
@pytest.mark.timeout(400)
def test_contents_are_equal_after_kills_and_with_a_task_that_runs_twice(
    spark: SparkSession, servers: Servers, tmp_path: Path
) -> None:
    """The session of the tests continues the stream whose driver was killed, in one batch."""
    topic = servers.make_topic("numbers", PARTITIONS, extend=True, replicas=2)
    archive = archive_of_link(tmp_path, ROOT)
    with standalone(tmp_path / "standalone") as cluster:
        run = Run(cluster, servers.options["lookupd"], topic, archive, tmp_path, 6000)
        check(run, partial(stream, spark, run.options() | {"batch": "100000"}))
