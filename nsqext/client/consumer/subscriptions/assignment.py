"""What a consumer consumes, the places that it is found at, and who is told what happens."""

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
    from nsqext.errors import NsqError

__all__ = ("Assignment", "Key", "Listener", "SubscriptionSpec")

Key = int | Address


@frozen
class SubscriptionSpec:
    """What a consumer consumes.

    Attributes:
        topic: name of the topic.
        channel: name of the channel.
        tag: tag that is wanted.
        options: the consumer's options.
    """

    topic: str
    channel: str
    tag: str | None
    options: ConsumerOptions

    def wants(self, key: Key) -> bool:
        """Return whether a partition is to be consumed."""
        chosen = self.options.partitions
        return chosen is None or key in chosen


@frozen
class Listener:
    """Whom the keeper tells.

    Attributes:
        arrived: takes messages.
        failed: told when nothing further makes sense.
        ticked: called a few times a second with the time, and the seconds by which this came too late; returns whether
            more may be in flight than before.
    """

    arrived: Callable[[list[Message]], None]
    failed: Callable[[NsqError], None]
    ticked: Callable[[float, float], bool]


@define(eq=False)
class Assignment:
    """A partition, or a node of the original NSQ.

    Attributes:
        key: which one.
        pending: where its channel has to be moved to.
        fresh: the start position was not seen to yet.
        moved: set when the channel was moved, or will never be.
        opened: a subscription worked once.
    """

    key: Key
    pending: Position | None = None
    fresh: bool = True
    moved: anyio.Event = field(factory=anyio.Event)
    opened: bool = False

    @property
    def partition(self) -> int:
        """Its number; -1 for a node of the original NSQ."""
        return self.key if isinstance(self.key, int) else -1
