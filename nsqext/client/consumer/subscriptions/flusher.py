"""Sends what subscriptions have to say, many answers together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from nsqext.client.consumer.subscriptions.subscription import Subscription

__all__ = ("Flusher",)


class Flusher:
    """Remembers who has something to send, and has it sent as soon as the event loop has a moment, or at once."""

    __slots__ = ("_dirty", "_wake")

    def __init__(self) -> None:
        self._dirty: list[Subscription] = []
        self._wake = anyio.Event()

    def mark(self, subscription: Subscription) -> None:
        """Note that a subscription has something to send."""
        self._dirty.append(subscription)
        self._wake.set()

    def flush(self) -> None:
        """Send it."""
        dirty, self._dirty = self._dirty, []
        for subscription in dirty:
            subscription.flush()

    async def run(self) -> None:
        """Send for ever whatever nobody else has sent."""
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            self.flush()
