"""Topics that tests create, also on real clusters."""

from __future__ import annotations

from secrets import token_hex
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from nsqext import Admin

__all__ = ("TopicPlan", "fresh_name")


@frozen
class TopicPlan:
    """A topic to create.

    Attributes:
        name: topic name.
        partitions: number of partitions.
        extend: whether messages may have extend headers.
        ordered: whether the topic is ordered.
        channels: channels to create.
        spread: whether each partition is on a node of its own.
    """

    name: str
    partitions: int = 1
    extend: bool = False
    ordered: bool = False
    channels: tuple[str, ...] = ()
    spread: bool = False

    async def create(self, admin: Admin, *, wait: float = 150.0) -> None:
        """Create the topic with its channels; see `nsqext.Admin.create_topic`."""
        await admin.create_topic(
            self.name,
            partitions=self.partitions,
            extend=self.extend,
            ordered=self.ordered,
            multipart=not (self.ordered or self.spread),
            channels=self.channels,
            wait=wait,
        )


def fresh_name(word: str) -> str:
    """Return a topic name with a random suffix."""
    return f"{word}_{token_hex(4)}"
