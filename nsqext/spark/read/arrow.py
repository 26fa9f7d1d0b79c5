"""Delivered messages as rows: record batches of Arrow, made column by column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import orjson
import pyarrow as pa

from nsqext.errors import ProtocolError
from nsqext.protocol.client.body_compression import COMPRESS_HEADER, SIZE_HEADER, decompress_body, is_compressed
from nsqext.protocol.headers import KEY_HEADER, RESERVED_PREFIX, TAG_HEADER, decode_headers, tag_of
from nsqext.protocol.messages import EXT_JSON, EXT_TAG, MESSAGE_ID_SIZE
from nsqext.spark.schema import arrow_schema

if TYPE_CHECKING:
    from nsqext.protocol.messages import RawMessage

__all__ = ("to_batches",)

_BATCH_BYTES = 64 << 20
"""Bytes of bodies in one batch: Arrow's limit is 2 GiB, and compressed bodies grow."""
_FIRST_DIGIT = ord("0")
_NO_HEADERS: dict[str, Any] = {}

_bodies = attrgetter("body")
_ids = attrgetter("id")
_headers = attrgetter("header")
_numbers = attrgetter("timestamp", "offset", "attempts")


class Messages(Protocol):
    """Messages of one partition that lie one behind the other."""

    @property
    def first(self) -> int:
        """Number of the first one."""

    @property
    def messages(self) -> Sequence[RawMessage]:
        """The messages."""


def to_batches(
    block: Messages, topic: str, partition: int, include_headers: bool = False, *, decompress: bool = True
) -> list[pa.RecordBatch]:
    """Return messages as rows: one batch, or several where their bodies are large.

    Args:
        block: the messages.
        topic: where they come from.
        partition: where they come from; -1 at the original NSQ.
        include_headers: rows have the columns ``headers`` and ``key``.
        decompress: restore bodies that the publishing client compressed.

    Raises:
        ProtocolError: an extend header is not JSON, or a compressed body is damaged.
    """
    messages = block.messages
    count = len(messages)
    bodies: list[bytes] = list(map(_bodies, messages))
    encoded: list[bytes] = list(map(_headers, messages))
    tags: pa.Array = pa.nulls(count, pa.string())
    parsed: list[dict[str, Any]] | None = None
    if any(encoded):
        try:
            parsed = _parsed(messages, encoded, everything=include_headers)
            if decompress:
                _unpack(messages, bodies, parsed)
        except ProtocolError as error:
            raise error.at(topic=topic, partition=partition) from error.__cause__
        tags = pa.array(map(_tag, messages, parsed), pa.string())
    identity, traces = _identity(messages)
    timestamps, offsets, attempts = _columns_of_numbers(messages)
    columns = [
        pa.repeat(pa.scalar(topic, pa.string()), count),
        pa.repeat(pa.scalar(partition, pa.int32()), count),
        pa.array(np.arange(block.first, block.first + count, dtype=np.int64)),
        pa.array(offsets),
        pa.array(timestamps // 1000).view(pa.timestamp("us", tz="UTC")),
        identity,
        pa.array(traces),
        pa.array(attempts.astype(np.int32)),
        tags,
    ]
    if include_headers:
        columns += _header_columns(messages, parsed)
    return list(_batches(bodies, columns, arrow_schema(include_headers)))


def _batches(bodies: list[bytes], columns: list[pa.Array], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Put columns together; bodies decide where a batch ends."""
    start = 0
    large = sum(map(len, bodies)) > _BATCH_BYTES
    while start < len(bodies):
        stop = len(bodies)
        if large:
            stop, size = start + 1, len(bodies[start])
            while stop < len(bodies) and size + len(bodies[stop]) <= _BATCH_BYTES:
                size += len(bodies[stop])
                stop += 1
        values = pa.array(bodies[start:stop], pa.binary())
        rest = [column.slice(start, stop - start) for column in columns]
        yield pa.RecordBatch.from_arrays([values, *rest], schema=schema)
        start = stop


def _columns_of_numbers(messages: Sequence[RawMessage]) -> tuple[Any, Any, Any]:
    """Return time stamps, offsets and attempts."""
    table = np.array(list(map(_numbers, messages)), dtype=np.int64).reshape(-1, 3)
    return table[:, 0], np.ascontiguousarray(table[:, 1]), table[:, 2]


def _identity(messages: Sequence[RawMessage]) -> tuple[pa.Array, Any]:
    """Return ids, and trace ids as signed numbers; text ids have none."""
    count = len(messages)
    joined = b"".join(map(_ids, messages))
    ends = np.arange(0, (count + 1) * MESSAGE_ID_SIZE, MESSAGE_ID_SIZE, dtype=np.int32)
    ids = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(joined)])
    traces = np.frombuffer(joined, dtype=">i8").reshape(-1, 2)[:, 1].astype(np.int64)
    text = np.frombuffer(joined, dtype=np.uint8)[::MESSAGE_ID_SIZE] >= _FIRST_DIGIT
    if text.any():
        traces[text] = 0
    return ids, traces


# --- extend headers -------------------------------------------------------------------------------------------------


def _parsed(messages: Sequence[RawMessage], encoded: list[bytes], *, everything: bool) -> list[dict[str, Any]]:
    """Return the headers of each message; only of those with something of interest unless everything is asked for."""
    return [
        _decoded(message)
        if header and message.version == EXT_JSON and (everything or _matters(header))
        else _NO_HEADERS
        for message, header in zip(messages, encoded, strict=True)
    ]


def _decoded(message: RawMessage) -> dict[str, Any]:
    try:
        return decode_headers(message.header)
    except ProtocolError as error:
        raise _named(message, error) from error.__cause__


def _named(message: RawMessage, error: ProtocolError) -> ProtocolError:
    error.message = f"message {message.id.hex()}: {error.message}"
    return error


def _matters(header: bytes) -> bool:
    """Return whether there may be a tag or a compressed body; an escape may spell any name."""
    return (
        header.find(TAG_HEADER.encode()) >= 0 or header.find(COMPRESS_HEADER.encode()) >= 0 or header.find(b"\\u") >= 0
    )


def _tag(message: RawMessage, headers: Mapping[str, Any]) -> str | None:
    if message.version == EXT_TAG:
        return message.header.decode("utf-8", "replace") or None
    return tag_of(headers)


def _unpack(messages: Sequence[RawMessage], bodies: list[bytes], parsed: list[dict[str, Any]]) -> None:
    """Restore compressed bodies, and take the headers away that say so."""
    for index, headers in enumerate(parsed):
        if headers and is_compressed(headers):
            try:
                bodies[index] = decompress_body(headers, bodies[index])
            except ProtocolError as error:
                error.hint = error.hint or "nsqext.delivery_decompress=false reads bodies as they are stored"
                raise _named(messages[index], error) from error.__cause__
            parsed[index] = {name: headers[name] for name in headers if name not in (COMPRESS_HEADER, SIZE_HEADER)}


def _header_columns(messages: Sequence[RawMessage], parsed: list[dict[str, Any]] | None) -> list[pa.Array]:
    count = len(messages)
    kind = pa.map_(pa.string(), pa.string())
    if parsed is None:
        return [pa.nulls(count, kind), pa.nulls(count, pa.string())]
    keys = [_scalar(headers.get(KEY_HEADER)) for headers in parsed]
    maps = [
        [(name, _scalar(value)) for name, value in headers.items() if not name.startswith(RESERVED_PREFIX)]
        if message.header
        else None
        for message, headers in zip(messages, parsed, strict=True)
    ]
    return [pa.array(maps, kind), pa.array(keys, pa.string())]


def _scalar(value: object) -> str | None:
    """Return a value of a header as text; what is no text stays JSON."""
    if value is None or isinstance(value, str):
        return value
    return orjson.dumps(value).decode()
