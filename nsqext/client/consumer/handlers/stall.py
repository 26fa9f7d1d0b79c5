"""Report an event loop that was blocked, and the handlers that ran meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message

__all__ = ("StallWatch",)

logger: logging.Logger = logging.getLogger("nsqext.consumer")

_MOST_NAMED = 3
"""Messages that a report names, at most."""


class StallWatch:
    """Compares the delay of a timer with the durations of handlers.

    Args:
        limit: seconds of delay that are reported; 0 for never.
        name: what handles the messages, for the log.
    """

    __slots__ = ("_limit", "_name", "_slow")

    def __init__(self, limit: float, name: str) -> None:
        self._limit = limit
        self._name = name
        self._slow: list[tuple[float, str]] = []

    def took(self, messages: Sequence[Message], seconds: float) -> None:
        """Record how long the handler of one message, or of a batch, took."""
        if self._limit and seconds > self._limit / 2:
            self._slow.append((seconds, _names(messages)))

    def tick(self, late: float, running: Sequence[Message]) -> None:
        """Report the delay of the timer if it is above the limit.

        Args:
            late: the delay, in seconds.
            running: messages whose handlers run.
        """
        slow, self._slow = self._slow, []
        if not self._limit or late < self._limit:
            return
        handled = [text for seconds, text in slow if seconds > late / 2][:_MOST_NAMED]
        if not handled and running:
            handled = [_names(running)]
        if handled:
            reason = f"{self._name} was handling {', '.join(handled)}"
        else:
            reason = "no handler of this consumer was running"
        logger.warning(
            "the event loop was blocked for %.1f s; %s; heartbeats cannot be answered meanwhile: "
            "give blocking work to a thread (anyio.to_thread.run_sync)",
            late,
            reason,
            extra={"seconds": late},
        )


def _names(messages: Sequence[Message]) -> str:
    named = ", ".join(map(repr, messages[:_MOST_NAMED]))
    further = len(messages) - _MOST_NAMED
    return f"{named} and {further} further messages" if further > 0 else named
