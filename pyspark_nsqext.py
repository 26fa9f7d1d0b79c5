"""Lets Spark find the format ``nsqext`` by itself: it imports installed modules whose names begin with ``pyspark_``."""

from nsqext.spark.source import NsqDataSource as DefaultSource

__all__ = ("DefaultSource",)
