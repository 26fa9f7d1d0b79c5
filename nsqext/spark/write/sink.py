"""The sinks: publish the rows of a batch or of a stream's micro-batches.

A task is complete when all its messages are acknowledged. Commit and abort only log: a stored message cannot be
removed, so a repeated task publishes its rows again. `dedupe` removes the copies by their ids, see
`nsqext.spark.write.row_ids`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING
from uuid import uuid4

from attrs import frozen
from pyspark.sql import Window
from pyspark.sql import functions as sf
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import ArrayType

from nsqext.errors import InvalidInput
from nsqext.spark.options import ID_HEADER
from nsqext.spark.pyspark_features import DataSourceStreamArrowWriter
from nsqext.spark.write.publisher import publish_rows
from nsqext.spark.write.row_ids import TASK_SUFFIX, ContentIds

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

    from nsqext.spark.options import SinkOptions

logger: logging.Logger = logging.getLogger("nsqext.spark")


@frozen
class Written(WriterCommitMessage):
    tallies: Mapping[tuple[str, int | None], int]


class _TaskWriter:
    def __init__(self, options: SinkOptions, columns: tuple[str, ...]) -> None:
        self._options = options
        self._columns = columns
        self._run = uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Publish a task's rows; return after every message is acknowledged."""
        return Written(publish_rows(self._options, self._columns, self._ids(), iterator))

    def _ids(self) -> ContentIds:
        return ContentIds.of_job(self._run, self._options.job)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int | None = None) -> None:
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


class NsqWriter(_TaskWriter, DataSourceArrowWriter): ...


class NsqStreamWriter(_TaskWriter, DataSourceStreamArrowWriter):
    def _ids(self) -> ContentIds:
        return ContentIds.of_query(self._run)


_ID, _TASK, _BASE, _NUMBER = "__nsqext_id", "__nsqext_task", "__nsqext_base", "__nsqext_number"
_WATERMARK = "spark.watermarkDelayMs"
_NEEDED = ("topic", "partition", "offset", "trace_id")
_NUMBERED = "(/[0-9a-f]{16})-([0-9]+)$"  # the end of the id of a row with equal rows before it


def dedupe(rows: DataFrame, *, header: str = ID_HEADER, trace_ids: bool | None = None) -> DataFrame:
    """Return rows of topics without duplicates that a repeated task or micro-batch of the sink has published.

    Duplicates have the same id: in a header on topics with extend headers, as a trace id on others. One row of each id
    stays, and every row without an id. Ids of earlier versions count as well.

    Of equal rows without a position that several tasks published, a batch keeps as many as the run with most of them
    published. A stream, and trace ids, take them for duplicates of each other.

    A stream with a watermark drops older ids (``dropDuplicatesWithinWatermark``); otherwise the state keeps all ids.

    Args:
        rows: read rows with the columns ``topic``, ``partition``, ``offset`` and ``trace_id``, and ``headers`` if the
            ids are in headers (option ``includeHeaders``).
        header: header with the id, the sink's option ``idempotenceHeader``.
        trace_ids: use the trace id of rows without the header; None: only without a column ``headers``. Of messages
            with the same trace id, only one stays.

    Raises:
        InvalidInput: a column is missing.
    """
    missing = [name for name in _NEEDED if name not in rows.columns]
    if missing:
        raise InvalidInput(f"column {missing[0]} is missing", hint="call dedupe on the rows as they were read")
    choices: list[Column] = []
    task = sf.lit(None).cast("string")
    if "headers" in rows.columns:
        headers = sf.col("headers")
        if isinstance(rows.schema["headers"].dataType, ArrayType):
            headers = sf.map_from_entries(headers)
        choices.append(sf.concat(sf.lit("header:"), headers.getItem(header).cast("string")))
        task = headers.getItem(f"{header}{TASK_SUFFIX}").cast("string")
    if not choices if trace_ids is None else trace_ids:
        trace = sf.concat(sf.lit("trace:"), sf.col("trace_id").cast("string"))
        choices.append(sf.when(sf.col("trace_id") != 0, trace))
    # a row without an id has its unique position; of a channel it has none, and is no duplicate either
    position = sf.concat_ws(":", sf.lit("at"), sf.col("partition").cast("string"), sf.col("offset").cast("string"))
    place = sf.when(sf.col("offset").isNotNull(), position).otherwise(sf.expr("uuid()"))
    marked = rows.withColumn(_ID, sf.coalesce(*choices, place))
    if not rows.isStreaming:
        return _numbered(marked.withColumn(_TASK, task)) if "headers" in rows.columns else _single(marked)
    if any(_WATERMARK in field.metadata for field in rows.schema):
        return marked.dropDuplicatesWithinWatermark(["topic", _ID]).drop(_ID)
    return _single(marked)


def _single(marked: DataFrame) -> DataFrame:
    return marked.dropDuplicates(["topic", _ID]).drop(_ID)


def _numbered(marked: DataFrame) -> DataFrame:
    """Return one row of each id; equal rows without a position are numbered within their run.

    The complete run has all numbers of an interrupted run.
    """
    within_run = Window.partitionBy("topic", _BASE, sf.substring_index(_TASK, "/", 1)).orderBy(_TASK, _ID)
    number = sf.when(sf.col(_TASK).isNotNull(), sf.dense_rank().over(within_run))
    own = sf.when(sf.col(_ID).rlike(_NUMBERED), sf.regexp_extract(_ID, _NUMBERED, 2).cast("int") + 1)
    single = (
        marked.withColumn(_BASE, sf.regexp_replace(_ID, _NUMBERED, "$1"))
        .repartition("topic", _BASE)  # once for both of what follows
        .withColumn(_NUMBER, sf.coalesce(number, own, sf.lit(1)))
        .dropDuplicates(["topic", _BASE, _NUMBER])
    )
    return single.drop(_ID, _TASK, _BASE, _NUMBER)
