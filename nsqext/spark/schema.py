"""Columns of rows that are read, and of rows that can be written, in the types of Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from nsqext.spark.columns import check_written
from nsqext.spark.option_values import ALL_COLUMNS, BASE_COLUMNS, Columns

if TYPE_CHECKING:
    from nsqext.spark.options import SinkOptions

__all__ = ("check_write_schema", "chosen_columns", "read_schema")

_HEADER = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
_HEADER_ARRAY = ArrayType(_HEADER)
_TYPES: dict[str, DataType] = {
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "queue_offset": LongType(),
    "timestamp": TimestampType(),
    "message_id": BinaryType(),
    "trace_id": LongType(),
    "attempts": IntegerType(),
    "tag": StringType(),
    "headers": MapType(StringType(), StringType()),
    "key": StringType(),
}

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


def read_schema(columns: Columns = BASE_COLUMNS, headers_as_array: bool = False) -> StructType:
    """Return the schema of rows that are read; every column is nullable."""
    return StructType([StructField(name, _spark_type(name, headers_as_array)) for name in columns])


def _spark_type(name: str, headers_as_array: bool) -> DataType:
    return _HEADER_ARRAY if headers_as_array and name == "headers" else _TYPES[name]


def chosen_columns(schema: StructType, columns: Columns, headers_as_array: bool = False) -> Columns:
    """Return the columns that a query reads: those of its schema.

    Args:
        schema: schema of the query: that of the source, or that of ``DataFrameReader.schema``.
        columns: columns that the options choose.
        headers_as_array: the column ``headers`` is an array.
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
    """Check that rows with these columns can be published."""
    for found in schema:
        kinds, wanted = _WRITABLE.get(found.name, ((DataType,), ""))
        if not isinstance(found.dataType, kinds) or (found.name == "headers" and not _holds_headers(found.dataType)):
            raise InvalidSetting(f"column {found.name} is {found.dataType.simpleString()}", hint=f"cast it to {wanted}")
    check_written([found.name for found in schema], options.topic)


def _holds_headers(kind: DataType) -> bool:
    if isinstance(kind, ArrayType):
        found = kind.elementType
        return isinstance(found, StructType) and [(f.name, f.dataType) for f in found] == [
            (f.name, f.dataType) for f in _HEADER
        ]
    if not isinstance(kind, MapType):
        return True
    return isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)
