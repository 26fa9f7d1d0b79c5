"""Cancellations that come from elsewhere than the consumer: a handler fails, and its worker continues."""

from __future__ import annotations

import logging
import sys

from anyio import get_cancelled_exc_class
from anyio.lowlevel import current_token

from nsqext.errors import InvalidState
from nsqext.waits import AsyncioLoop

logger: logging.Logger = logging.getLogger("nsqext.consumer")


def failure_of(error: BaseException) -> InvalidState:
    """Return the failure of a handler that raised a cancellation or GeneratorExit itself; raises another error."""
    if isinstance(error, GeneratorExit):
        failure = InvalidState("the handler raised GeneratorExit", hint="it is raised to close a generator only")
    elif isinstance(error, get_cancelled_exc_class()):
        failure = InvalidState(
            "the handler was cancelled, but not by its consumer",
            hint="the handler probably awaited a task that was cancelled elsewhere",
        )
        _forget_cancellation()
    else:
        raise error
    failure.__cause__ = error
    return failure


def log_cancelled_worker(error: BaseException) -> None:
    """Log that a worker was cancelled outside of a call of its handler, and continues."""
    _forget_cancellation()
    logger.error(
        "the task that calls a handler was cancelled, but not by its consumer, and continues: a timeout outlived the "
        "handler, or dead_letter awaited a task that was cancelled",
        exc_info=error,
    )


def _forget_cancellation() -> None:
    """Continue a task of asyncio that other code has cancelled: `asyncio.TaskGroup` counts cancellations."""
    if isinstance(current_token().native_token, AsyncioLoop):
        task = sys.modules["asyncio"].current_task()
        while task.cancelling():
            task.uncancel()
