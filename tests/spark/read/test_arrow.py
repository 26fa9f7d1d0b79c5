"""Messages as rows."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from nsqext.errors import ProtocolError
from nsqext.protocol.client.body_compression import compress_body
from nsqext.protocol.headers import add_key, encode_headers
from nsqext.protocol.messages import EXT_JSON, EXT_NONE, EXT_TAG, RawMessage, message_id
from nsqext.spark.columns import ALL_COLUMNS, BASE_COLUMNS, Columns, arrow_schema
from nsqext.spark.read import arrow as rows
from nsqext.spark.read.arrow import RowFormat, to_batches
from nsqext.spark.read.frames import decode_frames, from_messages
from tests.support.message_frames import encode_message

MOMENT = 1_700_000_000_123_456_789


def message(body: bytes = b"x", header: bytes = b"", version: int | None = None, **fields: Any) -> RawMessage:
    made = RawMessage()
    made.timestamp, made.attempts, made.id = MOMENT, 1, message_id(7, 0)
    made.version = version if version is not None else EXT_JSON if header else EXT_NONE
    made.header, made.offset, made.size, made.body = header, 40, 31, body
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def read(
    *messages: RawMessage,
    first: int = 0,
    include_headers: bool = True,
    decompress: bool = True,
    columns: Columns | None = None,
    headers_as_array: bool = False,
) -> list[dict[str, Any]]:
    chosen = columns or (ALL_COLUMNS if include_headers else BASE_COLUMNS)
    rows = RowFormat(chosen, headers_as_array, decompress)
    frames = [encode_message(message, extend=True, detail=True) for message in messages]
    delivered = decode_frames(frames, True, with_bodies=rows.with_bodies)
    batches = to_batches(delivered, first, "t", 3, rows)
    assert all(batch.schema.equals(arrow_schema(chosen, headers_as_array)) for batch in batches)
    for batch in batches:
        batch.validate(full=True)
    found: list[dict[str, Any]] = [row for batch in batches for row in batch.to_pylist(maps_as_pydicts="strict")]
    return found


def test_every_field_is_a_column() -> None:
    ident = message_id(3 << 50 | 9, 2**64 - 1)
    (row, other) = read(
        message(b"\x00\xff", id=ident, attempts=4000), message(b"second", offset=71, timestamp=0), first=10
    )
    assert row == {
        "value": b"\x00\xff",
        "topic": "t",
        "partition": 3,
        "offset": 10,
        "queue_offset": 40,
        "timestamp": datetime.datetime.fromtimestamp(1_700_000_000, datetime.UTC).replace(microsecond=123_456),
        "message_id": ident,
        "trace_id": -1,
        "attempts": 4000,
        "tag": None,
        "headers": None,
        "key": None,
    }
    assert (other["offset"], other["queue_offset"], other["value"], other["trace_id"]) == (11, 71, b"second", 0)


def test_empty_input_gives_empty_output() -> None:
    assert to_batches(from_messages([]), 5, "t", 0, RowFormat()) == []


def test_only_the_chosen_columns() -> None:
    (row,) = read(message(b"body", offset=71), first=9, columns=("offset", "queue_offset"))
    assert row == {"offset": 9, "queue_offset": 71}
    (row,) = read(message(header=b'{"a":"b","##key":"k"}'), columns=("key",))
    assert row == {"key": "k"}
    others = [message(header=b'{"##key":%b}' % value) for value in (b'""', b"null", b"7", b"true", b"[1]")]
    assert [row["key"] for row in read(*others, columns=("key",))] == [None, None, "7", None, None], "as `Message.key`"


def test_headers_as_an_array_of_structs() -> None:
    header = b'{"a":"b","n":1,"z":null,"##key":"k"}'
    (row, without) = read(message(header=header), message(), columns=("headers",), headers_as_array=True)
    pairs = [{"key": "a", "value": b"b"}, {"key": "n", "value": b"1"}, {"key": "z", "value": None}]
    assert (row["headers"], without["headers"]) == (pairs, None)


def test_numbers_are_unknown_in_a_consumed_channel() -> None:
    columns = from_messages([message(offset=-1, size=0)])
    (batch,) = to_batches(columns, None, "t", None, RowFormat())
    (row,) = batch.to_pylist()
    assert (row["offset"], row["queue_offset"], row["value"]) == (None, -1, b"x")


def test_messages_of_the_original_nsq_have_neither_partition_nor_trace_id() -> None:
    columns = from_messages([message(id=b"0a1b2c3d4e5f6789", offset=-1)])
    (batch,) = to_batches(columns, None, "t", None, RowFormat())
    (row,) = batch.to_pylist()
    assert (row["message_id"], row["partition"], row["trace_id"]) == (b"0a1b2c3d4e5f6789", None, 0)


def test_headers_are_a_map_and_reserved_ones_are_columns() -> None:
    encoded = add_key(encode_headers({"carrier": "UA", "empty": ""}, tag="blue", trace_id=5), b"N14228")
    (row, without, empty) = read(message(header=encoded), message(), message(header=b"{}"))
    assert (row["headers"], row["tag"], row["key"]) == ({"carrier": "UA", "empty": ""}, "blue", "N14228")
    assert (without["headers"], without["tag"], without["key"]) == (None, None, None)
    assert (empty["headers"], empty["key"]) == ({}, None)


def test_values_other_than_text_are_json() -> None:
    (row, odd) = read(message(header=b'{"n":1.5,"l":[1,"a"],"z":null,"b":true}'), message(header=b'["no","object"]'))
    assert row["headers"] == {"n": "1.5", "l": '[1,"a"]', "z": None, "b": "true"}
    assert odd["headers"] == {}


@pytest.mark.parametrize("include_headers", [False, True])
def test_the_tag_is_found_however_it_is_written(include_headers: bool) -> None:
    spelled = b'{"\\u0023#client_dispatch_tag":"green"}'
    found = read(
        message(header=encode_headers(tag="blue")),
        message(header=spelled),
        message(header=b"red", version=EXT_TAG),
        message(header=b'{"##client_dispatch_tag":7}'),
        message(header=b'{"other":"blue"}'),
        include_headers=include_headers,
    )
    assert [row["tag"] for row in found] == ["blue", "green", "red", None, None]


def test_a_message_without_headers_beside_one_with_a_tag_or_an_empty_header() -> None:
    tagged = read(message(), message(header=b"red", version=EXT_TAG), include_headers=False)
    assert [row["tag"] for row in tagged] == [None, "red"]
    other = read(message(header=b'{"other":"blue"}'), include_headers=False)
    assert [row["tag"] for row in other] == [None]
    (row,) = read(message(version=EXT_JSON))
    assert (row["tag"], row["headers"]) == (None, None)


@pytest.mark.parametrize("include_headers", [False, True])
def test_compressed_bodies_are_restored(include_headers: bool) -> None:
    body = b"again and " * 1000
    packed = compress_body("gzip", body)
    assert packed is not None
    compressed = message(packed[0], encode_headers({**packed[1], "mine": "1"}))
    (row,) = read(compressed, include_headers=include_headers)
    assert row["value"] == body
    if include_headers:
        assert row["headers"] == {"mine": "1"}
    (kept,) = read(compressed, include_headers=include_headers, decompress=False)
    assert kept["value"] == packed[0]
    assert read(compressed, columns=("tag", "offset")) == [{"tag": None, "offset": 0}]
    if include_headers:
        assert read(compressed, columns=("headers",), include_headers=True) == [{"headers": {"mine": "1"}}]


def test_an_error_names_the_damaged_message() -> None:
    damaged = message(b"no gzip", encode_headers({"nsq.client.compress": "1", "nsq.msg.size": "10"}))
    with pytest.raises(ProtocolError, match=r"message 0.*topic t, partition 3.*decompress=false"):
        read(damaged)
    with pytest.raises(ProtocolError, match=r"message 0.*not JSON.*topic t, partition 3"):
        read(message(header=b"{"))


def test_headers_that_servers_store_although_they_are_not_quite_json() -> None:
    """A message of another client must not stop a query."""
    (row, half) = read(message(header=b'{"a":"\xff","##key":"k"}'), message(header=b'{"a":"\\ud800","n":1e999}'))
    assert (row["headers"], row["key"]) == ({"a": "\ufffd"}, "k")
    assert half["headers"] == {"a": "\ufffd", "n": "1e999"}


def test_large_bodies_are_read_in_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "BATCH_BYTES", 100)
    bodies = [b"a" * 60, b"b" * 40, b"c", b"d" * 500, b"e", b"f"]
    batches = to_batches(from_messages(message(body) for body in bodies), 2, "t", 0, RowFormat(ALL_COLUMNS))
    assert [batch.num_rows for batch in batches] == [2, 1, 1, 2]
    assert [row["value"] for batch in batches for row in batch.to_pylist()] == bodies
    assert [row["offset"] for batch in batches for row in batch.to_pylist()] == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(("sizes", "expected"), [([101, 1], [1, 1]), ([60, 41], [1, 1]), ([60, 40], [2]), ([0], [1])])
def test_where_the_first_batch_ends(monkeypatch: pytest.MonkeyPatch, sizes: list[int], expected: list[int]) -> None:
    monkeypatch.setattr(rows, "BATCH_BYTES", 100)
    batches = to_batches(from_messages(message(b"a" * size) for size in sizes), 0, "t", 0, RowFormat())
    assert [batch.num_rows for batch in batches] == expected
