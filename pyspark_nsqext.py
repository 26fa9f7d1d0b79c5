"""Lets Spark find the format ``nsqext`` by itself: it imports installed modules whose names begin with ``pyspark_``."""

from nsqext.spark.registration import default_source

__all__ = ("DefaultSource",)

DefaultSource = default_source()
