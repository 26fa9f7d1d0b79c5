"""Columns of rows that are read, and of rows that can be written, in the types of Arrow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pyarrow as pa

from nsqext.errors import InvalidSetting

Columns = tuple[str, ...]  # names of columns, in the order of `ALL_COLUMNS`

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
}
ALL_COLUMNS: Columns = tuple(_TYPES)  # with `includeHeaders`
BASE_COLUMNS: Columns = ALL_COLUMNS[: ALL_COLUMNS.index("headers")]
_HEADER_ARRAY = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

WRITABLE: Columns = ("value", "topic", "key", "partition", "headers", "trace_id", "tag")
"""Columns that become a message."""
ONLY_READ: Columns = tuple(name for name in ALL_COLUMNS if name not in WRITABLE)
"""Columns that a read has and a write ignores, so that rows can be written as they were read."""


@cache
def arrow_schema(columns: Columns = BASE_COLUMNS, headers_as_array: bool = False) -> pa.Schema:
    """Return the schema of rows that are read; Spark requires exactly these types and this order."""
    array = {"headers": _HEADER_ARRAY} if headers_as_array else {}
    return pa.schema([pa.field(name, array.get(name, _TYPES[name])) for name in columns])


def check_written(names: Sequence[str], topic: str | None) -> None:
    """Check the names of the columns of rows that are to be published."""
    for name in names:
        if names.count(name) > 1:
            raise InvalidSetting(f"column {name} occurs twice")
        if name not in ALL_COLUMNS:
            raise InvalidSetting(
                f"column {name} is unknown to the sink",
                hint=f"select from {', '.join(WRITABLE)}; {', '.join(ONLY_READ)} are ignored",
            )
    if "value" not in names:
        raise InvalidSetting("column value is missing", hint="it contains the bytes or the text of the message")
    if "topic" not in names and topic is None:
        raise InvalidSetting("no topic is given", hint="add a column topic, or use the option topic")
