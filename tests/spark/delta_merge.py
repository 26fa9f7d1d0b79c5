"""Merges a stream into a Delta table, the program of `tests.spark.test_delta`.

``python -m tests.spark.delta_merge FOLDER OPTIONS``: the options of the source as JSON, with the Maven package of Delta
as ``package``. After the merge of batch ``die_in``, before Spark has noted the batch, it kills itself with its Java.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

import nsqext.spark
from tests.support.spark_standalone import JAVA_OPTIONS

COLUMNS = ("partition", "offset", "value")


def session(package: str, folder: Path) -> SparkSession:
    """Return a session with Delta."""
    spark: SparkSession = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars.packages", package)
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "768m")
        .config("spark.driver.extraJavaOptions", JAVA_OPTIONS)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.local.dir", str(folder / "local"))
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    nsqext.spark.register(spark)
    return spark


def main(folder: Path, options: dict[str, str]) -> None:
    """Stream to the end, merging each batch, and write down the rows of the table."""
    die_in = int(options.pop("die_in", "-1"))
    spark = session(options.pop("package"), folder)
    table = f"delta.`{folder / 'table'}`"
    spark.sql(f"CREATE TABLE IF NOT EXISTS {table} (partition INT, offset BIGINT, value BINARY) USING delta")

    def merge(rows: DataFrame, batch: int) -> None:
        rows.createOrReplaceTempView("batch")
        rows.sparkSession.sql(
            f"MERGE INTO {table} old USING batch new ON old.partition = new.partition AND old.offset = new.offset "
            "WHEN NOT MATCHED THEN INSERT *"
        )
        if batch == die_in:
            os.killpg(0, signal.SIGKILL)

    source = spark.readStream.format("nsqext").options(**options).load().select(*COLUMNS)
    writer = source.writeStream.foreachBatch(merge).option("checkpointLocation", str(folder / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    found = spark.read.format("delta").load(str(folder / "table")).select(*COLUMNS).collect()
    (folder / "found.json").write_text(json.dumps([[row.partition, row.offset, row.value.decode()] for row in found]))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
