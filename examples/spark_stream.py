"""Stream a topic to Parquet files with Spark, each message once.

Start it again with the same folder: it continues where it stopped. ``--once`` reads the existing messages and ends.

    python examples/spark_stream.py --lookupd 127.0.0.1:4161 --topic orders --out /tmp/orders --once
"""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession

import nsqext.spark


def main() -> None:
    """Run the query."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lookupd", required=True, metavar="HOST:PORT", help="nsqlookupd's HTTP address")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="for the files and the checkpoint")
    parser.add_argument("--channel", default="spark_stream", help="the query's own channel; default: spark_stream")
    parser.add_argument("--master", default="local[*]", help="default: local[*]")
    parser.add_argument("--once", action="store_true", help="read the existing messages, and end")
    given = parser.parse_args()
    spark = SparkSession.builder.master(given.master).appName("spark_stream").getOrCreate()
    nsqext.spark.register(spark)
    options = {"lookupd": given.lookupd, "subscribe": given.topic, "channel": given.channel}
    messages = spark.readStream.format("nsqext").options(**options, startingOffsets="earliest").load()
    writer = messages.writeStream.format("parquet").option("path", f"{given.out}/rows")
    writer = writer.option("checkpointLocation", f"{given.out}/checkpoint")
    query = writer.trigger(availableNow=True).start() if given.once else writer.start()
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main()
