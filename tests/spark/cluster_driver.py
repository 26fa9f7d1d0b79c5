"""The driver of `tests.spark.cluster_run`: jobs of a session on a standalone cluster.

``python -m tests.spark.cluster_driver JOBS OPTIONS``: names of jobs with commas between them, and options as JSON.
Prints the result of each job as a line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

import nsqext.spark
from nsqext.spark.pyspark_features import HAS_READ_LIMITS
from tests.support.spark_queries import run_to_end

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

HESITATION = "hesitation"
"""Name of the file with the Spark partition of the attempt that hesitates."""
_SLICE = 500
"""Rows of an Arrow batch in the job with a slow task."""


def main() -> None:
    """Run the jobs and print their results."""
    given = json.loads(sys.argv[2])
    builder = SparkSession.builder.master(given["master"]).appName(sys.argv[1])
    for name, value in given["conf"].items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    nsqext.spark.register(spark)
    for job in sys.argv[1].split(","):
        sys.stdout.write(f"{json.dumps(JOBS[job](spark, given))}\n")
        sys.stdout.flush()
    spark.stop()


def write(spark: SparkSession, given: dict[str, str]) -> object:
    """Publish numbered rows."""
    numbers = spark.range(0, int(given["rows"]), 1, 8)
    values = numbers.select(sf.col("id").cast("string").alias("value"))
    slow = values.mapInArrow(partial(_slowly, given["folder"]), "value string")
    slow.write.format("nsqext").mode("append").options(lookupd=given["lookupd"], topic=given["topic"]).save()
    return int(given["rows"])


def _slowly(folder: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Make tasks last long enough to be killed in their middle."""
    import time

    for batch in batches:
        for start in range(0, batch.num_rows, 500):
            yield batch.slice(start, 500)
            (Path(folder) / "writing").touch()
            time.sleep(0.1)


def read(spark: SparkSession, given: dict[str, str]) -> object:
    """Count messages, different ids, and different values."""
    rows = spark.read.format("nsqext").options(lookupd=given["lookupd"], subscribe=given["topic"])
    row = (
        rows.option("includeHeaders", "true")
        .load()
        .agg(
            sf.count("*"),
            sf.count_distinct(sf.col("headers")["nsqext_id"]),
            sf.count_distinct("value"),
        )
        .head()
    )
    return list(row or ())


def stream(spark: SparkSession, given: dict[str, str]) -> object:
    """Stream the topic to Parquet in small batches until everything is read."""
    return _to_parquet(spark, given, "streamed", lambda rows: rows, maxOffsetsPerTrigger=given["batch"])


def speculate(spark: SparkSession, given: dict[str, str]) -> object:
    """Stream the topic to Parquet while a task hesitates, which Spark therefore runs a second time on another host."""
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(_SLICE))

    def slowly(rows: DataFrame) -> DataFrame:
        return rows.mapInArrow(partial(_hesitate, given["folder"]), rows.schema)

    return _to_parquet(spark, given, "speculated", slowly, minPartitions="4", arrowBatchRows=str(_SLICE))


def truncated(spark: SparkSession, given: dict[str, str]) -> object:
    """Continue the stream to Parquet after its topic was truncated and has grown again.

    Returns:
        The error, and the number of rows that are read with ``failOnDataLoss=false``.
    """
    limit = {"maxOffsetsPerTrigger": given["batch"]}
    try:
        _to_parquet(spark, given, "streamed", lambda rows: rows, **limit)
    except StreamingQueryException as error:
        cause = nsqext.spark.root_cause(error)
    else:
        cause = None
    return [cause, _to_parquet(spark, given, "streamed", lambda rows: rows, failOnDataLoss="false", **limit)]


def _hesitate(folder: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass on what was read; the first attempt of any task that reads a second batch waits there until it is killed.

    Spark may start a task a second time before its first attempt has read anything, so that either may wait.
    """
    import time

    context = TaskContext.get()
    assert context is not None
    for number, batch in enumerate(batches):
        (Path(folder) / f"attempt-{context.partitionId()}-{context.attemptNumber()}").touch()
        if number and _is_first(Path(folder) / HESITATION, str(context.partitionId())):
            time.sleep(3600)
        yield batch


def _is_first(file: Path, text: str) -> bool:
    """Write a file, and return whether it did not exist."""
    try:
        with file.open("x") as created:
            created.write(text)
    except FileExistsError:
        return False
    return True


def _to_parquet(
    spark: SparkSession, given: dict[str, str], name: str, change: Callable[[DataFrame], DataFrame], **options: str
) -> int:
    """Stream the topic to Parquet until everything is read; returns the number of rows."""
    source = spark.readStream.format("nsqext").options(lookupd=given["lookupd"], subscribe=given["topic"], **options)
    rows = source.options(channel=name, startingOffsets="earliest").load().select("partition", "offset", "value")
    writer = (
        change(rows)
        .writeStream.format("parquet")
        .option("path", f"{given['folder']}/{name}/rows")
        .option("checkpointLocation", f"{given['folder']}/{name}/checkpoint")
        .trigger(availableNow=True)
    )
    total = 0
    while True:
        query = run_to_end(writer.start, timeout=None)
        count = sum(progress.numInputRows for progress in query.recentProgress)
        total += count
        # PySpark 4.0 and 4.1 run one batch, first the one that was not completed
        if HAS_READ_LIMITS or not count:
            return total


JOBS = {"read": read, "speculate": speculate, "stream": stream, "truncated": truncated, "write": write}

if __name__ == "__main__":
    main()
