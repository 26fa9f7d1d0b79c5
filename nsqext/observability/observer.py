"""What observers are told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from attrs import define, field

from nsqext.client.consumer.handler_signals import HandlerSignal
from nsqext.client.consumer.message import Message  # noqa: TC001 (which of the two Message classes, for the documentation)

if TYPE_CHECKING:
    from types import TracebackType

    from nsqext.client.producer.request import OutgoingMessage
    from nsqext.types import Receipt

__all__ = ("Observed", "Observer", "Processing", "Publishing", "failure")

logger: logging.Logger = logging.getLogger("nsqext.observability")


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
    drafts: list[OutgoingMessage]
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
    """Told of what goes on. Each method returns a context manager that surrounds it, and sees how it ends.

    Nothing that an observer does changes that end: what it raises is logged, and it cannot suppress an error.
    """

    def publishing(self, publishing: Publishing) -> AbstractContextManager[object]:
        """Surround a publish, with all its attempts."""

    def processing(self, processing: Processing) -> AbstractContextManager[object]:
        """Surround a handler at work on a message; `failure` tells its failures from its decisions."""


class Observed:
    """A context manager that surrounds something with those of observers, as if they could not fail.

    A message that was stored must not be published again because a metric could not be written.

    Args:
        observers: each makes the context manager of one observer, the first one outermost.
    """

    def __init__(self, observers: Iterable[Callable[[], AbstractContextManager[object]]]) -> None:
        self._observers = observers
        self._entered: list[AbstractContextManager[object]] = []

    def __enter__(self) -> None:
        for observe in self._observers:
            try:
                manager = observe()
                manager.__enter__()
            except Exception:
                logger.exception("an observer failed at the beginning of what it observes")
            else:
                self._entered.append(manager)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for manager in reversed(self._entered):
            try:
                manager.__exit__(kind, error, trace)
            except Exception as own:
                if own is not error:
                    logger.exception("an observer failed at the end of what it observes")


def failure(error: BaseException | None) -> str | None:
    """Return what kind of error it is; None for none, and for the decisions of handlers, such as `nsqext.Requeue`."""
    if error is None or isinstance(error, HandlerSignal):
        return None
    return type(error).__qualname__
