"""Pauses of `anyio.sleep` that end at once, and are recorded; turns of the event loop."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import pytest

__all__ = ("recorded_sleeps", "replace_sleep", "settled")


def recorded_sleeps(patch: pytest.MonkeyPatch) -> list[float]:
    """Return the pauses of this thread from now on."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await anyio.lowlevel.checkpoint()

    replace_sleep(patch, sleep)
    return pauses


def replace_sleep(patch: pytest.MonkeyPatch, sleep: Callable[[float], Awaitable[None]]) -> None:
    """Replace `anyio.sleep` in this thread; servers of other tests run on in threads of their own."""
    real, thread = anyio.sleep, threading.get_ident()

    async def chosen(seconds: float) -> None:
        await (sleep if threading.get_ident() == thread else real)(seconds)

    patch.setattr(anyio, "sleep", chosen)


async def settled() -> None:
    """Let all tasks run until they wait; `anyio.wait_all_tasks_blocked` takes a tenth of a second."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()
