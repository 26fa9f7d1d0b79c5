"""A request to subscribe to one partition: its command and its IDENTIFY."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from nsqext.errors import InvalidSetting
from nsqext.errors.server import InvalidCommand
from nsqext.protocol.identify import KEY_FAILOVER, SHARED, IdentifyRequest

if TYPE_CHECKING:
    from nsqext.client.consumer.options import ConsumerOptions
    from nsqext.errors import NsqError
    from nsqext.protocol.identify import Negotiated
    from nsqext.types import Address, TopicMeta

__all__ = ("SubscribeRequest",)

_UNBUFFERED = -1
_SHORTEST = 0.01
_SHORTEST_ORIGINAL = 0.025
"""Shortest timeouts of the output buffer that the redesigned and the original server accept, in seconds."""


@frozen
class SubscribeRequest:
    """The partition and the channel to subscribe to, and how.

    Attributes:
        topic: name of the topic.
        channel: name of the channel.
        partition: the partition; -1 at the original NSQ.
        address: the node that leads it.
        meta: the topic's meta; decides extend support and order.
        tag: the tag that messages must have; None without one.
        options: the consumer's options.
        client_id: name of the consumer in the server's statistics; empty for that of the process.
    """

    topic: str
    channel: str
    partition: int
    address: Address
    meta: TopicMeta
    tag: str | None
    options: ConsumerOptions
    client_id: str = ""

    @property
    def ordered(self) -> bool:
        """Whether to subscribe in order."""
        return self.meta.ordered if self.options.ordered is None else self.options.ordered

    @property
    def verb(self) -> str:
        """The subscribe command (smart client note, ordered consumption)."""
        if self.ordered:
            return "SUB_ORDERED"
        return "SUB_ADVANCED" if self.options.reports_position and self.partition >= 0 else "SUB"

    def identify(self) -> IdentifyRequest:
        """Return the body of IDENTIFY.

        Extend support must be that of the topic (captured: sub_ext_need, sub_ext_forbidden).
        """
        extend = self.meta.extend_support
        size, timeout = self._buffer()
        return IdentifyRequest(
            client_id=self.client_id,
            msg_timeout=self.options.msg_timeout,
            sample_rate=self.options.sample_rate,
            output_buffer_size=size,
            output_buffer_timeout=timeout,
            extend_support=extend,
            desired_tag=self.tag if extend else None,
            ext_filter=self.options.ext_filter if extend else None,
            extra=self._dispatch(),
        )

    def _buffer(self) -> tuple[int | None, float | None]:
        """Return size and timeout of the server's output buffer.

        Without a partition the node may be of either generation, and the original refuses a shorter timeout.
        """
        options, connection = self.options, self.options.connection
        timeout = options.output_buffer_timeout
        if timeout is None:
            return options.output_buffer_size, None
        if not timeout and not connection.snappy and not connection.deflate_level:
            return _UNBUFFERED, None
        # with compression only the timer flushes, however small the buffer is
        return options.output_buffer_size, max(timeout, _SHORTEST if self.partition >= 0 else _SHORTEST_ORIGINAL)

    def _dispatch(self) -> dict[str, str]:
        dispatch, key = self.options.dispatch, self.options.key
        if dispatch is None:
            return {}
        if self.options.key_tags:
            return {"dispatch": SHARED}
        return {"dispatch": dispatch} | ({"key_header": key} if isinstance(key, str) else {})

    def check(self, negotiated: Negotiated) -> None:
        """Check what the server granted.

        Raises:
            InvalidSetting: the server does not support the dispatch type, or the topic no tags.
        """
        if self.options.key_tags:
            self._check_tags()
            return
        if self.options.dispatch == KEY_FAILOVER and negotiated.dispatch != KEY_FAILOVER:
            raise InvalidSetting(
                f"the server (version {negotiated.version or 'unknown'}) does not support dispatch by key_failover",
                hint="give producers and consumers key_tags=16: tags divide the keys, on topics with extend support "
                "of the redesigned NSQ; or one consumer key= instead: its lanes keep the order on any server",
            )

    def _check_tags(self) -> None:
        if self.partition < 0:
            raise InvalidSetting(
                "key_tags needs a redesigned NSQ with lookup: the original has no tags, and nsqd= tells no partitions",
                topic=self.topic,
                hint="give one consumer key= instead of dispatch: its lanes keep the order on any server",
            )
        if not self.meta.extend_support:
            raise InvalidSetting(
                "the topic does not support extend headers, which key_tags needs",
                topic=self.topic,
                hint="create it with extend, or upgrade it: Admin.upgrade_topic",
            )

    def explain(self, error: NsqError) -> NsqError:
        """Return the error of a subscription: `InvalidSetting`, not retried, if the channel is of another type."""
        if isinstance(error, InvalidCommand) and "is dispatched by" in str(error):
            return InvalidSetting(error.message, hint="set dispatch to the type of the channel, or to None")
        return error

    def fits(self, meta: TopicMeta) -> bool:
        """Return whether a topic with this meta can be consumed by this subscription."""
        return self.meta.extend_support == meta.extend_support and self.meta.ordered == meta.ordered
