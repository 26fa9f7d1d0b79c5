"""Relays that run for the time of a block."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar, cast

import anyio

from nsqext.delays import DelayRelay
from nsqext.transactions import OutboxRelay

if TYPE_CHECKING:
    from nsqext import Producer

Relay = TypeVar("Relay", DelayRelay, OutboxRelay)


@asynccontextmanager
async def running(relay: Relay, producer: object, seconds: float = 40) -> AsyncIterator[Relay]:
    """Run a relay with a producer, which may be scripted, until the end of the block, which is within a time."""
    with anyio.fail_after(seconds):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(relay.run, cast("Producer", producer))
            yield relay
            tasks.cancel_scope.cancel()
