"""Transports for task queues: `nsqext.integrations.celery` and `nsqext.integrations.taskiq`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.client.consumer.handler_signals import ACCEPTED_DELAY

if TYPE_CHECKING:
    import logging

    from nsqext.errors import NsqError
    from nsqext.types import TopicMeta

__all__ = ("kept_delay", "log_lost")


def kept_delay(meta: TopicMeta, delay: float) -> float:
    """Return for how many seconds a task is kept from workers; less than its delay where they have to return it."""
    if not meta.partition_num:
        return min(delay, ACCEPTED_DELAY)
    return delay if meta.extend_support and not meta.ordered else 0.0


def log_lost(logger: logging.Logger, error: NsqError, queue: str) -> None:
    """Log that a message was acknowledged too late."""
    logger.error(
        "queue %s: a message was acknowledged after the server had taken it back, and is delivered again: %s; a task "
        "may run for the server's -max-msg-timeout (15 minutes by default)",
        queue,
        error,
    )
