"""Rows of Parquet as records of CSV and JSON lines, and back."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nsqext.cli.files.tables import SCHEMA, entries_of, format_of, writer_of
from nsqext.errors import InvalidInput, InvalidSetting
from nsqext.spark.columns import arrow_schema

if TYPE_CHECKING:
    from pathlib import Path

_LARGEST = (1 << 64) - 1
_HEADER = b'{"shop":"berlin"}'
_ROW: dict[str, Any] = {
    "value": b"one\r\ntwo, \xc3\xa4",
    "topic": "orders",
    "partition": 3,
    "offset": 70,
    "timestamp": datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
    "message_id": bytes(range(16)),
    "trace_id": -1,
    "attempts": 2,
    "tag": "blue",
    "headers": [("shop", b"berlin")],
    "key": b"k",
    "header": _HEADER,
}
_RECORD = {
    "topic": "orders",
    "partition": 3,
    "offset": 70,
    "timestamp": int(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()) * 10**9 + 678_901_000,
    "id": bytes(range(16)).hex(),
    "trace_id": _LARGEST,
    "attempts": 2,
    "tag": "blue",
    "key": "k",
    "headers": {"shop": "berlin"},
    "body": "one\r\ntwo, ä",
    "header_base64": "eyJzaG9wIjoiYmVybGluIn0=",
}


def part_of(folder: Path, *rows: dict[str, Any], name: str = "part.parquet") -> Path:
    """Write rows as an export does before it writes its file."""
    path, schema = folder / name, arrow_schema(SCHEMA)
    arrays = [pa.array([row.get(field.name) for row in rows], field.type) for field in schema]
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), path)
    return path


@pytest.mark.parametrize("ending", ["jsonl", "csv", "CSV"])
def test_every_column_is_written_and_read_again(tmp_path: Path, ending: str) -> None:
    part, target = part_of(tmp_path, _ROW), tmp_path / f"orders.{ending}"
    writer_of(target)(target, [part, part])
    entries = [*entries_of(target, 0)]
    assert [entry.number for entry in entries] == [1, 2]
    for entry in entries:
        assert {name: value for name, value in entry.record.items() if value is not None} == _RECORD


def test_parquet_keeps_the_rows_of_all_parts(tmp_path: Path) -> None:
    parts = [part_of(tmp_path, _ROW | {"offset": offset}, name=f"{offset}.parquet") for offset in (1, 2)]
    target = tmp_path / "orders.Parquet"
    writer_of(target)(target, parts)
    assert pq.read_table(target).column("offset").to_pylist() == [1, 2]
    record = next(iter(entries_of(target, 0))).record
    assert (record["body"], record["trace_id"], record["headers"]) == (_RECORD["body"], _LARGEST, {"shop": "berlin"})


def test_an_empty_body_and_bytes_that_are_no_text_are_kept(tmp_path: Path) -> None:
    part = part_of(tmp_path, {"value": b""}, {"value": b"\xff"})
    for ending in ("jsonl", "csv"):
        target = tmp_path / f"orders.{ending}"
        writer_of(target)(target, [part])
        records = [entry.record for entry in entries_of(target, 0)]
        assert [(one.get("body"), one.get("body_base64")) for one in records] == [("", None), (None, "/w==")]


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl"])
def test_an_import_continues_behind_any_row(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsqext.cli.files.tables._ROWS", 2)
    target = tmp_path / f"orders.{ending}"
    writer_of(target)(target, [part_of(tmp_path, *({"value": b"%d" % number} for number in range(5)))])
    for skip in range(6):
        found = [(entry.number, entry.record["body"]) for entry in entries_of(target, skip)]
        assert found == [(number + 1, str(number)) for number in range(skip, 5)]


def test_long_bodies_and_the_mark_of_spreadsheets_are_read(tmp_path: Path) -> None:
    file = tmp_path / "long.csv"
    file.write_bytes(b"\xef\xbb\xbfbody,key\n" + b"x" * 300_000 + b",a\n")
    (entry,) = entries_of(file, 0)
    assert (len(entry.record["body"]), entry.record["key"]) == (300_000, "a")


def test_a_null_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"part.parquet, row 2: the value is null"):
        list(entries_of(part_of(tmp_path, {"value": b"a"}, {}), 0))


def test_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=r"is of no known format"):
        format_of(tmp_path / "orders.txt")
