"""The cluster's clock: the machine's, unless a test moves it."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ("Clock",)


class Clock:
    """Time for timeouts and time stamps; everything in a cluster reads this clock and no other.

    It runs with the machine's clock. `advance` lets time pass at once, `stop` holds it, so that a test decides when a
    message times out. Heartbeats follow it too; leases of silent nodes do not, they run on the machine's clock.
    """

    def __init__(self) -> None:
        self._ahead = 0.0
        self._held: tuple[float, int] | None = None
        self._watchers: list[Callable[[], None]] = []

    def now(self) -> float:
        """Return seconds that never go backwards."""
        return (self._held[0] if self._held else time.monotonic()) + self._ahead

    def wall(self) -> int:
        """Return nanoseconds since 1970."""
        return (self._held[1] if self._held else time.time_ns()) + round(self._ahead * 1e9)

    def advance(self, seconds: float) -> None:
        """Let this many seconds pass at once; what is due by then happens."""
        self._ahead += seconds
        for watcher in list(self._watchers):
            watcher()

    def stop(self) -> None:
        """Hold the clock; time passes only by `advance`."""
        if self._held is None:
            self._held = time.monotonic(), time.time_ns()

    def run(self) -> None:
        """Let the clock run again, from where it stands."""
        if self._held is not None:
            self._ahead -= time.monotonic() - self._held[0]
            self._held = None

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call a function after each `advance`, in the thread that advances."""
        self._watchers.append(watcher)
