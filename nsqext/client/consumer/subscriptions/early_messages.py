"""Requeue messages that are received before they are due.

The redesigned NSQ has no delayed publish. A delayed message carries the header ``##due``, and consumers requeue it
until then. Its first delivery is always requeued, also one after the due time, so that every consumer knows from the
message alone how many deliveries to subtract from its attempts.
"""

from __future__ import annotations

import time
from math import ceil
from typing import TYPE_CHECKING

from nsqext.client.consumer.handler_signals import MAX_DELAY
from nsqext.protocol.headers import DUE_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqext.client.consumer.message import Message

__all__ = ("EarlyMessages",)

_clock = time.monotonic
_MOST_KNOWN = 10_000
"""Messages with further early deliveries that are remembered."""


class EarlyMessages:
    """Requeues messages that are not due, and corrects the attempts of the others.

    Args:
        requeue_at: keeps a message of an ordered channel, where servers ignore the delay of a requeue, and requeues it
            at a time of the monotonic clock.
    """

    def __init__(self, requeue_at: Callable[[Message, float], None]) -> None:
        self._requeue_at = requeue_at
        self._uncounted: dict[tuple[str, bytes], int] = {}
        """Deliveries of messages that came early more often than planned: the server has a shorter longest requeue,
        refused one, or the clocks of two consumers differ."""

    def without_early(self, messages: list[Message], send_requeue: Callable[[Message, float], None]) -> list[Message]:
        """Return the messages that are due; requeue the others until then.

        Args:
            messages: received messages.
            send_requeue: sends REQ with a delay in seconds, without an effect on the backoff.
        """
        now = time.time()
        ready = []
        for message in messages:
            due = due_time(message)
            if due is None or not self._is_early(message, due, now):
                ready.append(message)
                continue
            left = min(ceil(max(due - now, 0.0) * 1000) / 1000, MAX_DELAY)
            if message.in_order:
                self._requeue_at(message, _clock() + left)
            else:
                send_requeue(message, left)
                message.answered = True
        return ready

    def _is_early(self, message: Message, due: float, now: float) -> bool:
        """Return whether a delayed message has to be requeued; otherwise correct its attempts."""
        name = (message.topic, message.id)
        planned = max(1, ceil((due - message.timestamp / 1e9) / MAX_DELAY))
        if message.attempts <= planned:
            return True
        if due <= now:
            message.attempts -= self._uncounted.get(name, planned)
            return False
        self._uncounted.pop(name, None)
        self._uncounted[name] = message.attempts
        if len(self._uncounted) > _MOST_KNOWN:
            del self._uncounted[next(iter(self._uncounted))]
        return True


def due_time(message: Message) -> float | None:
    """Return when a delayed message is due, in seconds since 1970; None for other messages."""
    text = message.header_value(DUE_HEADER)
    return int(text) / 1000 if text is not None and text.isascii() and text.isdigit() and len(text) < 20 else None
