"""Removes rows that a sink has published more than once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as sf
from pyspark.sql.types import ArrayType

from nsqext.errors import InvalidInput
from nsqext.spark.options import ID_HEADER

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_ID = "__nsqext_id"
_WATERMARK = "spark.watermarkDelayMs"
_NEEDED = ("topic", "partition", "offset", "trace_id")


def dedupe(rows: DataFrame, *, header: str = ID_HEADER, trace_ids: bool | None = None) -> DataFrame:
    """Return rows of topics without duplicates that a repeated task of the sink has published.

    Duplicates have the same id: in a header on topics with extend headers, as a trace id on others. One row of each id
    stays, and every row without an id.

    A stream with a watermark drops ids that are older than it (``dropDuplicatesWithinWatermark``); without a watermark,
    the state keeps all ids.

    Args:
        rows: rows that were read, with at least the columns ``topic``, ``partition``, ``offset`` and ``trace_id``, and
            ``headers`` if the ids are in headers (option ``includeHeaders``).
        header: header that carries the id: option ``idempotenceHeader`` of the sink.
        trace_ids: use the trace id of rows without the header; None: only if there is no column ``headers``.
            If a publisher uses one trace id for several messages, all but one of them are removed.

    Raises:
        InvalidInput: a column is missing.
    """
    missing = [name for name in _NEEDED if name not in rows.columns]
    if missing:
        raise InvalidInput(f"column {missing[0]} is missing", hint="call dedupe on the rows as they were read")
    found = _header(rows, header) if "headers" in rows.columns else None
    marked = rows.withColumn(_ID, _identity(found, found is None if trace_ids is None else trace_ids))
    if rows.isStreaming and any(_WATERMARK in field.metadata for field in rows.schema):
        single = marked.dropDuplicatesWithinWatermark(["topic", _ID])
    else:
        single = marked.dropDuplicates(["topic", _ID])
    return single.drop(_ID)


def _header(rows: DataFrame, name: str) -> Column:
    headers = sf.col("headers")
    if isinstance(rows.schema["headers"].dataType, ArrayType):
        headers = sf.map_from_entries(headers)
    return headers.getItem(name).cast("string")


def _identity(header: Column | None, trace_ids: bool) -> Column:
    """Return the id of a row; the position of a row without an id, which is unique."""
    choices: list[Column] = []
    if header is not None:
        choices.append(sf.concat(sf.lit("header:"), header))
    if trace_ids:
        trace = sf.concat(sf.lit("trace:"), sf.col("trace_id").cast("string"))
        choices.append(sf.when(sf.col("trace_id") != 0, trace))
    place = sf.concat_ws(":", sf.lit("at"), sf.col("partition").cast("string"), sf.col("offset").cast("string"))
    return sf.coalesce(*choices, place)
