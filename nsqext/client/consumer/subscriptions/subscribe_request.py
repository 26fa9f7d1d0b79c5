"""A request to subscribe to one partition: its command and its IDENTIFY."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, frozen

from nsqext.dispatch.buckets import KeySharing, shared_tag
from nsqext.errors import InvalidSetting
from nsqext.errors.server import InvalidCommand
from nsqext.protocol.headers import KEY_HEADER
from nsqext.protocol.identify import KEY_FAILOVER, SHARED, IdentifyRequest

if TYPE_CHECKING:
    from nsqext.client.consumer.options import ConsumerOptions
    from nsqext.errors import NsqError
    from nsqext.protocol.identify import Negotiated
    from nsqext.types import Address, TopicMeta

_UNBUFFERED = -1
_SHORTEST = 0.01
_SHORTEST_ORIGINAL = 0.025
"""Shortest timeouts of the output buffer that the redesigned and the original server accept, in seconds."""
_ALONE = "give one consumer key= instead of dispatch: its lanes keep the order on any server"


@frozen
class SubscribeRequest:
    """The partition and the channel to subscribe to, and how."""

    topic: str
    channel: str
    partition: int  # the partition; -1 at the original NSQ
    address: Address  # the node that leads it
    meta: TopicMeta  # the topic's meta; decides extend support and order
    tag: str | None  # the tag that messages must have; None without one
    options: ConsumerOptions
    # name of a consumer that shares keys by tags in the server's statistics, where the others find it
    client_id: str = ""
    key_tags: int = 0  # number of buckets by whose tags keys are shared; 0 if they are shared in another way, or not

    @property
    def key_sharing(self) -> KeySharing:
        """How the consumers of the channel share the keys of the partition."""
        if self.options.dispatch != KEY_FAILOVER:
            return KeySharing.NONE
        return KeySharing.TAGS if self.key_tags else KeySharing.SERVER

    @property
    def ordered(self) -> bool:
        """Whether to subscribe in order."""
        return self.meta.ordered if self.options.ordered is None else self.options.ordered

    @property
    def verb(self) -> str:
        """The subscribe command (smart client note, ordered consumption)."""
        if self.ordered:
            return "SUB_ORDERED"
        options = self.options
        # lanes restore the order of a partition by the offsets of its messages
        sorts = options.lanes is not None and self.key_sharing is not KeySharing.SERVER
        return "SUB_ADVANCED" if (options.queue_position or sorts) and self.partition >= 0 else "SUB"

    def identify(self) -> IdentifyRequest:
        """Return the body of IDENTIFY.

        Extend support must be that of the topic (captured: sub_ext_need, sub_ext_forbidden).
        """
        extend = self.meta.extend_support
        size, timeout = self._buffer()
        return IdentifyRequest(
            client_id=self.client_id if self.key_tags else "",
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
        if self.key_tags:
            return {"dispatch": SHARED}
        return {"dispatch": dispatch} | ({"key_header": key} if isinstance(key, str) else {})

    def supported_by(self, negotiated: Negotiated) -> SubscribeRequest:
        """Return the request that a server can serve: this one, or one by tags if it does not share keys itself.

        What the server answered decides, and nothing that was known before: so all consumers of a channel share a
        partition in the same way, also while servers are replaced by others. One that has key_failover lets no consumer
        subscribe in another way than the first. Raises InvalidSetting if keys cannot be shared here.
        """
        if self.key_sharing is KeySharing.TAGS:
            self._check_tags(negotiated)
        elif self.key_sharing is KeySharing.SERVER and negotiated.dispatch != KEY_FAILOVER:
            return self._by_tags(negotiated)
        return self

    def _by_tags(self, negotiated: Negotiated) -> SubscribeRequest:
        count = self.options.bucket_count
        if not count:
            chosen = [name for name in ("tag", "ext_filter") if getattr(self.options, name) is not None]
            given = chosen[0] if chosen else "key_tags=0"
            raise InvalidSetting(
                f"{_lacking(negotiated)}, and {given} leaves no tags to share the keys by",
                topic=self.topic,
                hint=f"leave out {given}, or {_ALONE}",
            )
        by_tags = evolve(self, key_tags=count, tag=shared_tag(count))
        by_tags._check_tags(negotiated)
        return by_tags

    def _check_tags(self, negotiated: Negotiated) -> None:
        lacks = _lacking(negotiated)
        if self.partition < 0:
            raise InvalidSetting(
                f"{lacks}, and key_tags needs a redesigned NSQ with lookup: the original has no tags, and nsqd= tells "
                "no partitions",
                topic=self.topic,
                hint=_ALONE,
            )
        if not self.meta.extend_support:
            raise InvalidSetting(
                f"{lacks}, and the topic does not support extend headers, which key_tags needs",
                topic=self.topic,
                hint="create it with extend, or upgrade it: Admin.upgrade_topic",
            )
        key = self.options.key
        if isinstance(key, str) and key != KEY_HEADER:
            raise InvalidSetting(
                f"{lacks}, and tags cannot share the keys of the header {key!r}: they are those of publish(key=...)",
                topic=self.topic,
                hint=f"leave out key={key!r} and publish with key=, or {_ALONE}",
            )
        if negotiated.dispatch and self.options.key_tags is None:
            raise InvalidSetting("the server supports dispatch by key_failover now", topic=self.topic)

    def explain(self, error: NsqError) -> NsqError:
        """Return the error of a subscription: `InvalidSetting`, not retried, if the channel is of another type."""
        if isinstance(error, InvalidCommand) and "is dispatched by" in str(error):
            return InvalidSetting(error.message, hint="set dispatch to the type of the channel, or to None")
        return error

    def fits(self, meta: TopicMeta) -> bool:
        """Return whether a topic with this meta can be consumed by this subscription."""
        return self.meta.extend_support == meta.extend_support and self.meta.ordered == meta.ordered


def _lacking(negotiated: Negotiated) -> str:
    """Return why an error demands something of a consumer that shares keys by tags."""
    if negotiated.dispatch:
        return "keys are shared by tags"
    return f"the server (version {negotiated.version or 'unknown'}) does not support dispatch by key_failover"
