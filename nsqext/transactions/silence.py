"""Connections of psycopg whose calls end when the server does not respond, however its host does."""

from __future__ import annotations

import time
from collections.abc import Generator
from functools import cache
from typing import Any

SILENCE: float = 60.0
"""Seconds without a response after which a call ends, longer than a transaction waits for a lock."""


@cache
def bounded_connection() -> Any:
    """Return the class of connections whose calls raise ``psycopg.OperationalError`` after `SILENCE`.

    Such a connection cannot be used any more then.
    """
    from psycopg import Connection

    class BoundedConnection(Connection[Any]):
        def wait(self, gen: Generator[Any, Any, Any], *arguments: Any, **named: Any) -> Any:
            return super().wait(_bounded(gen), *arguments, **named)

    return BoundedConnection


def _bounded(waiting: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Pass on what psycopg waits for, and whether it is ready; psycopg asks ten times a second, for signals."""
    from psycopg import OperationalError

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
