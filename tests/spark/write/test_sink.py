"""Sinks, run by Spark: what is published, what happens twice, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pyarrow as pa
import pytest
from attrs import evolve
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import functions as sf

from nsqext import Admin
from nsqext.spark import dedupe
from tests.support.header_values import WRITTEN
from tests.support.raw_publish import RawPublisher, Stored
from tests.support.spark_cluster import collect
from tests.support.spark_queries import after_slow_starts, run_to_end

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.support.spark_cluster import Servers

ROW = "value string, topic string, key string, headers map<string,string>, trace_id bigint, tag string"


def save(rows: DataFrame, servers: Servers, **options: str) -> None:
    rows.write.format("nsqext").mode("append").options(**servers.options, **options).save()


async def leader_of(servers: Servers, topic: str) -> str:
    async with Admin(servers.lookupd) as admin:
        return str((await admin.topic(topic)).leaders[0])


def spoiled(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Make the last row one that cannot be published."""
    columns = batch.to_pydict()
    columns["value"][-1] = None
    return pa.RecordBatch.from_pydict(columns, schema=batch.schema)


def failing_late(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Let the first try of a task fail when all rows but the last one are published."""
    context = TaskContext.get()
    for batch in batches:
        yield batch if context is None or context.attemptNumber() else spoiled(batch)


def test_columns_become_messages(spark: SparkSession, servers: Servers) -> None:
    plain, extend = servers.make_topic("plain", 2), servers.make_topic("extend", 2, extend=True)
    rows = spark.createDataFrame(
        [
            ("to plain", plain, "k", None, None, None),
            ("traced", plain, None, None, -2, None),
            ("to extend", extend, "k", {"a": "b"}, None, "blue"),
            ("its own id", extend, None, {"nsqext_id": "mine"}, 5, None),
        ],
        ROW,
    )
    save(rows.coalesce(1), servers)
    found = {message.body: message for message in collect(servers, plain, 2) + collect(servers, extend, 2)}
    assert found[b"traced"].trace_id == 2**64 - 2
    tagged, own = found[b"to extend"], found[b"its own id"]
    assert (tagged.key, tagged.tag, tagged.headers["a"], tagged.trace_id) == ("k", "blue", "b", 0)
    assert (own.headers["nsqext_id"], own.trace_id) == ("mine", 5)
    run, partition, content = str(tagged.headers["nsqext_id"]).split("/")
    assert (len(run), partition, len(content)) == (32, "0", 16)
    assert "nsqext_id_task" not in tagged.headers, "the rows of a batch that is run once stay in their task"
    assert found[b"to plain"].trace_id


def test_a_stream_of_one_topic_with_the_option_topic_of_another_feeds_itself_nothing(
    spark: SparkSession, servers: Servers, tmp_path: Path
) -> None:
    source, target = servers.make_topic("source", 1), servers.make_topic("target", 1)
    servers.publish(source, [b"%d" % number for number in range(11)])
    rows = spark.readStream.format("nsqext").options(**servers.options, subscribe=source, channel="copy")
    writer = rows.option("startingOffsets", "earliest").load().writeStream.format("nsqext")
    writer = writer.options(**servers.options, topic=target, checkpointLocation=str(tmp_path / "checkpoint"))

    def run() -> None:
        query = writer.trigger(processingTime="0 seconds").start()
        try:
            for _ in range(2):
                query.processAllAvailable()
        finally:
            query.stop()

    after_slow_starts(run)
    assert load(spark, servers, source).count() == 11
    assert sorted(int(message.body) for message in collect(servers, target, 11)) == list(range(11))


def test_keys_and_partitions_keep_their_order(spark: SparkSession, servers: Servers) -> None:
    topic = servers.make_topic("order", 2, ordered=True)
    number = sf.col("id").cast("string")
    keyed = spark.range(0, 400, 1, 2).select(
        number.alias("value"), (sf.col("id") % 7).cast("string").cast("binary").alias("key")
    )
    save(keyed, servers, topic=topic, ackBatchBytes="2000")
    found = collect(servers, topic, 400)
    places: dict[int, set[int]] = {}
    for key in range(7):
        of_key = [message for message in found if int(message.body) % 7 == key]
        places[key] = {message.partition for message in of_key}
        for half in (range(200), range(200, 400)):
            numbers = [int(message.body) for message in of_key if int(message.body) in half]
            assert numbers == sorted(numbers)
    assert all(len(partitions) == 1 for partitions in places.values())
    chosen = spark.range(0, 20, 1, 1).select(number.alias("value"), (sf.col("id") % 2).alias("partition"))
    save(chosen, servers, topic=topic)
    assert {(int(message.body) % 2, message.partition) for message in collect(servers, topic, 20)} == {(0, 0), (1, 1)}


def load(spark: SparkSession, servers: Servers, topic: str, **options: str) -> DataFrame:
    """Return the messages of a topic."""
    return spark.read.format("nsqext").options(**servers.options, subscribe=topic, **options).load()


def test_dedupe_removes_rows_of_a_second_attempt(spark: SparkSession, servers: Servers) -> None:
    topics = [servers.make_topic("plain", 2), servers.make_topic("extend", 1, extend=True)]
    number, of_topic = sf.col("id").cast("string"), sf.element_at(sf.lit(topics), (sf.col("id") % 2 + 1).cast("int"))
    rows = spark.range(0, 60, 1, 2).select(number.alias("value"), of_topic.alias("topic"))
    save(rows.mapInArrow(failing_late, "value string, topic string"), servers, ackBatchBytes="1")
    stored = load(spark, servers, ",".join(topics), includeHeaders="true").cache()
    found = [
        ((row.headers or {}).get("nsqext_id", row.trace_id), int(row.value), row.topic) for row in stored.collect()
    ]
    assert len(found) > 60
    # an id stands for a row, and a row for an id
    assert len({name for name, *_ in found}) == len(set(found)) == 60
    single = dedupe(stored, trace_ids=True).collect()
    assert sorted((int(row.value), row.topic) for row in single) == [
        (number, topics[number % 2]) for number in range(60)
    ]


def test_a_micro_batch_that_is_run_again_publishes_the_same_ids(
    spark: SparkSession, servers: Servers, tmp_path: Path
) -> None:
    topic = servers.make_topic("stream", 1, extend=True)
    flag, files = tmp_path / "fail", tmp_path / "files"
    files.mkdir()

    def stumbling(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield spoiled(batch) if flag.exists() else batch

    def run() -> str:
        rows = spark.readStream.text(str(files)).mapInArrow(stumbling, "value string")
        writer = rows.writeStream.format("nsqext").options(**servers.options, topic=topic, ackBatchBytes="1")
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()
        query.awaitTermination()
        return str(query.id)

    (files / "1.txt").write_text("\n".join(f"first {number}" for number in range(10)))
    query = run()
    (files / "2.txt").write_text("\n".join(f"second {number}" for number in range(10)))
    flag.touch()
    with pytest.raises(PySparkException, match="row 9 of Spark partition 0: the value is null"):
        run()
    flag.unlink()
    assert run() == query
    stored = load(spark, servers, topic, includeHeaders="true").cache()
    lines = [f"{word} {number}" for word in ("first", "second") for number in range(10)]
    found = [(row.headers["nsqext_id"], bytes(row.value).decode()) for row in stored.collect()]
    assert len(found) > 20
    assert len(set(found)) == len(dict(found)) == 20, "an id stands for a row, and a row for an id"
    assert {(name.rpartition("/")[0], line.split()[0]) for name, line in found} == {
        (f"{query}/0", "first"),
        (f"{query}/1", "second"),
    }
    assert sorted(bytes(row.value).decode() for row in dedupe(stored).collect()) == lines


def test_rows_with_their_header_are_written_as_they_were_stored(spark: SparkSession, servers: Servers) -> None:
    source, target = (servers.make_topic("headers", 1, extend=True) for _ in range(2))
    publisher = RawPublisher(anyio.run(leader_of, servers, source), source, 0)
    messages = [Stored(written.header, b"%d" % number) for number, written in enumerate(WRITTEN)]
    messages += [Stored(b"", b"none"), Stored(b"", b"traced", 7), Stored(b'{"##trace_id":"8","##key":"k"}', b"all")]
    assert all(response.startswith(b"OK") for response in publisher.publish_stored(messages))
    publisher.close()
    rows = load(spark, servers, source, columns="value,trace_id,tag,headers,key,header")
    read = {bytes(row.value): row.headers for row in rows.select("value", "headers").collect()}
    assert [read[b"%d" % number] for number in range(len(WRITTEN))] == [written.texts for written in WRITTEN]
    save(rows, servers, topic=target)
    stored = load(spark, servers, target, columns="value,trace_id,header").collect()
    found = [Stored(bytes(row.header), bytes(row.value), row.trace_id) for row in stored]
    assert sorted(found, key=repr) == sorted(
        [evolve(message, trace_id=8) if message.body == b"all" else message for message in messages], key=repr
    )


def test_a_job_that_is_run_again_publishes_the_same_ids(spark: SparkSession, servers: Servers, tmp_path: Path) -> None:
    """As a function of foreachBatch is; its rows are in other tasks the second time."""
    topic = servers.make_topic("job", 1, extend=True)
    for tasks in (2, 3):
        rows = spark.range(0, 30, 1, tasks).select(sf.col("id").cast("string").alias("value"))
        save(rows, servers, topic=topic, job="orders/7")
    stored = load(spark, servers, topic, includeHeaders="true").cache()
    assert len({row.headers["nsqext_id"] for row in stored.collect()}) == 30
    assert stored.count() == 60
    assert sorted(int(row.value) for row in dedupe(stored).collect()) == list(range(30))


def test_a_complete_result_is_published_each_time(spark: SparkSession, servers: Servers, tmp_path: Path) -> None:
    """In the output mode `complete`, as with Kafka's connector."""
    topic = servers.make_topic("complete", 1)
    for number in (1, 2):
        (tmp_path / f"{number}.txt").write_text("a\nb\na\n")
    lines = spark.readStream.option("maxFilesPerTrigger", 1).text(str(tmp_path), pathGlobFilter="*.txt")
    messages = lines.groupBy("value").count().select(sf.format_string("%s %d", "value", "count").alias("value"))
    writer = messages.writeStream.format("nsqext").outputMode("complete").options(**servers.options, topic=topic)
    run_to_end(writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start)
    assert sorted(message.body for message in collect(servers, topic, 4)) == [b"a 2", b"a 4", b"b 1", b"b 2"]


def test_an_error_names_the_row(spark: SparkSession, servers: Servers) -> None:
    topic = servers.make_topic("wrong", 1)
    rows = spark.createDataFrame(
        [("fine", None), ("refused", {"a": "b"})], "value string, headers map<string,string>"
    ).coalesce(1)
    with pytest.raises(PySparkException, match=f"row 1 of Spark partition 0: .*topic {topic}"):
        save(rows, servers, topic=topic)


def test_invalid_writes_raise_on_the_driver(spark: SparkSession, servers: Servers) -> None:
    rows = spark.range(1).select(sf.lit("x").alias("value"))
    with pytest.raises(PySparkException, match="option topics is unknown: do you mean topic"):
        save(rows, servers, topics="t")
    with pytest.raises(PySparkException, match="no topic is given: add a column topic"):
        save(rows, servers)
    with pytest.raises(PySparkException, match="column other is unknown to the sink"):
        save(rows.withColumn("other", sf.lit(1)), servers, topic="t")
    with pytest.raises(PySparkException, match="cannot be overwritten"):
        rows.write.format("nsqext").mode("overwrite").options(**servers.options, topic="t").save()


def test_spark_refuses_its_default_save_mode(spark: SparkSession) -> None:
    rows = spark.createDataFrame([("one",)], "value string")
    with pytest.raises(PySparkException, match=r"\[UNSUPPORTED_DATA_SOURCE_SAVE_MODE\]"):
        rows.write.format("nsqext").options(lookupd="127.0.0.1:1", topic="t").save()


def test_bad_rows_do_not_fail_the_job(spark: SparkSession, servers: Servers) -> None:
    topic, bad = servers.make_topic("good", 1), servers.make_topic("bad", 1)
    rows = spark.range(0, 20, 1, 2).select(
        sf.when(sf.col("id") % 10 != 3, sf.col("id").cast("string")).alias("value"), sf.lit("k").alias("key")
    )
    save(rows, servers, topic=topic, badRows="topic", badRowsTopic=bad)
    assert sorted(int(message.body) for message in collect(servers, topic, 18)) == [n for n in range(20) if n % 10 != 3]
    assert all(b'"key":"k"' in message.body and b'"row":3' in message.body for message in collect(servers, bad, 2))
