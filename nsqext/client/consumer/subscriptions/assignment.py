"""What the subscribers of a consumer share, and the state of each partition, which outlives its subscriptions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
from attrs import define, field, frozen

from nsqext.types import Address

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqext.client.consumer.message import Message
    from nsqext.client.consumer.options import ConsumerOptions
    from nsqext.client.consumer.position import Position
    from nsqext.client.consumer.subscriptions.subscription import Subscription
    from nsqext.client.consumer.subscriptions.subscription_group import SubscriptionGroup
    from nsqext.client.events import ClientEvents
    from nsqext.client.tasks import BackgroundTasks
    from nsqext.lookup.metadata import MetadataCache

Key = int | Address
"""A partition; on the original NSQ, which has no partitions, the address of a node."""


@frozen(eq=False)
class SubscriberContext:
    """What all subscribers of a consumer share.

    Attributes:
        channel: name of the channel.
        options: the consumer's options.
        group: the open subscriptions.
        metadata: where topics and the leaders of partitions are looked up.
        deliver: called with the messages of each read.
        forget: called with the subscription of a bucket that ended: its messages are redelivered to the next owner.
        events: receives connections that open and end, and leaders that move.
        tasks: where the tasks of topics and partitions run.
    """

    channel: str
    options: ConsumerOptions
    group: SubscriptionGroup
    metadata: MetadataCache
    deliver: Callable[[list[Message]], None]
    forget: Callable[[Subscription], None]
    events: ClientEvents
    tasks: BackgroundTasks

    def wants(self, key: Key) -> bool:
        """Return whether a partition is consumed."""
        chosen = self.options.partitions
        return chosen is None or key in chosen


@define(eq=False)
class Assignment:
    """A partition that the consumer consumes, or a node of the original NSQ.

    Attributes:
        key: the partition or the node.
        pending: position to move the channel to as soon as possible.
        moved: set when no move is pending, or a move will never be possible.
        start_applied: whether the start position of the options was applied.
        opened: number of successful subscriptions.
        ended_at: end of the last subscription, in seconds of the monotonic clock.
        warned_at: time of the last logged failure.
        unreported: number of failures since then that were not logged.
        last: its last subscription that was opened.
    """

    key: Key
    pending: Position | None = None
    moved: anyio.Event = field(factory=lambda: anyio.Event())
    start_applied: bool = False
    opened: int = 0
    ended_at: float = 0.0
    warned_at: float = float("-inf")
    unreported: int = 0
    last: Subscription | None = None

    @property
    def partition(self) -> int:
        """The number of the partition; -1 for a node of the original NSQ."""
        return self.key if isinstance(self.key, int) else -1

    def __str__(self) -> str:
        return f"partition {self.key}" if isinstance(self.key, int) else str(self.key)
