"""Connections of psycopg whose calls end when the server does not respond, however its host does."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

from psycopg import Connection, OperationalError

SILENCE: float = 60.0
"""Seconds without a response after which a call ends: longer than a transaction waits for a lock."""


class BoundedConnection(Connection[tuple[Any, ...]]):
    """A connection whose calls raise `OperationalError` after `SILENCE`; it cannot be used any more then."""

    def wait(self, gen: Generator[Any, Any, Any], *arguments: Any, **named: Any) -> Any:
        """Wait as psycopg, which looks for signals ten times a second, and has no limit."""
        return super().wait(_bounded(gen), *arguments, **named)


def _bounded(waiting: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Pass on when the socket is ready, until the server is silent for too long."""
    until = time.monotonic() + SILENCE
    try:
        state = next(waiting)
        while True:
            ready = yield state
            if ready:
                until = time.monotonic() + SILENCE
            elif time.monotonic() > until:
                raise OperationalError(f"the server has not responded for {SILENCE:g} seconds")
            state = waiting.send(ready)
    except StopIteration as end:
        return end.value
