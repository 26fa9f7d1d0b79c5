"""Streaming queries of Spark over the servers."""

from __future__ import annotations

import ast
import json
import re
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark import TaskContext
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.readwriter import DataStreamWriter

from nsqext.errors import InvalidSetting
from nsqext.spark.columns import read_schema
from nsqext.spark.pyspark_features import HAS_READ_LIMITS
from nsqext.spark.source import NsqDataSource
from nsqext.sync import Producer
from tests.support.programs import ROOT
from tests.support.spark_queries import Reading, after_slow_starts, post, run_to_end, starting, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyarrow import RecordBatch
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from tests.support.spark_cluster import Servers


RECORD = 30
"""Bytes that a message takes in the log of a plain topic besides its body."""


def bodies(word: str, count: int, first: int = 0) -> list[bytes]:
    return [b"%b %d" % (word.encode(), number) for number in range(first, first + count)]


def test_a_query_over_topics_of_all_kinds_is_restarted_and_replayed(
    spark: SparkSession, servers: Servers, tmp_path: Path
) -> None:
    plain, extend, ordered = (
        servers.make_topic("plain", 2),
        servers.make_topic("extend", extend=True),
        servers.make_topic("ordered", ordered=True),
    )
    reading = Reading(
        spark,
        tmp_path / "checkpoint",
        servers.options
        | {
            "subscribe": f"{plain},{extend},{ordered}",
            "channel": "spark",
            "startingOffsets": starting(servers.first, {plain: 2, extend: 1, ordered: 1}),
            "maxOffsetsPerTrigger": "250",
            "minPartitions": "5",
        },
    )
    for topic, partitions in ((plain, 2), (extend, 1), (ordered, 1)):
        for partition in range(partitions):
            servers.publish(topic, bodies(f"{topic} {partition}", 100), partition)
    query = reading.run()
    assert [len(times[-1]) for times in reading.batches.values()] == [250, 150]
    if HAS_READ_LIMITS:  # PySpark 4.0 and 4.1 run a batch for each query
        assert sum(progress.numInputRows for progress in query.recentProgress) == 400
    source = query.recentProgress[-1].sources[0]
    ends = {plain: {"0": 100, "1": 100}, extend: {"0": 100}, ordered: {"0": 100}}
    expected = {topic: {key: count + servers.first for key, count in named.items()} for topic, named in ends.items()}
    # PySpark 4.0 and 4.1 show offsets as Python writes them
    parse = json.loads if HAS_READ_LIMITS else ast.literal_eval
    assert parse(source.endOffset)["topics"] == parse(source.latestOffset)["topics"] == expected

    servers.publish(extend, bodies(f"{extend} 0", 50, first=100), 0)
    reading.run()
    last = reading.forget_commit()
    first_time = reading.batches[last][-1]
    assert len(first_time) == 50
    servers.publish(extend, bodies(f"{extend} 0", 50, first=150), 0)
    reading.run()
    assert [times == [first_time, first_time] for batch, times in reading.batches.items() if batch == last] == [True]
    rows = [
        (topic, partition, servers.first + number, b"%b %d" % (f"{topic} {partition}".encode(), number))
        for topic, partitions, count in ((plain, 2, 100), (extend, 1, 200), (ordered, 1, 100))
        for partition in range(partitions)
        for number in range(count)
    ]
    assert reading.rows() == sorted(rows)


@pytest.mark.skipif(not HAS_READ_LIMITS, reason="PySpark 4.0 and 4.1 show no metrics")
def test_metrics_as_the_page_shows_them(spark: SparkSession, servers: Servers, tmp_path: Path) -> None:
    """Also of a query that is restarted and repeats a batch, and of one that is restarted otherwise."""
    page = (ROOT / "docs/reference/spark.md").read_text(encoding="utf-8")
    snippet = re.search(r"^```py\n(latest = .*?)^```", page, re.MULTILINE | re.DOTALL)
    assert snippet is not None
    topic = servers.make_topic("metrics")
    servers.publish(topic, bodies("metrics", 20))
    options = {"subscribe": topic, "channel": "spark", "startingOffsets": starting(servers.first, {topic: 1})}
    reading = Reading(spark, tmp_path / "checkpoint", servers.options | options)

    def shown() -> dict[str, Any] | None:
        given = {"json": json, "query": reading.run()}
        exec(snippet[1], given)  # noqa: S102
        found: dict[str, Any] | None = given["metrics"]  # type: ignore[assignment]
        return found

    first = shown()
    assert first is not None
    assert (first["messagesBehind"], first["behind"]) == (0, {topic: {"0": 0}})
    servers.publish(topic, bodies("metrics", 5))
    assert shown() == first | {"publishedPerSecond": 0.0}
    reading.forget_commit()
    assert shown() is None, "Spark repeats the batch"


@pytest.mark.skipif(
    "realTime" not in signature(DataStreamWriter.trigger).parameters, reason="this PySpark has no real-time mode"
)
def test_spark_refuses_real_time_mode(spark: SparkSession, servers: Servers, tmp_path: Path) -> None:
    topic = servers.make_topic("realtime")
    options = {"subscribe": topic, "channel": "spark", "startingOffsets": "earliest"}
    rows = spark.readStream.format("nsqext").options(**servers.options, **options).load()
    mode: dict[str, Any] = {"realTime": "5 seconds"}
    writer = rows.writeStream.format("console").outputMode("update").trigger(**mode)
    with pytest.raises(StreamingQueryException, match="not supported in Real-time Mode"):
        run_to_end(writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start)


def test_batches_are_bounded_by_their_bytes(spark: SparkSession, servers: Servers, tmp_path: Path) -> None:
    topic = servers.make_topic("bytes", 2)
    expected: list[tuple[str, int, int, bytes]] = []
    for partition, size in ((0, 100), (1, 1000)):
        found = [b"%0*d" % (size, number) for number in range(16)]
        servers.publish(topic, found, partition)
        expected += [(topic, partition, servers.first + number, body) for number, body in enumerate(found)]
    options = servers.options | {
        "subscribe": topic,
        "channel": "spark",
        "startingOffsets": starting(servers.first, {topic: 2}),
        "maxBytesPerTrigger": "10000",
    }
    reading = Reading(spark, tmp_path / "checkpoint", options)
    reading.run()
    assert reading.rows() == expected
    sizes = [sum(len(row[3]) + RECORD for row in times[-1]) for times in reading.batches.values()]
    assert len(sizes) == 2, "18,560 bytes"
    assert max(sizes) <= 10_000


def test_tasks_that_fail_in_the_middle_are_run_again(spark: SparkSession, servers: Servers, tmp_path: Path) -> None:
    topic = servers.make_topic("again", 2)
    for partition in (0, 1):
        servers.publish(topic, bodies("again", 200), partition)
    frame = (
        spark.readStream.format("nsqext")
        .options(**servers.options)
        .options(
            subscribe=topic, channel="spark", startingOffsets=starting(servers.first, {topic: 2}), arrowBatchRows="50"
        )
        .load()
        .select("partition", "offset", "value")
    )
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "50")
    writer = (
        frame.mapInArrow(partial(fail_at_first, tmp_path / "failed"), frame.schema)
        .writeStream.format("parquet")
        .option("path", str(tmp_path / "rows"))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
    )
    try:
        run_to_end(writer.start)
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert (tmp_path / "failed").exists()
    rows = spark.read.parquet(str(tmp_path / "rows")).collect()
    assert sorted((row.partition, row.offset - servers.first, bytes(row.value)) for row in rows) == [
        (partition, number, body) for partition in (0, 1) for number, body in enumerate(bodies("again", 200))
    ]


def fail_at_first(failed: Path, batches: Iterator[RecordBatch]) -> Iterator[RecordBatch]:
    """Fail on the second batch, when a task is run for the first time, and create a file."""
    context = TaskContext.get()
    assert context is not None
    for number, batch in enumerate(batches):
        if number == 1 and context.attemptNumber() == 0:
            failed.touch()
            raise RuntimeError("on purpose")
        yield batch


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, "option channel is missing"),
        ({"channel": "c", "startingOffsets": "newest"}, "startingOffsets='newest' is invalid"),
        ({"channel": "c", "readMode": "channel", "resetChannel": "true"}, "option resetChannel contradicts"),
    ],
)
def test_a_reader_with_invalid_options_raises(given: dict[str, str], wanted: str) -> None:
    source = NsqDataSource({"lookupd": "127.0.0.1:1", "subscribe": "orders", **given})
    reader = source.streamReader(read_schema())
    with pytest.raises(InvalidSetting, match=wanted):
        reader.initialOffset()
    with pytest.raises(InvalidSetting, match=wanted):
        reader.partitions({}, {})


def test_invalid_options_raise(spark: SparkSession, tmp_path: Path) -> None:
    """Spark would raise an UnboundLocalError instead."""
    reading = Reading(spark, tmp_path / "checkpoint", {"lookupd": "127.0.0.1:1", "subscribe": "orders"})
    with pytest.raises(StreamingQueryException, match="option channel is missing") as caught:
        reading.run()
    assert "UnboundLocalError" not in str(caught.value)


def test_a_topic_that_grows_while_a_query_runs(spark: SparkSession, servers: Servers, tmp_path: Path) -> None:
    """More partitions, and extend support."""
    if servers.cluster is None:
        pytest.skip("NSQEXT_TEST_LOOKUPD: a real cluster takes minutes for that")
    topic = servers.make_topic("grows")
    options = servers.options | {"subscribe": topic, "channel": "spark", "startingOffsets": "earliest"}
    reading = Reading(spark, tmp_path / "checkpoint", options)
    servers.publish(topic, bodies("plain", 10), 0)

    def start() -> StreamingQuery:
        query = reading.start(processingTime="0 seconds")
        query.processAllAvailable()
        return query

    query = after_slow_starts(start)
    try:
        assert len(reading.rows()) == 10
        post(servers.lookupd[0], "/topic/partition/expand", topic=topic, partition_num=2)
        servers.cluster.wait_writable(topic, 1)
        servers.cluster.upgrade_topic(topic)
        for partition in (0, 1):
            with Producer(servers.lookupd) as producer:
                for body in bodies("extend", 10):
                    producer.publish(topic, body, partition=partition, headers={"from": "test"})
        wait_for(lambda: len(reading.rows()) == 30, "the messages after that are read")
    finally:
        query.stop()
    assert [row[:3] for row in reading.rows()] == [
        *((topic, 0, number) for number in range(20)),
        *((topic, 1, number) for number in range(10)),
    ]
