"""The owner of messages that are handled in lanes by key."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from nsqext.client.consumer.handlers.partition_order import PartitionOrder, is_lost

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqext.client.consumer.message import Message, Owner

__all__ = ("KeyLaneOwner", "owner_of")


class KeyLaneOwner:
    """The owner of messages in lanes: passes answers on to their subscription, but delays requeued messages itself.

    Args:
        owner: the subscription.
        order: of its partition.
        delay: keeps a requeued message in its lane for so many seconds.
    """

    __slots__ = (
        "_delay",
        "ignore_lost",
        "in_order",
        "max_msg_timeout",
        "moved",
        "msg_timeout",
        "node",
        "number",
        "order",
        "owner",
        "partition",
        "topic",
    )

    def __init__(self, owner: Owner, order: PartitionOrder, delay: Callable[[Message, float], None]) -> None:
        self.owner: Owner = owner
        self.order: PartitionOrder = order
        self.topic: str = owner.topic
        self.partition: int = owner.partition
        self.node: str = owner.node
        self.in_order: bool = owner.in_order
        self.moved: bool = owner.moved
        self.number: int = owner.number
        self.msg_timeout: float = owner.msg_timeout
        self.max_msg_timeout: float = owner.max_msg_timeout
        self.ignore_lost: bool = owner.ignore_lost
        self._delay = delay

    @property
    def horizon(self) -> float:
        """Messages received before this time are not in flight any more."""
        return self.owner.horizon

    @horizon.setter
    def horizon(self, time: float) -> None:
        self.owner.horizon = time

    @property
    def ready(self) -> int:
        """Messages that the server may have in flight."""
        return self.owner.ready

    def finish(self, message: Message) -> None:
        """Send FIN."""
        self.owner.finish(message)
        self.order.finish(message)

    def requeue(self, message: Message, delay: float, *, backoff: bool) -> None:
        """Delay the message in this process, and the later ones of its key; other keys continue."""
        self._delay(message, delay)

    def send_requeue(self, message: Message, delay: float = 0.0) -> None:
        """Send REQ with a delay in seconds, if the message is in flight."""
        if not is_lost(message):
            self.owner.requeue(message, delay, backoff=False)
            message.mark_answered()

    def touch(self, message: Message) -> None:
        """Send TOUCH."""
        self.owner.touch(message)

    def record_outcome(self, failed: bool) -> None:
        """Do nothing: a failure delays its key only."""

    def expired(self, message: Message) -> bool:
        """Return whether the message is not in flight any more."""
        return self.owner.expired(message)

    def reset(self, reason: str) -> None:
        """End the connection; the consumer connects again."""
        self.owner.reset(reason)


def owner_of(message: Message) -> KeyLaneOwner:
    """Return the owner of a message in lanes."""
    return cast("KeyLaneOwner", message.owner)
