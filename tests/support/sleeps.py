"""Pauses of `anyio.sleep` that end at once, and are recorded; turns of the event loop."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    import pytest

__all__ = ("recorded_sleeps", "settled")


def recorded_sleeps(patch: pytest.MonkeyPatch) -> list[float]:
    """Return the pauses of this thread from now on; servers of other tests run on in threads of their own."""
    pauses: list[float] = []
    real, thread = anyio.sleep, threading.get_ident()

    async def sleep(seconds: float) -> None:
        if threading.get_ident() == thread:
            pauses.append(seconds)
            await anyio.lowlevel.checkpoint()
        else:
            await real(seconds)

    patch.setattr(anyio, "sleep", sleep)
    return pauses


async def settled() -> None:
    """Let all tasks run until they wait; `anyio.wait_all_tasks_blocked` takes a tenth of a second."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()
