"""Micro-batches that are run again with their rows distributed over other tasks: no row is lost, none stays twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from attrs import define
from pyspark.errors import PySparkException
from pyspark.sql import functions as sf

from nsqext.spark import dedupe
from nsqext.spark.pyspark_features import HAS_READ_LIMITS
from tests.support.spark_queries import run_to_end

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.support.spark_cluster import Servers

VALUES = 42
SPLITS = (2, 3)
"""Numbers of tasks of one micro-batch: the first time that it is run, and the second time."""

Source = Callable[[int], "DataFrame"]
"""Makes a stream of text `value`, which reads in about as many tasks."""


@define
class Copy:
    """A query that is run again and again, from a source to topics; each value is published to each topic."""

    servers: Servers
    topics: list[str]
    folder: Path

    def run(self, rows: DataFrame) -> None:
        flag = str(self.folder / "fail")

        def stumbling(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            """Let a task fail when all rows but the last one are published."""
            for batch in batches:
                values = batch.to_pydict()
                if Path(flag).exists() and batch.num_rows > 1:
                    values["value"][-1] = None
                yield pa.RecordBatch.from_pydict(values, schema=batch.schema)

        several = rows.select("value", sf.explode(sf.array(*map(sf.lit, self.topics))).alias("topic"))
        # equal rows for the last topic
        source, number = sf.split_part("value", sf.lit(" "), sf.lit(1)), sf.split_part("value", sf.lit(" "), sf.lit(2))
        equal = sf.concat_ws(" ", source, (number.cast("int") % 7).cast("string"))
        value = sf.when(sf.col("topic") == self.topics[-1], equal).otherwise(sf.col("value"))
        changed = several.select(value.alias("value"), "topic").mapInArrow(stumbling, "value string, topic string")
        writer = changed.writeStream.format("nsqext").options(**self.servers.options, ackBatchBytes="700")
        writer = writer.option("checkpointLocation", str(self.folder / "checkpoint")).trigger(availableNow=True)
        run_to_end(writer.start)

    def run_again(self, source: Source) -> None:
        """Run the first micro-batch twice; the first time it fails."""
        first, second = SPLITS
        (self.folder / "fail").touch()
        with pytest.raises(PySparkException, match="the value is null"):
            self.run(source(first))
        (self.folder / "fail").unlink()
        self.run(source(second))


def files(spark: SparkSession, servers: Servers, folder: Path) -> Source:
    """Text files, which Spark splits by a size in the configuration."""
    folder.mkdir()
    for part in range(2):
        lines = [f"files {number:030}" for number in range(part, VALUES, 2)]
        (folder / f"{part}.txt").write_text("\n".join(lines))

    def source(tasks: int) -> DataFrame:
        spark.conf.set("spark.sql.files.maxPartitionBytes", VALUES * 37 // tasks)
        spark.conf.set("spark.sql.files.openCostInBytes", 0)
        return spark.readStream.text(str(folder))

    return source


def rate(spark: SparkSession, servers: Servers, folder: Path) -> Source:
    """Numbers, in as many tasks as the option says."""

    def source(tasks: int) -> DataFrame:
        numbers = spark.readStream.format("rate-micro-batch")
        rows = numbers.options(rowsPerBatch=str(VALUES), numPartitions=str(tasks), startTimestamp="0").load()
        return rows.select(sf.concat(sf.lit("rate "), sf.col("value").cast("string")).alias("value"))

    return source


def topic(spark: SparkSession, servers: Servers, folder: Path) -> Source:
    """A topic, without the columns that tell rows apart."""
    name = servers.make_topic("source", 2)
    for partition in range(2):
        servers.publish(name, [b"topic %d" % number for number in range(partition, VALUES, 2)], partition)

    def source(tasks: int) -> DataFrame:
        rows = spark.readStream.format("nsqext").options(**servers.options, subscribe=name, channel="restart")
        rows = rows.options(startingOffsets="earliest", minPartitions=str(tasks))
        return rows.load().select(sf.col("value").cast("string").alias("value"))

    return source


@pytest.fixture
def file_settings(spark: SparkSession) -> Iterator[None]:
    """Settings that split files are removed after the test."""
    yield
    spark.conf.unset("spark.sql.files.maxPartitionBytes")
    spark.conf.unset("spark.sql.files.openCostInBytes")


@pytest.mark.skipif(not HAS_READ_LIMITS, reason="PySpark 4.0 and 4.1 plan another batch after one that is run again")
def test_another_split_after_a_restart(
    spark: SparkSession, servers: Servers, tmp_path: Path, file_settings: None
) -> None:
    """Of every source that Spark ships which has splits, and of this one, in one query."""
    plain, extend, equal = servers.make_topic("plain", 2), *(servers.make_topic("e", 2, extend=True) for _ in range(2))
    copy = Copy(servers, [plain, extend, equal], tmp_path)
    sources = [make(spark, servers, tmp_path / "files") for make in (files, rate, topic)]

    def union(tasks: int) -> DataFrame:
        first, second, third = (source(tasks) for source in sources)
        return first.union(second).union(third)

    copy.run_again(union)
    counts = dict.fromkeys(("files", "rate", "topic"), VALUES)
    for names in ([plain], [extend, equal]):
        rows = spark.read.format("nsqext").options(**servers.options, subscribe=",".join(names))
        stored = rows.option("includeHeaders", str(plain not in names).lower()).load().cache()
        assert stored.count() > 5 * VALUES * len(names), "the batch was published twice"
        kept = [(row.topic, *bytes(row.value).decode().split()) for row in dedupe(stored).collect()]
        if names == [plain]:
            counts["rate"] = sum(source == "rate" for _, source, _ in kept)  # a rate has a next micro-batch
            assert counts["rate"] % VALUES == 0
        assert Counter((name, source, int(number)) for name, source, number in kept) == Counter(
            (name, source, number % 7 if name == equal else number)
            for name in names
            for source, count in counts.items()
            for number in range(count)
        )
