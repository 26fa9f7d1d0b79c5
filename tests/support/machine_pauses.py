"""Pauses of the machine, for tests whose sense lies in the time between two events.

Machines that are shared stop a process for a second now and then. What a test finds then says nothing about the code:
it receives how long the process was held up, or tries again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

__all__ = ("PauseWatch", "unless_paused")

_STEP = 0.01
_TRIES = 6


class PauseWatch:
    """Measures how long this process was held up, whatever its event loops did meanwhile.

    What it found is complete when its block has ended.

    Attributes:
        longest: longest pause so far, in seconds.
        total: all pauses together, in seconds.
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


async def unless_paused(attempt: Callable[[int], Awaitable[None]], limit: float) -> None:
    """Run a test again that failed while the process was held up; other failures are failures.

    Args:
        attempt: the test; it is given the number of the try, from 0, for names of its own.
        limit: longest pause in seconds that the test bears.
    """
    for number in range(_TRIES):
        watch = PauseWatch()
        try:
            with watch:
                await attempt(number)
        except Exception:
            if number + 1 == _TRIES or watch.longest <= limit:
                raise
        else:
            return
