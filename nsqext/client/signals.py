"""Ends a run on SIGTERM and SIGINT."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

__all__ = ("stop_on_signals",)


async def stop_on_signals(stop: Callable[[], None], logger: logging.Logger) -> None:
    """Wait for SIGTERM or SIGINT and call a function; returns at once outside of the main thread.

    After the first signal they have their usual effect again.

    Args:
        stop: what is called.
        logger: where this is noted.
    """
    try:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
            async for number in received:
                logger.info("stopping on %s", signal.Signals(number).name)
                stop()
                return
    except (NotImplementedError, RuntimeError, ValueError):
        logger.debug("no signals outside of the main thread")
