"""Notices that the event loop was blocked, and names what did it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message

__all__ = ("StallWatch",)

logger: logging.Logger = logging.getLogger("nsqext.consumer")


class StallWatch:
    """Puts together two observations: a timer that was late, and handlers that took as long.

    Args:
        limit: seconds of lateness that are reported; 0 for none.
        name: what the handlers are called.
    """

    __slots__ = ("_limit", "_name", "_slow")

    def __init__(self, limit: float, name: str) -> None:
        self._limit = limit
        self._name = name
        self._slow: list[tuple[float, str]] = []

    def took(self, message: Message, seconds: float) -> None:
        """Note a handler that has just returned and took long, for whatever reason."""
        if self._limit and seconds > self._limit / 2:
            self._slow.append((seconds, repr(message)))

    def tick(self, late: float, running: list[Message], topic: str) -> None:
        """Note how many seconds too late the timer was.

        Args:
            late: seconds.
            running: messages whose handlers run.
            topic: for the log.
        """
        slow, self._slow = self._slow, []
        if not self._limit or late < self._limit:
            return
        culprits = [text for seconds, text in slow if seconds > late / 2] or [repr(message) for message in running]
        if culprits:
            who = f"{self._name} was handling {', '.join(culprits)}"
        else:
            who = "no handler of this consumer was running"
        logger.warning(
            "the event loop was blocked for %.1f s; %s; heartbeats cannot be answered meanwhile: "
            "give blocking work to a thread (anyio.to_thread.run_sync)",
            late,
            who,
            extra={"topic": topic, "seconds": late},
        )
