"""Taking messages from a consumer, with a deadline instead of sleeps."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from nsqext import Consumer, Message

__all__ = ("DEADLINE", "finish_all", "nothing_for", "subscribed", "take")

DEADLINE = 20.0
"""Seconds; the real server shows the last message of a partition up to some seconds late."""


async def take(consumer: Consumer, count: int) -> list[Message]:
    """Return the next messages, unanswered."""
    messages: list[Message] = []
    with anyio.fail_after(DEADLINE):
        while len(messages) < count:
            messages.append(await anext(consumer))
    return messages


async def finish_all(consumer: Consumer, count: int) -> list[Message]:
    """Return the next messages, finished one by one."""
    messages: list[Message] = []
    for _ in range(count):
        messages += await take(consumer, 1)
        await messages[-1].finish()
    return messages


async def nothing_for(consumer: Consumer, seconds: float) -> bool:
    """Return whether no message comes for so long."""
    with anyio.move_on_after(seconds):
        await anext(consumer)
        return False
    return True


@asynccontextmanager
async def subscribed(*consumers: Consumer) -> AsyncIterator[None]:
    """Open consumers, so that their channels begin here."""
    if not consumers:
        yield
        return
    async with consumers[0], subscribed(*consumers[1:]):
        yield
