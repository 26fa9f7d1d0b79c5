"""Streaming queries for tests: started, ended, and what they read by batch."""

from __future__ import annotations

import json
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import define, field
from pyspark.errors import StreamingQueryException

from nsqext.spark.pyspark_features import HAS_READ_LIMITS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ("Reading", "after_slow_starts", "forget_last_commit", "post", "run_to_end", "starting", "wait_for")

T = TypeVar("T")

_DEADLINE = 90
STARTS = 60.0
"""Seconds in which a stream whose start was too slow is started again."""
_SLOW_START = "Python worker failed to connect back"

Row = tuple[str, int, int, bytes]
"""Topic, partition, offset and value."""


@define
class Reading:
    """A streaming query that is run again and again with the same checkpoint.

    PySpark 4.0 and 4.1 run one micro-batch for ``availableNow``: there `run` repeats the query until it reads nothing.

    Attributes:
        spark: the session.
        checkpoint: where Spark keeps the query's progress.
        options: of the source.
        batches: rows by batch, for every time that the batch was run.
    """

    spark: SparkSession
    checkpoint: Path
    options: Mapping[str, str]
    batches: dict[int, list[list[Row]]] = field(factory=dict)

    def start(self, change: Callable[[DataFrame], DataFrame] | None = None, **trigger: Any) -> StreamingQuery:
        """Start the query.

        Args:
            change: what is done to the rows.
            trigger: see ``DataStreamWriter.trigger``; by default it ends at the current end.
        """
        frame = self.spark.readStream.format("nsqext").options(**self.options).load()
        rows = frame.select("topic", "partition", "offset", "value")
        writer = (change(rows) if change is not None else rows).writeStream
        return (
            writer.foreachBatch(self._keep)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(**(trigger or {"availableNow": True}))
            .start()
        )

    def _keep(self, rows: DataFrame, batch: int) -> None:
        found = [(row.topic, row.partition, row.offset, bytes(row.value)) for row in rows.collect()]
        self.batches.setdefault(batch, []).append(sorted(found))

    def run(self, change: Callable[[DataFrame], DataFrame] | None = None) -> StreamingQuery:
        """Read everything that is there now; returns the last query that ran a batch."""
        query = run_to_end(lambda: self.start(change))
        while not HAS_READ_LIMITS:
            before = self._runs()
            following = run_to_end(lambda: self.start(change))
            if self._runs() == before:
                break
            query = following
        return query

    def _runs(self) -> int:
        return sum(map(len, self.batches.values()))

    def rows(self) -> list[Row]:
        """Return the rows of all batches, each as it was read last."""
        return sorted(row for times in self.batches.values() for row in times[-1])

    def forget_commit(self) -> int:
        """Let Spark believe that the last batch was not done; returns its number."""
        return forget_last_commit(self.checkpoint)


def forget_last_commit(checkpoint: Path) -> int:
    """Let Spark believe that the last batch was not done; returns its number."""
    last = max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdigit())
    for path in (checkpoint / "commits").iterdir():
        if path.name in (str(last), f".{last}.crc"):
            path.unlink()
    return last


def after_slow_starts(action: Callable[[], T]) -> T:
    """Run something that starts streams, and run it again if Spark gave up on the start of one.

    Spark gives the Python process that plans a stream 10 seconds to start, which no setting changes. On a machine that
    is too busy for that a stream is started again with its checkpoint, as users are advised to do.
    """
    until = time.monotonic() + STARTS
    while True:
        try:
            return action()
        except StreamingQueryException as error:
            if _SLOW_START not in str(error) or time.monotonic() > until:
                raise


def run_to_end(start: Callable[[], StreamingQuery], timeout: int | None = _DEADLINE) -> StreamingQuery:
    """Start a query and wait until it has ended by itself.

    Args:
        start: starts the query.
        timeout: seconds in which the query must end; None for no limit.
    """

    def run() -> StreamingQuery:
        query = start()
        assert query.awaitTermination(timeout) is not False, "the query did not end"
        return query

    return after_slow_starts(run)


def wait_for(condition: Callable[[], bool], what: str, timeout: float = 60.0) -> None:
    """Wait until something is so; it is tested every 10 ms at first, and every 100 ms after two seconds."""
    begun = time.monotonic()
    while not condition():
        waited = time.monotonic() - begun
        assert waited < timeout, what
        time.sleep(min(max(waited / 20, 0.01), 0.1))


def starting(first: int, topics: Mapping[str, int]) -> str:
    """Return start positions as the option takes them.

    Args:
        first: the position, for all partitions.
        topics: number of partitions by topic.
    """
    return json.dumps({topic: {str(number): first for number in range(count)} for topic, count in topics.items()})


def post(address: str, path: str, **params: object) -> None:
    """Ask a server over HTTP to do something."""
    url = f"http://{address}{path}?{urllib.parse.urlencode(params)}"
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=10):
        pass
