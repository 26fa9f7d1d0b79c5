"""Columns of rows that are read, and of rows that can be written, in the types of Spark."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pyspark.sql.pandas.types import from_arrow_schema

from nsqext.errors import InvalidSetting
from nsqext.spark.columns import ALL_COLUMNS, BASE_COLUMNS, Columns, arrow_schema, check_written

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from nsqext.spark.options import SinkOptions

_TEXT, _WHOLE = ("binary", "string"), ("tinyint", "smallint", "int", "bigint")
_WRITABLE: dict[str, tuple[str, ...]] = {
    "value": _TEXT,
    "topic": ("string",),
    "key": _TEXT,
    "partition": _WHOLE,
    "headers": ("map<string,string>", "array<struct<key:string,value:binary>>"),
    "trace_id": _WHOLE,
    "tag": ("string",),
}
_CAST_TO = {"value": "binary or string", "key": "binary or string", "partition": "int", "trace_id": "bigint"}
"""What to cast a column to; to the first type in `_WRITABLE` by default."""
_COLLATION = re.compile(r" collate \w+")


def read_schema(columns: Columns = BASE_COLUMNS, headers_as_array: bool = False) -> StructType:
    """Return the schema of rows that are read; every column is nullable."""
    return from_arrow_schema(arrow_schema(columns, headers_as_array))


def chosen_columns(schema: StructType, columns: Columns, headers_as_array: bool = False) -> Columns:
    """Return the columns that a query reads: those of its schema, which is the source's or that of ``schema()``."""
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
        kind, allowed = found.dataType.simpleString(), _WRITABLE.get(found.name)
        if allowed is not None and _COLLATION.sub("", kind) not in allowed:
            hint = f"cast it to {_CAST_TO.get(found.name, allowed[0])}"
            raise InvalidSetting(f"column {found.name} is {kind}", hint=hint)
    check_written([found.name for found in schema], options.topic)
