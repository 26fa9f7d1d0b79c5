"""Streaming queries for tests: started, ended, and what they read by batch."""

from __future__ import annotations

import json
import shutil
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, field

from nsqext.spark.pyspark_features import HAS_READ_LIMITS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ("Reading", "finish", "post", "starting", "wait_for")

_DEADLINE = 90

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
        query = self.start(change)
        finish(query)
        while not HAS_READ_LIMITS:
            before = self._runs()
            following = self.start(change)
            finish(following)
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
        last = max(int(path.name) for path in (self.checkpoint / "commits").iterdir() if path.name.isdigit())
        for path in (self.checkpoint / "commits").iterdir():
            if path.name in (str(last), f".{last}.crc"):
                path.unlink()
        return last

    def forget_all(self) -> None:
        """Let Spark believe that the query is new."""
        shutil.rmtree(self.checkpoint)


def finish(query: StreamingQuery) -> None:
    """Wait until a query has ended by itself."""
    assert query.awaitTermination(_DEADLINE), "the query did not end"
    assert query.exception() is None


def wait_for(condition: Callable[[], bool], what: str, timeout: float = 60.0) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


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
