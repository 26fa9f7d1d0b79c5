"""Warn of settings that have no effect on a topic, or on a channel with further consumers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from nsqext.errors import NsqError

if TYPE_CHECKING:
    from nsqext.client.consumer.options import ConsumerOptions, FailureOptions
    from nsqext.client.consumer.subscriptions.subscription import Subscription
    from nsqext.lookup.metadata import MetadataCache
    from nsqext.types import Address

logger: logging.Logger = logging.getLogger("nsqext.consumer")


def warn_of_all_messages(topic: str, options: ConsumerOptions) -> None:
    """Warn that a topic's messages are received whatever tag and filter say."""
    logger.warning(
        "the topic does not support tags and headers: %s has no effect, all messages are received",
        "ext_filter" if options.tag is None else "tag",
        extra={"topic": topic, "tag": options.tag},
    )


def warn_of_order(topic: str, options: FailureOptions) -> None:
    """Warn that failed messages of an ordered topic are not given up."""
    logger.warning(
        "the topic is ordered: max_attempts%s has no effect, a message that fails blocks its partition; set "
        "reject_ordered=True to skip it",
        " and dead_letter" * (options.dead_letter is not None),
        extra={"topic": topic},
    )


async def warn_of_others(metadata: MetadataCache, node: Address, subscription: Subscription) -> None:
    """Warn of other connections to the channel, which receive messages of the same keys.

    Args:
        node: HTTP address of the partition's leader.
    """
    topic, channel = subscription.topic, subscription.request.channel
    try:
        count = await metadata.channels.clients(node, topic, subscription.partition, channel)
    except NsqError as error:
        logger.debug("statistics of the channel: %s", error, extra={"topic": topic})
        return
    if count > 1:
        logger.warning(
            "%d further connections consume %s/%s: key= keeps the order of a key within this process only; use one "
            "consumer, an ordered topic, or dispatch='key_failover' on the redesigned NSQ",
            count - 1,
            topic,
            channel,
            extra={"topic": topic, "channel": channel},
        )
