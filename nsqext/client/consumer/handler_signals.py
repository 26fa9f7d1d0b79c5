"""Exceptions that a handler raises to decide about its message."""

from __future__ import annotations

from nsqext.arguments import is_delay
from nsqext.errors import InvalidInput

MAX_DELAY = 3 * 24 * 3600.0
"""Longest delay of a requeue that a server accepts, in seconds; a longer one takes several."""
ACCEPTED_DELAY = 900.0
"""Longest delay of a requeue that every server accepts, in seconds; the original one shortens those above an hour."""


def check_delay(delay: float) -> float:
    """Return a requeue delay in seconds; raises InvalidInput."""
    if not is_delay(delay):
        raise InvalidInput(f"a requeue delay of {delay!r} is not a number of seconds")
    return delay


class HandlerSignal(Exception):
    """A handler's decision about its message; not logged as an error."""


class Finish(HandlerSignal):
    """Finish the message, as returning does; for code deep inside a handler."""


class Requeue(HandlerSignal):
    """Requeue the message.

    Args:
        delay: seconds until it is delivered again; None for the delay of failed messages.
        backoff: slow the consumer down, as for any other exception.

    Raises:
        InvalidInput: the delay is negative, or not a number of seconds.
    """

    def __init__(self, delay: float | None = None, *, backoff: bool = True) -> None:
        super().__init__("requeue")
        self.delay: float | None = None if delay is None else check_delay(delay)
        self.backoff: bool = backoff


class Reject(HandlerSignal):
    """Send the message to the dead letters and finish it, after any number of attempts.

    On ordered channels this needs the setting ``reject_ordered``.

    Args:
        reason: for the log and the dead letter.
    """

    def __init__(self, reason: str = "rejected by its handler") -> None:
        super().__init__(reason)
        self.reason: str = reason
