"""Publish requests: check and encode messages, write a target's command, read the response."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from nsqext.arguments import is_whole
from nsqext.client.events import tracing
from nsqext.client.producer.publishing import OutgoingMessage
from nsqext.errors import (
    ExtendNotSupported,
    InvalidInput,
    InvalidPartition,
    InvalidSetting,
    InvalidState,
    NsqError,
    OperationNotSupported,
    ProtocolError,
)
from nsqext.errors.server import LeaderLost, NotLeader, PubRefused, RecordTooLarge
from nsqext.protocol.client.commands import HEADER_LENGTH, TRACE_SIZE, check_body, publish_ext, publish_trace
from nsqext.protocol.frames import decode_trace_reply
from nsqext.protocol.names import check_partition, check_topic, check_trace_id
from nsqext.types import Receipt, TopicMeta

if TYPE_CHECKING:
    from nsqext.client.producer.connection_pool import PooledConnection
    from nsqext.client.producer.options import ProducerOptions
    from nsqext.client.producer.route import Target
    from nsqext.protocol.client.commands import Command

_RECORD_PARTS = 29  # most bytes of a record besides its length word, body and header
_UNKNOWN = TopicMeta()
_EXTEND = TopicMeta(extend_support=True)

Outcome = Receipt | NsqError
"""What a publish of a message returned or raised."""
Encoded = tuple[bytes, bytes, int | None]
"""Body, extend header (empty for none) and trace id as sent."""


def key_bytes(key: str | bytes | int) -> bytes:
    """Return a key as bytes; text is encoded as UTF-8, a number as its decimal digits.

    Raises InvalidInput, also for an empty key, which servers and consumers read as no key.
    """
    if isinstance(key, (str, bytes)):
        if not key:
            raise InvalidInput("the key is empty", hint="leave out key=, or give None, for a message without a key")
        if isinstance(key, bytes):
            return key
        try:
            return key.encode()
        except UnicodeEncodeError:
            raise InvalidInput(
                f"the key {key!r} is no text: it has half of a surrogate pair", hint="give bytes"
            ) from None
    if is_whole(key, -inf):
        return b"%d" % key
    raise InvalidInput(f"a key has to be str, bytes or int, not {type(key).__name__}")


def check_choice(key: object, partition: object) -> None:
    """Raise InvalidInput for both key and partition, or an invalid partition number."""
    if partition is not None:
        if key is not None:
            raise InvalidPartition("key and partition were both given", hint="give one of them")
        check_partition(partition)  # type: ignore[arg-type]


def check_supported(target: Target, *, header: bool) -> None:
    """Raise ExtendNotSupported where a topic accepts no headers, or, without ``header``, a server no trace ids.

    Without the topic's metadata (fixed nodes) a redesigned server decides.
    """
    if target.meta.partition_num:
        if header and not target.meta.extend_support:
            raise no_extend_support(target.topic)
    elif not target.node.redesigned:
        what = "headers and tags" if header else "trace ids"
        raise ExtendNotSupported(
            f"the original NSQ does not support {what}", topic=target.topic, hint="publish without them"
        )


def no_extend_support(topic: str) -> ExtendNotSupported:
    """Return the error of a message with headers or a tag for a topic that accepts none."""
    return ExtendNotSupported(
        "the topic does not accept headers or a tag",
        topic=topic,
        hint="create it with extend: Admin.create_topic(..., extend=True), nsqext broker --topic NAME:extend, in tests "
        "@pytest.mark.nsq_topic(extend=True); or upgrade it: Admin.upgrade_topic",
    )


def logs_traces(topic: str, meta: TopicMeta) -> bool:
    """Return whether the trace log needs a topic's receipts: its messages get trace id 0."""
    return tracing.log is not None and tracing.log.wants(topic) and meta.partition_num > 0


def default_trace_id(options: ProducerOptions, topic: str, meta: TopicMeta) -> int | None:
    """Return the trace id that a message gets by default: random to settle by, 0 for the trace log, or None.

    Raises OperationNotSupported.
    """
    if options.on_unknown == "settle":
        if not meta.partition_num:
            raise OperationNotSupported(
                "on_unknown='settle' needs a topic of the redesigned NSQ: the original has no log to search",
                topic=topic,
                hint="use on_unknown='retry' or 'raise'",
            )
        return int.from_bytes(os.urandom(8)) or 1
    return 0 if logs_traces(topic, meta) else None


def encode_message(
    options: ProducerOptions,
    meta: TopicMeta,
    message: OutgoingMessage | bytes,
    key: bytes | None = None,
    *,
    default_trace: int | None = None,
    due: int | None = None,
) -> Encoded:
    """Check a message; return body, extend header and trace id as sent. Raises InvalidInput.

    Args:
        options: limits and compression for the topic.
        meta: without extend support neither key nor compression adds a header.
        default_trace: see `default_trace_id`.
        due: due time of a delayed message, in milliseconds since 1970.
    """
    if isinstance(message, OutgoingMessage):
        if message.header is not None:
            from nsqext.client.producer.given_header import encode_with_header

            others = {"headers": message.headers, "tag": message.tag, "delay": due, "key_tags": options.key_tags}
            own = message.body, message.header, message.trace_id
            return encode_with_header(options, meta, *own, default_trace=default_trace, others=others)
        body, headers, tag, trace_id = message.body, message.headers, message.tag, message.trace_id
    else:
        body, headers, tag, trace_id = message, None, None, None
    return encode_parts(options, meta, body, headers, tag, trace_id, key, default_trace=default_trace, due=due)


def encode_parts(
    options: ProducerOptions,
    meta: TopicMeta,
    body: bytes,
    headers: Mapping[str, str] | None,
    tag: str | None,
    trace_id: int | None,
    key: bytes | None,
    *,
    default_trace: int | None = None,
    due: int | None = None,
) -> Encoded:
    """As `encode_message`, without a message object, which would cost as much as all checks."""
    limit = options.max_message_size
    header = b""
    if options.key_tags:
        tag = _key_tag(options.key_tags, tag, key)
    if trace_id is not None:
        check_trace_id(trace_id)
    elif default_trace is not None and len(check_body(body, limit)) + TRACE_SIZE <= limit:
        trace_id = default_trace
    if (
        options.compression != "none"
        and meta.extend_support
        and len(check_body(body, limit)) >= options.compression_min
    ):
        body, headers = _compress(options, body, headers)
    carried = key if meta.extend_support else None
    if headers or tag is not None or due is not None or carried is not None:
        header = _header_encoder()(headers, tag, trace_id, due, carried)
    if header:
        overhead = HEADER_LENGTH + len(header) + meta.extend_support
    else:
        overhead = meta.extend_support if trace_id is None else TRACE_SIZE
    check_body(body, limit, overhead)
    return body, header, trace_id


HeaderEncoder = Callable[[Mapping[str, str] | None, str | None, int | None, int | None, bytes | None], bytes]


@cache
def _header_encoder() -> HeaderEncoder:
    """Load the encoder with the first header."""
    from nsqext.protocol.headers import message_header

    return message_header


def _key_tag(count: int, tag: str | None, key: bytes | None) -> str:
    from nsqext.key_ranges import bucket_tag, shared_tag

    if tag is not None:
        raise InvalidSetting(f"tag={tag!r} and key_tags contradict each other", hint="use a producer without key_tags")
    return shared_tag(count) if key is None else bucket_tag(key, count)


def _compress(
    options: ProducerOptions, body: bytes, headers: Mapping[str, str] | None
) -> tuple[bytes, Mapping[str, str] | None]:
    """Return a compressed body and the headers that declare it; unchanged if not smaller or compressed already."""
    from nsqext.protocol.client.body_compression import COMPRESS_HEADER, compress_body

    if COMPRESS_HEADER in (headers or {}):
        return body, headers
    codec = options.compression
    compressed = compress_body(codec, body) if isinstance(codec, str) else None
    return (body, headers) if compressed is None else (compressed[0], {**(headers or {}), **compressed[1]})


def message_command(target: Target, body: bytes, header: bytes, trace_id: int | None) -> Command:
    """Return the command for an encoded message; raises ExtendNotSupported."""
    if header:
        if not target.meta.extend_support:
            check_supported(target, header=True)
        return publish_ext(target.line("PUB_EXT"), header, body)
    if trace_id is None:
        return target.pub(body)
    if not target.meta.partition_num:
        check_supported(target, header=False)
    return publish_trace(target.line("PUB_TRACE"), trace_id, body)


def read_receipt(target: Target, response: bytes, trace_id: int | None) -> Receipt:
    """Return the receipt of a message; raises ProtocolError."""
    receipt = target.receipt
    if trace_id is None:
        if response != b"OK":
            raise ProtocolError(f"received {response[:80]!r} in response to a publish")
        return receipt
    message_id, _, offset, size = decode_trace_reply(response, trace_id)
    return Receipt(receipt.topic, receipt.partition, receipt.node, message_id, trace_id, offset, size)


class Known(NamedTuple):
    """An acknowledged record."""

    number: int  #: how many this producer had acknowledged before
    receipt: Receipt  #: where it was stored


class SentTo(NamedTuple):
    """The connection of a publish."""

    partition: int | None
    node: str  #: ``host:port`` of the node
    connection: PooledConnection
    since: Known | None  #: the record acknowledged last before


_clock = time.monotonic


class PublishRequest:
    """A publish command: a `MessageRequest`, or a `nsqext.client.producer.batch.Batch` of messages."""

    __slots__ = ("breaks", "in_doubt", "key", "partition", "sent", "sent_to", "started", "topic")

    def __init__(
        self, topic: str, partition: int | None = None, key: bytes | None = None, started: float | None = None
    ) -> None:
        self.topic: str = topic
        #: begin of the timeout, in seconds of the monotonic clock
        self.started: float = _clock() if started is None else started
        self.key: bytes | None = key  #: decides the partition
        self.partition: int | None = partition  #: chosen by the caller
        self.in_doubt: bool = False  #: sent without response so far
        self.sent: int = 0  #: bytes of its command, of the latest attempt
        self.breaks: bool = False  #: an error response leaves the stream out of step (captured in pub_ext_on_plain)
        #: of the latest attempt; only with ``on_unknown="settle"``
        self.sent_to: SentTo | None = None

    @property
    def any_partition(self) -> bool:
        return self.key is None and self.partition is None

    @property
    def count(self) -> int:
        return 1

    @property
    def trace_ids(self) -> Sequence[int | None]:
        """Trace id of each message as last sent."""
        raise NotImplementedError

    @property
    def largest(self) -> int:
        """Bytes of body and header of the largest message, at least."""
        raise NotImplementedError

    def failed(self, error: NsqError) -> NsqError:
        """Return the error of an attempt that was sent, which has the outcome, as it counts for this request."""
        self.in_doubt = False
        return self.refined(error)

    def refined(self, error: NsqError) -> NsqError:
        """Return an attempt's error as it counts for this request: another client's message may be too large."""
        if isinstance(error, RecordTooLarge) and error.size > self.largest + _RECORD_PARTS:
            return PubRefused(error.code, error.description, node=error.node)
        return error

    def command(self, target: Target) -> Command:
        """Return the command for a target; raises InvalidInput."""
        raise NotImplementedError

    def receipts(self, target: Target, response: bytes) -> list[Receipt]:
        """Return a receipt for each message, in order; raises ProtocolError."""
        raise NotImplementedError


class MessageRequest(PublishRequest):
    """A message with its publish, in its own command or waiting for a `Batch`.

    ``message.key`` is ignored for ``key``. Raises InvalidInput.
    """

    __slots__ = ("_default_trace", "_options", "_trace_id", "message", "on_outcome", "outcome")

    def __init__(
        self,
        options: ProducerOptions,
        topic: str,
        message: bytes | OutgoingMessage,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        started: float | None = None,
    ) -> None:
        super().__init__(topic, partition, key, started)
        self.message: bytes | OutgoingMessage = message
        #: of a message that another task publishes, and a function to call then
        self.outcome: Outcome | None = None
        self.on_outcome: Callable[[], object] | None = None
        self._options = options
        self._trace_id: int | None = None
        self._default_trace: int | None = None

    @property
    def due(self) -> int | None:
        """When a delayed message is due, in milliseconds since 1970."""
        return None

    def check(self) -> None:
        """Raise InvalidInput for an invalid topic or message, whatever the topic supports."""
        check_topic(self.topic)
        self.size()

    def size(self) -> int:
        """Return the bytes of body, extend header and trace id, without a key; raises InvalidInput."""
        body, header, trace_id = encode_message(self._options, _UNKNOWN, self.message)
        return len(body) + len(header) + (0 if trace_id is None else TRACE_SIZE)

    def settle(self, outcome: Outcome) -> None:
        self.outcome = self.outcome or outcome
        if self.on_outcome is not None:
            self.on_outcome()

    def result(self) -> Receipt:
        """Return the receipt of a settled message; raises its error."""
        if isinstance(self.outcome, Receipt):
            return self.outcome
        raise self.outcome or InvalidState("the message is not published yet", topic=self.topic)

    def joinable(self, meta: TopicMeta) -> bool:
        """Return whether a batch can replace the command, with the same receipt.

        The response to a batch with headers has no position, which the receipt of a trace id needs.
        """
        message = self.message
        traced = logs_traces(self.topic, meta)
        if isinstance(message, OutgoingMessage):
            if message.header is not None:
                return False
            traced = traced or message.trace_id is not None
        return not traced or (meta.partition_num > 0 and not meta.extend_support)

    def encoded(self, meta: TopicMeta) -> Encoded:
        """See `encode_message`."""
        if not self._default_trace:  # the same for all attempts, which are settled by it
            self._default_trace = default_trace_id(self._options, self.topic, meta)
        default = self._default_trace
        return encode_message(self._options, meta, self.message, self.key, default_trace=default, due=self.due)

    def refined(self, error: NsqError) -> NsqError:
        if type(error) is NotLeader:
            return LeaderLost(error.code, error.description, node=error.node)
        return super().refined(error)

    def command(self, target: Target) -> Command:
        body, header, self._trace_id = self.encoded(target.meta)
        return message_command(target, body, header, self._trace_id)

    @property
    def trace_ids(self) -> Sequence[int | None]:
        return (self._trace_id,)

    @property
    def largest(self) -> int:
        body, header, _ = self.encoded(_EXTEND)
        return len(body) + len(header)

    def receipts(self, target: Target, response: bytes) -> list[Receipt]:
        return [read_receipt(target, response, self._trace_id)]
