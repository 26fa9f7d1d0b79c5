"""Report on standard error what a command waits for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, Timer
from typing import TYPE_CHECKING

from nsqext.errors import escaped

if TYPE_CHECKING:
    from nsqext import App, Consumer

What = str | Callable[[], str | None] | None
"""Text behind "waiting for", or a function that returns it; None for an intended pause."""

_SILENCE = 2.0  # seconds without output before a report


class Waits:
    """The waits of a command, innermost last. Each text is printed once."""

    def __init__(self) -> None:
        self._waits: list[list[What]] = []  # lists of one element, removed by identity
        self._said: set[str] = set()
        self._since = time.monotonic()
        self._timer: Timer | None = None
        self._lock = Lock()

    @contextmanager
    def waiting(self, what: What) -> Iterator[None]:
        """Report what the command waits for if the block takes two seconds without output."""
        one = [what]
        with self._lock:
            self._waits.append(one)
            self._since = time.monotonic()
            if self._timer is None:
                self._start_timer(_SILENCE)
        try:
            yield
        finally:
            with self._lock:
                self._waits[:] = [other for other in self._waits if other is not one]
                self._since = time.monotonic()
                if not self._waits and self._timer is not None:
                    self._timer.cancel()
                    self._timer = None

    def spoke(self) -> None:
        self._since = time.monotonic()

    def _start_timer(self, seconds: float) -> None:
        self._timer = Timer(seconds, self._look)
        self._timer.daemon = True
        self._timer.start()

    def _look(self) -> None:
        with self._lock:
            if not self._waits:
                self._timer = None
                return
            left = self._since + _SILENCE - time.monotonic()
            self._start_timer(left if left > 0 else _SILENCE)
            what = self._waits[-1][0] if left <= 0 else None
        text = what() if callable(what) else what
        if text is not None and text not in self._said:
            self._said.add(text)
            print(f"nsqext: waiting for {escaped(text)}", file=sys.stderr, flush=True)


waits: Waits = Waits()
"""The waits of this process."""


def wait_of(consumer: Consumer, obstacles: Sequence[str] = ()) -> Callable[[], str]:
    """Return what a command with a consumer waits for: at any moment the first obstacle, or messages."""

    def text() -> str:
        obstacle = next(iter(obstacles), None)  # the event loop changes the list meanwhile
        if obstacle is not None:
            return obstacle
        topics = ", ".join(consumer.topics)
        if not consumer.connections:
            return f"a partition of {topics} to consume: no node is connected"
        return f"messages of {topics}, channel {consumer.channel}"

    return text


def wait_of_app(app: App) -> Callable[[], str | None]:
    """Return what an app waits for until it is ready."""

    def text() -> str | None:
        for consumer in app.consumers:
            if not consumer.subscribed:
                return wait_of(consumer)()
        return None if app.health().ready else "the lifespans of the app to start"

    return text
