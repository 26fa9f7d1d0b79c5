"""Columns of rows that are read, and of those that can be written."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from nsqext.errors import InvalidSetting

if TYPE_CHECKING:
    from nsqext.spark.options import SinkOptions

__all__ = ("arrow_schema", "check_read_schema", "check_write_schema", "read_schema")

_COLUMNS: Sequence[tuple[str, DataType, pa.DataType]] = (
    ("value", BinaryType(), pa.binary()),
    ("topic", StringType(), pa.string()),
    ("partition", IntegerType(), pa.int32()),
    ("offset", LongType(), pa.int64()),
    ("queue_offset", LongType(), pa.int64()),
    ("timestamp", TimestampType(), pa.timestamp("us", tz="UTC")),
    ("message_id", BinaryType(), pa.binary()),
    ("trace_id", LongType(), pa.int64()),
    ("attempts", IntegerType(), pa.int32()),
    ("tag", StringType(), pa.string()),
)
_WITH_HEADERS: Sequence[tuple[str, DataType, pa.DataType]] = (
    ("headers", MapType(StringType(), StringType()), pa.map_(pa.string(), pa.string())),
    ("key", StringType(), pa.string()),
)

_TEXT = (StringType, BinaryType)
_WHOLE = (ByteType, ShortType, IntegerType, LongType)
_WRITABLE: dict[str, tuple[tuple[type[DataType], ...], str]] = {
    "value": (_TEXT, "binary or string"),
    "topic": ((StringType,), "string"),
    "key": (_TEXT, "binary or string"),
    "partition": (_WHOLE, "int"),
    "headers": ((MapType,), "map<string,string>"),
    "trace_id": (_WHOLE, "bigint"),
    "tag": ((StringType,), "string"),
}


def _columns(include_headers: bool) -> Sequence[tuple[str, DataType, pa.DataType]]:
    return (*_COLUMNS, *_WITH_HEADERS) if include_headers else _COLUMNS


def read_schema(include_headers: bool = False) -> StructType:
    """Return the columns of rows that are read; every column may be null, as far as Spark is told."""
    return StructType([StructField(name, kind) for name, kind, _ in _columns(include_headers)])


@cache
def arrow_schema(include_headers: bool = False) -> pa.Schema:
    """Return the columns of rows that are read as Arrow knows them; Spark demands exactly these."""
    return pa.schema([pa.field(name, kind) for name, _, kind in _columns(include_headers)])


def check_read_schema(schema: StructType, include_headers: bool) -> None:
    """Raise unless rows that are read have these columns.

    Raises:
        InvalidSetting: they have others.
    """
    wanted = read_schema(include_headers)
    if [(found.name, found.dataType) for found in schema] != [(found.name, found.dataType) for found in wanted]:
        raise InvalidSetting(
            f"rows have the columns {wanted.simpleString()}, not {schema.simpleString()}",
            hint="leave schema() out, and select what you need",
        )


def check_write_schema(schema: StructType, options: SinkOptions) -> None:
    """Raise unless rows with these columns can be published.

    Raises:
        InvalidSetting: a column is missing, unknown, there twice, or of another type.
    """
    names = [found.name for found in schema]
    for found in schema:
        known = _WRITABLE.get(found.name)
        if known is None:
            raise InvalidSetting(
                f"column {found.name} is unknown to the sink",
                hint=f"select from {', '.join(_WRITABLE)}",
            )
        if names.count(found.name) > 1:
            raise InvalidSetting(f"column {found.name} is there twice")
        kinds, wanted = known
        if not isinstance(found.dataType, kinds) or not _is_text_map(found.dataType):
            raise InvalidSetting(f"column {found.name} is {found.dataType.simpleString()}", hint=f"cast it to {wanted}")
    if "value" not in names:
        raise InvalidSetting("column value is missing", hint="it holds the bytes, or the text, that is published")
    if "topic" not in names and options.topic is None:
        raise InvalidSetting("neither a column topic nor the option topic says where rows are published")


def _is_text_map(kind: DataType) -> bool:
    if not isinstance(kind, MapType):
        return True
    return isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)
