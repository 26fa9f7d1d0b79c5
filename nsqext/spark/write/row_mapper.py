"""Rows of record batches as messages, put together by where they go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from attrs import define, field, frozen

from nsqext import OutgoingMessage
from nsqext.errors import InvalidBody, InvalidInput, InvalidName, InvalidPartition
from nsqext.protocol.names import check_partition, check_topic
from nsqext.spark.write.row_id import Origin, trace_id_of

if TYPE_CHECKING:
    from nsqext.types import TopicMeta

__all__ = ("Assignment", "Chunk", "Group", "RowMapper", "RowRules")

_U64 = (1 << 64) - 1
_MESSAGE = 64
"""Bytes that a message takes besides body and headers, about."""

Assignment = tuple[str, int | None]
"""Topic and partition; None for a partition that the producer chooses."""


@define(eq=False)
class Group:
    """Messages for one place, with the numbers of their rows."""

    rows: list[int] = field(factory=list)
    messages: list[bytes | OutgoingMessage] = field(factory=list)


@define(eq=False)
class Chunk:
    """Messages that are published together.

    Attributes:
        groups: the messages, by place.
        size: their bytes, about.
        count: how many they are.
    """

    groups: dict[Assignment, Group] = field(factory=dict)
    size: int = 0
    count: int = 0

    def add(self, place: Assignment, row: int, message: bytes | OutgoingMessage, size: int) -> None:
        """Add a message."""
        group = self.groups.get(place)
        if group is None:
            group = self.groups[place] = Group()
        group.rows.append(row)
        group.messages.append(message)
        self.size += size + _MESSAGE
        self.count += 1


@frozen
class RowRules:
    """What becomes of rows.

    Attributes:
        columns: names of the columns, in their order.
        topic: topic of rows that name none.
        header: header that carries the id of a row.
        max_bytes: bytes of a chunk, unless a single message is larger.
        max_count: messages of a chunk.
    """

    columns: tuple[str, ...]
    topic: str | None
    header: str
    max_bytes: int
    max_count: int


class RowMapper:
    """Makes messages of the rows of one task.

    Args:
        rules: what becomes of rows.
        origin: where the rows come from.
        meta: tells about a topic.
    """

    def __init__(self, rules: RowRules, origin: Origin, meta: Callable[[str], TopicMeta]) -> None:
        self._rules = rules
        self._origin = origin
        self._ask = meta
        self._metas: dict[str, TopicMeta] = {}
        self._row = 0

    def chunks(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Chunk]:
        """Return the rows as chunks of messages.

        Raises:
            InvalidInput: a row cannot be right; the message tells which.
            NsqError: the lookup service cannot tell about a topic.
        """
        chunk = Chunk()
        limit, most = self._rules.max_bytes, self._rules.max_count
        for batch in batches:
            for row in zip(*self._columns(batch), strict=False):
                place, message, size = self._message(*row)
                if chunk.count and (chunk.size + size > limit or chunk.count >= most):
                    yield chunk
                    chunk = Chunk()
                chunk.add(place, self._row, message, size)
                self._row += 1
        if chunk.count:
            yield chunk

    def _columns(self, batch: pa.RecordBatch) -> list[Iterable[Any]]:
        """Return values, topics, keys, partitions, headers, trace ids and tags."""
        found = dict(zip(self._rules.columns, batch.columns, strict=True))
        return [
            _bytes(found["value"]),
            _values(found.get("topic")),
            _bytes(found.get("key")),
            _values(found.get("partition")),
            _values(found.get("headers")),
            _values(found.get("trace_id")),
            _values(found.get("tag")),
        ]

    def _message(
        self,
        value: bytes | None,
        topic: str | None,
        key: bytes | None,
        partition: int | None,
        headers: Mapping[str, str] | None,
        trace_id: int | None,
        tag: str | None,
    ) -> tuple[Assignment, bytes | OutgoingMessage, int]:
        topic = topic or self._rules.topic
        try:
            meta = self._metas.get(topic) if topic is not None else None
            if meta is None or topic is None:
                topic, meta = self._meet(topic)
            if value is None:
                raise InvalidBody("the value is null", topic=topic)
            if partition is not None:
                check_partition(partition)
                if key is not None:
                    raise InvalidPartition("key and partition were both given", topic=topic, hint="give one of them")
        except InvalidInput as error:
            error.message = f"row {self._row} of Spark partition {self._origin.partition}: {error.message}"
            raise error.at(topic=topic) from error.__cause__
        trace = trace_id & _U64 if trace_id else None
        if meta.extend_support:
            name = self._rules.header
            if headers is None:
                headers = {name: self._origin.row_id(self._row)}
            elif name not in headers:
                headers = {**headers, name: self._origin.row_id(self._row)}
        elif trace is None and meta.partition_num:
            trace = trace_id_of(self._origin.row_id(self._row))
        place = (topic, partition)
        if headers is None and trace is None and key is None and tag is None:
            return place, value, len(value)
        size = len(value) + (sum(map(len, headers)) + sum(map(_length, headers.values())) if headers else 0)
        return place, OutgoingMessage(value, headers, tag, trace, key), size

    def _meet(self, topic: str | None) -> tuple[str, TopicMeta]:
        """Find out about a topic that occurs for the first time."""
        if topic is None:
            raise InvalidName("no topic is named", hint="fill the column topic, or give the option topic")
        meta = self._metas[topic] = self._ask(check_topic(topic))
        return topic, meta


def _length(value: str | None) -> int:
    return len(value or "")


def _values(column: pa.Array | None) -> Iterable[Any]:
    """Return the values of a column, maps as dicts; None for ever without a column."""
    if column is None:
        return repeat(None)
    return list(column.to_pylist(maps_as_pydicts="strict"))


def _bytes(column: pa.Array | None) -> Iterable[Any]:
    """Return the values of a column of bytes or text, as bytes; None for ever without a column."""
    if column is None:
        return repeat(None)
    if pa.types.is_string(column.type):
        column = column.cast(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    return list(column.to_pylist())
