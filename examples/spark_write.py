"""Publish rows to a topic with Spark.

python examples/spark_write.py --lookupd 127.0.0.1:4161 --topic orders --rows 100000
"""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

import nsqext.spark


def main() -> None:
    """Publish numbered messages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lookupd", required=True, metavar="HOST:PORT", help="nsqlookupd's HTTP address")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--rows", type=int, default=100_000, help="default: 100000")
    parser.add_argument("--tasks", type=int, default=4, help="default: 4")
    parser.add_argument("--master", default="local[*]", help="default: local[*]")
    given = parser.parse_args()
    spark = SparkSession.builder.master(given.master).appName("spark_write").getOrCreate()
    nsqext.spark.register(spark)
    numbers = spark.range(0, given.rows, 1, given.tasks)
    rows = numbers.select(sf.to_json(sf.struct("id")).alias("value"))
    rows.write.format("nsqext").mode("append").options(lookupd=given.lookupd, topic=given.topic).save()
    print(f"{given.rows} messages are stored")
    spark.stop()


if __name__ == "__main__":
    main()
