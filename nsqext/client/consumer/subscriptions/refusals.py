"""Which errors end a consumer, and which ones time or another look at lookup heals."""

from __future__ import annotations

from nsqext.errors import InvalidInput, NsqError
from nsqext.errors.server import (
    AuthFailed,
    AuthRequired,
    BadChannel,
    BadPartition,
    BadTopic,
    ChannelNotRegistered,
    ExtendForbidden,
    ExtendRequired,
    IdentifyFailed,
    InvalidCommand,
    NotLeader,
    OrderRequired,
    TopicNotExist,
    Unauthorized,
)

__all__ = ("heals_itself", "is_fatal", "is_refused")

_FATAL = (AuthRequired, BadChannel, BadTopic, ChannelNotRegistered, InvalidInput, Unauthorized)
_FATAL_AT_FIRST = (AuthFailed, BadPartition, IdentifyFailed, InvalidCommand)
"""Settings that the server does not take; once they were taken, the server is to blame, and it is tried again."""
_REFUSED = (NotLeader, TopicNotExist)
_SELF_HEALING = (ExtendForbidden, ExtendRequired, OrderRequired)


def is_fatal(error: NsqError, *, opened: bool) -> bool:
    """Return whether no further try makes sense.

    Args:
        error: why a subscription ended.
        opened: a subscription to this place worked once.
    """
    return isinstance(error, _FATAL if opened else _FATAL + _FATAL_AT_FIRST)


def is_refused(error: NsqError | None) -> bool:
    """Return whether a node says that it does not lead the partition, so that lookup's answer is in doubt."""
    return isinstance(error, _REFUSED)


def heals_itself(error: NsqError | None) -> bool:
    """Return whether the topic is not what lookup said, which the next look at lookup mends without a pause."""
    return isinstance(error, _SELF_HEALING)
