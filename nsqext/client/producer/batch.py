"""Batches, and how many messages are sorted into them: one for each partition concerned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nsqext.client.producer.plain_batch import COUNT_WORD, ITEM_WORD, PlainBatch, compresses, logs_traces, plain_batches
from nsqext.client.producer.request import OutgoingMessage, PublishRequest, key_bytes, pack_body, refuse
from nsqext.errors import ExtendNotSupported, InvalidInput
from nsqext.protocol.client.commands import check_body, ext_body, multi, trace_body
from nsqext.protocol.headers import add_key, encode_headers
from nsqext.protocol.names import check_trace_id
from nsqext.protocol.record import raw_size
from nsqext.protocol.trace_reply import TraceReply, decode_trace_reply
from nsqext.types import Receipt

if TYPE_CHECKING:
    from nsqext.client.producer.options import ProducerOptions
    from nsqext.client.producer.routing import Route, Target
    from nsqext.protocol.hashing import KeyHash
    from nsqext.protocol.identify import Negotiated
    from nsqext.types import TopicMeta

__all__ = ("Batch", "BatchPlanner", "Rows", "wrong_message")

_LONGEST_TRACE = 40
"""Bytes that a trace id takes at most, as a header of its own."""


class Batch(PublishRequest):
    """Several messages for one partition, all or nothing."""

    __slots__ = ("_bodies", "_headers", "_traces", "indexes")

    def __init__(self, topic: str, partition: int | None = None) -> None:
        self.topic: str = topic
        self.key: bytes | None = None
        self.partition: int | None = partition
        self.in_doubt = False
        self.indexes: list[int] = []
        self._bodies: list[bytes] = []
        self._headers: list[bytes] = []
        self._traces: list[int] = []

    @property
    def breaks(self) -> bool:
        return any(self._headers)

    def add(self, index: int, body: bytes, header: bytes, trace_id: int | None) -> None:
        """Add a message, with header or trace id where it has them; it was checked."""
        self.indexes.append(index)
        self._bodies.append(body)
        self._headers.append(header)
        self._traces.append(-1 if trace_id is None else trace_id)

    def command(self, target: Target, meta: TopicMeta, negotiated: Negotiated) -> bytes:
        verb, items = "MPUB", self._bodies
        if any(self._headers):
            refuse(meta, negotiated, self.topic, header=True)
            verb, items = "MPUB_EXT", list(map(ext_body, map(self._ext_header, range(len(items))), items))
        elif any(trace >= 0 for trace in self._traces):
            refuse(meta, negotiated, self.topic, header=False)
            verb = "MPUB_TRACE"
            items = [trace_body(max(trace, 0), body) for trace, body in zip(self._traces, items, strict=True)]
        return multi(target.line(verb), items)

    def _ext_header(self, index: int) -> bytes:
        header, trace_id = self._headers[index], self._traces[index]
        return encode_headers(trace_id=trace_id) if not header and trace_id >= 0 else header

    def receipts(self, target: Target, meta: TopicMeta, reply: bytes) -> list[Receipt]:
        receipt = target.receipt
        if reply != b"OK":
            return self._traced(receipt, meta, decode_trace_reply(reply))
        return [
            receipt if trace <= 0 else Receipt(receipt.topic, receipt.partition, receipt.node, trace_id=trace)
            for trace in self._traces
        ]

    def _traced(self, where: Receipt, meta: TopicMeta, reply: TraceReply) -> list[Receipt]:
        """Work out id and offset of each message: a batch is stored in one piece, with ids in a row."""
        sizes = [raw_size(len(body), 0, meta.extend_support) for body in self._bodies]
        known = sum(sizes) == reply.size
        receipts = []
        offset = reply.offset
        for number, (size, trace) in enumerate(zip(sizes, self._traces, strict=True)):
            told = (reply.message_id + number, max(trace, 0), offset, size)
            if not (known or not number):
                told = (0, max(trace, 0), -1, 0)
            receipts.append(Receipt(where.topic, where.partition, where.node, *told))
            offset += size
        return receipts


Rows = list[list[Batch | PlainBatch]]
"""Batches of one call; those of a row go one after the other, rows beside each other."""


class BatchPlanner:
    """Sorts the messages of one call; all of them are checked before anything is sent.

    Args:
        route: where the topic's messages go.
        options: limits.
        key_hash: chooses the partition of a key.
        key: for messages that have none of their own.
        partition: for all messages.

    Attributes:
        rows: what came out.
        keys: keys that occurred, whose turns have to be taken.
        count: number of messages.
        marked: index of the first message with headers, tag or trace id, where only the node can tell whether it takes
            that; and whether it is more than a trace id.
    """

    def __init__(
        self, route: Route, options: ProducerOptions, key_hash: KeyHash, key: bytes | None, partition: int | None
    ) -> None:
        self.rows: Rows = []
        self.keys: set[bytes] = set()
        self.count: int = 0
        self.marked: tuple[int, bool] | None = None
        self._route = route
        self._options = options
        self._key_hash = key_hash
        self._key = key
        self._partition = partition
        self._filling: dict[int | None, tuple[Batch, int]] = {}
        self._row_of: dict[int, list[Batch | PlainBatch]] = {}
        self._carries = route.meta.extend_support
        self._plain = route.meta.partition_num > 0 and not route.meta.extend_support
        self._compresses = compresses(route, options)
        self._traced = logs_traces(route)

    def add(self, messages: Sequence[bytes | OutgoingMessage]) -> None:
        """Sort messages in.

        Raises:
            InvalidInput: a message cannot be right; its ``index`` tells which.
        """
        self.count = len(messages)
        if self._key is not None and not self._carries:
            batches = plain_batches(self._route, self._place(self._key), messages, self._options)
            if batches is not None:
                self.rows.append([*batches])
                return
        index = 0
        try:
            for index, message in enumerate(messages):
                self._add_one(index, message if isinstance(message, OutgoingMessage) else OutgoingMessage(message))
        except InvalidInput as error:
            raise wrong_message(error, index, self._route.topic) from error.__cause__

    def _add_one(self, index: int, message: OutgoingMessage) -> None:
        header = b""
        overhead = 0
        body, headers, trace_id = message.body, message.headers, message.trace_id
        if trace_id is not None:
            check_trace_id(trace_id)
            overhead = 8
        elif self._traced:
            trace_id = 0
        if self._compresses and isinstance(body, bytes):
            check_body(body, self._options.max_message_size)
            body, headers = pack_body(self._options, body, headers)
        if headers or message.tag is not None:
            header = encode_headers(headers, tag=message.tag, trace_id=trace_id)
            if self._plain:
                raise ExtendNotSupported(
                    "the topic takes no headers and no tag", hint="create it with extend support, or upgrade it"
                )
        if self.marked is None and not self._route.meta.partition_num and (header or trace_id is not None):
            self.marked = index, bool(header)
        key = self._key if message.key is None else key_bytes(message.key)
        if key is not None and self._carries:
            header = add_key(header or (b"" if trace_id is None else encode_headers(trace_id=trace_id)), key)
        if header:
            overhead = 2 + len(header)
        check_body(body, self._options.max_message_size, overhead)
        place = self._place(key)
        size = ITEM_WORD + _LONGEST_TRACE + len(header) + len(body)
        self._batch(place, size).add(index, body, header, trace_id)

    def _place(self, key: bytes | None) -> int | None:
        if key is None or self._partition is not None:
            return self._partition
        self.keys.add(key)
        return self._route.keyed(key, self._key_hash)

    def _batch(self, place: int | None, size: int) -> Batch:
        batch, filled = self._filling.get(place, (None, 0))
        full = filled + size > self._options.max_batch_size or (
            batch is not None and len(batch.indexes) >= self._options.max_batch_count
        )
        if batch is None or full:
            batch, filled = self._new_batch(place), COUNT_WORD
        self._filling[place] = (batch, filled + size)
        return batch

    def _new_batch(self, place: int | None) -> Batch:
        batch = Batch(self._route.topic, place)
        if place is None:
            self.rows.append([batch])
        elif place in self._row_of:
            self._row_of[place].append(batch)
        else:
            self._row_of[place] = [batch]
            self.rows.append(self._row_of[place])
        return batch


def wrong_message(error: InvalidInput, index: int, topic: str) -> InvalidInput:
    """Let an error say which message of a call it is about."""
    error.index = index
    error.message = f"message {index}: {error.message}"
    error.at(topic=topic)
    return error
