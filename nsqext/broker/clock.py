"""The clock of a cluster: the machine's, unless a test moves it."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Time for timeouts and time stamps in a cluster.

    It runs with the machine's clock. `advance` moves it forward and `stop` stops it, so that a test decides when a
    message times out. Heartbeats follow it too; leases of silent nodes run on the machine's clock.
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
        """Move the clock forward and call the watchers."""
        self._ahead += seconds
        for watcher in list(self._watchers):
            watcher()

    def stop(self) -> None:
        """Stop the clock; only `advance` moves it."""
        if self._held is None:
            self._held = time.monotonic(), time.time_ns()

    def run(self) -> None:
        """Start the clock again, from the time at which it was stopped."""
        if self._held is not None:
            self._ahead -= time.monotonic() - self._held[0]
            self._held = None

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call a function after each `advance`, in the thread that advances."""
        self._watchers.append(watcher)
