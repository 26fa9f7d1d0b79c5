"""The program of a query whose slowest task is run a second time beside the first, on another (made up) machine.

Spark speculates only across hosts; two workers with addresses of their own on the loopback interface are two hosts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.spark_standalone import JAVA_OPTIONS

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

SLOW = 2
"""Partition of the task that hesitates, when it is tried for the first time."""


def open_session(master: str) -> SparkSession:
    """Return a session at a master, which starts a task again as soon as it takes longer than the others did."""
    from pyspark.sql import SparkSession

    from nsqext.spark import register

    session: SparkSession = (
        SparkSession.builder.master(master)
        .appName("speculation")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "768m")
        .config("spark.driver.extraJavaOptions", JAVA_OPTIONS)
        .config("spark.executor.memory", "512m")
        .config("spark.executor.extraJavaOptions", JAVA_OPTIONS)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.speculation", "true")
        .config("spark.speculation.interval", "100ms")
        .config("spark.speculation.quantile", "0.5")
        .config("spark.speculation.multiplier", "1.05")
        .config("spark.speculation.minTaskRuntime", "100ms")
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "50")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    register(session)
    return session


def hesitate(folder: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Pass on what was read; the first attempt of one task stops in the middle until it is killed."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    for number, batch in enumerate(batches):
        (Path(folder) / f"attempt-{context.partitionId()}-{context.attemptNumber()}").touch()
        if number and context.partitionId() == SLOW and not context.attemptNumber():
            time.sleep(3600)
        yield batch


def main(master: str, folder: Path, options: dict[str, str]) -> None:
    """Run the query to the end of the topic, and write down which rows there are."""
    session = open_session(master)
    rows = session.readStream.format("nsqext").options(**options).load()
    query = (
        rows.mapInArrow(partial(hesitate, str(folder)), rows.schema)
        .writeStream.format("parquet")
        .option("path", str(folder / "rows"))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    found = session.read.parquet(str(folder / "rows")).select("partition", "offset", "value").collect()
    (folder / "found.json").write_text(json.dumps([[row.partition, row.offset, row.value.decode()] for row in found]))
    session.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
