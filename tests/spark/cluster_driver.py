"""The driver of `tests.spark.cluster_run`: one job of a session on a standalone cluster.

``python -m tests.spark.cluster_driver JOB OPTIONS``, where the options are JSON.
"""

from __future__ import annotations

import json
import os
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

import nsqext.spark


def main() -> None:
    """Run a job and print its result as JSON."""
    job, given = sys.argv[1], json.loads(sys.argv[2])
    builder = SparkSession.builder.master(given["master"]).appName(job)
    for name, value in given["conf"].items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    nsqext.spark.register(spark)
    sys.stdout.write(f"{json.dumps(JOBS[job](spark, given))}\n")
    sys.stdout.flush()
    spark.stop()


def write(spark: SparkSession, given: dict[str, str]) -> object:
    """Publish numbered rows."""
    numbers = spark.range(0, int(given["rows"]), 1, int(given["tasks"]))
    values = numbers.select(sf.col("id").cast("string").alias("value"))
    # tasks that take a while, so that an executor can be killed meanwhile
    slow = values.mapInArrow(_slowly, "value string")
    slow.write.format("nsqext").mode("append").options(lookupd=given["lookupd"], topic=given["topic"]).save()
    return int(given["rows"])


def _slowly(batches):  # type: ignore[no-untyped-def]
    import time

    for batch in batches:
        for start in range(0, batch.num_rows, 500):
            time.sleep(0.1)
            yield batch.slice(start, 500)


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
    """Stream the topic to Parquet until everything is read."""
    options = {"lookupd": given["lookupd"], "subscribe": given["topic"], "channel": "cluster"}
    source = spark.readStream.format("nsqext").options(**options, maxOffsetsPerTrigger=given["batch"])
    rows = source.option("startingOffsets", "earliest").load()
    query = (
        rows.select("topic", "partition", "offset", "value")
        .writeStream.format("parquet")
        .option("path", f"{given['out']}/rows")
        .option("checkpointLocation", f"{given['out']}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return os.getpid()


JOBS = {"read": read, "stream": stream, "write": write}

if __name__ == "__main__":
    main()
