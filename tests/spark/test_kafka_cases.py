"""Cases of the suites of Spark's Kafka connector that no other test has: reuse of a DataFrame, progress, triggers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors.exceptions.captured import UnsupportedOperationException

from tests.support.spark_queries import run_to_end, starting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.support.spark_cluster import Servers


def read(spark: SparkSession, servers: Servers, topic: str) -> DataFrame:
    start = starting(servers.first, {topic: 1})
    options = {"subscribe": topic, "startingOffsets": start}
    return spark.read.format("nsqext").options(**servers.options, **options).load().select("value")


def test_a_dataframe_is_read_twice_in_one_job(spark: SparkSession, servers: Servers) -> None:
    topic = servers.make_topic("union")
    servers.publish(topic, [b"%d" % number for number in range(10)])
    rows = read(spark, servers, topic)
    found = sorted(bytes(row.value) for row in rows.union(rows).collect())
    assert found == sorted([b"%d" % number for number in range(10)] * 2)


def test_a_dataframe_keeps_the_end_of_its_first_read(spark: SparkSession, servers: Servers) -> None:
    """Spark keeps the plan of a source in Python."""
    topic = servers.make_topic("late")
    servers.publish(topic, [b"one"])
    rows = read(spark, servers, topic)
    assert rows.count() == 1
    servers.publish(topic, [b"two"])
    assert rows.count() == 1
    assert read(spark, servers, topic).count() == 2


def test_spark_refuses_continuous_processing(spark: SparkSession, servers: Servers, tmp_path: Path) -> None:
    topic = servers.make_topic("continuous")
    options = {"subscribe": topic, "channel": "spark", "startingOffsets": "earliest"}
    rows = spark.readStream.format("nsqext").options(**servers.options, **options).load()
    writer = rows.writeStream.format("console").trigger(continuous="1 second")
    with pytest.raises(UnsupportedOperationException, match="does not support continuous processing"):
        run_to_end(writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start)


def test_progress_of_a_stream_that_is_read_and_written(spark: SparkSession, servers: Servers, tmp_path: Path) -> None:
    source, target = servers.make_topic("source"), servers.make_topic("target")
    servers.publish(source, [b"%d" % number for number in range(7)])
    options = {"subscribe": source, "channel": "spark", "startingOffsets": starting(servers.first, {source: 1})}
    rows = spark.readStream.format("nsqext").options(**servers.options, **options).load().select("value")
    writer = rows.writeStream.format("nsqext").options(**servers.options, topic=target)
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
    query = run_to_end(writer.start)
    done = [progress for progress in query.recentProgress if progress.numInputRows]
    assert [(progress.numInputRows, progress.sink.numOutputRows) for progress in done] == [(7, 7)]
    assert read(spark, servers, target).count() == 7


def test_columns_of_wrong_types_fail_before_a_row_is_written(spark: SparkSession, servers: Servers) -> None:
    topic = servers.make_topic("types")
    for expression, name in (("1", "value"), ("1", "key"), ("'0'", "partition"), ("1", "topic")):
        chosen = {"value": "'x'", "topic": f"'{topic}'"} | {name: expression}
        rows = spark.range(1).selectExpr(*(f"{value} AS {column}" for column, value in chosen.items()))
        with pytest.raises(Exception, match=rf"{name}.* is .*cannot be written|column {name}"):
            rows.write.format("nsqext").mode("append").options(**servers.options).save()
    assert read(spark, servers, topic).count() == 0
