"""What one subscription asks for: which command, and which IDENTIFY."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from nsqext.protocol.identify import IdentifyRequest

if TYPE_CHECKING:
    from nsqext.client.consumer_options import ConsumerOptions
    from nsqext.types import Address, TopicMeta

__all__ = ("SubscriptionPlan",)


@frozen
class SubscriptionPlan:
    """What to subscribe to, and how.

    Attributes:
        topic: name of the topic.
        channel: name of the channel.
        partition: the partition; -1 at the original NSQ.
        address: the node that leads it.
        meta: the topic's meta; decides extend support and order.
        tag: tag that is wanted.
        options: the consumer's options.
    """

    topic: str
    channel: str
    partition: int
    address: Address
    meta: TopicMeta
    tag: str | None
    options: ConsumerOptions

    @property
    def ordered(self) -> bool:
        """Whether to subscribe in order."""
        return self.meta.ordered if self.options.ordered is None else self.options.ordered

    @property
    def verb(self) -> str:
        """The subscribe command that fits (smart client note, ordered consumption)."""
        if self.ordered:
            return "SUB_ORDERED"
        return "SUB_ADVANCED" if self.options.queue_position and self.partition >= 0 else "SUB"

    def identify(self) -> IdentifyRequest:
        """Return what to tell the server.

        Extend support has to follow the topic (captured: sub_ext_need, sub_ext_forbidden).
        """
        extend = self.meta.extend_support
        return IdentifyRequest(
            msg_timeout=self.options.msg_timeout,
            sample_rate=self.options.sample_rate,
            extend_support=extend,
            desired_tag=self.tag if extend else None,
            ext_filter=self.options.ext_filter if extend else None,
        )

    def fits(self, meta: TopicMeta) -> bool:
        """Return whether a subscription that was made so is right for a topic with another meta."""
        return self.meta.extend_support == meta.extend_support and self.meta.ordered == meta.ordered
