"""Messages of a consumer, and the exceptions by which handlers decide about them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from enum import Enum
from functools import cache, update_wrapper, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from nsqext.arguments import is_delay
from nsqext.errors import InvalidInput, InvalidState, MessageNotInFlight
from nsqext.protocol.messages import EXT_JSON, EXT_TAG, KEY_HEADER, RESERVED_PREFIX, RawMessage, header_text, tag_of
from nsqext.protocol.names import topic_and_partition

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


logger: logging.Logger = logging.getLogger("nsqext.consumer")

KeyOf = Callable[["Message"], str | bytes | None]
"""Returns the key of a message; None if it has no key."""

MAX_DELAY = 3 * 24 * 3600.0
"""Longest requeue delay of the redesigned NSQ, in seconds; a longer delay takes several requeues."""
ACCEPTED_DELAY = 900.0
"""Longest requeue delay that every server accepts, in seconds; the original NSQ shortens delays above an hour."""


def check_delay(delay: float) -> float:
    """Return a valid requeue delay in seconds; raises InvalidInput."""
    if not is_delay(delay):
        raise InvalidInput(f"a requeue delay of {delay!r} is not a number of seconds")
    return delay


class HandlerSignal(Exception):
    """A handler's decision about its message; not logged as an error."""


class Finish(HandlerSignal):
    """Finish the message, as returning does; for code deep inside a handler."""


class Requeue(HandlerSignal):
    """Requeue the message.

    Args:
        delay: seconds until the redelivery; None for the delay of failed messages.
        backoff: slow the consumer down, as other exceptions do.

    Raises:
        InvalidInput: the delay is negative, or not a number of seconds.
    """

    def __init__(self, delay: float | None = None, *, backoff: bool = True) -> None:
        super().__init__("requeue")
        self.delay: float | None = None if delay is None else check_delay(delay)
        self.backoff: bool = backoff


class Reject(HandlerSignal):
    """Send the message to the dead letters and finish it, after any number of attempts.

    Without ``dead_letter`` it is dropped. On ordered channels this needs the setting ``reject_ordered``.

    Args:
        reason: for the log and the dead letter.
    """

    def __init__(self, reason: str = "rejected by its handler") -> None:
        super().__init__(reason)
        self.reason: str = reason


class KeySharing(Enum):
    """How the keys of a partition are shared by the consumers of a channel."""

    NONE = "none"  #: not shared, or their order does not count
    SERVER = "server"  #: by the server, in a channel of type key_failover
    TAGS = "tags"  #: by tags of messages; each bucket has a consumer with its own connection


class Owner(Protocol):
    """The subscription of a message."""

    topic: str
    original: bool  #: on a node of the original NSQ, which redelivers messages only after their timeout
    node: str  #: ``host:port`` of the node
    in_order: bool  #: a message is delivered after its predecessor was finished
    moved: bool  #: the channel was moved before this subscription received its first message
    number: int  #: number among the consumer's subscriptions to the partition, from 1
    horizon: float  #: messages received before this time are not in flight any more
    msg_timeout: float  #: seconds that a message may be in flight
    max_msg_timeout: float  #: the same, touches included
    ignore_lost: bool  #: an answer to a message that is not in flight any more is ignored instead of raising
    key_sharing: KeySharing

    @property
    def partition(self) -> int | None:
        """Number of the partition; None on the original NSQ."""

    @property
    def taking_over(self) -> bool:
        """Whether messages that another consumer had in flight may still be redelivered."""

    @property
    def ready(self) -> int:
        """Messages that the server may have in flight (RDY)."""

    def finish(self, message: Message) -> None:
        """Send FIN."""

    def requeue(self, message: Message, delay: float, *, backoff: bool | None) -> None:
        """Send REQ; with ``backoff`` it counts as a failure, with None its outcome was recorded or there is none."""

    def touch(self, message: Message) -> None:
        """Send TOUCH."""

    def record_outcome(self, failed: bool) -> None:
        """Record a failure, or a requeue without failure, whose REQ is sent later."""

    def expired(self, message: Message) -> bool:
        """Return whether the message timed out or lost its connection."""

    def reset(self, reason: str) -> None:
        """End the connection, so that the server redelivers its messages in order; the consumer reconnects."""


class UnpackedBodies(Protocol):
    """See `nsqext.client.consumer.unpacking.UnpackBudget`."""

    def try_unpack(self, message: Message) -> bool:
        """Decompress a body; return False if it must wait."""

    def pack(self, message: Message) -> None:
        """Keep only the stored body of a message that waits for its next attempt."""

    def call_unpacked(self, function: KeyOf, message: Message) -> str | bytes | None:
        """Call a function while the body is decompressed."""

    def release(self, message: Message) -> None:
        """Release the bytes of an answered message."""

    async def wait(self) -> None:
        """Wait until bytes may have been released."""


class InFlightCount:
    """Counts the messages in flight that were received or touched together."""

    __slots__ = ("count", "time")

    def __init__(self, time: float = 0.0, count: int = 0) -> None:
        self.time: float = time  #: when they were received or touched (monotonic seconds)
        self.count: int = count  #: messages neither answered nor timed out


_NOT_COUNTED = InFlightCount()
_FRESH = 0.2  # seconds within which no message times out: servers grant at least a second
_RETURNED = float("-inf")  # `Message.received` after a requeue by the consumer: before every horizon

TOUCHES = 16
"""Checks of the messages in flight per timeout. A message is touched after half to 9/16 of its timeout."""


class Requeueable(Protocol):
    """A message, or a batch of them."""

    requeue_called: bool  #: whether `requeue` was called, and was not awaited or has answered the message


R = TypeVar("R", bound=Requeueable)
P = ParamSpec("P")


def notes_call(
    requeue: Callable[Concatenate[R, P], Coroutine[Any, Any, None]],
) -> Callable[Concatenate[R, P], Coroutine[Any, Any, None]]:
    """Return the method ``requeue``, whose call counts until it is awaited.

    Otherwise the message of a handler that forgets to await it, or that runs in a thread, would be finished.
    """

    def call(self: R, /, *arguments: P.args, **named: P.kwargs) -> Coroutine[Any, Any, None]:
        self.requeue_called = True
        return awaited(self, *arguments, **named)

    @wraps(requeue)  # Python names it in a warning
    async def awaited(self: R, /, *arguments: P.args, **named: P.kwargs) -> None:
        self.requeue_called = False
        await requeue(self, *arguments, **named)

    update_wrapper(call, requeue)
    return call


class Message(RawMessage):
    """A delivered message.

    It is answered once: by `finish`, `requeue`, or the return or exception of its handler. An answer is sent at once;
    answers of the next 2 ms are sent together in the next turn of the event loop.
    """

    __slots__ = (
        "_headers",
        "_requeued",
        "_stored_body",
        "answered",
        "budget",
        "counted",
        "delivered",
        "owner",
        "received",
        "requeue_called",
    )

    def __init__(self, owner: Owner, counted: InFlightCount = _NOT_COUNTED) -> None:
        self.owner: Owner = owner  #: the subscription that received it
        self._headers: dict[str, Any] | None = None
        self.answered: bool = False  #: whether it was finished or requeued
        self.requeue_called: bool = False
        self.budget: UnpackedBodies | None = None  #: None for bodies that are not compressed
        self.counted: InFlightCount = counted  #: counts it as in flight
        time = counted.time
        self.delivered: float = time  #: when it was received (monotonic seconds)
        self.received: float = time  #: when it was received or last touched (monotonic seconds)

    @property
    def topic(self) -> str:
        """Topic of the message."""
        return self.owner.topic

    @property
    def partition(self) -> int | None:
        """Partition of the message; None on the original NSQ."""
        return self.owner.partition

    @property
    def trace_id(self) -> int:
        """Trace id of the publish; 0 without a trace id, always on the original NSQ."""
        return 0 if self.owner.original else super().trace_id

    @property
    def node(self) -> str:
        """``host:port`` of the node that delivered it."""
        return self.owner.node

    @property
    def in_order(self) -> bool:
        """Whether the next message of its partition is delivered only after it was finished."""
        return self.owner.in_order

    @property
    def headers(self) -> Mapping[str, Any]:
        """Extend headers without reserved headers; may be empty.

        Values are text, unless another client wrote other JSON; a value that is not JSON is a `nsqext.RawJson`.

        Raises:
            ProtocolError: the header is not JSON, even by the servers' lenient rules.
        """
        full = self._headers
        if full is None:
            full = self.all_headers()
        # no reserved name, and no escape that could spell it; 'find' takes a third of the time of 'in'
        if self.header.find(b"##") < 0 and self.header.find(b"\\u") < 0:
            return full
        return {name: value for name, value in full.items() if not name.startswith(RESERVED_PREFIX)}

    @property
    def tag(self) -> str | None:
        """Tag of the publish."""
        if self.version == EXT_TAG:
            return self.header.decode("utf-8", "replace") or None
        return tag_of(self.all_headers())

    @property
    def reserved_headers(self) -> Mapping[str, Any]:
        """Extend headers whose names begin with ``##``."""
        return {name: value for name, value in self.all_headers().items() if name.startswith(RESERVED_PREFIX)}

    @property
    def key(self) -> str | None:
        """Key of the publish; None on topics without extend support."""
        return self.header_value(KEY_HEADER)

    def header_value(self, name: str) -> str | None:
        """Return an extend or reserved header; None unless it is text or a whole number."""
        return header_text(self.all_headers(), name)

    def all_headers(self) -> dict[str, Any]:
        """Return extend and reserved headers."""
        if self._headers is None:
            self._headers = _decoder()(self.header) if self.version == EXT_JSON else {}
        return self._headers

    @property
    def expired(self) -> bool:
        """Whether it timed out or lost its connection, so that the server redelivers it."""
        return self.owner.expired(self)

    @property
    def in_flight(self) -> bool:
        """Whether it is neither answered nor `expired`."""
        return not self.answered and not self.owner.expired(self)

    @property
    def lost(self) -> bool:
        """Whether it was `expired` at the consumer's last check, or the consumer has requeued it."""
        return self.received < self.owner.horizon

    def may_begin(self, now: float) -> bool:
        """Return whether it is in flight before its handler begins, also after the process stood still."""
        # the time avoids two calls, 5 % of the cost of a message
        return self.received >= self.owner.horizon and (now - self.received < _FRESH or not self.expired)

    async def finish(self) -> None:
        """Acknowledge the message.

        As `requeue` and `touch`, it does not wait and is no cancellation point: FIN is sent with the next write, and
        servers do not acknowledge it.

        Raises:
            InvalidState: it was answered before.
            MessageNotInFlight: it is not in flight any more, see `expired`; not with ``on_lost="ignore"``.
        """
        self._check()
        try:
            self.owner.finish(self)
        except MessageNotInFlight as error:
            self._lost(error)
        self.mark_answered()

    @notes_call
    async def requeue(self, delay: float = 0.0, *, backoff: bool = False) -> None:
        """Return the message to the channel, which redelivers it.

        A handler that returns without awaiting this has failed: its message is requeued as after an exception.

        Args:
            delay: seconds until the redelivery; 0 on ordered channels, where servers ignore a requeue with a delay
                (captured: sub_ordered_requeue). A handler's `Requeue` may have a delay there.
            backoff: slow the consumer down, as after a failed handler.

        Raises:
            InvalidInput: the delay is negative or too long, or the channel is ordered.
            InvalidState, MessageNotInFlight: as for `finish`.
        """
        check_requeue_delay(self, delay)
        self._check()
        try:
            self.owner.requeue(self, delay, backoff=backoff)
        except MessageNotInFlight as error:
            self._lost(error)
        self.mark_requeued()

    async def touch(self) -> None:
        """Restart the message's timeout.

        Raises:
            InvalidState, MessageNotInFlight: as for `finish`.
        """
        self._check()
        try:
            self.owner.touch(self)
        except MessageNotInFlight as error:
            self._lost(error)

    def finish_now(self) -> None:
        """Finish it after its handler returned; log a warning if it is not in flight any more."""
        try:
            self.owner.finish(self)
        except MessageNotInFlight as error:
            logger.warning("a handled message will be redelivered: %s", error)
        self.mark_answered()

    def requeue_now(self, delay: float, *, backoff: bool | None) -> None:
        """Requeue it after its handler raised; log a warning if it is not in flight any more."""
        try:
            self.owner.requeue(self, delay, backoff=backoff)
        except MessageNotInFlight as error:
            logger.warning("a message that was not handled will be redelivered: %s", error)
        self.mark_answered()

    def mark_answered(self) -> None:
        """Record that it was finished or requeued."""
        self.answered = True
        if self.budget is not None:
            self.budget.release(self)

    @property
    def requeued(self) -> bool:
        """Whether `requeue` has answered it, and its handler was not called again."""
        return getattr(self, "_requeued", False)  # filling a slot in every message costs time

    def mark_requeued(self) -> None:
        """Record that its handler has requeued it."""
        self.requeue_called = self._requeued = True
        self.mark_answered()

    def mark_unanswered(self) -> None:
        """Record that its handler is called again after a requeue."""
        self.answered = self.requeue_called = self._requeued = False

    def renew(self, delivery: Message) -> None:
        """Continue with a later delivery of the message."""
        self.owner = delivery.owner
        self.counted = delivery.counted
        self.delivered = self.received = delivery.received
        self.attempts: int = max(self.attempts, delivery.attempts)

    def mark_returned(self) -> None:
        """Record a requeue by the consumer: answers of the handler raise `MessageNotInFlight`."""
        self.answered, self.received = False, _RETURNED

    def try_unpack(self) -> bool:
        """Decompress the body; return False if it must wait for the budget."""
        return self.budget is None or self.budget.try_unpack(self)

    @property
    def stored_body(self) -> bytes:
        """The body as stored, which `header` describes; compressed where `body` is decompressed."""
        try:
            return self._stored_body
        except AttributeError:  # filling a slot in every message costs time
            return self.body

    def restore(self, body: bytes, headers: dict[str, Any] | None = None) -> None:
        """Replace body and all headers; None for the headers as stored."""
        self._stored_body: bytes = self.stored_body
        self.body: bytes = body
        self._headers = headers

    def replace_body(self, body: bytes, *headers: str) -> None:
        """Set the decompressed body, and remove compression headers."""
        self.restore(body, {name: value for name, value in self.all_headers().items() if name not in headers})

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
        place = topic_and_partition(self.topic, self.partition)
        return f"<Message {place} id={self.id.hex()} attempts={self.attempts} {len(self.body)} bytes>"


@cache
def _decoder() -> Callable[[bytes], dict[str, Any]]:
    """Load the decoder of headers with the first header."""
    from nsqext.protocol.headers import decode_headers

    return decode_headers


def check_requeue_delay(message: Message, delay: float) -> None:
    """Raise InvalidInput if servers refuse a requeue with this delay, or ignore it on an ordered channel."""
    if check_delay(delay) and message.in_order:
        raise InvalidInput(
            "servers ignore a requeue with a delay on an ordered channel: "
            f"requeue without a delay, or raise Requeue(delay={delay:g}) in a handler",
            topic=message.topic,
            partition=message.partition,
        )


def touch_due(messages: Iterable[Message], now: float, *, requeued: bool = False) -> int:
    """Touch the messages of which half the timeout has passed; return how many.

    Call it `TOUCHES` times within the shortest timeout. No message is touched beyond ``max_msg_timeout``. Answered
    messages are skipped, unless they were ``requeued`` and REQ was not sent.
    """
    count = 0
    for message in messages:
        if message.answered and not requeued:
            continue
        owner = message.owner
        half = owner.msg_timeout / 2
        if now - message.received >= half and now - message.delivered + half < owner.max_msg_timeout:
            try:
                owner.touch(message)
            except MessageNotInFlight:
                continue
            count += 1
    return count


def requeue_unanswered(messages: Iterable[Message]) -> None:
    """Requeue the unanswered messages in flight."""
    for message in messages:
        if not message.answered and not message.lost:
            message.requeue_now(0.0, backoff=False)
