"""Appends a stream to an Iceberg table, the program of `tests.spark.test_iceberg`.

``python -m tests.spark.iceberg_append FOLDER OPTIONS``: the options of the source as JSON, with the Maven package of
Iceberg as ``package``. As soon as Spark has noted batch ``die_after``, it kills itself with its Java.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from pyspark.sql import SparkSession

from tests.support.spark_queries import after_slow_starts
from tests.support.spark_standalone import SESSION

COLUMNS = ("partition", "offset", "value")
_TABLE = "local.db.rows"


def session_with(folder: Path, package: str) -> SparkSession:
    """Return a session with a catalog of tables below the folder."""
    catalog = {
        "": "org.apache.iceberg.spark.SparkCatalog",
        ".type": "hadoop",
        ".warehouse": str(folder / "warehouse"),
    }
    builder = (
        SparkSession.builder.master("local[2]")
        .config(map=SESSION | {f"spark.sql.catalog.local{name}": value for name, value in catalog.items()})
        .config("spark.jars.packages", package)
        .config("spark.sql.extensions", "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions")
        .config("spark.driver.memory", "768m")
        .config("spark.local.dir", str(folder / "local"))
    )
    session: SparkSession = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def die_with(noted: Path) -> None:
    """Kill the process and its Java once a file exists."""
    while not noted.exists():
        time.sleep(0.002)
    os.killpg(0, signal.SIGKILL)


def main(folder: Path, options: dict[str, str]) -> None:
    """Stream to the end, and write down the rows of the table."""
    batch = options.pop("die_after", "")
    spark = session_with(folder, options.pop("package"))
    spark.sql(f"CREATE TABLE IF NOT EXISTS {_TABLE} (partition INT, offset BIGINT, value BINARY) USING iceberg")
    if batch:
        threading.Thread(target=die_with, args=[folder / "checkpoint" / "commits" / batch], daemon=True).start()
    source = spark.readStream.format("nsqext").options(**options).load().select(*COLUMNS)
    writer = source.writeStream.format("iceberg").option("checkpointLocation", str(folder / "checkpoint"))

    def run() -> None:
        # `availableNow` is one micro-batch with PySpark 4.0 and 4.1
        query = writer.toTable(_TABLE)
        query.processAllAvailable()
        query.stop()

    after_slow_starts(run)
    found = spark.table(_TABLE).select(*COLUMNS).collect()
    (folder / "found.json").write_text(json.dumps([[row.partition, row.offset, row.value.decode()] for row in found]))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
