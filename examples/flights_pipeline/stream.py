"""The streams: messages to rows, rows to delays, delays to a topic, and from there to Parquet."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pyspark
from attrs import frozen
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

import nsqext.spark
from examples.flights_pipeline.flights import airlines_file

__all__ = (
    "ARCHIVE",
    "DELAYS",
    "DEPARTURES",
    "Flow",
    "Locations",
    "Streams",
    "flow_of",
    "make_session",
    "parse",
    "read_by",
    "sum_up",
    "wait_for",
)

FLIGHT = (
    "number INT, year INT, month INT, day INT, dep_time INT, sched_dep_time INT, dep_delay INT, arr_time INT, "
    "sched_arr_time INT, arr_delay INT, carrier STRING, flight INT, tailnum STRING, origin STRING, dest STRING, "
    "air_time INT, distance INT, hour INT, minute INT, time_hour TIMESTAMP"
)
DELAY = "carrier STRING, airline STRING, time_hour TIMESTAMP, flights BIGINT, cancelled BIGINT, delay BIGINT"

DEPARTURES, DELAYS, ARCHIVE = "departures", "delays", "archive"
"""The channels. Each stream has its own, which makes the servers retain what the stream has not read yet."""

_HAS_AVAILABLE_NOW = tuple(map(int, pyspark.__version__.split(".")[:2])) >= (4, 2)
"""Whether ``availableNow`` reads everything; with older versions it is a single micro-batch."""
_LATENESS = "2 days"
_PER_TRIGGER = 60_000


def make_session(master: str = "local[*]") -> SparkSession:
    """Return a session; by default on all cores of this machine."""
    builder = SparkSession.builder.master(master).appName("flights pipeline")
    if master.startswith("local"):
        builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
    session = (
        builder.config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.sql.streaming.numRecentProgressUpdates", "10000")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", str(os.cpu_count() or 2))
        .config("spark.sql.execution.arrow.pyspark.enabled", "true")
        .getOrCreate()
    )
    nsqext.spark.register(session)
    return session


def parse(messages: DataFrame, schema: str) -> DataFrame:
    """Turn messages whose bodies are JSON into rows."""
    return messages.select(f.from_json(f.col("value").cast("string"), schema).alias("row")).select("row.*")


def sum_up(flights: DataFrame) -> DataFrame:
    """Add up the delays by airline and scheduled hour.

    A flight that was cancelled has no departure, hence no delay: it counts as cancelled, and not as punctual. An hour
    is closed, and its sum published, when a flight two days later has been read.
    """
    late = flights.withWatermark("time_hour", _LATENESS)
    hours = late.groupBy("carrier", "airline", f.window("time_hour", "1 hour").alias("span"))
    sums = hours.agg(
        f.count("*").alias("flights"),
        f.count_if(f.col("dep_time").isNull()).alias("cancelled"),
        f.coalesce(f.sum("dep_delay"), f.lit(0)).alias("delay"),
    )
    return sums.select("carrier", "airline", f.col("span.start").alias("time_hour"), "flights", "cancelled", "delay")


@frozen
class Locations:
    """Topics and folders of the data.

    Attributes:
        lookupd: lookup addresses, with commas.
        flights: topic of the flights.
        delays: topic of the delays.
        folder: for the Parquet files and the checkpoints.
    """

    lookupd: str
    flights: str
    delays: str
    folder: Path

    def parquet(self, name: str) -> str:
        """Return the folder of a table."""
        return str(self.folder / name)

    def checkpoint(self, name: str) -> str:
        """Return the checkpoint folder of a stream."""
        return str(self.folder / "checkpoints" / name)


@frozen
class Flow:
    """Figures of streams.

    Attributes:
        read: messages that they read.
        late: rows that were dropped because they were received too late for their hour.
    """

    read: int = 0
    late: int = 0

    def __add__(self, other: Flow) -> Flow:
        return Flow(self.read + other.read, self.late + other.late)


class Streams:
    """The streams of the pipeline.

    Args:
        session: knows the source ``nsqext``.
        locations: topics and folders.
        every: seconds between micro-batches of streams that run until they are stopped; None for streams that read the
            existing messages, and end.
    """

    def __init__(self, session: SparkSession, locations: Locations, every: float | None = None) -> None:
        self._session = session
        self._locations = locations
        self._every = every

    @property
    def folder(self) -> Path:
        """Folder of the Parquet files and the checkpoints."""
        return self._locations.folder

    def departures(self) -> StreamingQuery:
        """Keep every flight, with its airline, in Parquet."""
        return self._to_parquet(self._flights(DEPARTURES).where("number > 0"), DEPARTURES)

    def delays(self) -> StreamingQuery:
        """Add up the delays, and publish them to their topic, keyed by airline.

        Each message has an id that is computed from its airline and hour, so that readers can remove duplicates. The
        ids of the sink are numbers of rows, which are stable only if the rows have the same order again; after a
        shuffle they need not.
        """
        sums = sum_up(self._flights(DELAYS))
        identity = f.concat_ws("/", "carrier", "time_hour")
        writer = (
            sums.select(
                f.to_json(f.struct(*sums.columns)).alias("value"),
                f.col("carrier").alias("key"),
                f.create_map(f.lit("carrier"), f.col("carrier"), f.lit("nsqext_id"), identity).alias("headers"),
            )
            .writeStream.format("nsqext")
            .option("lookupd", self._locations.lookupd)
            .option("topic", self._locations.delays)
        )
        return self._start(writer, DELAYS)

    def archive(self) -> StreamingQuery:
        """Keep the delays in Parquet; what a repeated task published again is stored once."""
        messages = nsqext.spark.dedupe(self._read(self._locations.delays, ARCHIVE, "includeHeaders"))
        return self._to_parquet(parse(messages, DELAY), ARCHIVE)

    def table(self, name: str) -> DataFrame:
        """Return what a stream has written to Parquet."""
        return self._session.read.parquet(self._locations.parquet(name))

    def archived(self) -> DataFrame | None:
        """Return the delays that are archived so far; None before the first ones."""
        if not Path(self._locations.parquet(ARCHIVE), "_spark_metadata", "0").exists():
            return None
        return self._session.read.schema(DELAY).parquet(self._locations.parquet(ARCHIVE))

    def _read(self, topic: str, channel: str, *switches: str) -> DataFrame:
        reader = (
            self._session.readStream.format("nsqext")
            .option("lookupd", self._locations.lookupd)
            .option("subscribe", topic)
            .option("channel", channel)
            .option("maxOffsetsPerTrigger", _PER_TRIGGER)
        )
        return reader.options(**dict.fromkeys(switches, "true")).load()

    def _flights(self, channel: str) -> DataFrame:
        airlines = self._session.read.csv(str(airlines_file()), header=True).withColumnRenamed("name", "airline")
        return parse(self._read(self._locations.flights, channel), FLIGHT).join(
            f.broadcast(airlines), "carrier", "left"
        )

    def _to_parquet(self, rows: DataFrame, name: str) -> StreamingQuery:
        return self._start(rows.writeStream.format("parquet").option("path", self._locations.parquet(name)), name)

    def _start(self, writer: DataStreamWriter, name: str) -> StreamingQuery:
        writer = writer.queryName(name).option("checkpointLocation", self._locations.checkpoint(name))
        if self._every is not None:
            return writer.trigger(processingTime=f"{self._every:g} seconds").start()
        return writer.trigger(availableNow=True).start() if _HAS_AVAILABLE_NOW else writer.start()


def wait_for(queries: Sequence[StreamingQuery], progress: Callable[[StreamingQuery, int], None]) -> Flow:
    """Wait until streams have ended; returns the sum of their figures.

    Args:
        queries: the streams.
        progress: called repeatedly with a stream and the number of messages that it has read.

    Raises:
        StreamingQueryException: one of them failed.
    """
    for query in queries:
        if not _HAS_AVAILABLE_NOW:
            query.processAllAvailable()
            query.stop()
        ended = False
        while not ended:
            ended = bool(query.awaitTermination(1))
            for other in queries:
                progress(other, read_by(other))
    return flow_of(queries)


def flow_of(queries: Sequence[StreamingQuery]) -> Flow:
    """Return the sum of the figures of streams."""
    states = [state for query in queries for batch in query.recentProgress for state in batch.stateOperators]
    return Flow(sum(map(read_by, queries)), sum(state.numRowsDroppedByWatermark for state in states))


def read_by(query: StreamingQuery) -> int:
    """Return the number of messages that a stream has read."""
    return sum(batch.numInputRows for batch in query.recentProgress)
