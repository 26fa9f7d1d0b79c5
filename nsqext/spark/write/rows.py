"""Publishes the rows of a task."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from nsqext.spark.write.publisher import Tallies, publish_chunks
from nsqext.spark.write.row_mapper import RowMapper, RowRules

if TYPE_CHECKING:
    import pyarrow as pa

    from nsqext import OutgoingMessage
    from nsqext.errors import NsqError
    from nsqext.spark.options import SinkOptions
    from nsqext.spark.write.row_id import Origin
    from nsqext.spark.write.row_mapper import Chunk, Target
    from nsqext.types import TopicMeta

logger: logging.Logger = logging.getLogger("nsqext.spark")


def publish_rows(
    options: SinkOptions, columns: tuple[str, ...], origin: Origin, batches: Iterator[pa.RecordBatch]
) -> Tallies:
    """Publish the rows of a task; return the published messages by topic and partition.

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
    if found := sum(count for (topic, _), count in tallies.items() if topic == bad):
        logger.warning(
            "Spark partition %d: %d rows could not be published; %s describes them", origin.partition, found, bad
        )
    return tallies


def paced(
    chunks: Iterable[Chunk],
    rate: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[Chunk]:
    """Delay chunks so that their messages do not exceed a rate."""
    due = clock()
    for chunk in chunks:
        now = clock()
        if due > now:
            sleep(due - now)
        due = max(due, now) + chunk.count / rate
        yield chunk
