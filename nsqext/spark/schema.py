"""Columns of rows that are read, and of rows that can be written, in the types of Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.pandas.types import from_arrow_schema
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
)

from nsqext.errors import InvalidSetting
from nsqext.spark.columns import arrow_schema, check_written
from nsqext.spark.option_values import ALL_COLUMNS, BASE_COLUMNS, Columns

if TYPE_CHECKING:
    from nsqext.spark.options import SinkOptions

_HEADER = StructType([StructField("key", StringType()), StructField("value", BinaryType())])

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
    return from_arrow_schema(arrow_schema(columns, headers_as_array))


def chosen_columns(schema: StructType, columns: Columns, headers_as_array: bool = False) -> Columns:
    """Return the columns that a query reads: those of its schema.

    Args:
        schema: schema of the query: that of the source, or that of ``DataFrameReader.schema``.
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
