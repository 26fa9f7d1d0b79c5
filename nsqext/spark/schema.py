"""Columns of rows that are read, and of rows that can be written."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
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
from nsqext.spark.option_values import ALL_COLUMNS, BASE_COLUMNS, Columns

if TYPE_CHECKING:
    from nsqext.spark.options import SinkOptions

__all__ = ("arrow_schema", "check_write_schema", "chosen_columns", "read_schema", "written_columns")

_HEADER = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
_HEADER_ARRAY = ArrayType(_HEADER)
_TYPES: dict[str, tuple[DataType, pa.DataType]] = {
    "value": (BinaryType(), pa.binary()),
    "topic": (StringType(), pa.string()),
    "partition": (IntegerType(), pa.int32()),
    "offset": (LongType(), pa.int64()),
    "queue_offset": (LongType(), pa.int64()),
    "timestamp": (TimestampType(), pa.timestamp("us", tz="UTC")),
    "message_id": (BinaryType(), pa.binary()),
    "trace_id": (LongType(), pa.int64()),
    "attempts": (IntegerType(), pa.int32()),
    "tag": (StringType(), pa.string()),
    "headers": (MapType(StringType(), StringType()), pa.map_(pa.string(), pa.string())),
    "key": (StringType(), pa.string()),
}
_ARROW_HEADER_ARRAY = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

_TEXT = (StringType, BinaryType)
_WHOLE = (ByteType, ShortType, IntegerType, LongType)
_WRITABLE: dict[str, tuple[tuple[type[DataType], ...], str]] = {
    "value": (_TEXT, "binary or string"),
    "topic": ((StringType,), "string"),
    "key": (_TEXT, "binary or string"),
    "partition": (_WHOLE, "int"),
    "headers": ((MapType, ArrayType), "map<string,string>"),
    "trace_id": (_WHOLE, "bigint"),
    "tag": ((StringType,), "string"),
}
_ONLY_READ = tuple(name for name in ALL_COLUMNS if name not in _WRITABLE)
"""Columns that a read has and a write ignores, so that rows can be written as they were read."""


def read_schema(columns: Columns = BASE_COLUMNS, headers_as_array: bool = False) -> StructType:
    """Return the schema of rows that are read; every column is nullable."""
    return StructType([StructField(name, _spark_type(name, headers_as_array)) for name in columns])


def _spark_type(name: str, headers_as_array: bool) -> DataType:
    return _HEADER_ARRAY if headers_as_array and name == "headers" else _TYPES[name][0]


@cache
def arrow_schema(columns: Columns = BASE_COLUMNS, headers_as_array: bool = False) -> pa.Schema:
    """Return the same schema in Arrow's types; Spark requires exactly these types and this order."""
    array = {"headers": _ARROW_HEADER_ARRAY} if headers_as_array else {}
    return pa.schema([pa.field(name, array.get(name, _TYPES[name][1])) for name in columns])


def chosen_columns(schema: StructType, columns: Columns, headers_as_array: bool = False) -> Columns:
    """Return the columns that a query reads: those of its schema.

    Args:
        schema: schema of the query: that of the source, or that of ``DataFrameReader.schema``.
        columns: columns that the options choose.
        headers_as_array: the column ``headers`` is an array.

    Raises:
        InvalidSetting: a column is unknown or has another type.
    """
    known = read_schema(ALL_COLUMNS if columns == BASE_COLUMNS else columns, headers_as_array)
    types = {field.name: field.dataType for field in known}
    for field in schema:
        if types.get(field.name) != field.dataType:
            raise InvalidSetting(
                f"the schema has the column {field.name} {field.dataType.simpleString()}; "
                f"columns that can be read are {known.simpleString()}",
                hint="choose columns with the option columns, or call select()",
            )
    return tuple(field.name for field in schema)


def check_write_schema(schema: StructType, options: SinkOptions) -> None:
    """Check that rows with these columns can be published.

    Raises:
        InvalidSetting: a column is missing, unknown or duplicate, or has a wrong type.
    """
    names = [found.name for found in schema]
    for found in schema:
        if names.count(found.name) > 1:
            raise InvalidSetting(f"column {found.name} occurs twice")
        if found.name in _ONLY_READ:
            continue
        known = _WRITABLE.get(found.name)
        if known is None:
            raise InvalidSetting(
                f"column {found.name} is unknown to the sink",
                hint=f"select from {', '.join(_WRITABLE)}; {', '.join(_ONLY_READ)} are ignored",
            )
        kinds, wanted = known
        if not isinstance(found.dataType, kinds) or not _holds_headers(found.dataType):
            raise InvalidSetting(f"column {found.name} is {found.dataType.simpleString()}", hint=f"cast it to {wanted}")
    if "value" not in names:
        raise InvalidSetting("column value is missing", hint="it contains the bytes or the text of the message")
    if "topic" not in names and options.topic is None:
        raise InvalidSetting("no topic is given", hint="add a column topic, or use the option topic")


def written_columns(names: Sequence[str]) -> Columns:
    """Return the columns that the sink uses, in their order."""
    return tuple(name for name in names if name in _WRITABLE)


def _holds_headers(kind: DataType) -> bool:
    if isinstance(kind, ArrayType):
        found = kind.elementType
        return isinstance(found, StructType) and [(f.name, f.dataType) for f in found] == [
            (f.name, f.dataType) for f in _HEADER
        ]
    if not isinstance(kind, MapType):
        return True
    return isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)
