"""Columns of read rows, and of writable rows, in types of Arrow and Spark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import pyarrow as pa

from nsqext.errors import InvalidSetting

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

Columns = tuple[str, ...]
"""Columns in the order of `READABLE`."""

_TYPES: dict[str, pa.DataType] = {
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "queue_offset": pa.int64(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "message_id": pa.binary(),
    "trace_id": pa.int64(),
    "attempts": pa.int32(),
    "tag": pa.string(),
    "headers": pa.map_(pa.string(), pa.string()),
    "key": pa.string(),
    "header": pa.binary(),
}
READABLE: Columns = tuple(_TYPES)
"""Columns that the option `columns` may name."""
ALL_COLUMNS: Columns = READABLE[: READABLE.index("header")]
"""Columns with the option `includeHeaders`."""
BASE_COLUMNS: Columns = ALL_COLUMNS[: ALL_COLUMNS.index("headers")]
_HEADER_ARRAY = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

_TEXT, _WHOLE = ("binary", "string"), ("tinyint", "smallint", "int", "bigint")
_WRITABLE: dict[str, tuple[str, ...]] = {
    "value": _TEXT,
    "topic": ("string",),
    "key": _TEXT,
    "partition": _WHOLE,
    "headers": ("map<string,string>", "array<struct<key:string,value:binary>>"),
    "trace_id": _WHOLE,
    "tag": ("string",),
    "header": ("binary",),
}
# type to cast a column to; by default the first type in `_WRITABLE`
_CAST_TO = {"value": "binary or string", "key": "binary or string", "partition": "int", "trace_id": "bigint"}
_COLLATION = re.compile(r" collate \w+")
WRITABLE: Columns = tuple(_WRITABLE)
"""Columns that become a message."""
ONLY_READ: Columns = tuple(name for name in ALL_COLUMNS if name not in WRITABLE)
"""Columns that a write ignores, so that rows can be written as they were read."""


@cache
def written_type(name: str) -> str:
    """Return the type to which a column that is written is cast, if it has another type."""
    return _CAST_TO.get(name, _WRITABLE[name][0])


def arrow_schema(columns: Columns = BASE_COLUMNS, headers_as_array: bool = False) -> pa.Schema:
    """Return the schema of read rows; Spark requires exactly these types and this order."""
    array = {"headers": _HEADER_ARRAY} if headers_as_array else {}
    return pa.schema([pa.field(name, array.get(name, _TYPES[name])) for name in columns])


def check_written(names: Sequence[str], topic: str | None) -> None:
    for name in names:
        if names.count(name) > 1:
            raise InvalidSetting(f"column {name} occurs twice")
        if name not in READABLE:
            raise InvalidSetting(
                f"column {name} is unknown to the sink",
                hint=f"select from {', '.join(WRITABLE)}; {', '.join(ONLY_READ)} are ignored",
            )
    if "value" not in names:
        raise InvalidSetting("column value is missing", hint="it contains the bytes or the text of the message")
    if "topic" not in names and topic is None:
        raise InvalidSetting("no topic is given", hint="add a column topic, or use the option topic")


def read_schema(columns: Columns = BASE_COLUMNS, headers_as_array: bool = False) -> StructType:
    """Return the schema of read rows; every column is nullable."""
    from pyspark.sql.pandas.types import from_arrow_schema  # nsqext.arrow has no Spark

    return from_arrow_schema(arrow_schema(columns, headers_as_array))


def chosen_columns(schema: StructType, columns: Columns, headers_as_array: bool = False) -> Columns:
    """Return the columns that a query reads, from the schema of the source or of ``schema()``."""
    known = read_schema(READABLE if columns == BASE_COLUMNS else columns, headers_as_array)
    types = {field.name: field.dataType for field in known}
    for field in schema:
        if types.get(field.name) != field.dataType:
            raise InvalidSetting(
                f"the schema has the column {field.name} {field.dataType.simpleString()}; "
                f"columns that can be read are {known.simpleString()}",
                hint="choose columns with the option columns, or call select()",
            )
    return tuple(field.name for field in schema)


def check_write_schema(schema: StructType, topic: str | None) -> None:
    """Check that rows with these columns can be published."""
    for found in schema:
        kind, allowed = found.dataType.simpleString(), _WRITABLE.get(found.name)
        if allowed is not None and _COLLATION.sub("", kind) not in allowed:
            hint = f"cast it to {written_type(found.name)}"
            raise InvalidSetting(f"column {found.name} is {kind}", hint=hint)
    check_written([found.name for found in schema], topic)
