"""The program that is killed: a streaming query into Parquet, in a process (and a Java) of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ("COLUMNS", "finish")

COLUMNS = ("topic", "partition", "offset", "message_id", "value")


def open_session(folder: Path) -> SparkSession:
    """Return a session that knows the format."""
    from pyspark.sql import SparkSession

    from nsqext.spark import register

    session: SparkSession = (
        SparkSession.builder.master("local[2, 2]")
        .appName("exactly once")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "768m")
        .config("spark.driver.extraJavaOptions", "-XX:TieredStopAtLevel=1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.local.dir", str(folder / "local"))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    register(session)
    return session


def start(session: SparkSession, folder: Path, options: dict[str, str], **trigger: Any) -> StreamingQuery:
    """Start the query, with the checkpoint of its predecessors."""
    rows = session.readStream.format("nsqext").options(**options).load().select(*COLUMNS)
    return (
        rows.writeStream.format("parquet")
        .option("path", str(folder / "rows"))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(**trigger)
        .start()
    )


def main(mode: str, folder: Path, options: dict[str, str]) -> None:
    """Run until killed, or (``finish``) to the end of the topics, and tell which rows there are."""
    session = open_session(folder)
    if mode == "run":
        start(session, folder, options, processingTime="0 seconds").awaitTermination()
        return
    finish(session, folder, options)
    session.stop()


def finish(session: SparkSession, folder: Path, options: dict[str, str]) -> None:
    """Read to the end, and write down which rows there are, as Spark sees them."""
    start(session, folder, options, availableNow=True).awaitTermination()
    rows = session.read.parquet(str(folder / "rows")).select(*COLUMNS).collect()
    found = [[row.topic, row.partition, row.offset, row.message_id.hex(), row.value.decode()] for row in rows]
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
