"""Topics as Arrow record batches, for Polars, DuckDB, pandas and pyarrow; the Spark source's code without Spark.

`read` reads a topic, `consume` a channel, `write` publishes rows; all block. Needs pyarrow and numpy: ``pip install
'nsqext[arrow]'``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from math import isfinite
from typing import Any, Literal, Protocol, Unpack
from uuid import uuid4

import orjson

try:
    import pyarrow as pa
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(f"{_error}: pip install 'nsqext[arrow]'", name=_error.name) from _error

from nsqext.arguments import check_flags, check_number
from nsqext.client.producer.settings import ProducerSettings
from nsqext.errors import InvalidInput, InvalidSetting
from nsqext.lookup.settings import LookupSettings
from nsqext.settings import unknown_setting
from nsqext.spark.cluster import portal
from nsqext.spark.cluster.client_config import PREFIX, client_settings
from nsqext.spark.columns import WRITABLE, arrow_schema, check_written
from nsqext.spark.options import SinkOptions, SourceOptions, names_by_keyword
from nsqext.spark.read.batch_plan import Pruning, plan, read_within
from nsqext.spark.read.channel_batches import ChannelReader, rows_of
from nsqext.spark.write.publisher import publish_rows
from nsqext.spark.write.row_ids import NumberedIds
from nsqext.transport.settings import ConnectionSettings

__all__ = ("ConsumeOptions", "ReadOptions", "Topics", "WriteOptions", "bounds", "consume", "read", "write")

Topics = str | Sequence[str] | Mapping[str, Sequence[int]]
"""A topic, several, or partitions by topic."""
Offsets = Literal["earliest", "latest"] | Mapping[str, Mapping[int, int]]


class _RowOptions(ConnectionSettings, LookupSettings, total=False):
    """Options of read rows, with settings of connections and lookup."""

    columns: Sequence[str]
    """Columns to read; by default all except ``headers``, ``key`` and ``header``."""
    include_headers: bool
    """Add the columns ``headers`` and ``key``."""
    headers_format: Literal["map", "array"]
    """``array`` makes ``headers`` a list of structs, for libraries without maps, as older versions of Polars."""
    decompress: bool
    """Decompress bodies that the publishing client compressed."""
    read_timeout: float
    """Seconds of waiting for the next message, also during leader changes."""
    rdy: int
    """Messages in flight, 1 to 2500."""


class ReadOptions(_RowOptions, total=False):
    """Options of `read`, as of the Spark source, with settings of connections and lookup."""

    starting_offsets: Offsets
    """First message of each partition, by topic and partition; -2 for the first retained message."""
    ending_offsets: Offsets
    """Message after the last of each partition; -1 is the end."""
    starting_timestamp: datetime
    """Messages published since then; instead of ``starting_offsets``."""
    ending_timestamp: datetime
    """Messages published before; instead of ``ending_offsets``."""
    fail_on_data_loss: bool
    """Raise if messages are not retained any more; otherwise begin with the next messages."""
    arrow_batch_rows: int
    """Rows of a record batch."""


class ConsumeOptions(_RowOptions, total=False):
    """Options of `consume`, and settings of connections and lookup."""

    max_messages: int
    """Most messages received before the previous messages are finished."""


class WriteOptions(ProducerSettings, total=False):
    """Options of `write`, as of the Spark sink, with settings of producers."""

    topic: str
    """Topic of all rows, whatever the column ``topic`` contains."""
    idempotence_header: str
    ack_batch_bytes: int
    max_rows_per_second: int
    bad_rows: Literal["fail", "topic"]
    bad_rows_topic: str


class ArrowStream(Protocol):
    """Rows of a library that exports Arrow streams: data frame, table, relation, reader."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return the stream."""


def read(topics: Topics, lookupd: str | Sequence[str], **options: Unpack[ReadOptions]) -> pa.RecordBatchReader:
    """Read the messages that topics have now.

    Libraries that accept Arrow streams read it once: ``polars.from_arrow(reader)``, ``duckdb.sql("FROM reader")``,
    ``reader.read_pandas()``.

    Args:
        lookupd: addresses of nsqlookupd.
        options: see `ReadOptions`.

    Returns:
        The rows, ordered by topic, partition and offset, in the Spark source's columns. They are received while the
        reader is read, which raises the errors of the servers: `DataLoss` if messages are not retained any more,
        `RangeIncomplete` if a message was not received in time. Each message is in it once.

    Raises:
        InvalidSetting: unknown, invalid or contradictory option.
        TopicNotFound: unknown topic.
        NsqError: the servers do not answer.
    """
    source = SourceOptions.parse(_texts("read", ReadOptions, options, lookupd, _subscription(topics)))
    ranges = portal.call(plan, source, Pruning())
    schema = arrow_schema(source.columns, source.headers_as_array)
    return pa.RecordBatchReader.from_batches(schema, read_within(source, ranges))


def bounds(topic: str, lookupd: str | Sequence[str], **options: Unpack[ReadOptions]) -> Mapping[int, tuple[int, int]]:
    """Return by partition the offset of the first message that `read` would read, and the offset behind the last.

    With times they are up to five seconds farther apart, by which clocks of servers may differ: `read` leaves out the
    messages of other times between them.

    Raises:
        NsqError: as for `read`.
    """
    source = SourceOptions.parse(_texts("read", ReadOptions, options, lookupd, _subscription(topic)))
    return {found.partition: (found.start, found.end) for found in portal.call(plan, source, Pruning())}


def consume(
    topics: str | Sequence[str],
    channel: str,
    lookupd: str | Sequence[str],
    *,
    until_empty: bool = False,
    **options: Unpack[ConsumeOptions],
) -> Iterator[pa.RecordBatch]:
    """Consume a channel, at least once.

    Messages are finished when the next batch is requested. If the iterator is closed before, the servers redeliver the
    last batch.

    Args:
        channel: may be shared with other consumers.
        lookupd: addresses of nsqlookupd.
        until_empty: end after the messages published before the call.
        options: see `ConsumeOptions`.

    Returns:
        Batches of messages of a partition, without offsets; never empty.

    Raises:
        InvalidSetting: unknown or invalid option.
        NsqError: the consumer failed.
    """
    check_flags(until_empty=until_empty)
    given, own = dict(options), {"channel": channel, "read_mode": "channel", **_subscription(topics)}
    if "max_messages" in given:
        own["max_offsets_per_trigger"] = check_number("max_messages", given.pop("max_messages"), 1)
    source = SourceOptions.parse(_texts("consume", ConsumeOptions, given, lookupd, own), streaming=True)
    return _consumed(source, time.time_ns() if until_empty else None)


def _consumed(source: SourceOptions, frozen_at: int | None) -> Iterator[pa.RecordBatch]:
    reader, number = ChannelReader(source), 0
    try:
        if frozen_at is not None:
            reader.freeze(frozen_at)
        while True:
            messages = reader.take(number)
            if frozen_at is not None and not messages:
                return
            yield from rows_of(source, messages)
            number += len(messages)
    finally:
        reader.close()


def write(
    rows: ArrowStream | Iterable[pa.RecordBatch],
    lookupd: str | Sequence[str],
    *,
    job: str | None = None,
    **options: Unpack[WriteOptions],
) -> int:
    """Publish rows; return after all messages are stored.

    Args:
        rows: a data frame, table, or record batches, with the Spark sink's columns: ``value`` (text or bytes), and
            ``topic``, ``key``, ``partition``, ``headers``, ``tag``, ``trace_id``, ``header``.
        lookupd: addresses of nsqlookupd.
        job: first part of the ids of rows, by default random; a repeated write with the same job and rows repeats the
            ids, by which readers recognize duplicates.
        options: see `WriteOptions`.

    Returns:
        The number of messages.

    Raises:
        InvalidSetting: unknown or invalid option or column.
        NsqError: a row is invalid or was not stored; rows before it may be stored.
    """
    sink = SinkOptions.parse(_texts("write", WriteOptions, options, lookupd, {} if job is None else {"job": job}))
    schema, batches = _batches_of(rows)
    check_written(schema.names, sink.topic)
    ids = NumberedIds(sink.job or uuid4().hex)
    tallies = publish_rows(sink, tuple(schema.names), ids, map(_normal, batches))
    return tallies.total()


def _batches_of(rows: ArrowStream | Iterable[pa.RecordBatch]) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    if hasattr(rows, "__arrow_c_stream__"):
        reader = pa.RecordBatchReader.from_stream(rows)
        return reader.schema, iter(reader)
    if not isinstance(rows, Iterable):
        raise InvalidInput(f"{type(rows).__name__} cannot be read as Arrow data", hint="give a table or record batches")
    batches = iter(rows)
    first = next(batches, None)
    if first is None:
        return arrow_schema(), iter(())
    names = _checked(first).schema.names
    return first.schema, (_checked(batch, names) for batch in itertools.chain([first], batches))


def _checked(batch: object, names: Sequence[str] | None = None) -> pa.RecordBatch:
    if not isinstance(batch, pa.RecordBatch):
        raise InvalidInput(
            f"rows contain {type(batch).__name__} in place of a record batch",
            hint="convert them: pyarrow.Table.from_pylist(rows)",
        )
    if names is not None and batch.schema.names != names:
        raise InvalidInput(
            f"a record batch has the columns {', '.join(batch.schema.names)}, and the first one {', '.join(names)}",
            hint="give all the same columns in the same order: batch.select(names)",
        )
    return batch


def _normal(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch in types for the sink: libraries have several types of text and bytes."""
    arrays = []
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        kind = _kind(name, array.type)
        try:
            arrays.append(array if kind is None or kind == array.type else array.cast(kind))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise InvalidSetting(f"column {name} is {array.type}", hint=f"cast it to {kind}") from error
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def _kind(name: str, found: pa.DataType) -> pa.DataType | None:
    if name not in WRITABLE:
        return None
    if name in ("value", "key", "header"):
        return pa.large_binary()
    if name == "headers":
        array = pa.types.is_list(found) or pa.types.is_large_list(found)
        return arrow_schema((name,), array).field(name).type
    if name in ("partition", "trace_id"):
        return found if pa.types.is_integer(found) else pa.int64()
    return pa.string()


def _subscription(topics: Topics) -> dict[str, object]:
    if isinstance(topics, Mapping):
        return {"assign": {topic: list(partitions) for topic, partitions in topics.items()}}
    return {"subscribe": topics}


def _texts(
    function: str,
    options: type,
    given: Mapping[str, object],
    lookupd: str | Sequence[str],
    own: Mapping[str, object],
) -> dict[str, Any]:
    """Return given options, and the function's own, as the Spark source's texts, with a prefix for client settings."""
    kind: Literal["read", "write"] = "write" if function == "write" else "read"
    known, settings = names_by_keyword(kind), client_settings(kind)
    allowed = {*options.__annotations__, *settings}
    addresses = [lookupd] if isinstance(lookupd, str) else list(lookupd)
    texts: dict[str, Any] = {"lookupd": ",".join(map(str, addresses))}
    for name in given:
        if name not in allowed:
            raise unknown_setting(f"nsqext.arrow.{function}", name, sorted(allowed))
    for name, value in {**given, **own}.items():
        if name in known:
            texts[known[name]] = _text(name, value)
        else:
            texts[f"{PREFIX}{name}"] = value
    return texts


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise InvalidSetting(f"{name}={value} has no time zone", hint="write datetime(…, tzinfo=UTC)")
        return str(int(value.timestamp() * 1000))
    if value is None:
        raise InvalidSetting(f"{name}=None is not a value", hint="leave it out")
    if name == "read_timeout" and isinstance(value, (int, float)):
        if not isfinite(value):
            raise InvalidSetting(f"{name}={value} is not a number of seconds")
        return str(round(value * 1000))
    if isinstance(value, Mapping):
        return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()
    return str(value) if isinstance(value, (str, int)) or not isinstance(value, Iterable) else ",".join(map(str, value))
