"""Cases of the suites of Spark's Kafka connector that no other test has: reuse of a DataFrame, progress, triggers.

The table of the documentation names the suites, and what is different here.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.errors.exceptions.captured import UnsupportedOperationException

from nsqext.spark.pyspark_features import HAS_READ_LIMITS
from tests.support.spark_queries import Reading, Row, post, run_to_end, starting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from nsqext.broker import Cluster
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


def bodies(first: int, count: int) -> list[bytes]:
    """Return messages of consecutive numbers."""
    return [b"%d" % number for number in range(first, first + count)]


def values(reading: Reading) -> list[int]:
    """Return the numbers that were read."""
    return sorted(int(row[3]) for row in reading.rows())


def stream_options(servers: Servers, topic: str, count: int = 1, /, **given: str) -> dict[str, str]:
    """Return the options of a stream from the first message on."""
    known = {"subscribe": topic, "channel": "spark", "startingOffsets": starting(servers.first, {topic: count})}
    return {**servers.options, **known, **given}


needs_read_limits = pytest.mark.skipif(not HAS_READ_LIMITS, reason="PySpark 4.0 and 4.1 pass no limits")


@needs_read_limits
def test_the_trigger_once_ignores_limits(spark: SparkSession, servers: Servers, tmp_path: Path) -> None:
    topic = servers.make_topic("once")
    for count, limit in ((15, "maxOffsetsPerTrigger"), (18, "minOffsetsPerTrigger")):
        servers.publish(topic, bodies(count - 3, 3) if count > 15 else bodies(0, count))
        reading = Reading(spark, tmp_path / "checkpoint", stream_options(servers, topic, **{limit: "5"}))
        run_to_end(lambda reading=reading: reading.start(once=True))  # type: ignore[misc]
        assert values(reading)[-1] == count - 1
        assert len(reading.batches) == 1


@needs_read_limits
def test_the_largest_limit_and_batches_of_a_limit(spark: SparkSession, servers: Servers, tmp_path: Path) -> None:
    topic = servers.make_topic("limits", 3)
    for partition, (first, count) in enumerate(((100, 101), (10, 11), (1, 1))):
        servers.publish(topic, bodies(first, count), partition)
    found: dict[int, list[list[Row]]] = {}
    for limit in ("60", str(2**63 - 1)):
        options = stream_options(servers, topic, 3, maxOffsetsPerTrigger=limit)
        Reading(spark, tmp_path / "checkpoint", options, found).run()
        servers.publish(topic, bodies(300, 100))
    batches = [Counter(row[1] for row in times[-1]) for times in found.values()]
    assert batches[0] == {0: 53, 1: 6, 2: 1}, "in proportion; every partition has one at least"
    assert [batch.total() for batch in batches] == [60, 53, 100]


def test_a_failed_batch_is_repeated_after_partitions_were_added(
    spark: SparkSession, servers: Servers, tmp_path: Path
) -> None:
    if servers.cluster is None:
        pytest.skip("NSQEXT_TEST_LOOKUPD: a real cluster takes minutes for that")
    topic = servers.make_topic("grows")
    servers.publish(topic, bodies(0, 7))
    reading = Reading(spark, tmp_path / "checkpoint", stream_options(servers, topic))

    def fail(rows: DataFrame) -> DataFrame:
        return rows.selectExpr("topic", "partition", "offset", "value", "assert_true(CAST(value AS STRING) != '6')")

    for added in (False, True):
        with pytest.raises(StreamingQueryException, match="is not true"):
            reading.run(fail)
        if not added:
            post(servers.lookupd[0], "/topic/partition/expand", topic=topic, partition_num=3)
    assert reading.batches == {}
    servers.cluster.wait_writable(topic, 2)  # the query has created its anchor
    servers.publish(topic, bodies(7, 3), 2)
    reading.run()
    assert values(reading) == [*range(10)]


class Recreating(Reading):
    """A query whose topic is recreated after its first batch."""

    cluster: Cluster
    servers: Servers
    topic: str

    def _keep(self, rows: DataFrame, batch: int) -> None:
        super()._keep(rows, batch)
        if batch == 0:
            self.cluster.delete_topic(self.topic)
            self.cluster.create_topic(self.topic, 1, channels=["ready"])
            self.servers.publish(self.topic, bodies(0, 15))


def test_a_topic_that_is_recreated_between_batches(spark: SparkSession, servers: Servers, tmp_path: Path) -> None:
    """With fewer partitions; the end of the query is from before."""
    if servers.cluster is None:
        pytest.skip("NSQEXT_TEST_LOOKUPD: a real cluster takes minutes for that")
    topic = servers.make_topic("narrow", 2)
    servers.publish(topic, bodies(0, 15))
    options = stream_options(servers, topic, 2, maxOffsetsPerTrigger="5")
    reading = Recreating(spark, tmp_path / "checkpoint", options)
    reading.cluster, reading.servers, reading.topic = servers.cluster, servers, topic
    with pytest.raises(StreamingQueryException, match="DataLoss"):
        reading.run()
    assert [len(times[-1]) for times in reading.batches.values()] == [5]


def test_a_union_of_two_streams_continues_where_each_of_them_was(
    spark: SparkSession, servers: Servers, tmp_path: Path
) -> None:
    """Also of the one that had no new messages in the last batch before the restart."""
    topics = [servers.make_topic("small"), servers.make_topic("large")]
    servers.publish(topics[0], bodies(0, 4))
    servers.publish(topics[1], bodies(100, 12))
    found: dict[int, list[int]] = {}

    def keep(rows: DataFrame, batch: int) -> None:
        found[batch] = sorted(int(bytes(row.value)) for row in rows.collect())

    def run() -> None:
        small, large = (
            spark.readStream.format("nsqext")
            .options(**stream_options(servers, topic, channel=f"union_{number}", maxOffsetsPerTrigger="4"))
            .load()
            .select("value")
            for number, topic in enumerate(topics)
        )
        writer = small.union(large).writeStream.foreachBatch(keep)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
        run_to_end(writer.start)

    for _ in range(1 if HAS_READ_LIMITS else 3):
        run()
    servers.publish(topics[1], bodies(112, 3))
    run()
    assert list(found.values()) == [
        [*range(4), *range(100, 104)],
        [*range(104, 108)],
        [*range(108, 112)],
        [*range(112, 115)],
    ]


def test_a_start_by_topic(spark: SparkSession, servers: Servers, tmp_path: Path) -> None:
    old, new = servers.make_topic("old", 2), servers.make_topic("new", 2)
    for topic in (old, new):
        servers.publish(topic, bodies(0, 3), 1)
    options = stream_options(servers, old, subscribe=f"{old},{new}")
    options["startingOffsets"] = f'''{{"{old}": {{"0": {servers.first}, "1": {servers.first}}}, "{new}": "latest"}}'''
    reading = Reading(spark, tmp_path / "checkpoint", options)
    reading.run()
    servers.publish(new, bodies(10, 2), 1)
    reading.run()
    assert values(reading) == [0, 1, 2, 10, 11]


def test_async_progress_tracking_is_for_sinks_of_spark(spark: SparkSession, servers: Servers, tmp_path: Path) -> None:
    topic, target = servers.make_topic("source"), servers.make_topic("target")
    rows = spark.readStream.format("nsqext").options(**stream_options(servers, topic)).load().select("value")
    writer = rows.writeStream.format("nsqext").options(**servers.options, topic=target)
    writer = writer.options(asyncProgressTrackingEnabled="true", checkpointLocation=str(tmp_path / "checkpoint"))
    with pytest.raises(Exception, match="does not support async progress tracking"):
        run_to_end(writer.start, 30)


def test_a_null_partition_is_ignored(spark: SparkSession, servers: Servers) -> None:
    topic = servers.make_topic("nulls", 2)
    rows = spark.range(40).selectExpr(
        "CAST(id AS STRING) AS value", "CAST(id AS STRING) AS key", "CAST(NULL AS INT) AS partition"
    )
    rows.write.format("nsqext").mode("append").options(**servers.options, topic=topic).save()
    start = starting(servers.first, {topic: 2})
    found = spark.read.format("nsqext").options(**servers.options, subscribe=topic, startingOffsets=start).load()
    assert {row.partition for row in found.collect()} == {0, 1}


def test_one_end_by_time_is_after_all_messages(spark: SparkSession, servers: Servers) -> None:
    topic = servers.make_topic("times", 2)
    for partition in range(2):
        servers.publish(topic, bodies(10 * partition, 3), partition)
    ends = f'''{{"{topic}": {{"0": 1, "1": {2**53}}}}}'''
    options = {
        "subscribe": topic,
        "startingOffsets": starting(servers.first, {topic: 2}),
        "endingOffsetsByTimestamp": ends,
    }
    found = spark.read.format("nsqext").options(**servers.options, **options).load().select("value").collect()
    assert sorted(int(bytes(row.value)) for row in found) == [10, 11, 12]
