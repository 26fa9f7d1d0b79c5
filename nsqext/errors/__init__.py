"""Every error that nsqext raises, in one tree.

::

    NsqError
    ├── InvalidInput (ValueError)        refused before anything was sent
    │   ├── InvalidName                  topic, channel or tag
    │   ├── InvalidHeader                name, value or size of extend headers
    │   ├── InvalidBody                  empty, too large, not bytes
    │   ├── InvalidSetting               an option, URL or environment variable
    │   ├── InvalidPartition             a partition or key that the topic cannot take
    │   ├── ExtendNotSupported           headers or a tag for a topic without extend support
    │   └── DelayNotSupported            a delayed publish to the redesigned server
    ├── InvalidState                     used before it was opened, or after it was closed
    ├── ProtocolError                    the peer's bytes are not NSQ
    ├── ConnectionFailed                 no connection to a node
    │   └── NegotiationFailed            TLS or compression that the node does not offer, or that fails
    ├── ConnectionLost                   a connection that broke
    │   ├── HeartbeatMissed              a peer that fell silent
    │   └── NotSent                      a connection that broke before the request could have any effect
    ├── LookupFailed                     no lookup address gave a usable answer
    ├── TopicNotFound                    lookup works and does not know the topic
    ├── PartitionUnavailable             a partition without a reachable leader
    ├── PublishFailed                    not stored, although it was tried to the end
    │   └── BatchFailed                  some of many messages were not stored, or nobody knows
    ├── DeliveryUnknown                  sent, and nobody knows whether it was stored
    ├── MessageNotInFlight               finish, requeue or touch of a message that is no longer ours
    ├── OrderViolation                   an ordered partition went backwards
    ├── DataLoss                         messages that should have been read are gone
    ├── RangeIncomplete                  a range of messages that could not be read to its end in time
    └── ServerError                      an error frame; one class per error code, in `nsqext.errors.server`

Retries are driven by the class flags, never by the text of an error.
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
    "HeartbeatMissed",
    "InvalidBody",
    "InvalidHeader",
    "InvalidInput",
    "InvalidName",
    "InvalidPartition",
    "InvalidSetting",
    "InvalidState",
    "LookupFailed",
    "MessageNotInFlight",
    "NegotiationFailed",
    "NotSent",
    "NsqError",
    "OrderViolation",
    "PartitionUnavailable",
    "ProtocolError",
    "PublishFailed",
    "RangeIncomplete",
    "ServerError",
    "TopicNotFound",
)


class NsqError(Exception):
    """Base of every error of this package.

    Args:
        message: what happened.
        topic: the topic concerned, where there is one.
        partition: its partition.
        node: ``host:port`` of the node that was spoken to.
        hint: what to do about it.
    """

    retryable: ClassVar[bool] = False
    """The same request may succeed when it is tried again."""
    refresh_lookup: ClassVar[bool] = False
    """The routing that led here is stale, and lookup is asked before the next try."""
    overload: ClassVar[bool] = False
    """The server has too much to do, and the next try waits."""
    closes_connection: ClassVar[bool] = False
    """The server closes the connection after it."""
    maybe_stored: ClassVar[bool] = False
    """A publish that ended so may have been stored all the same."""

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
        self.attempts: tuple[NsqError, ...] = ()
        """The errors of the tries before this one, oldest first."""

    def __str__(self) -> str:
        where = ", ".join(
            f"{name} {value}"
            for name, value in (("topic", self.topic), ("partition", self.partition), ("node", self.node))
            if value is not None
        )
        text = f"{self.message} ({where})" if where else self.message
        text = f"{text}: {self.hint}" if self.hint else text
        return f"{text} [after {len(self.attempts)} earlier attempts]" if self.attempts else text

    def at(self, *, topic: str | None = None, partition: int | None = None, node: str | None = None) -> NsqError:
        """Fill in where it happened, keeping what is known already; returns the error itself."""
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
    """What the caller gave cannot be right; nothing was sent."""

    index: int | None = None
    """Which of many messages it is, counted from 0, where there are many."""


class InvalidName(InvalidInput):
    """A topic, channel or tag whose name NSQ does not allow."""


class InvalidHeader(InvalidInput):
    """Extend headers with a bad name, a bad value, a reserved name, or too many bytes."""


class InvalidBody(InvalidInput):
    """A message body that is empty, too large, or not bytes."""


class InvalidSetting(InvalidInput):
    """An option that is unknown, out of range, or contradicts another one."""


class InvalidPartition(InvalidInput):
    """A partition that the topic does not have, or a key for a topic whose partitions cannot be counted."""


class ExtendNotSupported(InvalidInput):
    """Headers or a tag for a topic that was not created with extend support."""


class DelayNotSupported(InvalidInput):
    """A delayed publish to a server of the redesigned generation, which has no command for it."""


class InvalidState(NsqError):
    """The object is not open (any more)."""


class ProtocolError(NsqError):
    """The peer sent bytes that are not the NSQ protocol; the connection is of no use any more."""

    closes_connection = True


class ConnectionFailed(NsqError):
    """No connection to a node could be made."""

    retryable = True
    refresh_lookup = True


class NegotiationFailed(ConnectionFailed):
    """TLS or compression was asked for, and the node does not offer it, or it failed; trying again would not help."""

    retryable = False
    refresh_lookup = False


class ConnectionLost(NsqError):
    """A connection broke while it was needed."""

    retryable = True
    refresh_lookup = True
    closes_connection = True


class HeartbeatMissed(ConnectionLost):
    """The peer was silent for longer than its heartbeats allow."""


class NotSent(ConnectionLost):
    """A connection broke, and the server did not look at the request: trying again cannot store anything twice."""


class LookupFailed(NsqError):
    """No lookup address gave a usable answer."""

    retryable = True


class TopicNotFound(NsqError):
    """The lookup service answers, and does not know the topic (or the topic has no channel yet)."""

    retryable = True
    refresh_lookup = True


class PartitionUnavailable(NsqError):
    """A partition has no leader that can be reached at the moment."""

    retryable = True
    refresh_lookup = True


class PublishFailed(NsqError):
    """A publish was not stored, and the time or the attempts for it are used up; see ``attempts`` and ``__cause__``."""


class BatchFailed(PublishFailed):
    """Not all messages of a batch were stored.

    Attributes:
        outcomes: for each message, in order, its `Receipt` or the error that it ended with; `DeliveryUnknown` among
            them where a message may be stored.
    """

    def __init__(self, outcomes: Sequence[Receipt | NsqError], **where: Any) -> None:
        self.outcomes: tuple[Receipt | NsqError, ...] = tuple(outcomes)
        failed = [outcome for outcome in self.outcomes if isinstance(outcome, NsqError)]
        first = str(failed[0]) if failed else "no reason"
        super().__init__(f"{len(failed)} of {len(self.outcomes)} messages failed, first: {first}", **where)


class DeliveryUnknown(NsqError):
    """A publish was sent and its answer never came: it may be stored, or not.

    Publishing again may store it twice.
    """

    maybe_stored = True


class MessageNotInFlight(NsqError):
    """A message was finished, requeued or touched which does not belong to this consumer any more."""


class OrderViolation(NsqError):
    """An ordered partition delivered a message from before the last one."""


class DataLoss(NsqError):
    """Messages that should have been read are not kept any more, or a partition holds less than was read of it."""


class RangeIncomplete(NsqError):
    """A range of messages could not be read to its end within the time; reading it again may succeed."""

    retryable = True


class ServerError(NsqError):
    """An error frame of a server.

    Attributes:
        code: first word of the frame, for example ``E_FAILED_ON_NOT_LEADER``.
        description: the rest of it; often empty.
    """

    code: str = ""

    def __init__(self, code: str, description: str = "", **where: Any) -> None:
        super().__init__(f"{code} {description}".rstrip(), **where)
        self.args: tuple[Any, ...] = (code, description)
        self.code = code
        self.description = description
