"""Delivered messages as rows: Arrow record batches, built column by column."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
from attrs import define

from nsqext.errors import ProtocolError
from nsqext.protocol.client.body_compression import COMPRESS_HEADER, SIZE_HEADER, decompress_body, is_compressed
from nsqext.protocol.headers import decode_headers, header_json
from nsqext.protocol.messages import (
    EXT_JSON,
    EXT_NONE,
    EXT_TAG,
    KEY_HEADER,
    MESSAGE_ID_SIZE,
    RESERVED_PREFIX,
    TAG_HEADER,
    header_text,
    tag_of,
)
from nsqext.spark.columns import BASE_COLUMNS, Columns, arrow_schema

if TYPE_CHECKING:
    from nsqext.spark.options import SourceOptions
    from nsqext.spark.read.frames import MessageColumns

BATCH_BYTES: int = 64 << 20
"""Bytes of bodies in one batch, because Arrow's limit is 2 GiB, and decompressed bodies grow."""
_NO_HEADERS: dict[str, Any] = {}
_HEADER_START = 3  # bytes of version and length before a header
_TAG = TAG_HEADER.encode()
_COMPRESS = COMPRESS_HEADER.encode()


@define
class RowFormat:
    columns: Columns = BASE_COLUMNS
    headers_as_array: bool = False  #: the column `headers` is an array of structs
    decompress: bool = True

    @classmethod
    def of(cls, options: SourceOptions) -> Self:
        # the column header describes the stored body
        decompress = options.client.consumer().delivery.decompress and "header" not in options.columns
        return cls(options.columns, options.headers_as_array, decompress)

    @property
    def schema(self) -> pa.Schema:
        return arrow_schema(self.columns, self.headers_as_array)

    @property
    def with_bodies(self) -> bool:
        return "value" in self.columns

    @property
    def with_headers(self) -> bool:
        return "headers" in self.columns or "key" in self.columns


def to_batches(
    columns: MessageColumns, first: int | None, topic: str, partition: int | None, rows: RowFormat
) -> list[pa.RecordBatch]:
    """Return messages as rows: one batch, or several for large bodies.

    ``first``, the first message's number, is None where unknown, ``partition`` on the original NSQ.
    """
    batch = _Batch(columns, first, topic, partition, rows)
    try:
        batch.parse_headers()
    except ProtocolError as error:
        raise error.at(topic=topic, partition=partition) from error.__cause__
    return list(batch.cut())


@define
class _Batch:
    columns: MessageColumns
    first: int | None
    topic: str
    partition: int | None
    rows: RowFormat
    parsed: list[dict[str, Any]] | None = None
    bodies: list[bytes] | None = None

    def parse_headers(self) -> None:
        headers = self.columns.headers
        everything = self.rows.with_headers
        # one search through all: most topics have neither tags nor compressed bodies
        if headers is None or not (
            everything or _is_needed(b"".join(headers)) or any(header[0] == EXT_TAG for header in headers)
        ):
            return
        self.parsed = [
            self._decoded(index, header[_HEADER_START:])
            if header[0] == EXT_JSON and len(header) > _HEADER_START and (everything or _is_needed(header))
            else _NO_HEADERS
            for index, header in enumerate(headers)
        ]
        if self.rows.decompress:
            self._decompress(self.parsed)

    def _decoded(self, index: int, header: bytes) -> dict[str, Any]:
        try:
            return decode_headers(header)
        except ProtocolError as error:
            raise self._named(index, error) from error.__cause__

    def _decompress(self, parsed: list[dict[str, Any]]) -> None:
        """Decompress bodies, and remove the headers of the compression."""
        for index, headers in enumerate(parsed):
            if headers and is_compressed(headers):
                if self.rows.with_bodies:
                    self._decompress_body(index, headers)
                parsed[index] = {name: headers[name] for name in headers if name not in (COMPRESS_HEADER, SIZE_HEADER)}

    def _decompress_body(self, index: int, headers: dict[str, Any]) -> None:
        self.bodies = self.columns.bodies if self.bodies is None else self.bodies
        try:
            self.bodies[index] = decompress_body(headers, self.bodies[index])
        except ProtocolError as error:
            error.hint = error.hint or "nsqext.decompress=false returns bodies as they are stored"
            raise self._named(index, error) from error.__cause__

    def _named(self, index: int, error: ProtocolError) -> ProtocolError:
        error.message = f"message {self.columns.heads['id'][index].tobytes().hex()}: {error.message}"
        return error

    def cut(self) -> Iterator[pa.RecordBatch]:
        """Return the rows, in several batches if the bodies are large."""
        schema, count = self.rows.schema, len(self.columns)
        build = {name: _BUILDERS[name](self) for name in self.rows.columns if name != "value"}
        start = 0
        for stop in self._stops() if self.rows.with_bodies else [count]:
            arrays = [
                self._values(start, stop) if name == "value" else build[name].slice(start, stop - start)
                for name in self.rows.columns
            ]
            if stop > start:
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)
            start = stop

    def _stops(self) -> Iterator[int]:
        """Return where batches end, before the message that would make them too large."""
        count = len(self.columns)
        sizes = (
            self.columns.body_sizes() if self.bodies is None else np.fromiter(map(len, self.bodies), np.int64, count)
        )
        ends = np.cumsum(sizes)
        start, before = 0, 0
        while count and int(ends[-1]) - before > BATCH_BYTES:
            start = max(start + 1, int(np.searchsorted(ends, before + BATCH_BYTES, side="right")))
            before = int(ends[start - 1])
            yield start
        yield count

    def _values(self, start: int, stop: int) -> pa.Array:
        if self.bodies is not None:
            return pa.array(self.bodies[start:stop], pa.binary())
        return self.columns.part(start, stop).body_array()

    # Columns

    def topics(self) -> pa.Array:
        return pa.repeat(pa.scalar(self.topic, pa.string()), len(self.columns))

    def partitions(self) -> pa.Array:
        return pa.repeat(pa.scalar(self.partition, pa.int32()), len(self.columns))

    def offsets(self) -> pa.Array:
        if self.first is None:
            return pa.nulls(len(self.columns), pa.int64())
        return pa.array(np.arange(self.first, self.first + len(self.columns), dtype=np.int64))

    def numbers(self, name: str, kind: type[np.generic]) -> pa.Array:
        return pa.array(self.columns.heads[name].astype(kind))

    def timestamps(self) -> pa.Array:
        microseconds = self.columns.heads["timestamp"].astype(np.int64) // 1000
        return pa.array(microseconds).view(pa.timestamp("us", tz="UTC"))

    def ids(self) -> pa.Array:
        count = len(self.columns)
        ends = np.arange(0, (count + 1) * MESSAGE_ID_SIZE, MESSAGE_ID_SIZE, dtype=np.int32)
        data = self.columns.heads["id"].tobytes()
        return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(data)])

    def trace_ids(self) -> pa.Array:
        """Return trace ids as signed numbers; 0 on the original NSQ."""
        if self.partition is None:
            return pa.repeat(pa.scalar(0, pa.int64()), len(self.columns))
        data = self.columns.heads["id"].tobytes()
        traces = np.frombuffer(data, dtype=">i8").reshape(-1, 2)[:, 1].astype(np.int64)
        return pa.array(traces)

    def stored_headers(self) -> pa.Array:
        headers = self.columns.headers
        if headers is None:
            return pa.repeat(pa.scalar(b"", pa.binary()), len(self.columns))
        found = [header[_HEADER_START:] if header[0] in (EXT_JSON, EXT_NONE) else None for header in headers]
        return pa.array(found, pa.binary())

    def from_headers(self, name: str, value: Callable[[bytes, Mapping[str, Any]], Any]) -> pa.Array:
        """Return a column of values that a function makes from each message's headers."""
        kind = self.rows.schema.field(name).type
        if self.columns.headers is None or self.parsed is None:
            return pa.nulls(len(self.columns), kind)
        return pa.array(map(value, self.columns.headers, self.parsed), kind)

    def pairs(self, header: bytes, parsed: Mapping[str, Any]) -> list[Any] | None:
        """Return a message's headers; None without headers."""
        if len(header) <= _HEADER_START:
            return None
        pairs = [(name, header_json(value)) for name, value in parsed.items() if not name.startswith(RESERVED_PREFIX)]
        if not self.rows.headers_as_array:
            return pairs
        return [{"key": name, "value": None if value is None else value.encode()} for name, value in pairs]


_BUILDERS: dict[str, Callable[[_Batch], pa.Array]] = {
    "topic": _Batch.topics,
    "partition": _Batch.partitions,
    "offset": _Batch.offsets,
    "queue_offset": lambda batch: batch.numbers("offset", np.int64),
    "timestamp": _Batch.timestamps,
    "message_id": _Batch.ids,
    "trace_id": _Batch.trace_ids,
    "attempts": lambda batch: batch.numbers("attempts", np.int32),
    "tag": lambda batch: batch.from_headers("tag", _tag),
    "headers": lambda batch: batch.from_headers("headers", batch.pairs),
    "header": _Batch.stored_headers,
    "key": lambda batch: batch.from_headers("key", lambda _, parsed: header_text(parsed, KEY_HEADER)),
}


def _is_needed(header: bytes) -> bool:
    """Return whether a header may have a tag or describe compression, also by escapes."""
    return header.find(_TAG) >= 0 or header.find(_COMPRESS) >= 0 or header.find(b"\\u") >= 0


def _tag(header: bytes, parsed: Mapping[str, Any]) -> str | None:
    if header[0] == EXT_TAG:
        return header[_HEADER_START:].decode("utf-8", "replace") or None
    return tag_of(parsed)
