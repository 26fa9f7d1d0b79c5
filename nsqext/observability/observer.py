"""What observers are told."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from attrs import define, field

from nsqext.client.control import HandlerSignal
from nsqext.client.message import Message  # noqa: TC001 (which of the two Message classes, for the documentation)

if TYPE_CHECKING:
    from nsqext.client.publication import Draft
    from nsqext.types import Receipt

__all__ = ("Observer", "Processing", "Publishing", "failure")


@define(eq=False)
class Publishing:
    """A publish that is under way.

    Attributes:
        topic: where it goes.
        drafts: the messages; an observer may replace them, to add headers, as long as their number stays.
        batch: whether they were given together.
        receipts: where they were stored, once they are.
    """

    topic: str
    drafts: list[Draft]
    batch: bool
    receipts: Sequence[Receipt] = field(factory=tuple)


@define(eq=False)
class Processing:
    """A message that is being handled.

    Attributes:
        message: the message.
        channel: the channel that it came through.
    """

    message: Message
    channel: str


class Observer(Protocol):
    """Told of what goes on. Each method returns a context manager that surrounds it, and sees how it ends."""

    def publishing(self, publishing: Publishing) -> AbstractContextManager[object]:
        """Surround a publish, with all its attempts."""

    def processing(self, processing: Processing) -> AbstractContextManager[object]:
        """Surround a handler at work on a message; `failure` tells its failures from its decisions."""


def failure(error: BaseException | None) -> str | None:
    """Return what kind of error it is; None for none, and for the decisions of handlers, such as `nsqext.Requeue`."""
    if error is None or isinstance(error, HandlerSignal):
        return None
    return type(error).__qualname__
