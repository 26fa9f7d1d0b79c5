"""Rows of record batches as messages, grouped by topic and partition."""

from __future__ import annotations

import logging
import sys
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from attrs import define, field

from nsqext import OutgoingMessage
from nsqext.client.producer.packed import PackedMessages
from nsqext.errors import InvalidBody, InvalidHeader, InvalidInput, InvalidName, InvalidPartition, NsqError
from nsqext.protocol.client.commands import TRACE_SIZE
from nsqext.protocol.names import check_partition, check_topic
from nsqext.spark.columns import ONLY_READ, WRITABLE
from nsqext.spark.write.header_column import Pair, as_stored
from nsqext.spark.write.packing import PackedRows
from nsqext.spark.write.row_ids import TASK_SUFFIX, row_name

if TYPE_CHECKING:
    from nsqext.errors import NsqError
    from nsqext.spark.options import SinkOptions
    from nsqext.spark.write.packing import Sizes
    from nsqext.spark.write.row_ids import BatchIds, RowIds
    from nsqext.types import TopicMeta

logger: logging.Logger = logging.getLogger("nsqext.spark")

_U64 = (1 << 64) - 1
_MESSAGE = 64
_UNIFORM = {"value", "key", "topic", *ONLY_READ}

Target = tuple[str, int | None]
"""Topic and partition; without partition, the producer chooses it."""


@define(eq=False)
class Group:
    rows: list[int] = field(factory=list)
    messages: PackedMessages | list[bytes | OutgoingMessage] = field(factory=list)

    def part(self, start: int, stop: int) -> Group:
        return Group(self.rows[start:stop], self.messages[start:stop])

    def extend(self, rows: Iterable[int], messages: PackedMessages | list[bytes | OutgoingMessage]) -> None:
        self.rows += rows
        mine = self.messages
        if not mine:
            self.messages = messages
        elif isinstance(mine, PackedMessages):
            if isinstance(messages, PackedMessages) and messages.verb == mine.verb:
                self.messages = mine + messages
            else:
                self.messages = [*mine, *messages]
        else:
            mine += messages


@define(eq=False)
class Chunk:
    groups: dict[Target, Group] = field(factory=dict)
    size: int = 0  #: approximate bytes
    count: int = 0

    def add(self, target: Target, row: int, message: bytes | OutgoingMessage, size: int) -> None:
        self.extend(target, range(row, row + 1), [message], size + _MESSAGE)

    def extend(
        self, target: Target, rows: range, messages: PackedMessages | list[bytes | OutgoingMessage], size: int
    ) -> None:
        group = self.groups.get(target)
        if group is None:
            group = self.groups[target] = Group()
        group.extend(rows, messages)
        self.size += size
        self.count += len(rows)


class RowMapper:
    def __init__(self, options: SinkOptions, columns: tuple[str, ...], ids: RowIds) -> None:
        client = options.client.producer()
        self._options = options
        self._names = columns
        self._ids = ids
        self._most_rows = min(client.max_batch_count, options.max_rows_per_second or sys.maxsize)  # of a chunk
        self._max_message_size = client.max_message_size
        self._most_traced = client.max_message_size - TRACE_SIZE  # bytes of a body that leaves room for a trace id
        self._ask: Callable[[str], TopicMeta]
        self._metas: dict[str, TopicMeta] = {}
        self._row = 0
        self._columns: Mapping[str, pa.Array]  # of the current batch
        self._first = 0  # number of its first row
        self._made: BatchIds | None = None  # ids of its rows, once a row needs its id
        self._warned = False

    def chunks(self, batches: Iterable[pa.RecordBatch], meta: Callable[[str], TopicMeta]) -> Iterator[Chunk]:
        """Return the rows as chunks of messages; without ``bad_rows_topic``, raise InvalidInput for an invalid row."""
        self._ask = meta
        if self._options.bad_rows_topic is not None:
            self._resolve(self._options.bad_rows_topic)
        chunk = Chunk()
        limit, most = self._options.ack_batch_bytes, self._most_rows
        for batch in batches:
            if not batch.num_rows:
                continue
            columns = dict(zip(self._names, batch.columns, strict=True))
            self._columns, self._first, self._made = columns, self._row, None
            uniform = self._uniform(columns)
            if uniform is None:
                for row in zip(*self._values(columns), strict=False):
                    target, message, size = self._message_or_description(row)
                    if chunk.count and (chunk.size + size > limit or chunk.count >= most):
                        yield chunk
                        chunk = Chunk()
                    chunk.add(target, self._row, message, size)
                    self._row += 1
                continue
            target, messages, ends = uniform
            start, count = 0, len(ends)
            while start < count:
                before = int(ends[start - 1]) if start else 0
                fitting = int(np.searchsorted(ends, limit - chunk.size + before, "right"))
                stop = min(start + most - chunk.count, fitting)
                if stop <= start and chunk.count:
                    yield chunk
                    chunk = Chunk()
                    continue
                stop = max(stop, start + 1)
                rows = range(self._row, self._row + stop - start)
                chunk.extend(target, rows, messages[start:stop], int(ends[stop - 1]) - before)
                self._row = rows.stop
                start = stop
        if chunk.count:
            yield chunk

    def _uniform(
        self, found: Mapping[str, pa.Array]
    ) -> tuple[Target, PackedRows | list[bytes | OutgoingMessage], Sizes] | None:
        """Return messages and sums of sizes of a batch whose rows differ only in value and key, for less CPU."""
        topic, values = self._options.topic or _only(found.get("topic")), found["value"]
        if topic is None or values.null_count:
            return None
        if any(found[name].null_count < len(values) for name in found.keys() - _UNIFORM):
            return None
        try:
            meta = self._metas.get(topic) or self._resolve(topic)[1]
        except InvalidInput as error:
            raise self._located(error, topic) from error.__cause__
        sizes = pc.min_max(pc.binary_length(values)).as_py()
        if not sizes["min"]:
            return None
        if meta.extend_support:
            packed = PackedRows.with_headers(values, self._of_batch(), self._options.idempotence_header)
        elif meta.partition_num:
            if sizes["max"] > self._most_traced:
                return None
            self._warn_of_equal_rows(topic, self._of_batch())
            packed = PackedRows.with_traces(values, self._of_batch())
        else:
            packed = PackedRows.of_bodies(values)
        if packed is None or "key" not in found:
            return None if packed is None else ((topic, None), packed, packed.ends)
        keyed = list(map(_with_key, packed[:], _bytes(found["key"])))
        return (topic, None), keyed, packed.ends + np.arange(1, len(keyed) + 1) * _MESSAGE

    def _message_or_description(self, row: Sequence[Any]) -> tuple[Target, bytes | OutgoingMessage, int]:
        try:
            return self._message(*row)
        except InvalidInput as error:
            if self._options.bad_rows_topic is None:
                raise
            return self.describe(self._row, error, dict(zip(WRITABLE, row, strict=True)))

    def describe(
        self, row: int, error: NsqError, fields: Mapping[str, Any]
    ) -> tuple[Target, bytes | OutgoingMessage, int]:
        """Return the message that describes a row which cannot be published; its id follows the row's content."""
        headers = fields.get("headers")
        if isinstance(headers, Mapping):  # the task differs when the batch is run again
            task = f"{self._options.idempotence_header}{TASK_SUFFIX}"
            fields = {**fields, "headers": {name: text for name, text in headers.items() if name != task} or None}
        body = describe_row(row, self._ids.partition, error, fields, self._max_message_size)
        ids = self._ids.of_description(row, orjson.dumps(_members(fields), default=str))
        return self._message(body, self._options.bad_rows_topic, None, None, None, None, None, described=ids)

    def _located(self, error: InvalidInput, topic: str | None) -> InvalidInput:
        error.message = f"{row_name(self._row, self._ids.partition)}: {error.message}"
        error.at(topic=topic)
        return error

    def _values(self, found: Mapping[str, pa.Array]) -> list[Iterable[Any]]:
        """Return the values of `WRITABLE`; the option `topic` replaces the column."""
        columns: list[Iterable[Any]] = [
            (_bytes if name in ("value", "key", "header") else _values)(found.get(name)) for name in WRITABLE
        ]
        if self._options.topic is not None:
            columns[WRITABLE.index("topic")] = repeat(self._options.topic)
        return columns

    def _message(
        self,
        value: bytes | None,
        topic: str | None,
        key: bytes | None,
        partition: int | None,
        headers: Mapping[str, str] | list[Pair | None] | None,
        trace_id: int | None,
        tag: str | None,
        header: bytes | None = None,
        described: BatchIds | None = None,
    ) -> tuple[Target, bytes | OutgoingMessage, int]:
        try:
            meta = self._metas.get(topic) if topic is not None else None
            if meta is None or topic is None:
                topic, meta = self._resolve(topic)
            if value is None:
                raise InvalidBody("the value is null", topic=topic)
            if partition is not None:
                check_partition(partition)
                if key is not None:
                    raise InvalidPartition(
                        "the row has a key and a partition",
                        topic=topic,
                        hint="set key or partition to null, or drop its column",
                    )
            if header is not None:
                trace = trace_id & _U64 if trace_id else None
                return (topic, partition), as_stored(value, header, headers, trace, tag, key), len(value) + len(header)
            if isinstance(headers, list):
                headers = _as_mapping(headers)
        except InvalidInput as error:
            raise self._located(error, topic) from error.__cause__
        trace = trace_id & _U64 if trace_id else None
        if meta.extend_support:
            name = self._options.idempotence_header
            if headers is None or name not in headers:
                ids, index = self._ids_of(described)
                headers = {**(headers or {}), **ids.headers_of(name, index)}
        elif trace is None and meta.partition_num and len(value) <= self._most_traced:
            ids, index = self._ids_of(described)
            self._warn_of_equal_rows(topic, ids)
            trace = int(ids.trace_ids[index])
        target = (topic, partition)
        if headers is None and trace is None and key is None and tag is None:
            return target, value, len(value)
        size = len(value) + (_size_of(headers) if headers else 0)
        return target, OutgoingMessage(value, headers, tag, trace, key), size

    def _of_batch(self) -> BatchIds:
        """Return the ids of the current batch's rows, which many batches do not need."""
        if self._made is None:
            self._made = self._ids.of_batch(self._columns, self._first)
        return self._made

    def _ids_of(self, described: BatchIds | None) -> tuple[BatchIds, int]:
        """Return ids, and the index in them of the current row or of its description."""
        return (self._of_batch(), self._row - self._first) if described is None else (described, 0)

    def _warn_of_equal_rows(self, topic: str, ids: BatchIds) -> None:
        if ids.ambiguous and not self._warned:
            self._warned = True
            logger.warning(
                "topic %s has no extend headers: dedupe would remove equal rows that other tasks of the batch publish; "
                "keep the columns topic and message_id of the read, or add the column trace_id",
                topic,
            )

    def _resolve(self, topic: str | None) -> tuple[str, TopicMeta]:
        """Return the meta of a topic at its first row."""
        if topic is None:
            raise InvalidName("the row has no topic", hint="fill the column topic, or use the option topic")
        meta = self._metas[topic] = self._ask(check_topic(topic))
        return topic, meta


def _only(topics: pa.Array | None) -> str | None:
    """Return the topic of all rows; None for several, and for null."""
    if topics is None or topics.null_count or len(found := pc.unique(topics)) > 1:
        return None
    return str(found[0])


def _with_key(message: bytes | OutgoingMessage, key: bytes | None) -> bytes | OutgoingMessage:
    if key is None:
        return message
    if isinstance(message, bytes):
        return OutgoingMessage(message, key=key)
    return OutgoingMessage(message.body, message.headers, None, message.trace_id, key)


def _size_of(headers: Mapping[str, str]) -> int:
    return sum(map(len, headers)) + sum(len(text or "") for text in headers.values())


def _values(column: pa.Array | None) -> Iterable[Any]:
    """Return a column's values, with maps as dicts; None for each row without a column."""
    if column is None:
        return repeat(None)
    try:
        return list(column.to_pylist(maps_as_pydicts="strict"))
    except KeyError:  # a map has a key twice: its row is refused, as one with an array
        return [None if pairs is None else [_pair(*pair) for pair in pairs] for pairs in column.to_pylist()]


def _pair(name: str | None, value: str | None) -> Pair:
    return {"key": name, "value": None if value is None else value.encode()}


def _as_mapping(pairs: Iterable[Pair | None]) -> dict[str, str]:
    """Return a row's headers from an array of key and value."""
    headers: dict[str, str] = {}
    for pair in pairs:
        name, value = (pair["key"], pair["value"]) if pair is not None else (None, None)
        if name is None or value is None:
            raise InvalidHeader(f"the header {name!r} is null" if name else "a header has no key")
        if name in headers:
            raise InvalidHeader(f"the header {name!r} occurs twice", hint="a message has one value of each header")
        try:
            headers[name] = value.decode()
        except UnicodeDecodeError:
            raise InvalidHeader(f"the header {name!r} is not UTF-8", hint="convert it to text: base64(value)") from None
    return headers


def _bytes(column: pa.Array | None) -> Any:
    """Return a column of bytes or text as bytes; None for each row without a column."""
    if column is None:
        return repeat(None)
    if pa.types.is_string(column.type):
        column = column.cast(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    # to_pylist makes an Arrow scalar of each value
    values: list[bytes | None] = column.to_numpy(zero_copy_only=False).tolist()
    return values


def describe_row(row: int, task: int | None, error: NsqError, fields: Mapping[str, Any], max_size: int) -> bytes:
    """Return why a row cannot be published, with its content, as a JSON object without null fields.

    Bytes that are not UTF-8 are in Base64, in a member with the suffix ``_base64``. A description above ``max_size``
    bytes has ``value_size`` in place of value and headers.
    """
    about: dict[str, Any] = {"error": f"{type(error).__name__}: {error.message}", "row": row}
    if task is not None:
        about["task"] = task
    described = orjson.dumps({**about, **_members(fields)}, default=str)
    if len(described) <= max_size:
        return described
    kept = {name: value for name, value in fields.items() if name not in ("value", "headers")}
    return orjson.dumps({**about, "value_size": len(fields.get("value") or b""), **_members(kept)}, default=str)


def _members(fields: Mapping[str, Any]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, bytes):
            members.update(_text_of(name, value))
        elif isinstance(value, list):  # headers as an array
            members[name] = [_members(pair or {}) for pair in value]
        elif value is not None:
            members[name] = value
    return members


def _text_of(name: str, value: bytes) -> dict[str, str]:
    try:
        return {name: value.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": b64encode(value).decode()}
