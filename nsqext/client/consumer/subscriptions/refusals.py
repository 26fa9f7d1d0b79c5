"""What servers refuse: which errors end a topic, and which requirements contradict lookup."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from attrs import evolve

from nsqext.errors import (
    DataLoss,
    FrameTooLarge,
    InvalidInput,
    InvalidSetting,
    NegotiationFailed,
    NsqError,
    ProtocolError,
)
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

if TYPE_CHECKING:
    from collections.abc import Collection

    from nsqext.client.consumer.options import ConsumerOptions
    from nsqext.client.consumer.subscriptions.assignment import Key
    from nsqext.client.consumer.subscriptions.partition_reader import SubscribeRequest
    from nsqext.types import TopicMeta

logger: logging.Logger = logging.getLogger("nsqext.consumer")

_FATAL = (AuthRequired, BadChannel, BadTopic, ChannelNotRegistered, DataLoss, InvalidInput, Unauthorized)
# refused settings; if the server accepted them before, the client retries
_FATAL_AT_FIRST = (AuthFailed, BadPartition, IdentifyFailed, InvalidCommand)
# no nsqd, or no TLS or compression: fatal if no subscription ever succeeded
_MISCONFIGURED = (NegotiationFailed, ProtocolError)
NOT_LEADER = (NotLeader, TopicNotExist)
"""The node does not lead the partition, against the lookup service."""
STALE_META = (ExtendForbidden, ExtendRequired, OrderRequired)
"""The topic has changed since the last lookup; the next attempt needs no pause."""


def is_fatal(error: NsqError, *, opened: bool) -> bool:
    """Return whether an error is permanent; ``opened``: the partition was subscribed before."""
    return isinstance(error, _FATAL if opened else _FATAL + _FATAL_AT_FIRST)


class Refusals:
    """The refusals of a topic's servers, over all partitions."""

    def __init__(self, options: ConsumerOptions) -> None:
        self._options = options
        self._misconfigured: set[Key] | None = set()
        self._demands: dict[str, bool] = {}  # requirements of servers that contradict lookup
        self._listed: TopicMeta | None = None  # what they contradict

    def subscribed(self) -> None:
        """Note that a subscription succeeded: the settings of connections are right."""
        self._misconfigured = None

    def all_misconfigured(self, key: Key, error: NsqError, keys: Collection[Key]) -> bool:
        """Return whether every address is wrong or refuses the settings of connections, and no address ever worked.

        Args:
            key: partition or node of the error.
            error: why its subscription failed.
            keys: all partitions or nodes of the topic.
        """
        if self._misconfigured is None or not isinstance(error, _MISCONFIGURED):
            return False
        self._misconfigured.add(key)
        return self._misconfigured.issuperset(keys)

    def corrected(self, meta: TopicMeta) -> TopicMeta:
        """Return the topic's meta from lookup, corrected by servers' requirements until lookup reports another meta.

        A topic that was created again would keep the requirements of the one before: its channel would become ordered.
        """
        if meta != self._listed:
            self._listed = meta
            self._demands.clear()
        return evolve(meta, **self._demands)

    def heed(self, error: NsqError, request: SubscribeRequest) -> NsqError:
        """Follow the server's requirement, against lookup, with the next subscription; return the error."""
        if isinstance(error, FrameTooLarge):
            return FrameTooLarge(
                f"{error.message}: nothing behind this message is received",
                topic=request.topic,
                partition=request.partition,
                node=str(request.address),
                hint="raise the setting max_frame_size; until then the server sends the message again and again, and "
                "the consumer is not ready",
            )
        if isinstance(error, OrderRequired):
            if self._options.ordered is False:
                refused = InvalidSetting(
                    "the topic is ordered, and its server requires consumers in order",
                    topic=request.topic,
                    hint="leave out ordered=False",
                )
                refused.__cause__ = error
                return refused
            name, value = "ordered", True
        elif isinstance(error, (ExtendRequired, ExtendForbidden)):
            name, value = "extend_support", isinstance(error, ExtendRequired)
        else:
            return error
        if getattr(request.meta, name) != value and self._demands.get(name) != value:
            self._demands[name] = value
            logger.warning("the server requires what lookup does not report: %s", error, extra={"topic": request.topic})
        return error
