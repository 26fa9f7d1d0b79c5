"""Files of `nsqext export` and `import`: Parquet with the columns of `nsqext.arrow`, CSV, JSON lines of records."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from nsqext.cli.connection import counted
from nsqext.cli.message_files import Entry, body_fields, encoded, read_entries
from nsqext.errors import InvalidInput, InvalidSetting

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = (
    *("value", "topic", "partition", "offset", "timestamp", "message_id", "trace_id", "attempts"),
    *("tag", "headers", "key", "header"),
)
_RECORD = (
    *("topic", "partition", "offset", "timestamp", "id", "trace_id", "attempts", "tag", "key", "headers"),
    *("body", "body_base64", "header_base64"),
)
_NUMBERS = ("partition", "offset", "timestamp", "trace_id", "attempts")
_ROWS = 1000

Writer: TypeAlias = Callable[[Path, Sequence[Path]], None]
"""Writes a file from the files of the parts."""
_Reader: TypeAlias = Callable[[Path, int], Iterator[Entry]]


def format_of(file: Path) -> str:
    """Return the format that a file's name ends with."""
    found = file.suffix.removeprefix(".").lower()
    if found not in ("parquet", "csv", "jsonl"):
        raise InvalidSetting(
            f"{file} is of no known format", hint="give a name that ends with .parquet, .csv or .jsonl"
        )
    return found


def writer_of(file: Path) -> Writer:
    """Return the function that writes a file in its format."""
    return {"parquet": _write_parquet, "csv": _write_csv, "jsonl": _write_lines}[format_of(file)]


def entries_of(file: Path, skip: int) -> Iterator[Entry]:
    """Yield the messages of a file behind the first ``skip``."""
    readers: dict[str, _Reader] = {"parquet": _read_parquet, "csv": _read_csv, "jsonl": read_entries}
    return readers[format_of(file)](file, skip)


def _write_parquet(target: Path, parts: Sequence[Path]) -> None:
    import pyarrow.parquet as pq

    from nsqext.spark.columns import arrow_schema

    with pq.ParquetWriter(target, arrow_schema(SCHEMA)) as writer:
        for part in parts:
            writer.write_table(pq.read_table(part))


def _write_lines(target: Path, parts: Sequence[Path]) -> None:
    with target.open("wb") as file:
        for record in _records(parts):
            file.write(orjson.dumps(record) + b"\n")


def _write_csv(target: Path, parts: Sequence[Path]) -> None:
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _RECORD)
        writer.writeheader()
        for record in _records(parts):
            writer.writerow(record | {"headers": json.dumps(record["headers"])})


def _records(parts: Sequence[Path]) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    for part in parts:
        with pq.ParquetFile(part) as opened:
            for batch in opened.iter_batches(_ROWS):
                yield from _records_of(batch)


def _records_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield rows as records from which `nsqext replay` makes the same bytes."""
    import pyarrow as pa

    place = batch.schema.get_field_index("timestamp")
    if place >= 0:
        batch = batch.set_column(place, "timestamp", batch.column(place).cast(pa.int64()))
    for row in batch.to_pylist():
        yield _record(row)


def _record(row: Mapping[str, Any]) -> dict[str, Any]:
    record = {name: row.get(name) for name in ("topic", "partition", "offset", "trace_id", "attempts", "tag", "key")}
    if row.get("timestamp") is not None:
        record["timestamp"] = row["timestamp"] * 1000  # nanoseconds
    if row.get("message_id") is not None:
        record["id"] = row["message_id"].hex()
    record["key"] = _text(record["key"]) or None
    record["headers"] = _headers(row.get("headers") or ())
    if row.get("trace_id") is not None:
        record["trace_id"] = row["trace_id"] & (1 << 64) - 1  # the column is signed
    value = row["value"]
    header = row.get("header")
    if header or (header is not None and _has_only_trace(record)):
        record["header_base64"] = encoded(header)
    return record | body_fields(value.encode() if isinstance(value, str) else bytes(value))


def _has_only_trace(record: Mapping[str, Any]) -> bool:
    """Return whether a message has a trace id alone: some batches make a header of it, unless that is empty bytes."""
    return bool(record.get("trace_id")) and not (record.get("headers") or record.get("tag") or record.get("key"))


def _read_parquet(file: Path, skip: int) -> Iterator[Entry]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from nsqext.spark.columns import WRITABLE, check_written

    number = 0
    try:
        with pq.ParquetFile(file) as opened:
            schema = opened.schema_arrow
            check_written(schema.names, file.name)
            _check_types(file, schema)
            columns = [name for name in schema.names if name in WRITABLE]
            for batch in opened.iter_batches(_ROWS, columns=columns):
                if number + batch.num_rows <= skip:
                    number += batch.num_rows
                    continue
                for row in batch.to_pylist():
                    number += 1
                    if number > skip:
                        yield Entry(file.name, number, _checked_record(file, number, row))
    except pa.ArrowInvalid as error:
        raise InvalidInput(f"{file.name} is not a Parquet file: {error}") from error


def _check_types(file: Path, schema: pa.Schema) -> None:
    """Refuse columns whose values are no bodies or numbers: of a number, Python would make zero bytes."""
    from pyarrow import types

    text = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    whole = (types.is_integer, types.is_null)
    for name, kinds, wanted in (("value", text, "text"), ("partition", whole, "int"), ("trace_id", whole, "bigint")):
        if name in schema.names:
            found = schema.field(name).type
            plain = found.value_type if types.is_dictionary(found) else found
            if not any(one(plain) for one in kinds):
                raise InvalidInput(f"{file.name}: the column {name} is {found}", hint=f"cast it to {wanted}")


def _checked_record(file: Path, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    if row["value"] is None:
        raise InvalidInput(f"{file.name}, row {number}: the value is null")
    try:
        return _record(row)
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{file.name}, row {number}: a key or header is no text: {error}") from error


def _headers(pairs: Iterable[Any]) -> dict[str, Any]:
    """Return headers of a map, or of an array of key and value, which Polars makes of a map."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, value = (pair["key"], pair["value"]) if isinstance(pair, Mapping) else pair
        found[name] = _text(value)
    return found


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _read_csv(file: Path, skip: int) -> Iterator[Entry]:
    csv.field_size_limit(1 << 30)  # for long bodies
    with file.open(encoding="utf-8-sig", newline="") as opened:  # spreadsheets write the mark
        reader = csv.reader(opened, strict=True)
        try:
            names = next(reader, [])
            if not {"body", "body_base64"} & {*names} or len({*names}) < len(names):
                raise InvalidInput(
                    f"{file.name} has no column body or body_base64, or two columns of one name",
                    hint="the first line names the columns",
                )
            for number, row in enumerate(filter(None, reader), 1):
                if len(row) != len(names):
                    place = f"{file.name}, line {reader.line_num}"
                    raise InvalidInput(f"{place}: {counted(len(row), 'column')} instead of {len(names)}")
                if number > skip:
                    named = dict(zip(names, row, strict=True))
                    yield Entry(file.name, number, _record_of_text(file, reader.line_num, named))
        except (UnicodeDecodeError, csv.Error) as error:
            raise InvalidInput(f"{file.name}, line {reader.line_num + 1}: {error}") from error


def _record_of_text(file: Path, number: int, row: Mapping[str, str]) -> dict[str, Any]:
    encoded = bool(row.get("body_base64"))
    record: dict[str, Any] = {name: value for name, value in row.items() if value or (name == "body" and not encoded)}
    try:
        record |= {name: int(record[name]) for name in _NUMBERS if name in record}
        if "headers" in record:
            record["headers"] = json.loads(record["headers"])
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{file.name}, line {number}: {error}") from error
    if row.get("header_base64") == "" and _has_only_trace(record):
        record["header_base64"] = ""
    return record
