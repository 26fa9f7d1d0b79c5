"""A message as a consumer receives it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

from nsqext.client.consumer.handler_signals import check_delay
from nsqext.errors import InvalidState, MessageNotInFlight
from nsqext.protocol.client.body_compression import COMPRESS_HEADER, SIZE_HEADER, decompress_body, is_compressed
from nsqext.protocol.headers import KEY_HEADER, RESERVED_PREFIX, decode_headers, tag_of
from nsqext.protocol.messages import EXT_JSON, EXT_TAG, RawMessage

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ("Message", "Owner")

logger: logging.Logger = logging.getLogger("nsqext.consumer")


class Owner(Protocol):
    """The subscription that a message came from.

    Attributes:
        topic: name of the topic.
        partition: number of the partition; -1 at the original NSQ.
        node: ``host:port`` of the node.
        in_order: the next message is delivered after this one was finished.
        moved: the channel was moved to another position before this subscription received its first message.
        number: which of the subscriptions of the consumer to its partition that were opened, counted from 1.
        ready: messages that the server may have in flight on it (RDY).
        horizon: messages received before this time are not in flight any more.
        msg_timeout: seconds that a message may be in flight.
        max_msg_timeout: seconds that it may be in flight, however often it is touched.
        ignore_lost: answering a message that is not in flight any more does nothing, rather than raise.
    """

    topic: str
    partition: int
    node: str
    in_order: bool
    moved: bool
    number: int
    horizon: float
    msg_timeout: float
    max_msg_timeout: float
    ignore_lost: bool

    @property
    def ready(self) -> int:
        """Messages that the server may have in flight."""

    def finish(self, message: Message) -> None:
        """Send FIN."""

    def requeue(self, message: Message, delay: float, *, backoff: bool) -> None:
        """Send REQ; with ``backoff`` it counts as a failure."""

    def touch(self, message: Message) -> None:
        """Send TOUCH."""

    def record_outcome(self, failed: bool) -> None:
        """Count a failure, or a requeue that is none, whose REQ is sent later."""

    def expired(self, message: Message) -> bool:
        """Return whether the message went back to the server."""


class Message(RawMessage):
    """A delivered message.

    Each message is answered once, with `finish` or `requeue`; for a handler, returning and raising do that. Answers are
    collected and sent together in the next turn of the event loop: awaiting them does not wait for the server, which
    does not reply to them.

    Attributes:
        body: what was published.
        attempts: how often it was delivered, this time included.
        timestamp: when the server stored it, in nanoseconds since 1970.
        id: the 16 bytes of its id.
        offset: byte offset in the partition's queue; -1 where the subscription does not report it.
        size: bytes of its record in the queue; 0 where the subscription does not report it.
        header: bytes of the extend header as they were published.
        delivered: when it was received, in seconds of the monotonic clock.
        received: when it was received or touched last, on the same clock.
        answered: whether it was finished or requeued.
        owner: the subscription that received it.
    """

    __slots__ = ("_headers", "answered", "delivered", "owner", "received")

    def __init__(self, owner: Owner) -> None:
        self.owner: Owner = owner
        self._headers: dict[str, Any] | None = None
        self.answered: bool = False
        self.delivered: float = 0.0
        self.received: float = 0.0

    @property
    def topic(self) -> str:
        """Topic it was published to."""
        return self.owner.topic

    @property
    def partition(self) -> int:
        """Partition that it was read from; -1 at the original NSQ."""
        return self.owner.partition

    @property
    def node(self) -> str:
        """``host:port`` of the node that delivered it."""
        return self.owner.node

    @property
    def in_order(self) -> bool:
        """Whether the next message of its partition is delivered after this one was finished."""
        return self.owner.in_order

    @property
    def headers(self) -> Mapping[str, Any]:
        """Extend headers without the reserved ones; empty without any.

        Values are text, unless a publisher of another kind used other JSON values.

        Raises:
            ProtocolError: the header is not JSON, not by the lenient rules of servers either.
        """
        full = self._headers
        if full is None:
            full = self._all_headers()
        # no reserved name, and no escape that could spell one; 'find' takes a third of the time of 'in'
        if self.header.find(b"##") < 0 and self.header.find(b"\\u") < 0:
            return full
        return {name: value for name, value in full.items() if not name.startswith(RESERVED_PREFIX)}

    @property
    def tag(self) -> str | None:
        """Tag that it was published with."""
        if self.version == EXT_TAG:
            return self.header.decode("utf-8", "replace") or None
        return tag_of(self._all_headers())

    @property
    def reserved_headers(self) -> Mapping[str, Any]:
        """Extend headers whose names begin with ``##``."""
        return {name: value for name, value in self._all_headers().items() if name.startswith(RESERVED_PREFIX)}

    @property
    def key(self) -> str | None:
        """Key that it was published with; None where the topic does not support extend headers."""
        return self.header_value(KEY_HEADER)

    def header_value(self, name: str) -> str | None:
        """Return an extend header, a reserved one too; None unless it is text or a whole number."""
        value = self._all_headers().get(name)
        return str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "" else None

    def _all_headers(self) -> dict[str, Any]:
        if self._headers is None:
            self._headers = decode_headers(self.header) if self.version == EXT_JSON else {}
        return self._headers

    @property
    def expired(self) -> bool:
        """Whether it is not in flight any more, after its timeout or the end of its connection. It is redelivered."""
        return self.owner.expired(self)

    async def finish(self) -> None:
        """Acknowledge it: it will not be delivered again.

        It does not wait, so it is not a cancellation point: FIN is sent with the next write, and servers do not
        acknowledge it. The same holds for `requeue` and `touch`.

        Raises:
            InvalidState: it was answered before.
            MessageNotInFlight: it is not in flight any more, see `expired`; not with ``on_lost="ignore"``.
        """
        self._check()
        try:
            self.owner.finish(self)
        except MessageNotInFlight as error:
            self._lost(error)
        self.answered = True

    async def requeue(self, delay: float = 0.0, *, backoff: bool = False) -> None:
        """Requeue it: it will be delivered again, with one attempt more.

        Args:
            delay: seconds until then, up to three days; ordered channels ignore it.
            backoff: slow the consumer down, as for a handler that raises.

        Raises:
            InvalidInput: the delay is negative or too long.
            InvalidState: it was answered before.
            MessageNotInFlight: it is not in flight any more, see `expired`; not with ``on_lost="ignore"``.
        """
        check_delay(delay)
        self._check()
        try:
            self.owner.requeue(self, delay, backoff=backoff)
        except MessageNotInFlight as error:
            self._lost(error)
        self.answered = True

    async def touch(self) -> None:
        """Restart its timeout.

        Raises:
            InvalidState: it was answered before.
            MessageNotInFlight: it is not in flight any more, see `expired`; not with ``on_lost="ignore"``.
        """
        self._check()
        try:
            self.owner.touch(self)
        except MessageNotInFlight as error:
            self._lost(error)

    def finish_now(self) -> None:
        """Finish it after its handler returned; log where it is not in flight any more and will be redelivered."""
        try:
            self.owner.finish(self)
        except MessageNotInFlight as error:
            logger.warning("a handled message will be redelivered: %s", error)
        self.answered = True

    def requeue_now(self, delay: float, *, backoff: bool) -> None:
        """Requeue it after its handler raised; log where it is not in flight any more and will be redelivered."""
        try:
            self.owner.requeue(self, delay, backoff=backoff)
        except MessageNotInFlight as error:
            logger.warning("a message that was not handled will be redelivered: %s", error)
        self.answered = True

    def renew(self, delivery: Message) -> None:
        """Continue with a later delivery of the same message, in place of one that is not in flight any more."""
        self.owner = delivery.owner
        self.delivered = self.received = delivery.received
        self.attempts = max(self.attempts, delivery.attempts)

    def unpack(self) -> None:
        """Decompress a body that the publishing client compressed, and remove the headers that say so.

        Raises:
            ProtocolError: the body is damaged, or unpacks to too many bytes.
            InvalidSetting: the package for the compression is not installed.
        """
        headers = self._all_headers()
        if is_compressed(headers):
            self.replace_body(decompress_body(headers, self.body), COMPRESS_HEADER, SIZE_HEADER)

    def replace_body(self, body: bytes, *headers: str) -> None:
        """Replace the body by the decompressed one, and remove the headers that say how it was compressed."""
        self.body: bytes = body
        self._headers = {name: value for name, value in self._all_headers().items() if name not in headers}

    def _check(self) -> None:
        if self.answered:
            raise InvalidState(
                "the message was finished or requeued already", topic=self.topic, partition=self.partition
            )

    def _lost(self, error: MessageNotInFlight) -> None:
        if not self.owner.ignore_lost:
            raise error
        logger.info("an answer was not sent: %s", error)

    def __repr__(self) -> str:
        place = f"{self.topic}[{self.partition}]"
        return f"<Message {place} id={self.id.hex()} attempts={self.attempts} {len(self.body)} bytes>"
