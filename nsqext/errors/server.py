"""Error codes of the server: a class for each code, all of them `nsqext.errors.ServerError`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import ClassVar

from nsqext.errors import MAX_TEXT, ServerError, outside_text

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
    "ChannelNotRegistered",
    "CreateTopicFailed",
    "ExtendForbidden",
    "ExtendRefused",
    "ExtendRequired",
    "FinishFailed",
    "IdentifyFailed",
    "InvalidCommand",
    "InvalidJsonHeader",
    "InvalidTraceId",
    "LeaderLost",
    "NotLeader",
    "NotWritable",
    "OrderRequired",
    "PubFailed",
    "PubRefused",
    "RecordTooLarge",
    "RequeueFailed",
    "SubscribeFailed",
    "TooManyConnections",
    "TooMuchWaiting",
    "TopicNotExist",
    "TouchFailed",
    "Unauthorized",
    "server_error",
)


class InvalidCommand(ServerError, codes=("E_INVALID", "E_BAD_EXT"), closes_connection=True):
    """The command is unknown, not allowed in this state, or has invalid arguments (E_INVALID, E_BAD_EXT)."""


class BadProtocol(ServerError, codes=("E_BAD_PROTOCOL",), closes_connection=True):
    """The server does not know the protocol magic (E_BAD_PROTOCOL)."""


class BadTopic(ServerError, codes=("E_BAD_TOPIC",), closes_connection=True):
    """The server refuses the topic name (E_BAD_TOPIC)."""


class BadChannel(ServerError, codes=("E_BAD_CHANNEL",), closes_connection=True):
    """The server refuses the channel name (E_BAD_CHANNEL)."""


class BadPartition(ServerError, codes=("E_BAD_PARTITION", "E_BAD_PARTITIONID"), closes_connection=True):
    """The server refuses the partition (E_BAD_PARTITION, E_BAD_PARTITIONID)."""


class BadBody(ServerError, codes=("E_BAD_BODY",), closes_connection=True):
    """The server refuses the size or the format of a body (E_BAD_BODY)."""


class BadMessage(ServerError, codes=("E_BAD_MESSAGE",), closes_connection=True):
    """The server refuses a message, mostly because of its size (E_BAD_MESSAGE)."""


class BadTag(ServerError, codes=("E_BAD_TAG", "E_TAG_NOT_SUPPORT"), closes_connection=True):
    """The server refuses a tag (E_BAD_TAG, E_TAG_NOT_SUPPORT)."""


class PubFailed(ServerError, codes=("E_PUB_FAILED", "E_MPUB_FAILED", "E_DPUB_FAILED")):
    """The server could not store a publish, or not on every replica (E_PUB_FAILED, E_MPUB_FAILED, E_DPUB_FAILED)."""

    retryable = True
    maybe_stored = True


class PubRefused(PubFailed):
    """The server refused a publish before writing anything: it exits, or the publish waited too long in its queue."""

    maybe_stored = False


class RecordTooLarge(PubRefused):
    """A message is too large for the server's log, with its extend header ("invalid message write size").

    The redesigned server writes publishes of several clients together: the text may concern another client's message.
    """

    retryable = False
    advice: ClassVar[str | None] = (
        "send less, or raise -max-msg-size of the servers and max_message_size of this client"
    )

    @property
    def size(self) -> int:
        """Bytes of the refused record, without length word; 0 if unknown."""
        found = _RECORD_SIZE.search(self.description)
        return int(found[1]) if found else 0


class TooMuchWaiting(ServerError, codes=("E_PUB_TOO_MUCH_WAITING",), closes_connection=True):
    """Too many publishes wait at the server (E_PUB_TOO_MUCH_WAITING); nothing was stored."""

    retryable = True
    overload = True


class TooManyConnections(ServerError, closes_connection=True):
    """The server accepts no further connections ("too much client connections")."""

    retryable = True
    overload = True


class NotLeader(ServerError, codes=("E_FAILED_ON_NOT_LEADER",)):
    """The node does not lead the partition (E_FAILED_ON_NOT_LEADER)."""

    retryable = True
    refresh_lookup = True


class LeaderLost(NotLeader):
    """The node does not lead the partition after a publish of a single message (E_FAILED_ON_NOT_LEADER).

    The redesigned server checks batches before it writes them, but writes a single message first: a replica may have it
    when the node loses the lead meanwhile.
    """

    maybe_stored = True


class NotWritable(ServerError, codes=("E_FAILED_ON_NOT_WRITABLE",)):
    """The partition's leader cannot be written to (E_FAILED_ON_NOT_WRITABLE); some replicas may have stored it."""

    retryable = True
    refresh_lookup = True
    overload = True
    maybe_stored = True


class TopicNotExist(ServerError, codes=("E_TOPIC_NOT_EXIST",), closes_connection=True):
    """The node does not hold the topic or the partition (E_TOPIC_NOT_EXIST)."""

    retryable = True
    refresh_lookup = True


class ExtendRefused(ServerError, codes=("E_EXT_NOT_SUPPORT",)):
    """The topic does not support extend headers (E_EXT_NOT_SUPPORT)."""


class InvalidJsonHeader(ServerError, codes=("E_INVALID_JSON_HEADER",)):
    """The extend header is not valid JSON for the server (E_INVALID_JSON_HEADER)."""


class InvalidTraceId(ServerError, codes=("INVALID_TRACE_ID",)):
    """The header ``##trace_id`` is invalid (INVALID_TRACE_ID)."""


class OrderRequired(ServerError, codes=("E_SUB_ORDER_IS_MUST",), closes_connection=True):
    """The topic is ordered and requires SUB_ORDERED (E_SUB_ORDER_IS_MUST)."""

    refresh_lookup = True
    retryable = True


class ExtendRequired(ServerError, codes=("E_SUB_EXTEND_NEED",), closes_connection=True):
    """The topic supports extend headers and the consumer did not declare it (E_SUB_EXTEND_NEED)."""

    refresh_lookup = True
    retryable = True


class ExtendForbidden(ServerError, codes=("E_SUB_EXTEND_FORBIDDON",), closes_connection=True):
    """The topic has no extend support and the consumer declared it (E_SUB_EXTEND_FORBIDDON, the server's spelling)."""

    refresh_lookup = True
    retryable = True


class ChannelNotRegistered(ServerError, codes=("E_SUB_CHANNEL_NOT_REGISTERED",), closes_connection=True):
    """The topic requires registered channels (E_SUB_CHANNEL_NOT_REGISTERED)."""


class SubscribeFailed(ServerError, codes=("E_SUB_FAILED",), closes_connection=True):
    """The topic or channel was deleted, or has too many consumers (E_SUB_FAILED of the original NSQ)."""

    retryable = True


class FinishFailed(ServerError, codes=("E_FIN_FAILED",)):
    """FIN of a message that is not in flight at this connection (E_FIN_FAILED)."""


class RequeueFailed(ServerError, codes=("E_REQ_FAILED",)):
    """REQ of a message that is not in flight at this connection (E_REQ_FAILED)."""


class TouchFailed(ServerError, codes=("E_TOUCH_FAILED",)):
    """TOUCH of a message that is not in flight at this connection (E_TOUCH_FAILED)."""


class IdentifyFailed(ServerError, codes=("E_IDENTIFY_FAILED",), closes_connection=True):
    """The server refuses the settings of IDENTIFY (E_IDENTIFY_FAILED)."""


class AuthRequired(ServerError, codes=("E_AUTH_FIRST",), closes_connection=True):
    """AUTH is required before this command (E_AUTH_FIRST)."""


class AuthFailed(ServerError, codes=("E_AUTH_FAILED", "E_AUTH_ERROR"), closes_connection=True):
    """The server could not verify the secret, or refuses it (E_AUTH_FAILED, E_AUTH_ERROR)."""

    advice: ClassVar[str | None] = "check auth_secret, and the address after -auth-http-address of nsqd"


class AuthDisabled(ServerError, codes=("E_AUTH_DISABLED",), closes_connection=True):
    """The server has no authentication (E_AUTH_DISABLED)."""

    advice: ClassVar[str | None] = "remove auth_secret, or start nsqd with -auth-http-address"


class Unauthorized(ServerError, codes=("E_UNAUTHORIZED",), closes_connection=True):
    """The identity lacks the permission (E_UNAUTHORIZED)."""


class CreateTopicFailed(ServerError, codes=("E_CREATE_TOPIC_FAILED",)):
    """The server refuses INTERNAL_CREATE_TOPIC (E_CREATE_TOPIC_FAILED)."""


def _classes(kind: type[ServerError]) -> Iterator[type[ServerError]]:
    for derived in kind.__subclasses__():
        yield derived
        yield from _classes(derived)


SERVER_ERRORS: dict[str, type[ServerError]] = {code: kind for kind in _classes(ServerError) for code in kind.codes}
"""Error code to class; an unlisted code becomes a plain `ServerError`."""

_RECORD_SIZE = re.compile(r"invalid message write size \((\d{1,10})\)")
_REFUSED = re.compile(r"((M|D)?PUB failed )?exiting|pub to wait channel timeout|pub timeout while pop wait queue")
_TOO_MANY = "too much client connections"


def server_error(frame: bytes, *, node: str | None = None) -> ServerError:
    """Return the error for the data of an error frame; for an unknown code a plain `ServerError`.

    The first word decides the class: descriptions may be empty, and leave a trailing space (captured behaviour). Only
    texts of failed publishes show whether anything was written. The text is cut and escaped for ``attempts`` and logs.
    """
    text = outside_text(frame[:MAX_TEXT].decode("utf-8", "backslashreplace"))
    if len(frame) > MAX_TEXT:
        text = f"{text.removesuffix('…')}… ({len(frame)} bytes)"
    if text.startswith(_TOO_MANY):
        return TooManyConnections(text, node=node)
    code, _, description = text.partition(" ")
    description = description.strip()
    kind = SERVER_ERRORS.get(code, ServerError)
    if kind is PubFailed:
        if _RECORD_SIZE.search(description):
            kind = RecordTooLarge
        elif _REFUSED.fullmatch(description):
            kind = PubRefused
    return kind(code, description, node=node)
