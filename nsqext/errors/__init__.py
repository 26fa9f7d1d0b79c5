"""Every error that nsqext raises, in one tree.

::

    NsqError
    ├── InvalidInput (ValueError)        refused before anything was sent
    │   ├── InvalidName                  topic, channel or tag
    │   ├── InvalidHeader                name, value or size of extend headers
    │   ├── InvalidBody                  empty, too large, not bytes
    │   ├── InvalidSetting               the value of a keyword, a URL or an environment variable
    │   │   └── UnknownSetting (TypeError)   a name that no setting or argument has
    │   ├── InvalidPartition             a partition or key that the topic does not support
    │   ├── OperationNotSupported        an operation that this generation of NSQ does not have
    │   ├── ExtendNotSupported           headers or a tag for a topic without extend support
    │   └── DelayNotSupported            a delayed publish that the topic or the server cannot delay
    ├── InvalidState                     used before it was opened, or after it was closed
    ├── ProtocolError                    received bytes that are not the NSQ protocol
    │   └── FrameTooLarge                a message above max_frame_size
    ├── ConnectionFailed                 no connection to a node
    │   └── NegotiationFailed            TLS or compression is not offered by the node, or failed
    ├── ConnectionLost                   a connection failed while it was used
    │   ├── HeartbeatMissed              the server sent nothing for two heartbeat intervals
    │   └── NotSent                      the server did not read the request: it has no effect
    ├── RequestTimeout (TimeoutError)    no response in time; the request may have had its effect
    ├── LookupFailed                     no lookup node returned a usable response
    │   ├── NotLookupd                   the server at the address is not a lookup service
    │   └── LookupUnreachable            no lookup node can be reached
    ├── TopicNotFound                    the lookup service does not know the topic
    ├── TopicNotReady                    the topic cannot be published to yet: it has no channel
    ├── PartitionUnavailable             a partition without a reachable leader
    ├── PublishFailed                    not stored, after all retries
    │   └── BatchFailed                  some messages of a batch were not stored, or their outcome is unknown
    ├── DeliveryUnknown                  sent without a response: stored or not
    │   └── ReceiptsMissing              middleware did not return a receipt for each message
    ├── MessageNotInFlight               finish, requeue or touch of a message that is no longer in flight
    ├── OrderViolation                   an ordered partition delivered an older message
    ├── DataLoss                         messages that should have been read no longer exist
    ├── RangeIncomplete                  a range of messages that was not read to its end in time
    └── ServerError                      an error frame; a class for each code, in `nsqext.errors.server`

Class attributes decide retries, never the text of an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from nsqext.types import Receipt

__all__ = (
    "BatchFailed",
    "ConnectionFailed",
    "ConnectionLost",
    "DataLoss",
    "DelayNotSupported",
    "DeliveryUnknown",
    "ExtendNotSupported",
    "FrameTooLarge",
    "HeartbeatMissed",
    "InvalidBody",
    "InvalidHeader",
    "InvalidInput",
    "InvalidName",
    "InvalidPartition",
    "InvalidSetting",
    "InvalidState",
    "LookupFailed",
    "LookupUnreachable",
    "MessageNotInFlight",
    "NegotiationFailed",
    "NotLookupd",
    "NotSent",
    "NsqError",
    "OperationNotSupported",
    "OrderViolation",
    "PartitionUnavailable",
    "ProtocolError",
    "PublishFailed",
    "RangeIncomplete",
    "ReceiptsMissing",
    "RequestTimeout",
    "ServerError",
    "TopicNotFound",
    "TopicNotReady",
    "UnknownSetting",
)


class NsqError(Exception):
    """Base of every error of this package.

    Args:
        message: what happened.
        partition: number of its partition.
        node: ``host:port`` of the node.
        hint: what to do.
    """

    retryable: ClassVar[bool] = False  #: a retry of the request may succeed
    refresh_lookup: ClassVar[bool] = False  #: the cached partition map may be stale and is refreshed before a retry
    overload: ClassVar[bool] = False  #: the server is overloaded, and a retry waits
    closes_connection: ClassVar[bool] = False  #: the connection is closed after this error
    maybe_stored: ClassVar[bool] = False  #: a publish that fails with this error may be stored

    def __init__(
        self,
        message: str,
        *,
        topic: str | None = None,
        partition: int | None = None,
        node: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.topic = topic
        self.partition = partition
        self.node = node
        self.hint = hint
        self.attempts: tuple[NsqError, ...] = ()  #: errors of earlier attempts, oldest first

    def __str__(self) -> str:
        where = ", ".join(f"{name} {value}" for name, value in self.where.items() if value is not None)
        text = f"{self.message} ({where})" if where else self.message
        text = f"{text}: {self.hint}" if self.hint else text
        return f"{text} [after {len(self.attempts)} earlier attempts]" if self.attempts else text

    @property
    def where(self) -> dict[str, Any]:
        """Topic, partition and node, as arguments of a related error."""
        return {"topic": self.topic, "partition": self.partition, "node": self.node}

    def at(self, *, topic: str | None = None, partition: int | None = None, node: str | None = None) -> NsqError:
        """Set attributes that are None; return the error."""
        self.topic = self.topic if self.topic is not None else topic
        self.partition = self.partition if self.partition is not None else partition
        self.node = self.node if self.node is not None else node
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(cls: type[NsqError], args: tuple[Any, ...], state: dict[str, Any]) -> NsqError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidInput(NsqError, ValueError):
    """An argument is invalid; nothing was sent."""

    index: int | None = None  #: index of the invalid message in a batch


class InvalidName(InvalidInput):
    """NSQ does not allow the name of a topic, channel or tag."""


class InvalidHeader(InvalidInput):
    """Extend headers have an invalid or reserved name, an invalid value, or too many bytes."""


class InvalidBody(InvalidInput):
    """A message body is empty, too large, or not bytes."""


class InvalidSetting(InvalidInput):
    """A setting is out of range or contradicts another setting."""


class UnknownSetting(InvalidSetting, TypeError):
    """A setting or argument that does not exist; the error suggests a known name."""


class InvalidPartition(InvalidInput):
    """The topic does not have the partition, or cannot map a key: the number of partitions is unknown."""


class OperationNotSupported(InvalidInput):
    """An administration operation that this generation of NSQ does not have."""


class ExtendNotSupported(InvalidInput):
    """Headers or a tag were given for a topic without extend support, or a trace id for the original NSQ."""


class DelayNotSupported(InvalidInput):
    """A delayed publish to a topic whose consumers cannot delay it, or with headers to the original NSQ."""


class InvalidState(NsqError):
    """The object is not open, or already closed."""


class ProtocolError(NsqError):
    """Received bytes that are not the NSQ protocol; the connection is closed."""

    closes_connection = True


class FrameTooLarge(ProtocolError):
    """Received a message above ``max_frame_size``; the connection is closed, and the server sends it again."""


class ConnectionFailed(NsqError):
    """No connection to a node could be opened."""

    retryable = True
    refresh_lookup = True


class NegotiationFailed(ConnectionFailed):
    """The node does not offer the requested TLS or compression, or it failed; a retry would fail too."""

    retryable = False
    refresh_lookup = False


class ConnectionLost(NsqError):
    """A connection failed while it was used."""

    retryable = True
    refresh_lookup = True
    closes_connection = True


class HeartbeatMissed(ConnectionLost):
    """The server sent nothing, not even heartbeats, for more than two heartbeat intervals."""


class NotSent(ConnectionLost):
    """A connection failed before the server read the request; a retry cannot store anything twice."""


class RequestTimeout(NsqError, TimeoutError):
    """No response in time; the server may still process the request.

    Also a `TimeoutError`, and therefore an `OSError`.
    """

    retryable = True
    refresh_lookup = True
    maybe_stored = True


class LookupFailed(NsqError):
    """No lookup node returned a usable response."""

    retryable = True


class NotLookupd(LookupFailed):
    """The server at the address is not a lookup service, or its certificate is not trusted; a retry does not help."""

    retryable = False


class LookupUnreachable(LookupFailed):
    """No lookup address can be reached: the lookup service does not run (yet), or the network is down.

    A proxy's 5xx status counts as a lookup service that does not run.
    """


class TopicNotFound(NsqError):
    """The lookup service responded, but the topic is unknown."""

    retryable = True
    refresh_lookup = True


class TopicNotReady(NsqError):
    """The topic has no channel: the redesigned lookup service hides it from producers, whose messages would be lost."""

    refresh_lookup = True


class PartitionUnavailable(NsqError):
    """A partition has no reachable leader at the moment."""

    retryable = True
    refresh_lookup = True

    @classmethod
    def without_leader(cls, topic: str, partition: int) -> PartitionUnavailable:
        """Return the error of a partition for which lookup returns no leader."""
        return cls("lookup returned no leader of the partition", topic=topic, partition=partition)


class PublishFailed(NsqError):
    """A publish was not stored before its timeout or its attempts were used up; see ``attempts`` and ``__cause__``."""


class BatchFailed(PublishFailed):
    """Not all messages of a batch were stored.

    Attributes:
        outcomes: for each message, in order, its `Receipt` or error; `DeliveryUnknown` if it may be stored.
    """

    def __init__(self, outcomes: Sequence[Receipt | NsqError], **where: Any) -> None:
        self.outcomes: tuple[Receipt | NsqError, ...] = tuple(outcomes)
        failed = [outcome for outcome in self.outcomes if isinstance(outcome, NsqError)]
        first = str(failed[0]) if failed else "no reason"
        super().__init__(f"{len(failed)} of {len(self.outcomes)} messages failed, first: {first}", **where)


class DeliveryUnknown(NsqError):
    """A publish was sent and no response was received: the message is stored or not.

    Publishing it again may store it twice.
    """

    maybe_stored = True


class ReceiptsMissing(DeliveryUnknown):
    """Middleware did not return a receipt for each message that it was given; it may have dropped messages."""


class MessageNotInFlight(NsqError):
    """A finished, requeued or touched message is no longer in flight at this consumer."""


class OrderViolation(NsqError):
    """An ordered partition delivered a message that is older than the previous message."""


class DataLoss(NsqError):
    """Messages that should have been read no longer exist, or a partition holds less than was read from it."""


class RangeIncomplete(NsqError):
    """A range of messages was not read to its end in time; a retry may succeed."""

    retryable = True


class ServerError(NsqError):
    """An error frame that a server sent.

    Attributes:
        description: rest of the frame, cut after 500 characters; often empty.
    """

    code: str = ""  #: first word of the frame, for example ``E_FAILED_ON_NOT_LEADER``
    codes: ClassVar[tuple[str, ...]] = ()  #: the codes of this class
    advice: ClassVar[str | None] = None  #: hint of an error without a hint

    def __init_subclass__(cls, *, codes: tuple[str, ...] = (), closes_connection: bool | None = None) -> None:
        super().__init_subclass__()
        cls.codes = codes
        if closes_connection is not None:
            cls.closes_connection = closes_connection

    def __init__(self, code: str, description: str = "", **where: Any) -> None:
        super().__init__(f"{code} {description}".rstrip(), **{"hint": self.advice, **where})
        self.args: tuple[Any, ...] = (code, description)
        self.code = code
        self.description = description


# Texts of servers in errors, logs and terminals

MAX_TEXT = 500
"""Characters."""


def escaped(text: str) -> str:
    r"""Return a text with escapes such as \x1b for characters that are not printable.

    Line ends would forge log lines, escape sequences control a terminal, and direction marks hide names.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def outside_text(text: str, most: int = MAX_TEXT) -> str:
    """Return a text of at most ``most`` characters and an ellipsis; see `escaped`."""
    shown = escaped(text[: most + 1])
    return shown if len(shown) <= most else f"{shown[:most]}…"
