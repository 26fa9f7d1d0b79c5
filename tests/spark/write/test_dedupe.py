"""Taking away copies."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as sf

from nsqext.errors import InvalidInput
from nsqext.spark import dedupe
from nsqext.spark.columns import ALL_COLUMNS, BASE_COLUMNS, read_schema
from tests.support.spark_queries import run_to_end

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Row = dict[str, Any]


def row(offset: int, topic: str = "t", partition: int = 0, **fields: Any) -> Row:
    return {"value": b"%d" % offset, "topic": topic, "partition": partition, "offset": offset, "trace_id": 0, **fields}


def frame(spark: SparkSession, rows: list[Row], *, include_headers: bool = True) -> DataFrame:
    schema = read_schema(ALL_COLUMNS if include_headers else BASE_COLUMNS)
    return spark.createDataFrame([tuple(one.get(name) for name in schema.fieldNames()) for one in rows], schema)


def without_position(**fields: Any) -> Row:
    """Return a row that was read from a channel."""
    return {**row(0, **fields), "offset": None}


def offsets(rows: DataFrame) -> list[int]:
    """Return the sorted offsets of rows, -1 for none."""
    return sorted(-1 if found.offset is None else found.offset for found in rows.select("offset").collect())


def marked(offset: int, name: str, **fields: Any) -> Row:
    return row(offset, headers={"nsqext_id": name}, **fields)


def test_one_row_of_each_id_is_kept(spark: SparkSession) -> None:
    rows = frame(
        spark,
        [
            marked(0, "a"),
            marked(1, "b"),
            marked(2, "a"),
            marked(3, "a", topic="other"),
            marked(3, "b", partition=1),
            row(4),
            row(5, headers={"x": "y"}),
            row(6, trace_id=9),
            row(7, trace_id=9),
        ],
    )
    single = dedupe(rows)
    assert single.columns == rows.columns
    kept = offsets(single)
    assert len(kept) == 7
    assert sorted({0, 2} & set(kept)) in ([0], [2])
    assert {4, 5, 6, 7} <= set(kept)
    assert len({6, 7} & set(offsets(dedupe(rows, trace_ids=True)))) == 1
    array = "transform(map_entries(headers), one -> named_struct('key', one.key, 'value', binary(one.value)))"
    assert len(offsets(dedupe(rows.withColumn("headers", sf.expr(array))))) == 7
    assert len(offsets(dedupe(rows, header="other"))) == 9


def test_equal_rows_of_several_tasks_stay_as_often_as_a_run_published_them(spark: SparkSession) -> None:
    """The first run was interrupted; the second one had its rows in other tasks."""
    content = "q/0/0123456789abcdef"
    published = [
        *((content, "first/0"), (content, "first/1"), (content, "first/1")),
        *((content, "second/0"), (f"{content}-1", "second/0"), (f"{content}-1", "second/0"), (content, "second/2")),
        *(("q/0/fedcba9876543210", "first/1"), ("q/0/fedcba9876543210", "second/0")),
    ]
    rows = [
        row(offset, headers={"nsqext_id": name, "nsqext_id_task": task})
        for offset, (name, task) in enumerate(published)
    ]
    kept = offsets(dedupe(frame(spark, rows)))
    assert len(kept) == 4
    assert len([offset for offset in kept if offset < 7]) == 3


def test_ids_of_earlier_versions_are_understood(spark: SparkSession) -> None:
    rows = [marked(0, "q/0/0/0"), marked(1, "q/0/0/1"), marked(2, "q/0/0/0"), marked(3, "q/0/1/0")]
    # and numbers of rows that need no task
    rows += [marked(4, "q/0/0123456789abcdef"), marked(5, "q/0/0123456789abcdef-1"), marked(6, "q/0/0123456789abcdef")]
    assert len(offsets(dedupe(frame(spark, rows)))) == 5


def test_without_headers_trace_ids_count(spark: SparkSession) -> None:
    rows = frame(
        spark,
        [row(0, trace_id=-5), row(1, trace_id=-5), row(2, trace_id=7), row(3), row(4), row(3, partition=1)],
        include_headers=False,
    )
    assert len(offsets(dedupe(rows))) == 5
    assert len(offsets(dedupe(rows, trace_ids=False))) == 6
    copied = frame(spark, [row(0, trace_id=7), row(1, topic="copy", trace_id=7)], include_headers=False)
    assert len(offsets(dedupe(copied))) == 2, "messages of two topics"


def test_rows_of_channels_without_id_stay(spark: SparkSession) -> None:
    rows = [without_position(), without_position(), without_position(partition=None), without_position(trace_id=9)]
    for include_headers in (True, False):
        assert offsets(dedupe(frame(spark, rows, include_headers=include_headers))) == [-1] * 4
    copies = [without_position(headers={"nsqext_id": "a"})] * 2
    assert offsets(dedupe(frame(spark, [*rows, *copies]))) == [-1] * 5


def test_columns_are_needed(spark: SparkSession) -> None:
    rows = frame(spark, [row(0)])
    with pytest.raises(InvalidInput, match="column offset is missing"):
        dedupe(rows.drop("offset"))


def test_a_stream_remembers_ids(spark: SparkSession, tmp_path: Path) -> None:
    schema, kept = read_schema(ALL_COLUMNS), list[list[int]]()
    for batch in (
        [marked(0, "a"), marked(1, "b"), marked(2, "a")],
        [marked(3, "b"), marked(4, "c"), row(5), marked(6, "a", topic="other"), *[without_position()] * 2],
    ):
        rows = frame(spark, batch).withColumn("timestamp", sf.current_timestamp())
        rows.coalesce(1).write.mode("append").parquet(str(tmp_path / "source"))
    rows = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "source"))
    assert "DeduplicateWithinWatermark" not in plan(dedupe(rows))
    single = dedupe(rows.withWatermark("timestamp", "1 hour"))
    assert "DeduplicateWithinWatermark" in plan(single)
    writer = single.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
    run_to_end(writer.foreachBatch(lambda found, _: kept.append(offsets(found))).start)
    assert [len(found) for found in kept if found] == [2, 5]
    assert kept[1] == [-1, -1, 4, 5, 6]


def plan(rows: DataFrame) -> str:
    with redirect_stdout(io.StringIO()) as printed:
        rows.explain("extended")
    return printed.getvalue()
