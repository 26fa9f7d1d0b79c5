"""Columns that are read, and those that can be written."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import IntegerType, MapType, StringType, StructType

from nsqext.errors import InvalidSetting
from nsqext.spark.cluster.client_config import ClientConfig
from nsqext.spark.columns import (
    ALL_COLUMNS,
    BASE_COLUMNS,
    Columns,
    arrow_schema,
    check_write_schema,
    chosen_columns,
    read_schema,
)
from nsqext.spark.options import SinkOptions, SourceOptions
from nsqext.spark.pyspark_features import HAS_READ_LIMITS
from nsqext.spark.read.readers import NsqReader
from nsqext.spark.source import NsqDataSource
from nsqext.spark.write.sink import NsqWriter

NOWHERE = SinkOptions(ClientConfig(("a:1",)))
SOMEWHERE = SinkOptions(ClientConfig(("a:1",)), topic="t")


@pytest.mark.parametrize("columns", [BASE_COLUMNS, ALL_COLUMNS, ("offset", "headers")])
@pytest.mark.parametrize("as_array", [False, True])
def test_arrow_columns_match_the_schema_of_spark(columns: Columns, as_array: bool) -> None:
    zone: dict[str, Any] = {"timezone": "UTC"} if HAS_READ_LIMITS else {}  # the only zone of PySpark 4.0 and 4.1
    wanted = to_arrow_schema(read_schema(columns, as_array), **zone)
    assert arrow_schema(columns, as_array).equals(wanted)
    assert chosen_columns(read_schema(columns, as_array), columns, as_array) == columns


def test_the_columns() -> None:
    plain = "value topic partition offset queue_offset timestamp message_id trace_id attempts tag"
    assert " ".join(read_schema().fieldNames()) == plain
    assert " ".join(read_schema(ALL_COLUMNS).fieldNames()) == f"{plain} headers key"


def test_a_schema_chooses_columns() -> None:
    assert chosen_columns(StructType().add("offset", "long").add("value", "binary"), BASE_COLUMNS) == (
        "offset",
        "value",
    )
    assert chosen_columns(StructType().add("headers", MapType(StringType(), StringType())), BASE_COLUMNS) == (
        "headers",
    )
    with pytest.raises(InvalidSetting, match="the schema has the column offset int"):
        chosen_columns(StructType().add("offset", "integer"), BASE_COLUMNS)
    with pytest.raises(InvalidSetting, match="the schema has the column body"):
        chosen_columns(StructType().add("body", "binary"), BASE_COLUMNS)


@pytest.mark.parametrize("as_array", [False, True])
def test_rows_can_be_written_as_they_were_read(as_array: bool) -> None:
    check_write_schema(read_schema(ALL_COLUMNS, as_array), NOWHERE.topic)


@pytest.mark.parametrize("kind", ["binary", "string"])
def test_these_can_be_written(kind: str) -> None:
    rows = StructType()
    for name, type_name in (("topic", "string"), ("value", kind), ("key", kind), ("partition", "long")):
        rows.add(name, type_name)
    rows.add("trace_id", "integer").add("tag", "string").add("headers", MapType(StringType(), StringType()))
    check_write_schema(rows, NOWHERE.topic)
    check_write_schema(StructType().add("value", kind), SOMEWHERE.topic)
    check_write_schema(StructType().add("value", StringType("UNICODE")), SOMEWHERE.topic)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (StructType().add("value", "binary"), "no topic is given: add a column topic"),
        (StructType().add("topic", "string"), "column value is missing"),
        (
            StructType().add("value", "integer").add("topic", "string"),
            "column value is int: cast it to binary or string",
        ),
        (StructType().add("value", "string").add("topics", "string"), "column topics is unknown to the sink"),
        (StructType().add("value", "string").add("value", "string"), "column value occurs twice"),
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
def test_these_cannot_be_written(rows: StructType, expected: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        check_write_schema(rows, NOWHERE.topic)
    assert expected in str(caught.value)


def table(**options: str) -> NsqDataSource:
    """As Spark makes it for CREATE TABLE … USING nsqext OPTIONS (…) TBLPROPERTIES ('team' = 'a')."""
    prefixed = {f"option.{name}": value for name, value in options.items()}
    return NsqDataSource({"provider": "nsqext", "team": "a", **options, **prefixed})


def test_a_table_is_read_and_written_with_its_options() -> None:
    """Spark passes them for the schema only."""
    given = {"lookupd": "a:1", "subscribe": "t", "topic": "u", "nsqext.timeout": "5", "columns": "value,offset"}
    schema = table(**given).schema()
    assert schema.fieldNames() == ["value", "offset"]
    assert isinstance(NsqDataSource({}).reader(schema), NsqReader)
    assert isinstance(NsqDataSource({}).writer(schema, overwrite=False), NsqWriter)
    with pytest.raises(InvalidSetting, match="cannot be overwritten"):
        NsqDataSource({}).writer(schema, overwrite=True)


def test_options_of_a_query_win_over_those_of_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[SourceOptions] = []
    monkeypatch.setattr("nsqext.spark.read.readers.NsqReader", found.append)
    schema = table(lookupd="a:1", subscribe="t", rdy="5").schema()
    NsqDataSource({"rdy": "7"}).reader(StructType(schema.fields[:2]))
    assert [(options.rdy, options.columns) for options in found] == [(7, ("value", "topic"))]


def test_a_write_is_checked_at_its_start() -> None:
    source = NsqDataSource({"lookupd": "a:1", "topic": "t"})
    with pytest.raises(InvalidSetting, match="column value is int"):
        source.writer(StructType().add("value", "integer"), overwrite=False)
    with pytest.raises(InvalidSetting, match="option job is for batch writes only"):
        NsqDataSource({"lookupd": "a:1", "topic": "t", "job": "j"}).streamWriter(
            StructType().add("value", "binary"), overwrite=False
        )


def test_rows_of_a_table_that_are_written_elsewhere_do_not_bring_their_options() -> None:
    schema = table(lookupd="a:1", subscribe="t", topic="u").schema()
    with pytest.raises(InvalidSetting, match="option lookupd is missing"):
        NsqDataSource({"topic": "other"}).writer(schema, overwrite=False)


def test_a_table_with_columns_does_not_keep_its_options() -> None:
    for use in (NsqDataSource({}).reader, lambda schema: NsqDataSource({}).writer(schema, overwrite=False)):
        with pytest.raises(InvalidSetting, match="only a table that was created without columns keeps its options"):
            use(read_schema())


def test_options_of_a_table_that_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="do you mean subscribe"):
        table(lookupd="a:1", subscribee="t").schema()
    with pytest.raises(InvalidSetting, match="topics have no path"):
        NsqDataSource({"provider": "nsqext", "location": "/tmp/x"}).schema()
