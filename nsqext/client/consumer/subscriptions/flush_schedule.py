"""When the commands of subscriptions are sent: at once, at the end of a turn of the event loop, or together."""

from __future__ import annotations

import time
from math import inf
from typing import TYPE_CHECKING

import anyio

from nsqext.waits import Wakeup

if TYPE_CHECKING:
    from collections.abc import Callable, Sized

    from nsqext.client.consumer.subscriptions.subscription import Subscription

# seconds within which answers are sent together, after an answer that is sent at once: its handler may block the event
# loop next
_TOGETHER = 0.02
# messages in the queue with which answers may wait for others while a handler waits for something: otherwise a handler
# that publishes costs a system call for each answer
_AHEAD = 3
LONGEST_WAIT: float = 0.002
"""Seconds for which answers wait for others then, at most."""
_BURST = 16  # answers that show a burst: an answer sent at once would split the next burst
_AFTER_BURST = 0.1  # seconds after a burst within which answers are sent together
_BLOCKS_AGAIN = 60.0  # seconds after a block of the event loop in which every answer is sent at once

_clock = time.monotonic


class FlushSchedule:
    """Decides when the pending commands of subscriptions are sent.

    Args:
        flush: sends all pending commands.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self.ahead: Sized = ()  #: received messages that wait for handlers
        self._flush = flush
        self._unsent: list[Subscription] = []
        self._collects_until = -inf  # until when answers are sent together
        self._blocked_at = -inf  # when the event loop was last found blocked
        self._due = Wakeup()
        self._collect_due = Wakeup()

    def wake(self) -> None:
        """Flush at the end of this turn of the event loop."""
        self._due.wake()

    def blocked(self, now: float) -> None:
        """Note that the event loop was found blocked."""
        self._blocked_at = now

    def add(self, subscription: Subscription, *, answer: bool) -> bool:
        """Flush a subscription at the end of this turn of the event loop.

        An ``answer`` may wait for others, for 2 ms, while at least half of what RDY allows is in the queue. Returns
        whether it has to be sent at once instead: after a pause, or while handlers block the event loop.
        """
        due = self._due
        if answer:
            now, ahead = _clock(), len(self.ahead)
            if now >= self._collects_until or now - self._blocked_at <= _BLOCKS_AGAIN:
                self._collects_until = now + _TOGETHER
                return True
            if ahead >= _AHEAD and 2 * ahead >= subscription.ready:
                due = self._collect_due
        due.wake()
        self._unsent.append(subscription)
        return False

    def flush_added(self) -> None:
        """Flush the subscriptions that were added."""
        unsent, self._unsent = self._unsent, []
        if any(len(subscription.pending) >= _BURST for subscription in unsent):
            self._collects_until = _clock() + _AFTER_BURST
        for subscription in unsent:
            subscription.flush()

    async def run(self) -> None:
        """Flush at the end of turns until cancelled, many commands with one write."""
        while True:
            await self._due.wait()
            self._flush()

    async def run_collected(self) -> None:
        """Flush answers that waited for others until cancelled."""
        while True:
            await self._collect_due.wait()
            await anyio.sleep(LONGEST_WAIT)
            self._flush()
