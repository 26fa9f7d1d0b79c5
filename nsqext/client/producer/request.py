"""What is to be published: checked when it is made, written as a command when its target is known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import frozen

from nsqext.client.trace_log import trace_log
from nsqext.errors import DelayNotSupported, ExtendNotSupported, InvalidInput, InvalidPartition, ProtocolError
from nsqext.protocol.client.body_compression import COMPRESS_HEADER, compress_body
from nsqext.protocol.client.commands import check_body, ext_body, publish_line, sized, trace_body
from nsqext.protocol.headers import add_key, encode_headers
from nsqext.protocol.names import check_partition, check_topic, check_trace_id
from nsqext.protocol.trace_reply import decode_trace_reply
from nsqext.types import Receipt, TopicMeta

if TYPE_CHECKING:
    from nsqext.client.producer.options import ProducerOptions
    from nsqext.client.producer.routing import Target
    from nsqext.protocol.identify import Negotiated

__all__ = (
    "OutgoingMessage",
    "PublishRequest",
    "Single",
    "check_choice",
    "key_bytes",
    "marked_command",
    "pack_body",
    "read_receipt",
    "refuse",
)

_EXT_LENGTH = 2
_TRACE_LENGTH = 8


@frozen
class OutgoingMessage:
    """A message for `Producer.publish_many` that is more than its body.

    Attributes:
        body: what is published.
        headers: extend headers; the topic has to support them.
        tag: tag for dispatch; the topic has to support extend headers.
        trace_id: trace id, 0 to 2**64 - 1.
        key: messages of one key go to one partition and keep their order; on extend topics they carry it to consumers.
    """

    body: bytes
    headers: Mapping[str, str] | None = None
    tag: str | None = None
    trace_id: int | None = None
    key: str | bytes | None = None


def key_bytes(key: str | bytes) -> bytes:
    """Return a key as bytes; text is encoded as UTF-8.

    Raises:
        InvalidInput: it is neither text nor bytes.
    """
    if isinstance(key, str):
        return key.encode()
    if not isinstance(key, bytes):
        raise InvalidInput(f"a key has to be str or bytes, not {type(key).__name__}")
    return key


def pack_body(
    options: ProducerOptions, body: bytes, headers: Mapping[str, str] | None
) -> tuple[bytes, Mapping[str, str] | None]:
    """Return body and headers as they are sent: compressed where that is wanted, and the body gets smaller by it."""
    if options.compression == "none" or len(body) < options.compression_min or COMPRESS_HEADER in (headers or {}):
        return body, headers
    packed = compress_body(options.compression, body)
    return (body, headers) if packed is None else (packed[0], {**(headers or {}), **packed[1]})


def marked_command(
    target: Target,
    body: bytes,
    headers: Mapping[str, str] | None,
    tag: str | None,
    trace_id: int | None,
    limit: int,
) -> bytes:
    """Return the command for one message with headers, tag or trace id, which is sent as it is: the short way.

    Raises:
        InvalidInput: it cannot be right, or the topic or the server does not take it.
    """
    if headers or tag is not None:
        if not target.meta.extend_support:
            refuse(target.meta, target.node.negotiated, target.topic, header=True)
        header = encode_headers(headers, tag=tag, trace_id=trace_id)
        check_body(body, limit, _EXT_LENGTH + len(header))
        return sized(target.line("PUB_EXT"), ext_body(header, body))
    if trace_id is None:
        return target.pub(body)
    check_trace_id(trace_id)
    check_body(body, limit, _TRACE_LENGTH)
    if not target.meta.partition_num:
        refuse(target.meta, target.node.negotiated, target.topic, header=False)
    return sized(target.line("PUB_TRACE"), trace_body(trace_id, body))


def read_receipt(target: Target, reply: bytes, *, traced: bool) -> Receipt:
    """Return the receipt for one message.

    Raises:
        ProtocolError: the reply is none to a publish, or not the one with trace that was asked for.
    """
    receipt = target.receipt
    if traced:
        told = decode_trace_reply(reply)
        return Receipt(
            receipt.topic, receipt.partition, receipt.node, told.message_id, told.trace_id, told.offset, told.size
        )
    if reply != b"OK":
        raise ProtocolError(f"the reply to a publish is {reply[:80]!r}")
    return receipt


def refuse(meta: TopicMeta, negotiated: Negotiated, topic: str, *, header: bool) -> None:
    """Raise when the topic takes no headers, or the server no traces; unknown meta leaves it to a redesigned server."""
    if meta.partition_num:
        if header and not meta.extend_support:
            raise ExtendNotSupported(
                "the topic takes no headers and no tag",
                topic=topic,
                hint="create it with extend support, or upgrade it",
            )
    elif not negotiated.is_ha:
        what = "headers and tags" if header else "trace ids"
        raise ExtendNotSupported(f"the original NSQ knows no {what}", topic=topic, hint="publish without them")


class PublishRequest:
    """Something that is published with one command.

    Attributes:
        topic: name of the topic.
        key: decides the partition.
        partition: the partition, where the caller chose it.
        in_doubt: it was sent, and nothing is known of the answer yet.
    """

    __slots__ = ("in_doubt", "key", "partition", "topic")

    topic: str
    key: bytes | None
    partition: int | None
    in_doubt: bool

    @property
    def free(self) -> bool:
        """Whether it may go to any partition."""
        return self.key is None and self.partition is None

    @property
    def breaks(self) -> bool:
        """Whether an error frame in answer to it leaves the stream out of step (captured in pub_ext_on_plain)."""
        return False

    def command(self, target: Target, meta: TopicMeta, negotiated: Negotiated) -> bytes:
        """Return the command for a target.

        Raises:
            InvalidInput: the topic or the server does not take it.
        """
        raise AssertionError("abstract")

    def receipts(self, target: Target, meta: TopicMeta, reply: bytes) -> list[Receipt]:
        """Return a receipt for each message, in order.

        Raises:
            ProtocolError: the reply is none to this command.
        """
        raise AssertionError("abstract")


class Single(PublishRequest):
    """One message."""

    __slots__ = ("_body", "_delay", "_header", "_headers", "_options", "_tag", "_trace_id", "_traced")

    def __init__(
        self,
        topic: str,
        body: bytes,
        options: ProducerOptions,
        headers: Mapping[str, str] | None = None,
        tag: str | None = None,
        trace_id: int | None = None,
        delay: float | None = None,
    ) -> None:
        self.topic: str = check_topic(topic)
        self.key: bytes | None = None
        self.partition: int | None = None
        self.in_doubt = False
        self._options = options
        self._header = b""
        self._headers = headers
        self._tag = tag
        self._trace_id = trace_id
        self._traced = False
        self._delay = delay
        overhead = 0
        if trace_id is not None:
            check_trace_id(trace_id)
            overhead = _TRACE_LENGTH
        if headers or tag is not None:
            self._header = encode_headers(headers, tag=tag, trace_id=trace_id)
            overhead = _EXT_LENGTH + len(self._header)
        self._body = check_body(body, options.max_message_size, overhead)
        if delay is not None:
            self._check_delay(delay)

    def _check_delay(self, delay: object) -> None:
        if isinstance(delay, bool) or not isinstance(delay, (int, float)) or not 0 <= delay < 1e9:
            raise InvalidInput(f"delay={delay!r} is not a time in seconds", topic=self.topic)
        if self._header or self._trace_id is not None:
            raise DelayNotSupported(
                "a delayed message takes neither headers nor tag nor trace id",
                topic=self.topic,
                hint="only the original NSQ delays, and knows none of them",
            )

    def command(self, target: Target, meta: TopicMeta, negotiated: Negotiated) -> bytes:
        if self._delay is not None:
            return self._delayed(self._delay, meta, negotiated)
        if meta.extend_support and len(self._body) >= self._options.compression_min:
            self._compress()
        trace_id = self._trace_id
        if trace_id is None and trace_log.active and trace_log.wants(self.topic) and meta.partition_num:
            trace_id = 0
        self._traced = trace_id is not None
        if self._header or (self.key is not None and meta.extend_support):
            refuse(meta, negotiated, self.topic, header=True)
            header = self._header
            if trace_id is not None and (self._trace_id is None or not header):
                header = encode_headers(self._headers, tag=self._tag, trace_id=trace_id)
            if self.key is not None:
                header = add_key(header, self.key)
                check_body(self._body, self._options.max_message_size, _EXT_LENGTH + len(header))
            return sized(target.line("PUB_EXT"), ext_body(header, self._body))
        if trace_id is not None:
            refuse(meta, negotiated, self.topic, header=False)
            return sized(target.line("PUB_TRACE"), trace_body(trace_id, self._body))
        return target.pub(self._body)

    def _compress(self) -> None:
        body, headers = pack_body(self._options, self._body, self._headers)
        if body is not self._body:
            self._body, self._headers = body, headers
            self._header = encode_headers(headers, tag=self._tag, trace_id=self._trace_id)

    def _delayed(self, delay: float, meta: TopicMeta, negotiated: Negotiated) -> bytes:
        if meta.partition_num or negotiated.is_ha:
            raise DelayNotSupported(
                "the redesigned NSQ has no delayed publish",
                topic=self.topic,
                hint="publish later, or let the consumer requeue with a delay",
            )
        return sized(publish_line("DPUB", self.topic, delay=delay), self._body)

    def receipts(self, target: Target, meta: TopicMeta, reply: bytes) -> list[Receipt]:
        return [read_receipt(target, reply, traced=self._traced)]


def check_choice(key: object, partition: object) -> None:
    """Raise when both key and partition are given, or the partition is none."""
    if partition is not None:
        if key is not None:
            raise InvalidPartition("key and partition were both given", hint="give one of them")
        check_partition(partition)  # type: ignore[arg-type]
