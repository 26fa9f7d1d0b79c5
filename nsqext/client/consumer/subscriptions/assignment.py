"""State of each partition, which outlives its subscriptions, and objects that all subscribers share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import anyio
from attrs import define, field, frozen

from nsqext.types import Address

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message
    from nsqext.client.consumer.options import ConsumerOptions
    from nsqext.client.consumer.position import Position
    from nsqext.client.consumer.subscriptions.subscription import Subscription
    from nsqext.client.consumer.subscriptions.subscription_group import SubscriptionGroup
    from nsqext.client.events import ClientEvents
    from nsqext.client.tasks import BackgroundTasks
    from nsqext.errors import NsqError
    from nsqext.lookup.metadata import MetadataCache

STABLE: Final = 5.0
"""Seconds after which a subscription is stable, so that the next failure starts with a short pause."""

Key = int | Address
"""A partition; on the original NSQ the address of a node."""


class MessageReceiver(Protocol):
    """Receives the messages of all subscriptions."""

    def receive(self, messages: list[Message]) -> None:
        """Queue the messages of a read."""

    def forget(self, subscription: Subscription) -> None:
        """Forget the messages of a key bucket whose subscription ended, or of a topic that was left."""


@frozen(eq=False)
class SubscriberContext:
    """What all subscribers of a consumer share."""

    channel: str
    group: SubscriptionGroup
    receiver: MessageReceiver

    @property
    def options(self) -> ConsumerOptions:
        return self.group.options

    @property
    def metadata(self) -> MetadataCache:
        return self.group.metadata

    @property
    def events(self) -> ClientEvents:
        return self.group.events

    @property
    def tasks(self) -> BackgroundTasks:
        return self.group.tasks

    def wants(self, key: Key) -> bool:
        """Return whether a partition is consumed."""
        chosen = self.options.partitions
        return chosen is None or key in chosen

    def forget(self, assignment: Assignment) -> None:
        """Forget the lost messages of a partition that is not consumed any more: their order does not count."""
        if assignment.last is not None:
            self.receiver.forget(assignment.last)


@define(eq=False)
class Assignment:
    """A consumed partition, or a node of the original NSQ."""

    key: Key
    pending: Position | None = field(default=None, init=False)  #: to move the channel to as soon as possible
    #: no move is pending or possible
    moved: anyio.Event = field(factory=lambda: anyio.Event(), init=False)
    #: if ``pending`` is the start position, `opened` when it was chosen
    started_at: int | None = field(default=None, init=False)
    opened: int = field(default=0, init=False)  #: number of successful subscriptions
    ended_at: float = field(default=0.0, init=False)  #: end of the last subscription (monotonic seconds)
    warned_at: float = field(default=float("-inf"), init=False)  #: time of the last logged failure
    refused: bool = field(default=False, init=False)  #: whether that failure is a refusal, not an outage
    opened_at: float = field(default=0.0, init=False)  #: when its last subscription was opened (monotonic seconds)
    blocked: NsqError | None = field(default=None, init=False)  #: error of a message that blocks it; see `is_stable`
    unreported: int = field(default=0, init=False)  #: failures since then that were not logged
    last: Subscription | None = field(default=None, init=False)  #: its last open subscription

    @property
    def partition(self) -> int | None:
        """None for a node of the original NSQ."""
        return self.key if isinstance(self.key, int) else None

    def is_stable(self, now: float) -> bool:
        """Return whether the partition has been subscribed for some seconds."""
        return self.opened_at > self.ended_at and now - self.opened_at > STABLE

    def __str__(self) -> str:
        return f"partition {self.key}" if isinstance(self.key, int) else str(self.key)
