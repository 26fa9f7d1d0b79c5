"""What is to be published: checked when it is made, encoded for a topic when its meta is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen

from nsqext.client.routes import Target
from nsqext.errors import ExtendNotSupported, InvalidInput, InvalidPartition, ProtocolError
from nsqext.protocol.commands import check_body, ext_body, multi_body, trace_body
from nsqext.protocol.headers import encode_headers
from nsqext.protocol.identify import Negotiated
from nsqext.protocol.names import check_partition, check_topic, check_trace_id
from nsqext.protocol.record import raw_size
from nsqext.protocol.replies import TraceReply, decode_trace_reply
from nsqext.types import Receipt, TopicMeta

__all__ = ("Batch", "Draft", "Publication", "Single", "key_bytes")

_EXT_LENGTH = 2
_TRACE_LENGTH = 8


@frozen
class Draft:
    """A message for `Producer.publish_many` that is more than its body.

    Attributes:
        body: what is published.
        headers: extend headers; the topic has to support them.
        tag: tag for dispatch; the topic has to support extend headers.
        trace_id: trace id, 0 to 2**64 - 1.
        key: messages of one key go to one partition and keep their order.
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


def _refuse(meta: TopicMeta, negotiated: Negotiated, topic: str, *, header: bool) -> None:
    """Raise when the topic takes no headers, or the server no traces; unknown meta leaves it to a redesigned server."""
    if meta.partition_num:
        if header and not meta.extend_support:
            raise ExtendNotSupported(
                "the topic takes no headers and no tag", topic=topic, hint="create it with extend support, or upgrade it"
            )
    elif not negotiated.is_ha:
        what = "headers and tags" if header else "trace ids"
        raise ExtendNotSupported(f"the original NSQ knows no {what}", topic=topic, hint="publish without them")


class Publication:
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

    def encode(self, meta: TopicMeta, negotiated: Negotiated) -> tuple[str, bytes]:
        """Return the command and its body for a topic.

        Raises:
            ExtendNotSupported: the topic or the server does not take it.
        """
        raise AssertionError("abstract")

    def receipts(self, target: Target, meta: TopicMeta, reply: bytes) -> list[Receipt]:
        """Return a receipt for each message, in order.

        Raises:
            ProtocolError: the reply is none to this command.
        """
        raise AssertionError("abstract")


class Single(Publication):
    """One message."""

    __slots__ = ("_body", "_header", "_trace_id")

    def __init__(
        self,
        topic: str,
        body: bytes,
        limit: int,
        headers: Mapping[str, str] | None,
        tag: str | None,
        trace_id: int | None,
    ) -> None:
        self.topic = check_topic(topic)
        self.key = None
        self.partition = None
        self.in_doubt = False
        self._header = b""
        self._trace_id = trace_id
        overhead = 0
        if trace_id is not None:
            check_trace_id(trace_id)
            overhead = _TRACE_LENGTH
        if headers or tag is not None:
            self._header = encode_headers(headers, tag=tag, trace_id=trace_id)
            overhead = _EXT_LENGTH + len(self._header)
        self._body = check_body(body, limit, overhead)

    def encode(self, meta: TopicMeta, negotiated: Negotiated) -> tuple[str, bytes]:
        if self._header:
            _refuse(meta, negotiated, self.topic, header=True)
            return "PUB_EXT", ext_body(self._header, self._body)
        if self._trace_id is not None:
            _refuse(meta, negotiated, self.topic, header=False)
            return "PUB_TRACE", trace_body(self._trace_id, self._body)
        return "PUB", self._body

    def receipt(self, target: Target, reply: bytes) -> Receipt:
        """Return the receipt."""
        receipt = target.receipt()
        if self._trace_id is not None:
            receipt.message_id, receipt.trace_id, receipt.offset, receipt.size = decode_trace_reply(reply)
        elif reply != b"OK":
            raise ProtocolError(f"the reply to a publish is {reply[:80]!r}")
        return receipt

    def receipts(self, target: Target, meta: TopicMeta, reply: bytes) -> list[Receipt]:
        return [self.receipt(target, reply)]


class Batch(Publication):
    """Several messages for one partition, all or nothing."""

    __slots__ = ("_bodies", "_extended", "_headers", "_traces", "indexes")

    def __init__(self, topic: str, partition: int | None = None) -> None:
        self.topic = topic
        self.key = None
        self.partition = partition
        self.in_doubt = False
        self.indexes: list[int] = []
        self._bodies: list[bytes] = []
        self._headers: list[bytes] = []
        self._traces: list[int] = []

    def add_plain(self, first: int, bodies: Sequence[bytes]) -> None:
        """Add messages without anything else; they were checked."""
        self.indexes.extend(range(first, first + len(bodies)))
        self._bodies.extend(bodies)

    def add(self, index: int, body: bytes, header: bytes, trace_id: int | None) -> None:
        """Add a message with header or trace id; it was checked."""
        self._fill()
        self.indexes.append(index)
        self._bodies.append(body)
        self._headers.append(header)
        self._traces.append(-1 if trace_id is None else trace_id)

    def _fill(self) -> None:
        missing = len(self._bodies) - len(self._headers)
        self._headers += [b""] * missing
        self._traces += [-1] * missing

    def encode(self, meta: TopicMeta, negotiated: Negotiated) -> tuple[str, bytes]:
        if not self._headers:
            return "MPUB", multi_body(self._bodies)
        self._fill()
        if any(self._headers):
            _refuse(meta, negotiated, self.topic, header=True)
            return "MPUB_EXT", multi_body(map(ext_body, self._headers, self._bodies))
        if all(trace < 0 for trace in self._traces):
            return "MPUB", multi_body(self._bodies)
        _refuse(meta, negotiated, self.topic, header=False)
        return "MPUB_TRACE", multi_body(trace_body(max(trace, 0), body) for trace, body in zip(self._traces, self._bodies))

    def receipts(self, target: Target, meta: TopicMeta, reply: bytes) -> list[Receipt]:
        if reply == b"OK":
            return [target.receipt()] * len(self._bodies)
        return self._traced(target, meta, decode_trace_reply(reply))

    def _traced(self, target: Target, meta: TopicMeta, reply: TraceReply) -> list[Receipt]:
        """Work out id and offset of each message: a batch is stored in one piece, with ids in a row."""
        sizes = [raw_size(len(body), 0, meta.extend_support) for body in self._bodies]
        known = sum(sizes) == reply.size
        receipts = []
        offset = reply.offset
        for number, (size, trace) in enumerate(zip(sizes, self._traces)):
            receipt = target.receipt()
            receipt.trace_id = max(trace, 0)
            if known or not number:
                receipt.message_id, receipt.offset, receipt.size = reply.message_id + number, offset, size
            offset += size
            receipts.append(receipt)
        return receipts


def check_choice(key: object, partition: object) -> None:
    """Raise when both key and partition are given, or the partition is none."""
    if partition is not None:
        if key is not None:
            raise InvalidPartition("key and partition were both given", hint="give one of them")
        check_partition(partition)  # type: ignore[arg-type]
