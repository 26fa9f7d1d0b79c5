"""A standalone Spark cluster whose processes are killed; `make spark-cluster` delivers a packed environment, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.spark.cluster_run import run
from tests.support.spark_cluster import REAL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.timeout(400)
def test_contents_are_equal_after_kills(spark: SparkSession) -> None:
    assert not REAL, "the run has a cluster of its own"
    run(6000, short=True)
