"""Detect pauses of the machine, for tests that measure time between events.

A shared machine sometimes stops a process for a second, which makes a measured time meaningless: a test can read the
length of the pauses, or run again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable
from functools import wraps
from types import TracebackType
from typing import Any, Self

import anyio

__all__ = ("PauseWatch", "repeated_if_paused", "unless_paused")

_STEP = 0.01
_TRIES = 6


class PauseWatch:
    """Measures how long the machine stopped this process, independently of its event loops.

    The attributes are complete when the block has ended.

    Attributes:
        longest: longest pause so far, in seconds.
        total: sum of all pauses, in seconds.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        self.total = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pauses", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        before, ended = time.monotonic(), False
        while not ended:
            ended = self._ended.wait(_STEP)
            now = time.monotonic()
            late = now - before - _STEP
            before = now
            if late > _STEP:
                self.total += late
                self.longest = max(self.longest, late)

    async def watch_event_loop(self) -> None:
        """Count pauses of this event loop alone: a busy machine runs one thread and not the other; until cancelled."""
        before = time.monotonic()
        while True:
            await anyio.sleep(_STEP)
            now = time.monotonic()
            self.longest = max(self.longest, now - before - _STEP)
            before = now


async def unless_paused(attempt: Callable[[int], Awaitable[None]], limit: float) -> None:
    """Repeat a test that failed during a pause of the process or of the event loop; raise other failures.

    Args:
        attempt: the test; it receives the number of the attempt, from 0, to create unique names.
        limit: longest pause in seconds that the test tolerates.
    """
    for number in range(_TRIES):
        error: Exception | None = None
        with PauseWatch() as watch:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(watch.watch_event_loop)
                try:
                    await attempt(number)
                except Exception as found:
                    error = found
                tasks.cancel_scope.cancel()
        if error is None:
            return
        if number + 1 == _TRIES or watch.longest <= limit:
            raise error


def repeated_if_paused(limit: float) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., Awaitable[None]]]:
    """Decorator: repeat a test as `unless_paused` does; for tests that need no unique names."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        @wraps(test)
        async def run(*arguments: Any, **named: Any) -> None:
            await unless_paused(lambda _: test(*arguments, **named), limit)

        return run

    return decorate
