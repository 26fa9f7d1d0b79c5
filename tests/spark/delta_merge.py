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
from typing import TYPE_CHECKING

from nsqext.spark.pyspark_features import HAS_READ_LIMITS
from tests.spark.exactly_once_driver import open_session
from tests.support.spark_queries import run_to_end

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

COLUMNS = ("partition", "offset", "value")


def main(folder: Path, options: dict[str, str]) -> None:
    """Stream to the end, merging each batch, and write down the rows of the table."""
    die_in = int(options.pop("die_in", "-1"))
    spark = open_session(folder, options.pop("package"))
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
    writer = writer.trigger(availableNow=True)
    while True:
        query = run_to_end(writer.start, timeout=None)
        # PySpark 4.0 and 4.1 run one batch, first the one that was not completed
        if HAS_READ_LIMITS or not sum(progress.numInputRows for progress in query.recentProgress):
            break
    found = spark.read.format("delta").load(str(folder / "table")).select(*COLUMNS).collect()
    (folder / "found.json").write_text(json.dumps([[row.partition, row.offset, row.value.decode()] for row in found]))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
