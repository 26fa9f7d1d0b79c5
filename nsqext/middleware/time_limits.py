"""Cancel handlers that run too long, with one timer for all of an event loop.

All have the same time limit, so that their deadlines are in the order of their calls. A cancel scope with a deadline of
its own costs three times as much as one without: anyio looks for the event loop, and the loop sorts its timer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, cast, runtime_checkable

import anyio
from anyio.lowlevel import current_token


@runtime_checkable
class TimerLoop(Protocol):
    """An event loop of asyncio, whose timers call functions."""

    def is_running(self) -> bool: ...

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], None]) -> Any: ...


def _scope_class(kind: type[anyio.CancelScope]) -> Callable[[], anyio.CancelScope]:
    """Return a class of scopes whose deadline sets no timer, but `anyio.current_effective_deadline` reads it."""
    return cast("Callable[[], anyio.CancelScope]", type("TimedScope", (kind,), {"__slots__": ("deadline",)}))


class TimeLimits:
    """The time limits of the handlers that run in an event loop of asyncio."""

    __slots__ = ("_loop", "_new_scope", "_running", "_seconds", "_timed")

    def __init__(self, loop: TimerLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds
        self._new_scope = _scope_class(type(anyio.CancelScope()))
        self._running: dict[anyio.CancelScope, None] = {}  # an ordered set: oldest first
        self._timed = False  # whether the timer of the oldest is set

    def of_running_loop(self) -> bool:
        """Return whether the loop is running, in the thread of the last call."""
        return self._loop.is_running()

    def begin(self) -> anyio.CancelScope:
        """Return a scope to enter at once, which the end of its time cancels; call `end` after it."""
        scope = self._new_scope()
        scope.deadline = self._loop.time() + self._seconds
        self._running[scope] = None
        if not self._timed:
            self._set_timer(scope)
        return scope

    def end(self, scope: anyio.CancelScope) -> None:
        """Forget a scope."""
        self._running.pop(scope, None)

    def _set_timer(self, oldest: anyio.CancelScope) -> None:
        self._loop.call_at(oldest.deadline, self._cancel_late)
        self._timed = True

    def _cancel_late(self) -> None:
        """Cancel all scopes whose time has ended, and set the timer of the next."""
        self._timed = False
        now = self._loop.time()
        for scope in list(self._running):
            if scope.deadline > now:
                self._set_timer(scope)
                return
            self.end(scope)
            scope.cancel("deadline exceeded")


class LimitsOfThreads(threading.local):
    """The time limits in each thread's event loop."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: TimeLimits | None = None
        self._trio = False  # the thread ran trio, where to look for the loop costs as much as a scope

    def current(self) -> TimeLimits | None:
        """Return the limits of the running event loop; None where a scope needs a deadline of its own."""
        last = self._last
        if last is not None and last.of_running_loop():
            return last
        if self._trio:
            return None
        loop = current_token().native_token
        self._trio = not isinstance(loop, TimerLoop)
        self._last = TimeLimits(loop, self._seconds) if isinstance(loop, TimerLoop) else None
        return self._last
