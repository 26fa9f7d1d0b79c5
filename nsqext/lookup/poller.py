"""Asks about topics whenever that is due, once for all who share the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import anyio

from nsqext.errors import InvalidState

if TYPE_CHECKING:
    from nsqext.lookup.refresher import Refresher

__all__ = ("Poller",)

_POLLS = 4  # topics that are polled at the same time


class Poller:
    """Polls topics. Of all tasks that are in `run` one does it; when it is cancelled, the next takes over.

    Args:
        polled: returns the topics that are to be polled.
    """

    def __init__(self, polled: Callable[[], Iterable[Refresher]]) -> None:
        self._polled = polled
        self._wake: anyio.Event | None = None
        self._polling: anyio.Event | None = None
        self._stopped = False

    async def run(self) -> None:
        """Poll, or wait for one's turn to, until `stop`."""
        while not self._stopped:
            if self._polling is not None:
                await self._polling.wait()
                continue
            self._polling = done = anyio.Event()
            try:
                await self._poll_all()
            finally:
                self._polling = self._wake = None
                done.set()

    def wake(self) -> None:
        """Let it see that a poll is due earlier than it was."""
        if self._wake is not None:
            self._wake.set()

    def stop(self) -> None:
        """Let `run` end, which does not wait for answers."""
        self._stopped = True
        self.wake()

    async def _poll_all(self) -> None:
        limiter = anyio.CapacityLimiter(_POLLS)
        async with anyio.create_task_group() as tasks:
            while not self._stopped:
                self._wake = anyio.Event()
                now, next_poll = anyio.current_time(), float("inf")
                for refresher in self._polled():
                    if refresher.poll_at <= now:
                        refresher.poll_at = float("inf")
                        tasks.start_soon(self._poll, refresher, limiter)
                    next_poll = min(next_poll, refresher.poll_at)
                with anyio.move_on_after(next_poll - now):
                    await self._wake.wait()

    async def _poll(self, refresher: Refresher, limiter: anyio.CapacityLimiter) -> None:
        try:
            async with limiter:
                if refresher.poll_at < float("inf"):
                    return  # somebody has asked meanwhile
                await refresher.refresh(asked_for=False)
        except InvalidState:
            return  # closed meanwhile
        except anyio.get_cancelled_exc_class():
            refresher.poll_at = float("-inf")  # whoever polls next begins with it
            raise
        self.wake()
