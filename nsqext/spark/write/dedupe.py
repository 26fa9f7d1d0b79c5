"""Taking away what a sink has published twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from nsqext.errors import InvalidInput
from nsqext.spark.options import ID_HEADER

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ("dedupe",)

_ID = "__nsqext_id"
_WATERMARK = "spark.watermarkDelayMs"
_NEEDED = ("topic", "partition", "offset", "trace_id")


def dedupe(rows: DataFrame, *, header: str = ID_HEADER, trace_ids: bool | None = None) -> DataFrame:
    """Return rows of topics without those that a sink of this format has published again.

    A row's copies have the same id: in a header on topics that support extend headers, as a trace id elsewhere. Rows
    without an id all stay; so does one of each id.

    A stream with a watermark forgets ids that are older than it (``dropDuplicatesWithinWatermark``); without one, all
    ids are kept for ever.

    Args:
        rows: what was read, with at least the columns ``topic``, ``partition``, ``offset`` and ``trace_id``, and
            ``headers`` where the ids are in headers (option ``includeHeaders``).
        header: header that carries the id, as the sink was told with ``idempotenceHeader``.
        trace_ids: take trace ids for ids where there is no header; None does so when there is no column ``headers``.
            Publishers that give several messages one trace id would lose all but one of them.

    Raises:
        InvalidInput: a column is missing.
    """
    missing = [name for name in _NEEDED if name not in rows.columns]
    if missing:
        raise InvalidInput(f"column {missing[0]} is missing", hint="call dedupe on the rows as they were read")
    with_headers = "headers" in rows.columns
    marked = rows.withColumn(
        _ID, _identity(header if with_headers else None, not with_headers if trace_ids is None else trace_ids)
    )
    if rows.isStreaming and any(_WATERMARK in field.metadata for field in rows.schema):
        single = marked.dropDuplicatesWithinWatermark(["topic", _ID])
    else:
        single = marked.dropDuplicates(["topic", _ID])
    return single.drop(_ID)


def _identity(header: str | None, trace_ids: bool) -> Column:
    """Return the id of a row; one that has none goes by its place, which is its own."""
    choices: list[Column] = []
    if header is not None:
        choices.append(sf.concat(sf.lit("header:"), sf.col("headers").getItem(header)))
    if trace_ids:
        trace = sf.concat(sf.lit("trace:"), sf.col("trace_id").cast("string"))
        choices.append(sf.when(sf.col("trace_id") != 0, trace))
    place = sf.concat_ws(":", sf.lit("at"), sf.col("partition").cast("string"), sf.col("offset").cast("string"))
    return sf.coalesce(*choices, place)
