"""The subscriptions that work: what each may have in flight, what it has to send, and the time that passes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio

from nsqext.client.consumer.subscriptions.flusher import Flusher

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from nsqext.client.consumer.subscriptions.assignment import Key, Listener
    from nsqext.client.consumer.subscriptions.backoff import Backoff
    from nsqext.client.consumer.subscriptions.flow_control import RdyDistributor
    from nsqext.client.consumer.subscriptions.subscription import Subscription

__all__ = ("SubscriptionGroup",)

_TICK = 0.25

_clock = time.monotonic


class SubscriptionGroup:
    """What the subscriptions of one consumer report to, and what keeps them going.

    Args:
        flow: shares the messages in flight out.
        backoff: of the consumer.
        listener: told of messages and of the time.

    Attributes:
        live: subscriptions by their places.
        backoff: of the consumer.
    """

    def __init__(self, flow: RdyDistributor[Subscription], backoff: Backoff, listener: Listener) -> None:
        self.live: dict[Key, Subscription] = {}
        self.backoff: Backoff = backoff
        self._flow = flow
        self._listener = listener
        self._flusher = Flusher()
        self._wake = anyio.Event()

    @property
    def subscriptions(self) -> list[Subscription]:
        """Those that work at the moment."""
        return [subscription for subscription in self.live.values() if subscription.live]

    def add(self, key: Key, subscription: Subscription) -> None:
        """Take in a subscription that has just been made."""
        self.live[key] = subscription
        self._flow.add(subscription, subscription.max_ready, subscription.backoff, _clock())
        self.rebalance()

    def remove(self, key: Key, subscription: Subscription) -> None:
        """Forget a subscription, also one that was never added."""
        if self.live.get(key) is subscription:
            del self.live[key]
        self._flow.remove(subscription)
        self.rebalance()

    def received(self, subscription: Subscription, count: int, now: float) -> None:
        """Note the messages of one read."""
        if count and self._flow.delivered(subscription, now):
            self.rebalance()

    def rebalance(self) -> None:
        """Set the RDY count of every connection."""
        now = _clock()
        for subscription, share in self._flow.shares(now).items():
            subscription.set_ready(share)
        if self._next_tick(now) < _TICK:
            self._wake.set()

    def needs_flush(self, subscription: Subscription) -> None:
        """Note that a subscription has something to send."""
        self._flusher.mark(subscription)

    def flush(self) -> None:
        """Send all answers that were given."""
        self._flusher.flush()

    def start(self, tasks: TaskGroup) -> None:
        """Start what sends answers, and what lets the time pass."""
        tasks.start_soon(self._flusher.run)
        tasks.start_soon(self._run)

    def _backoffs(self) -> list[Backoff]:
        return [self.backoff, *(subscription.backoff for subscription in self.live.values())]

    def _next_tick(self, now: float) -> float:
        return min((max(0.0, backoff.until - now) for backoff in self._backoffs() if backoff.until), default=_TICK)

    async def _run(self) -> None:
        while True:
            started = _clock()
            pause = min(_TICK, self._next_tick(started))
            self._wake = anyio.Event()
            with anyio.move_on_after(pause) as scope:
                await self._wake.wait()
            now = _clock()
            for subscription in self.subscriptions:
                subscription.tick(now)
            for backoff in self._backoffs():
                backoff.tick(now)
            self.rebalance()
            if self._listener.ticked(now, now - started - pause if scope.cancelled_caught else 0.0):
                self.rebalance()
