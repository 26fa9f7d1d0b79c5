"""Columns that are read, and those that can be written."""

from __future__ import annotations

import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import IntegerType, MapType, StringType, StructType

from nsqext.errors import InvalidSetting
from nsqext.spark.options import Access, SinkOptions
from nsqext.spark.schema import arrow_schema, check_read_schema, check_write_schema, read_schema

NOWHERE = SinkOptions(Access(("a:1",)))
SOMEWHERE = SinkOptions(Access(("a:1",)), topic="t")


@pytest.mark.parametrize("include_headers", [False, True])
def test_arrow_columns_are_those_that_spark_demands(include_headers: bool) -> None:
    wanted = to_arrow_schema(read_schema(include_headers), timezone="UTC")
    assert arrow_schema(include_headers).equals(wanted)
    check_read_schema(read_schema(include_headers), include_headers)


def test_the_columns() -> None:
    plain = "value topic partition offset queue_offset timestamp message_id trace_id attempts tag"
    assert " ".join(read_schema().fieldNames()) == plain
    assert " ".join(read_schema(include_headers=True).fieldNames()) == f"{plain} headers key"


def test_rows_cannot_have_other_columns() -> None:
    with pytest.raises(InvalidSetting, match=r"leave schema\(\) out"):
        check_read_schema(read_schema(include_headers=True), include_headers=False)


@pytest.mark.parametrize("kind", ["binary", "string"])
def test_these_can_be_written(kind: str) -> None:
    rows = StructType()
    for name, type_name in (("topic", "string"), ("value", kind), ("key", kind), ("partition", "long")):
        rows.add(name, type_name)
    rows.add("trace_id", "integer").add("tag", "string").add("headers", MapType(StringType(), StringType()))
    check_write_schema(rows, NOWHERE)
    check_write_schema(StructType().add("value", kind), SOMEWHERE)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (StructType().add("value", "binary"), "neither a column topic nor the option topic"),
        (StructType().add("topic", "string"), "column value is missing"),
        (
            StructType().add("value", "integer").add("topic", "string"),
            "column value is int: cast it to binary or string",
        ),
        (StructType().add("value", "string").add("topics", "string"), "column topics is unknown to the sink"),
        (StructType().add("value", "string").add("value", "string"), "column value is there twice"),
        (
            StructType()
            .add("value", "string")
            .add("headers", MapType(StringType(), StringType(), True))
            .add("tag", "integer"),
            "column tag is int: cast it to string",
        ),
        (
            StructType().add("headers", MapType(StringType(), IntegerType())).add("value", "string"),
            "column headers is map<string,int>: cast it to map<string,string>",
        ),
    ],
)
def test_these_cannot_be_written(rows: StructType, told: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        check_write_schema(rows, NOWHERE)
    assert told in str(caught.value)
