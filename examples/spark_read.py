"""Read a topic with Spark, and count its messages by partition.

python examples/spark_read.py --lookupd 127.0.0.1:4161 --topic orders
python examples/spark_read.py --lookupd 127.0.0.1:4161 --topic orders --master spark://host:7077
"""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession
from pyspark.sql import functions as sf

import nsqext.spark


def main() -> None:
    """Print a table of partitions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lookupd", required=True, metavar="HOST:PORT", help="nsqlookupd's HTTP address")
    parser.add_argument("--topic", required=True)
    parser.add_argument("--master", default="local[*]", help="default: local[*]")
    given = parser.parse_args()
    spark = SparkSession.builder.master(given.master).appName("spark_read").getOrCreate()
    nsqext.spark.register(spark)
    messages = spark.read.format("nsqext").options(lookupd=given.lookupd, subscribe=given.topic).load()
    by_partition = messages.groupBy("partition").agg(
        sf.count("*").alias("messages"),
        sf.sum(sf.length("value")).alias("bytes"),
        sf.min("timestamp").alias("first"),
        sf.max("timestamp").alias("last"),
    )
    by_partition.orderBy("partition").show(truncate=False)
    spark.stop()


if __name__ == "__main__":
    main()
