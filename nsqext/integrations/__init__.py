"""Transports for task queues: `nsqext.integrations.celery` and `nsqext.integrations.taskiq`."""

from __future__ import annotations

__all__ = ("MAX_DELAY",)

MAX_DELAY = 900.0
"""Longest delay and requeue that every server accepts, in seconds; a longer one takes several of them."""
