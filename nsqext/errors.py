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
    └── ServerError                      an error frame; one class for each code, see `nsqext.errors.SERVER_ERRORS`

Retries are driven by the class flags, never by the text of an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from nsqext.types import Receipt

__all__ = (
    "SERVER_ERRORS",
    "AuthDisabled",
    "AuthFailed",
    "AuthRequired",
    "BadBody",
    "BadChannel",
    "BadMessage",
    "BadPartition",
    "BadProtocol",
    "BadTag",
    "BadTopic",
    "BatchFailed",
    "ChannelNotRegistered",
    "ConnectionFailed",
    "ConnectionLost",
    "CreateTopicFailed",
    "DataLoss",
    "DelayNotSupported",
    "DeliveryUnknown",
    "ExtendForbidden",
    "ExtendNotSupported",
    "ExtendRefused",
    "ExtendRequired",
    "FinishFailed",
    "HeartbeatMissed",
    "IdentifyFailed",
    "InvalidBody",
    "InvalidCommand",
    "InvalidHeader",
    "InvalidInput",
    "InvalidJsonHeader",
    "InvalidName",
    "InvalidPartition",
    "InvalidSetting",
    "InvalidState",
    "InvalidTraceId",
    "LookupFailed",
    "MessageNotInFlight",
    "NegotiationFailed",
    "NotLeader",
    "NotSent",
    "NotWritable",
    "NsqError",
    "OrderRequired",
    "OrderViolation",
    "PartitionUnavailable",
    "ProtocolError",
    "PubFailed",
    "PublishFailed",
    "RangeIncomplete",
    "RequeueFailed",
    "ServerError",
    "SubscribeFailed",
    "TooManyConnections",
    "TooMuchWaiting",
    "TopicNotExist",
    "TopicNotFound",
    "TouchFailed",
    "Unauthorized",
    "server_error",
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


class InvalidCommand(ServerError):
    """The server does not take this command, or not now, or not with these words (E_INVALID, E_BAD_EXT)."""

    closes_connection = True


class BadProtocol(ServerError):
    """The server does not know the protocol magic (E_BAD_PROTOCOL)."""

    closes_connection = True


class BadTopic(ServerError):
    """The server refuses the topic name (E_BAD_TOPIC)."""

    closes_connection = True


class BadChannel(ServerError):
    """The server refuses the channel name (E_BAD_CHANNEL)."""

    closes_connection = True


class BadPartition(ServerError):
    """The server refuses the partition (E_BAD_PARTITION, E_BAD_PARTITIONID)."""

    closes_connection = True


class BadBody(ServerError):
    """The server refuses the size or the framing of a body (E_BAD_BODY)."""

    closes_connection = True


class BadMessage(ServerError):
    """The server refuses a message (E_BAD_MESSAGE), because of its size most often."""

    closes_connection = True


class BadTag(ServerError):
    """The server refuses a tag (E_BAD_TAG, E_TAG_NOT_SUPPORT)."""

    closes_connection = True


class PubFailed(ServerError):
    """The server could not store a publish, or not on every replica (E_PUB_FAILED, E_MPUB_FAILED, E_DPUB_FAILED)."""

    retryable = True
    maybe_stored = True


class TooMuchWaiting(ServerError):
    """The server has too many publishes waiting (E_PUB_TOO_MUCH_WAITING); nothing was stored."""

    retryable = True
    overload = True
    closes_connection = True


class TooManyConnections(ServerError):
    """The server takes no more connections ("too much client connections")."""

    retryable = True
    overload = True
    closes_connection = True


class NotLeader(ServerError):
    """The node does not lead the partition (E_FAILED_ON_NOT_LEADER)."""

    retryable = True
    refresh_lookup = True


class NotWritable(ServerError):
    """The partition's leader cannot be written to (E_FAILED_ON_NOT_WRITABLE); some replicas may have stored it."""

    retryable = True
    refresh_lookup = True
    overload = True
    maybe_stored = True


class TopicNotExist(ServerError):
    """The node does not hold the topic or the partition (E_TOPIC_NOT_EXIST)."""

    retryable = True
    refresh_lookup = True
    closes_connection = True


class ExtendRefused(ServerError):
    """The topic takes no extend headers (E_EXT_NOT_SUPPORT)."""


class InvalidJsonHeader(ServerError):
    """The server cannot read the extend header (E_INVALID_JSON_HEADER)."""


class InvalidTraceId(ServerError):
    """The server cannot read ``##trace_id`` (INVALID_TRACE_ID)."""


class OrderRequired(ServerError):
    """The topic is ordered and takes only SUB_ORDERED (E_SUB_ORDER_IS_MUST)."""

    refresh_lookup = True
    retryable = True
    closes_connection = True


class ExtendRequired(ServerError):
    """The topic is extended and the consumer did not say that it can read that (E_SUB_EXTEND_NEED)."""

    refresh_lookup = True
    retryable = True
    closes_connection = True


class ExtendForbidden(ServerError):
    """The topic is not extended and the consumer said that it is (E_SUB_EXTEND_FORBIDDON, the server's spelling)."""

    refresh_lookup = True
    retryable = True
    closes_connection = True


class ChannelNotRegistered(ServerError):
    """The topic takes registered channels only (E_SUB_CHANNEL_NOT_REGISTERED)."""

    closes_connection = True


class SubscribeFailed(ServerError):
    """The topic or channel went away, or has too many consumers (E_SUB_FAILED of the original NSQ)."""

    retryable = True
    closes_connection = True


class FinishFailed(ServerError):
    """FIN of a message that is not in flight at this connection (E_FIN_FAILED)."""


class RequeueFailed(ServerError):
    """REQ of a message that is not in flight at this connection (E_REQ_FAILED)."""


class TouchFailed(ServerError):
    """TOUCH of a message that is not in flight at this connection (E_TOUCH_FAILED)."""


class IdentifyFailed(ServerError):
    """The server refuses what IDENTIFY asked for (E_IDENTIFY_FAILED)."""

    closes_connection = True


class AuthRequired(ServerError):
    """AUTH has to come first (E_AUTH_FIRST)."""

    closes_connection = True


class AuthFailed(ServerError):
    """The server could not check or does not accept the secret (E_AUTH_FAILED, E_AUTH_ERROR)."""

    closes_connection = True


class AuthDisabled(ServerError):
    """The server does no authentication (E_AUTH_DISABLED)."""

    closes_connection = True


class Unauthorized(ServerError):
    """The identity lacks the permission (E_UNAUTHORIZED)."""

    closes_connection = True


class CreateTopicFailed(ServerError):
    """INTERNAL_CREATE_TOPIC is refused (E_CREATE_TOPIC_FAILED)."""


SERVER_ERRORS: dict[str, type[ServerError]] = {
    "E_INVALID": InvalidCommand,
    "E_BAD_EXT": InvalidCommand,
    "E_BAD_PROTOCOL": BadProtocol,
    "E_BAD_TOPIC": BadTopic,
    "E_BAD_CHANNEL": BadChannel,
    "E_BAD_PARTITION": BadPartition,
    "E_BAD_PARTITIONID": BadPartition,
    "E_BAD_BODY": BadBody,
    "E_BAD_MESSAGE": BadMessage,
    "E_BAD_TAG": BadTag,
    "E_TAG_NOT_SUPPORT": BadTag,
    "E_PUB_FAILED": PubFailed,
    "E_MPUB_FAILED": PubFailed,
    "E_DPUB_FAILED": PubFailed,
    "E_PUB_TOO_MUCH_WAITING": TooMuchWaiting,
    "E_FAILED_ON_NOT_LEADER": NotLeader,
    "E_FAILED_ON_NOT_WRITABLE": NotWritable,
    "E_TOPIC_NOT_EXIST": TopicNotExist,
    "E_EXT_NOT_SUPPORT": ExtendRefused,
    "E_INVALID_JSON_HEADER": InvalidJsonHeader,
    "INVALID_TRACE_ID": InvalidTraceId,
    "E_SUB_ORDER_IS_MUST": OrderRequired,
    "E_SUB_EXTEND_NEED": ExtendRequired,
    "E_SUB_EXTEND_FORBIDDON": ExtendForbidden,
    "E_SUB_CHANNEL_NOT_REGISTERED": ChannelNotRegistered,
    "E_SUB_FAILED": SubscribeFailed,
    "E_FIN_FAILED": FinishFailed,
    "E_REQ_FAILED": RequeueFailed,
    "E_TOUCH_FAILED": TouchFailed,
    "E_IDENTIFY_FAILED": IdentifyFailed,
    "E_AUTH_FIRST": AuthRequired,
    "E_AUTH_FAILED": AuthFailed,
    "E_AUTH_ERROR": AuthFailed,
    "E_AUTH_DISABLED": AuthDisabled,
    "E_UNAUTHORIZED": Unauthorized,
    "E_CREATE_TOPIC_FAILED": CreateTopicFailed,
}
"""Error code to class; a code that is not listed becomes a plain `ServerError`."""

_TOO_MANY = "too much client connections"


def server_error(frame: bytes, *, node: str | None = None) -> ServerError:
    """Make the error for the data of an error frame.

    Only the first word is looked at: descriptions may be empty, and leave a trailing space (captured behaviour).
    Unknown codes, empty frames and bytes that are not UTF-8 become a plain `ServerError`.
    """
    text = frame.decode("utf-8", "backslashreplace")
    if text.startswith(_TOO_MANY):
        return TooManyConnections(text, node=node)
    code, _, description = text.partition(" ")
    return SERVER_ERRORS.get(code, ServerError)(code, description.strip(), node=node)
