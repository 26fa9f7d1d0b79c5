"""The sinks: publish the rows of a batch, or of the micro-batches of a stream.

A task is complete when each of its messages is acknowledged. Commit and abort only log: a stored message cannot be
removed, so a repeated task publishes its rows again. Rows carry an id, see `nsqext.spark.write.row_id`, by which
`nsqext.spark.dedupe` removes duplicates.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING
from uuid import uuid4

from attrs import frozen
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from nsqext.spark.pyspark_features import DataSourceStreamArrowWriter
from nsqext.spark.write.publisher import publish_rows
from nsqext.spark.write.row_id import Origin

if TYPE_CHECKING:
    import pyarrow as pa

    from nsqext.spark.options import SinkOptions

logger: logging.Logger = logging.getLogger("nsqext.spark")


@frozen
class Written(WriterCommitMessage):
    """Result of a task."""

    tallies: Mapping[tuple[str, int], int]


class _TaskWriter:
    """Publishes the rows of tasks."""

    _origin = staticmethod(Origin.of_job)

    def __init__(self, options: SinkOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns
        self._job = uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Publish the rows of a task; return after every message is acknowledged."""
        return Written(publish_rows(self._options, self._columns, self._origin(self._job), iterator))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int | None = None) -> None:
        """Log the number of published messages."""
        _log("written", messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int | None = None) -> None:
        """Log the number of published messages, which cannot be removed."""
        _log("aborted after publishing", messages, batchId)


def _log(what: str, messages: Sequence[WriterCommitMessage | None], batch: int | None) -> None:
    written = [message for message in messages if isinstance(message, Written)]
    logger.info(
        "%s %s: %d messages of %d tasks, %d tasks failed",
        "batch" if batch is None else f"micro-batch {batch}",
        what,
        sum(sum(message.tallies.values()) for message in written),
        len(written),
        len(messages) - len(written),
    )


class NsqWriter(_TaskWriter, DataSourceArrowWriter):
    """Publishes the rows of a batch."""


class NsqStreamWriter(_TaskWriter, DataSourceStreamArrowWriter):
    """Publishes the rows of micro-batches."""

    _origin = staticmethod(Origin.of_query)
