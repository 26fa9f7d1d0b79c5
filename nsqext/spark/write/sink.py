"""The sinks: publish the rows of a batch, or of the micro-batches of a stream.

A task is complete when each of its messages is acknowledged. Commit and abort only log: a stored message cannot be
removed, so a repeated task publishes its rows again. Rows carry an id, see `nsqext.spark.write.row_id`, by which
`nsqext.spark.dedupe` removes duplicates.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from attrs import frozen
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from nsqext.spark.pyspark_features import DataSourceStreamArrowWriter
from nsqext.spark.write.publisher import Tally, publish_chunks
from nsqext.spark.write.row_id import Origin
from nsqext.spark.write.row_mapper import RowMapper, RowRules

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import pyarrow as pa

    from nsqext import OutgoingMessage
    from nsqext.errors import NsqError
    from nsqext.spark.options import SinkOptions
    from nsqext.spark.write.row_mapper import Chunk, Target
    from nsqext.types import TopicMeta

__all__ = ("NsqStreamWriter", "NsqWriter", "Written")

logger: logging.Logger = logging.getLogger("nsqext.spark")


@frozen
class Written(WriterCommitMessage):
    """Result of a task.

    Attributes:
        tallies: published messages by topic and partition.
    """

    tallies: Mapping[tuple[str, int], Tally]

    @property
    def count(self) -> int:
        """Number of messages."""
        return sum(tally.count for tally in self.tallies.values())


def publish_rows(
    options: SinkOptions, columns: tuple[str, ...], origin: Origin, batches: Iterator[pa.RecordBatch]
) -> Written:
    """Publish the rows of a task.

    Raises:
        NsqError: a row is invalid or was not stored; the error message contains its number.
    """
    rate, client, bad = options.max_rows_per_second, options.client.producer(), options.bad_rows_topic
    rules = RowRules(
        columns,
        options.topic,
        options.idempotence_header,
        options.ack_batch_bytes,
        min(client.max_batch_count, rate or sys.maxsize),
        bad,
        client.max_message_size,
    )
    mapper: RowMapper

    def chunks(meta: Callable[[str], TopicMeta]) -> Iterable[Chunk]:
        nonlocal mapper
        mapper = RowMapper(rules, origin, meta)
        found = mapper.chunks(batches)
        return found if rate is None else paced(found, rate)

    def describe(row: int, error: NsqError, fields: Mapping[str, Any]) -> tuple[Target, bytes | OutgoingMessage, int]:
        return mapper.describe(row, error, fields)

    tallies = publish_chunks(options.client, origin.partition, chunks, None if bad is None else describe)
    if found := sum(tally.count for (topic, _), tally in tallies.items() if topic == bad):
        logger.warning(
            "Spark partition %d: %d rows could not be published; %s describes them", origin.partition, found, bad
        )
    return Written(tallies)


def paced(
    chunks: Iterable[Chunk],
    rate: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[Chunk]:
    """Delay chunks so that their messages do not exceed a rate.

    Args:
        chunks: the chunks.
        rate: messages a second.
        clock: returns the time in seconds.
        sleep: waits for some seconds.
    """
    due = clock()
    for chunk in chunks:
        now = clock()
        if due > now:
            sleep(due - now)
        due = max(due, now) + chunk.count / rate
        yield chunk


def _log(what: str, messages: Sequence[WriterCommitMessage | None]) -> None:
    written = [message for message in messages if isinstance(message, Written)]
    logger.info(
        "%s: %d messages of %d tasks, %d tasks failed",
        what,
        sum(message.count for message in written),
        len(written),
        len(messages) - len(written),
    )


class NsqWriter(DataSourceArrowWriter):
    """Publishes the rows of a batch.

    Args:
        options: options of the query.
        columns: names of the columns, in their order.
    """

    def __init__(self, options: SinkOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns
        self._job = uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Publish the rows of a task; returns after every message is acknowledged.

        Raises:
            NsqError: a row is invalid or was not stored; the error message contains its number.
        """
        return publish_rows(self._options, self._columns, Origin.of_job(self._job), iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log the number of published messages."""
        _log("batch written", messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Log the number of published messages, which cannot be removed."""
        _log("batch aborted after publishing", messages)


class NsqStreamWriter(DataSourceStreamArrowWriter):
    """Publishes the rows of micro-batches.

    Args:
        options: options of the query.
        columns: names of the columns, in their order.
    """

    def __init__(self, options: SinkOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns
        self._job = uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Publish the rows of a task; returns after every message is acknowledged.

        Raises:
            NsqError: a row is invalid or was not stored; the error message contains its number.
        """
        return publish_rows(self._options, self._columns, Origin.of_query(self._job), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Log the number of published messages."""
        _log(f"micro-batch {batchId} written", messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Log the number of published messages, which cannot be removed."""
        _log(f"micro-batch {batchId} aborted after publishing", messages)
