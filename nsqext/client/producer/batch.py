"""Batches: many messages in one command, and the planner that divides a call's messages into batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import add
from typing import TYPE_CHECKING

from attrs import define, field

from nsqext.client.producer.publishing import OutgoingMessage, with_columns
from nsqext.client.producer.request import (
    PublishRequest,
    check_supported,
    default_trace_id,
    encode_message,
    key_bytes,
    no_extend_support,
)
from nsqext.errors import InvalidBody, InvalidInput, ProtocolError
from nsqext.protocol.client.batch_commands import multi, multi_ext, multi_packed, multi_trace
from nsqext.protocol.client.commands import HEADER_LENGTH, TRACE_SIZE
from nsqext.protocol.frames import decode_trace_reply
from nsqext.protocol.headers import encode_header_columns, encode_headers
from nsqext.types import Receipt

if TYPE_CHECKING:
    from nsqext.client.producer.options import ProducerOptions
    from nsqext.client.producer.packed import PackedMessages
    from nsqext.client.producer.route import Route, Target
    from nsqext.protocol.client.commands import Command
    from nsqext.protocol.hashing import KeyHash
    from nsqext.types import TopicMeta

_COUNT_WORD = 4  # bytes before the first message of a batch
_ITEM_WORD = 4  # bytes before each message
_LONGEST_TRACE = 40  # most bytes of a trace id as a header

_LARGEST_TRACE = (1 << 64) - 1

Messages = Sequence[bytes | OutgoingMessage]
NO_HEADERS: Mapping[str, Sequence[str]] = {}


class Batch(PublishRequest):
    """Encoded messages for a partition in one command: stored together or not at all."""

    __slots__ = ("_bare", "_bodies", "_filled", "_headers", "_sizes", "_traced", "_traces", "indexes")

    def __init__(
        self,
        topic: str,
        partition: int | None,
        bodies: list[bytes] | None = None,
        sizes: Sequence[int] | int | None = None,
        *,
        first: int = 0,
        trace_ids: Sequence[int] = (),
        headers: Sequence[bytes] = (),
        started: float | None = None,
    ) -> None:
        super().__init__(topic, partition, started=started)
        # checked bodies, with or without headers or trace ids; `add` adds other messages
        self._bodies: list[bytes] = [] if bodies is None else bodies
        self._sizes = sizes  # lengths of the bodies in bytes, or their common length; without headers only
        self._headers: list[bytes] = list(headers)
        self._traces: list[int | None] = [None] * len(headers) or list(trace_ids)
        if headers:
            self.breaks: bool = True
        self._traced = bool(trace_ids)
        self._bare = False  # has a trace id that must not become a header
        self._filled = _COUNT_WORD
        #: index of each message in the call
        self.indexes: Sequence[int] = [] if bodies is None else range(first, first + len(bodies))

    @property
    def count(self) -> int:
        return len(self._bodies)

    @property
    def first(self) -> bytes:
        """The first body."""
        return self._bodies[0]

    @property
    def trace_ids(self) -> Sequence[int | None]:
        return self._traces

    @property
    def largest(self) -> int:
        headers = self._headers or [b""] * len(self._bodies)
        return max(len(header) + len(body) for header, body in zip(headers, self._bodies, strict=True))

    def has_room(
        self, body: bytes, header: bytes, trace_id: int | None, options: ProducerOptions, *, bare: bool = False
    ) -> bool:
        """Return whether another message can join; HTTP has no batches with headers or trace ids.

        In a batch with headers, a trace id becomes a header, unless it is ``bare``.
        """
        if self._bare if header else bare and self.breaks:
            return False
        if options.transport == "http" and (header or trace_id is not None or self.breaks or self._traced):
            return not self._bodies
        size = self._filled + _ITEM_WORD + _LONGEST_TRACE + len(header) + len(body)
        return size <= options.max_batch_size and len(self._bodies) < options.max_batch_count

    def add(self, index: int, body: bytes, header: bytes, trace_id: int | None, *, bare: bool = False) -> None:
        """Add an encoded message; see `has_room`."""
        self._bare = self._bare or bare
        self._filled += _ITEM_WORD + _LONGEST_TRACE + len(header) + len(body)
        self.indexes.append(index)  # type: ignore[attr-defined]
        self._bodies.append(body)
        self._headers.append(header)
        self._traces.append(trace_id)
        self.breaks = self.breaks or bool(header)
        self._traced = self._traced or trace_id is not None

    def command(self, target: Target) -> Command:
        bodies = self._bodies
        if self.breaks:
            check_supported(target, header=True)
            headers = self._headers
            if not all(headers):
                headers = [
                    header or (b"" if trace is None else encode_headers(trace_id=trace))
                    for header, trace in zip(headers, self._traces, strict=True)
                ]
            return multi_ext(target.line("MPUB_EXT"), headers, bodies)
        if self._traced:
            check_supported(target, header=False)
            return multi_trace(target.line("MPUB_TRACE"), [trace or 0 for trace in self._traces], bodies)
        return multi(target.line("MPUB"), bodies, self._sizes)

    def receipts(self, target: Target, response: bytes) -> list[Receipt]:
        receipt = target.receipt
        if response == b"OK":
            if not self._traced:
                return [receipt] * len(self._bodies)
            return [
                Receipt(receipt.topic, receipt.partition, receipt.node, trace_id=trace) if trace else receipt
                for trace in self._traces
            ]
        if self.breaks or not self._traced:
            raise ProtocolError(f"received {response[:80]!r} in response to a batch")
        return self._stored_together(target, response)

    def _stored_together(self, target: Target, response: bytes) -> list[Receipt]:
        """Compute id and offset of each message: a batch is stored in one piece, with consecutive ids."""
        from nsqext.protocol.record import raw_size  # its import takes 7 ms, and few producers trace

        first_id, _, offset, size_of_all = decode_trace_reply(response, 0)
        sizes = [raw_size(len(body), 0, target.meta.extend_support) for body in self._bodies]
        known = sum(sizes) == size_of_all
        where = target.receipt[:3]
        receipts: list[Receipt] = []
        for number, (size, trace) in enumerate(zip(sizes, self._traces, strict=True)):
            if known or not number:
                receipts.append(Receipt(*where, first_id + number, trace or 0, offset, size))
            else:
                receipts.append(Receipt(*where, trace_id=trace or 0))
            offset += size
        return receipts


class PackedBatch(Batch):
    """See `nsqext.client.producer.packed.PackedMessages`."""

    __slots__ = ("_messages",)

    def __init__(self, topic: str, partition: int | None, messages: PackedMessages) -> None:
        super().__init__(topic, partition)
        self._messages = messages
        self.breaks: bool = messages.verb == "MPUB_EXT"
        self.indexes: Sequence[int] = range(len(messages))

    @property
    def count(self) -> int:
        return len(self._messages)

    @property
    def trace_ids(self) -> Sequence[int | None]:
        return [None] * self.count

    @property
    def largest(self) -> int:
        return self._messages.largest

    def command(self, target: Target) -> Command:
        messages = self._messages
        if messages.verb != "MPUB":
            check_supported(target, header=messages.verb == "MPUB_EXT")
        return multi_packed(target.line(messages.verb), messages.items, len(messages))

    def receipts(self, target: Target, response: bytes) -> list[Receipt]:
        if response != b"OK":
            if self._messages.verb != "MPUB_TRACE":
                raise ProtocolError(f"received {response[:80]!r} in response to a batch")
            decode_trace_reply(response, 0)
        return [target.receipt] * self.count


def check_arguments(
    messages: Iterable[bytes | OutgoingMessage],
    topic: str,
    trace_ids: Sequence[int] = (),
    headers: Mapping[str, Sequence[str]] = NO_HEADERS,
) -> Messages:
    """Return the messages of a call of `nsqext.Producer.publish_many`, whose arguments have to fit together.

    Raises InvalidBody or InvalidInput.
    """
    if isinstance(messages, (bytes, bytearray, str)):
        raise InvalidBody("publish_many needs a list of bodies, not one body", hint="use publish", topic=topic)
    if not isinstance(messages, Iterable):
        raise InvalidBody(f"publish_many needs a list of bodies, not {type(messages).__name__}", topic=topic)
    listed = messages if isinstance(messages, Sequence) else list(messages)
    count = len(listed)
    if trace_ids and len(trace_ids) != count:
        raise InvalidInput(f"{len(trace_ids)} trace ids were given for {count} messages", topic=topic)
    for name, values in headers.items():
        if isinstance(values, str) or len(values) != count:
            found = "one text was" if isinstance(values, str) else f"{len(values)} values were"
            raise InvalidInput(f"{found} given as header {name!r} of {count} messages", topic=topic)
    return listed


def _most_bytes(options: ProducerOptions, meta: TopicMeta, overhead: int) -> int:
    """Return the size of body and header up to which a message of a batch needs no check and no compression."""
    largest = options.max_message_size - (overhead or meta.extend_support) - (overhead == HEADER_LENGTH)
    if options.compression != "none" and meta.extend_support:
        largest = min(largest, options.compression_min - 1)
    return largest


def plain_batches(
    route: Route,
    partition: int | None,
    messages: Messages,
    options: ProducerOptions,
    trace_ids: Sequence[int] = (),
    columns: Mapping[str, Sequence[str]] = NO_HEADERS,
) -> list[Batch] | None:
    """Return batches of bodies, with their trace ids or headers, in order: the fast path of `BatchPlanner`.

    None if `BatchPlanner` must check each message.
    """
    overhead = 0
    headers: list[bytes] = []
    if type(messages) is not list:
        from nsqext.client.producer.packed import PackedMessages

        if isinstance(messages, PackedMessages):
            packed = _packed_batch(route, partition, messages, options)
            return None if packed is None else [packed]
    if list(map(type, messages)).count(bytes) != len(messages):
        return None
    if columns:
        encoded = None if trace_ids or not route.meta.extend_support else encode_header_columns(columns)
        if encoded is None or options.transport == "http" or not all(messages):
            return None
        if default_trace_id(options, route.topic, route.meta) is not None:
            return None
        headers, overhead = encoded, HEADER_LENGTH
    elif trace_ids:
        overhead = TRACE_SIZE
        if options.transport == "http" or not route.meta.partition_num:
            return None
        if list(map(type, trace_ids)).count(int) != len(messages):
            return None
        if min(trace_ids) < 0 or max(trace_ids) > _LARGEST_TRACE:
            return None
    elif default_trace_id(options, route.topic, route.meta) is not None:
        return None
    listed: list[bytes] = list(messages)  # type: ignore[arg-type]
    largest = _most_bytes(options, route.meta, overhead)
    batches: list[Batch] = []
    left: list[tuple[int, list[bytes]]] = [(0, listed)]
    while left:
        first, bodies = left.pop()
        count = len(bodies)
        sizes: Sequence[int] | int
        lengths = list(map(len, bodies))
        if headers:
            lengths = list(map(add, lengths, map(len, headers[first : first + count])))
        distinct = set(lengths)
        if len(distinct) == 1:
            sizes = smallest = biggest = distinct.pop()
            total = count * biggest
        else:
            sizes = lengths
            smallest, biggest, total = min(distinct), max(distinct), sum(sizes)
        if not smallest or biggest > largest:
            return None
        total += (_ITEM_WORD + overhead) * count
        if count <= options.max_batch_count and _COUNT_WORD + total <= options.max_batch_size:
            traces, own = trace_ids[first : first + count], headers[first : first + count]
            batches.append(Batch(route.topic, partition, bodies, sizes, first=first, trace_ids=traces, headers=own))
        elif count > 1:
            cut = options.max_batch_count if count > options.max_batch_count else count // 2
            left += ((first + cut, bodies[cut:]), (first, bodies[:cut]))
        else:
            return None
    return batches


def _packed_batch(
    route: Route, partition: int | None, messages: PackedMessages, options: ProducerOptions
) -> PackedBatch | None:
    """Return messages as one batch; None if they must be decoded, checked or divided."""
    meta, verb = route.meta, messages.verb
    if options.transport == "http" or default_trace_id(options, route.topic, meta) is not None:
        return None
    if not {"MPUB": True, "MPUB_TRACE": meta.partition_num, "MPUB_EXT": meta.extend_support}[verb]:
        return None
    overhead = {"MPUB": 0, "MPUB_TRACE": TRACE_SIZE, "MPUB_EXT": HEADER_LENGTH}[verb]
    if messages.largest > _most_bytes(options, meta, overhead) or len(messages) > options.max_batch_count:
        return None
    if _COUNT_WORD + messages.size > options.max_batch_size:
        return None
    return PackedBatch(route.topic, partition, messages)


Rows = list[list[Batch]]
"""Batches of a call. A row is sent in order, rows concurrently."""


@define(eq=False)
class BatchPlanner:
    """Divide the messages of a call into batches; all are checked before anything is sent."""

    route: Route
    _options: ProducerOptions
    _key_hash: KeyHash
    _key: bytes | None  # for messages without their own key
    _partition: int | None
    rows: Rows = field(factory=list, init=False)
    keys: set[bytes] = field(factory=set, init=False)  #: keys to lock during the publish
    #: if only the node knows whether it accepts headers and trace ids (no metadata), index of the first message with
    #: them, and whether it has more than a trace id
    marked: tuple[int, bool] | None = field(default=None, init=False)
    _filling: dict[int | None, Batch] = field(factory=dict, init=False)
    _row_of: dict[int, list[Batch]] = field(factory=dict, init=False)

    def add(
        self,
        messages: Messages,
        trace_ids: Sequence[int] = (),
        headers: Mapping[str, Sequence[str]] = NO_HEADERS,
    ) -> None:
        """Divide messages into batches; raises InvalidInput."""
        if not self._options.key_tags and (self._key is None or not self.route.meta.extend_support):
            partition = self._partition if self._key is None else self._partition_of(self._key)
            batches = plain_batches(self.route, partition, messages, self._options, trace_ids, headers)
            if batches is not None:
                self.rows += [batches] if partition is not None else [[batch] for batch in batches]
                return
        index = 0
        try:
            for index, message in enumerate(with_columns(messages, trace_ids, headers)):
                self._add_message(index, message)
        except InvalidInput as error:
            raise invalid_message(error, index, self.route.topic) from error.__cause__

    def _add_message(self, index: int, message: bytes | OutgoingMessage) -> None:
        meta = self.route.meta
        key = self._key
        given: bytes | None = None
        if isinstance(message, OutgoingMessage):
            key, given = key if message.key is None else key_bytes(message.key), message.header
        default = default_trace_id(self._options, self.route.topic, meta)
        body, header, trace_id = encode_message(self._options, meta, message, key, default_trace=default)
        if header and meta.partition_num and not meta.extend_support:
            raise no_extend_support(self.route.topic)
        if self.marked is None and not meta.partition_num and (header or trace_id is not None):
            self.marked = index, bool(header)
        bare = given == b"" and trace_id is not None
        partition = self._partition_of(key)
        batch = self._filling.get(partition)
        if batch is None or not batch.has_room(body, header, trace_id, self._options, bare=bare):
            batch = self._filling[partition] = self._new_batch(partition)
        batch.add(index, body, header, trace_id, bare=bare)

    def _partition_of(self, key: bytes | None) -> int | None:
        if key is None or self._partition is not None:
            return self._partition
        self.keys.add(key)
        return self.route.partition_of(key, self._key_hash)

    def _new_batch(self, partition: int | None) -> Batch:
        batch = Batch(self.route.topic, partition)
        if partition is None:
            self.rows.append([batch])
        elif partition in self._row_of:
            self._row_of[partition].append(batch)
        else:
            self._row_of[partition] = [batch]
            self.rows.append(self._row_of[partition])
        return batch


def invalid_message(error: InvalidInput, index: int, topic: str) -> InvalidInput:
    """Add to an error the index of its message; return it."""
    error.index = index
    error.message = f"message {index}: {error.message}"
    error.at(topic=topic)
    return error
