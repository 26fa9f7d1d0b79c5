"""The program that is killed: streaming queries, in a process (and a Java) of its own.

One query writes topics to Parquet or Delta. Another one counts the messages of a topic by windows, and publishes each
window to a topic as soon as it is complete.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sf

from nsqext.spark.pyspark_features import HAS_READ_LIMITS
from tests.support.spark_queries import run_to_end
from tests.support.spark_standalone import SESSION

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ("COLUMNS", "WINDOW", "finish")

WINDOW = 50
"""Numbers of messages in a window: their number is taken as the time in seconds."""

COLUMNS = ("topic", "partition", "offset", "message_id", "value")


def open_session(folder: Path, delta: str) -> SparkSession:
    """Return a session that knows the format, and Delta if there is a Maven coordinate of it."""
    from pyspark.sql import SparkSession

    from nsqext.spark import register

    builder = SparkSession.builder.master("local[2, 2]")
    if delta:
        builder = (
            builder.config("spark.jars.packages", delta)
            .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
            .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
            .config("spark.databricks.delta.snapshotPartitions", "2")
        )
    session: SparkSession = (
        builder.appName("exactly once")
        .config(map=SESSION)
        .config("spark.driver.memory", "768m")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.local.dir", str(folder / "local"))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    register(session)
    return session


def start(
    session: SparkSession, folder: Path, options: dict[str, str], kind: str = "parquet", **trigger: Any
) -> StreamingQuery:
    """Start the query, with the checkpoint of its predecessors."""
    rows = session.readStream.format("nsqext").options(**options).load().select(*COLUMNS)
    writer = rows.writeStream.format(kind).option("checkpointLocation", str(folder / "checkpoint"))
    return writer.trigger(**trigger).start(str(folder / "rows"))


def start_counts(session: SparkSession, folder: Path, counts: Mapping[str, str], **trigger: Any) -> StreamingQuery:
    """Start the query that counts messages by windows of their numbers, and publishes the counts."""
    options = {"subscribe": counts["source"], "channel": "counts", "startingOffsets": "earliest"}
    messages = session.readStream.format("nsqext").options(**options, lookupd=counts["lookupd"]).load()
    number = sf.split_part(sf.col("value").cast("string"), sf.lit(" "), sf.lit(2)).cast("long")
    times = messages.select(sf.timestamp_seconds(number).alias("at"))
    # one partition, one publisher: the numbers are in order
    windows = times.withWatermark("at", "0 seconds").groupBy(sf.window("at", f"{WINDOW} seconds").alias("span")).count()
    first = sf.unix_seconds("span.start").cast("string")
    rows = windows.select(
        sf.concat_ws(" ", first, sf.col("count").cast("string")).alias("value"),
        # not the id of the row, which another order of the rows would change
        sf.create_map(sf.lit("nsqext_id"), first).alias("headers"),
    )
    return (
        rows.writeStream.format("nsqext")
        .options(lookupd=counts["lookupd"], topic=counts["target"])
        .option("checkpointLocation", str(folder / "counts-checkpoint"))
        .trigger(**trigger)
        .start()
    )


def main(mode: str, folder: Path, options: dict[str, str], counts: dict[str, str], delta: str) -> None:
    """Run until killed, or (``finish``) to the end of the topics, and write down which rows exist."""
    session, kind = open_session(folder, delta), "delta" if delta else "parquet"
    if mode == "run":
        if counts:
            start_counts(session, folder, counts, processingTime="0 seconds")
        run_to_end(lambda: start(session, folder, options, kind, processingTime="0 seconds"), timeout=None)
        return
    finish(session, folder, options, counts, kind)
    session.stop()


def finish(
    session: SparkSession, folder: Path, options: dict[str, str], counts: dict[str, str], kind: str = "parquet"
) -> None:
    """Read to the end, and write down which rows exist, as Spark sees them."""
    # PySpark 4.0 and 4.1 run one batch, first the one that was not completed
    for _ in range(1 if HAS_READ_LIMITS else 2):
        run_to_end(lambda: start(session, folder, options, kind, availableNow=True), timeout=None)
    if counts:
        finish_counts(session, folder, counts)
    rows = session.read.format(kind).load(str(folder / "rows")).select(*COLUMNS).collect()
    found = [[row.topic, row.partition, row.offset, row.message_id.hex(), row.value.decode()] for row in rows]
    (folder / "found.json").write_text(json.dumps(found))


def finish_counts(session: SparkSession, folder: Path, counts: dict[str, str]) -> None:
    """Count to the end, and write down the published counts: number of messages, and windows without duplicates."""
    from nsqext.spark import dedupe

    run_to_end(lambda: start_counts(session, folder, counts, availableNow=True), timeout=None)
    options = {"lookupd": counts["lookupd"], "subscribe": counts["target"], "includeHeaders": "true"}
    published = session.read.format("nsqext").options(**options).load()
    once = [row.value.decode().split() for row in dedupe(published).select("value").collect()]
    found = {"messages": published.count(), "windows": [[int(first), int(count)] for first, count in once]}
    (folder / "counts.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4]), sys.argv[5])
