"""Transports for task queues: `nsqext.integrations.celery` and `nsqext.integrations.taskiq`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

    from nsqext.errors import NsqError

__all__ = ("MAX_DELAY", "log_lost")

MAX_DELAY = 900.0
"""Longest delay and requeue that every server accepts, in seconds; a longer one takes several of them."""


def log_lost(logger: logging.Logger, error: NsqError, queue: str) -> None:
    """Log that a message was acknowledged too late."""
    logger.error(
        "queue %s: a message was acknowledged after the server had taken it back, and is delivered again: %s; a task "
        "may run for the server's -max-msg-timeout (15 minutes by default)",
        queue,
        error,
    )
