"""Rows of record batches as messages, by topic and partition.

A row's id stays the same when a task or batch is repeated, so that readers can remove duplicates. It is
``query/batch/partition/row``. For a stream, query is the query's id in its checkpoint, and batch the number of the
micro-batch; for a batch, they are a random number and 0. Partition is the task's. The id is stable if a repeated
computation returns the rows in the same order and partitions.
"""

from __future__ import annotations

import sys
from base64 import b64encode
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import repeat
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from attrs import define, field, frozen

from nsqext import OutgoingMessage
from nsqext.client.producer.request import with_trace_ids
from nsqext.errors import InvalidBody, InvalidHeader, InvalidInput, InvalidName, InvalidPartition, NsqError
from nsqext.protocol.client.commands import TRACE_SIZE
from nsqext.protocol.names import check_partition, check_topic
from nsqext.spark.columns import ONLY_READ, WRITABLE
from nsqext.spark.write.header_column import Pair, as_stored

if TYPE_CHECKING:
    from nsqext.errors import NsqError
    from nsqext.spark.options import SinkOptions
    from nsqext.types import TopicMeta

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

# properties of a task that name its query and micro-batch
_QUERY = "sql.streaming.queryId"
_BATCH = "streaming.sql.batchId"


@frozen
class Origin:
    """Origin of rows."""

    query: str  # id of the streaming query; random for a batch
    batch: int  # number of the micro-batch; 0 for a batch
    partition: int  # of the task

    @classmethod
    def of_job(cls, job: str) -> Self:
        """Return the origin of the current task's rows in a batch."""
        from pyspark import TaskContext  # nsqext.arrow has no Spark

        context = TaskContext.get()
        return cls(job, 0, context.partitionId() if context is not None else 0)

    @classmethod
    def of_query(cls, job: str) -> Self:
        """Return the origin of the current task's rows in a micro-batch; of the job if Spark names no query."""
        from pyspark import TaskContext  # nsqext.arrow has no Spark

        context = TaskContext.get()
        query = context.getLocalProperty(_QUERY) if context is not None else None
        batch = context.getLocalProperty(_BATCH) if context is not None else None
        if context is None or query is None or batch is None:
            return cls.of_job(job)
        return cls(query, int(batch), context.partitionId())

    def row_id(self, row: int) -> str:
        return f"{self.query}/{self.batch}/{self.partition}/{row}"

    def row_ids(self, first: int, count: int) -> list[str]:
        prefix = f"{self.query}/{self.batch}/{self.partition}/"
        return [f"{prefix}{row}" for row in range(first, first + count)]

    def trace_ids(self, first: int, count: int) -> list[int]:
        """Return 64-bit ids of consecutive rows, for topics without extend headers; never 0 (no trace id).

        A hash of the origin, and of the row by SplitMix64, which gives a task's rows different ids.
        """
        origin = f"{self.query}/{self.batch}/{self.partition}"
        seed = np.uint64(int.from_bytes(blake2b(origin.encode(), digest_size=8).digest(), "big"))
        # wraps around, as it must
        mixed = seed + np.arange(first + 1, first + count + 1, dtype=np.uint64) * _GAMMA
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _FACTORS[0]
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _FACTORS[1]
        mixed ^= mixed >> np.uint64(31)
        mixed[mixed == 0] = 1
        found: list[int] = mixed.tolist()
        return found


_U64 = (1 << 64) - 1
_MESSAGE = 64

Target = tuple[str, int | None]  # None if the producer chooses the partition


@define(eq=False)
class Group:
    """Messages for one target, with their row numbers."""

    rows: list[int] = field(factory=list)
    messages: list[bytes | OutgoingMessage] = field(factory=list)
    trace_ids: list[int] = field(factory=list)  # if all messages are bodies, at half the cost of objects

    def without(self, index: int) -> Group:
        """Return the other messages."""
        rows, messages = list(self.rows), with_trace_ids(self.messages, self.trace_ids)
        return Group(rows[:index] + rows[index + 1 :], [*messages[:index], *messages[index + 1 :]])

    def extend(self, rows: Iterable[int], messages: Sequence[bytes | OutgoingMessage], trace_ids: list[int]) -> None:
        """Add messages."""
        if bool(trace_ids) == bool(self.trace_ids) or not self.messages:
            self.trace_ids += trace_ids
        else:
            self.messages = list(with_trace_ids(self.messages, self.trace_ids))
            messages, self.trace_ids = with_trace_ids(messages, trace_ids), []
        self.rows += rows
        self.messages += messages


@define(eq=False)
class Chunk:
    """Messages published together."""

    groups: dict[Target, Group] = field(factory=dict)
    size: int = 0  # approximate bytes
    count: int = 0

    def add(self, target: Target, row: int, message: bytes | OutgoingMessage, size: int) -> None:
        self.extend(target, row, [message], [], size + _MESSAGE)

    def extend(
        self, target: Target, first: int, messages: Sequence[bytes | OutgoingMessage], trace_ids: list[int], size: int
    ) -> None:
        """Add the messages of consecutive rows, bodies with trace ids if given."""
        group = self.groups.get(target)
        if group is None:
            group = self.groups[target] = Group()
        group.extend(range(first, first + len(messages)), messages, trace_ids)
        self.size += size
        self.count += len(messages)


class RowMapper:
    """Converts one task's rows to messages."""

    def __init__(self, options: SinkOptions, columns: tuple[str, ...], origin: Origin) -> None:
        client = options.client.producer()
        self._options = options
        self._names = columns
        self._origin = origin
        self._most_rows = min(client.max_batch_count, options.max_rows_per_second or sys.maxsize)  # of a chunk
        self._max_message_size = client.max_message_size
        self._most_traced = client.max_message_size - TRACE_SIZE  # bytes of a body that leaves room for a trace id
        self._ask: Callable[[str], TopicMeta]
        self._metas: dict[str, TopicMeta] = {}
        self._row = 0

    def chunks(self, batches: Iterable[pa.RecordBatch], meta: Callable[[str], TopicMeta]) -> Iterator[Chunk]:
        """Return the rows as chunks of messages; ``meta`` returns a topic's meta.

        Raises InvalidInput for an invalid row, with its number; not with ``bad_rows_topic``.
        """
        self._ask = meta
        if self._options.bad_rows_topic is not None:
            self._resolve(self._options.bad_rows_topic)
        chunk = Chunk()
        limit, most = self._options.ack_batch_bytes, self._most_rows
        for batch in batches:
            uniform = self._uniform(batch)
            if uniform is None:
                for row in zip(*self._columns(batch), strict=False):
                    target, message, size = self._message_or_description(row)
                    if chunk.count and (chunk.size + size > limit or chunk.count >= most):
                        yield chunk
                        chunk = Chunk()
                    chunk.add(target, self._row, message, size)
                    self._row += 1
                continue
            target, messages, traces, ends = uniform
            start = 0
            while start < len(messages):
                before = ends[start - 1] if start else 0
                stop = min(
                    start + most - chunk.count, bisect_right(ends, limit - chunk.size + before, start, len(messages))
                )
                if stop <= start and chunk.count:
                    yield chunk
                    chunk = Chunk()
                    continue
                stop = max(stop, start + 1)
                chunk.extend(target, self._row, messages[start:stop], traces[start:stop], ends[stop - 1] - before)
                self._row += stop - start
                start = stop
        if chunk.count:
            yield chunk

    def _uniform(
        self, batch: pa.RecordBatch
    ) -> tuple[Target, Sequence[bytes | OutgoingMessage], list[int], list[int]] | None:
        """Return messages, trace ids and sums of sizes of a batch whose rows differ only in value and key.

        Costs half of single rows. None for other batches.
        """
        found = dict(zip(self._names, batch.columns, strict=True))
        topic, values = self._options.topic, found["value"]
        if topic is None or values.null_count or not found.keys() <= {"value", "key", "topic", *ONLY_READ}:
            return None
        try:
            meta = self._metas.get(topic) or self._resolve(topic)[1]
        except InvalidInput as error:
            raise self._located(error, topic) from error.__cause__
        bodies, keys, first = _bytes(values), _bytes(found.get("key")), self._row
        overhead = _MESSAGE
        messages: Sequence[bytes | OutgoingMessage]
        traces: list[int] = []
        if meta.extend_support:
            name = self._options.idempotence_header
            ids = self._origin.row_ids(first, len(values))
            messages = [
                OutgoingMessage(body, {name: row_id}, None, None, key)
                for body, row_id, key in zip(bodies, ids, keys, strict=False)
            ]
            overhead += len(name) + len(ids[-1]) if ids else 0
        elif meta.partition_num and (pc.max(pc.binary_length(values)).as_py() or 0) <= self._most_traced:
            traces = self._origin.trace_ids(first, len(values))
            if "key" in found:
                messages = [
                    OutgoingMessage(body, None, None, trace, key)
                    for body, trace, key in zip(bodies, traces, keys, strict=False)
                ]
                traces = []
            else:
                messages = bodies
        else:
            return None
        sizes = pc.add(pc.cast(pc.binary_length(values), pa.int64()), overhead)
        ends: list[int] = pc.cumulative_sum(sizes).to_pylist()
        return (topic, None), messages, traces, ends

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
        """Return the message that describes an unpublishable row, with the row's id."""
        body = describe_row(row, self._origin.partition, error, fields, self._max_message_size)
        return self._message(body, self._options.bad_rows_topic, None, None, None, None, None, row=row)

    def _located(self, error: InvalidInput, topic: str | None) -> InvalidInput:
        """Return an error that names the current row."""
        error.message = f"row {self._row} of Spark partition {self._origin.partition}: {error.message}"
        error.at(topic=topic)
        return error

    def _columns(self, batch: pa.RecordBatch) -> list[Iterable[Any]]:
        """Return the values of `WRITABLE`; the option `topic` replaces the column."""
        found = dict(zip(self._names, batch.columns, strict=True))
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
        row: int | None = None,
    ) -> tuple[Target, bytes | OutgoingMessage, int]:
        row = self._row if row is None else row
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
                        hint="set one of them to null, or drop a column",
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
                headers = {**(headers or {}), name: self._origin.row_id(row)}
        elif trace is None and meta.partition_num and len(value) <= self._most_traced:
            trace = self._origin.trace_ids(row, 1)[0]
        target = (topic, partition)
        if headers is None and trace is None and key is None and tag is None:
            return target, value, len(value)
        size = len(value) + (
            sum(map(len, headers)) + sum(len(text or "") for text in headers.values()) if headers else 0
        )
        return target, OutgoingMessage(value, headers, tag, trace, key), size

    def _resolve(self, topic: str | None) -> tuple[str, TopicMeta]:
        """Return the meta of a topic at its first row."""
        if topic is None:
            raise InvalidName("the row has no topic", hint="fill the column topic, or use the option topic")
        meta = self._metas[topic] = self._ask(check_topic(topic))
        return topic, meta


def _values(column: pa.Array | None) -> Iterable[Any]:
    """Return a column's values, maps as dicts; only None without a column."""
    if column is None:
        return repeat(None)
    return list(column.to_pylist(maps_as_pydicts="strict"))


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
    """Return a column of bytes or text as bytes; only None without a column."""
    if column is None:
        return repeat(None)
    if pa.types.is_string(column.type):
        column = column.cast(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    # to_pylist makes an Arrow scalar of each value
    values: list[bytes | None] = column.to_numpy(zero_copy_only=False).tolist()
    return values


def describe_row(row: int, task: int, error: NsqError, fields: Mapping[str, Any], max_size: int) -> bytes:
    """Return why a row cannot be published, with its content, as a JSON object.

    Without null fields. Bytes that are not UTF-8 are in Base64, in a member with the suffix ``_base64``. A description
    above ``max_size`` bytes has ``value_size`` in place of value and headers.
    """
    about: dict[str, Any] = {"error": f"{type(error).__name__}: {error.message}", "row": row, "task": task}
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
