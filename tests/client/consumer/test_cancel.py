"""Cancellation of a consumer at any await: no leaks, and finished messages stay finished."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio import create_task_group, get_running_tasks
from anyio.lowlevel import checkpoint

from nsqext import Consumer, Message
from tests.support.consumers import eventually, quick
from tests.support.fake_nsqd import message, obey, scripted_lookup, scripted_node

if TYPE_CHECKING:
    from nsqext.protocol.server.command_parser import Command
    from tests.support.fake_nsqd import Peer

pytestmark = pytest.mark.anyio

_TURNS = (*range(0, 60, 3), 100, 200, 400, 800)
_OPTIONS = quick(close_timeout=0.2, start_timeout=1.0)


def _deliver(command: Command) -> bytes | None:
    return message(1) + message(2) if command.words[1] not in (b"0", b"1") else None


async def _cancel_after(turns: int, scope: anyio.CancelScope) -> None:
    for _ in range(turns):
        await checkpoint()
    scope.cancel()


async def _settled(before: int) -> None:
    """Wait until only the earlier tasks are left."""
    await eventually(lambda: len(get_running_tasks()) <= before)


@pytest.mark.parametrize("kind", ["run", "iterate", "body"])
async def test_at_any_turn_of_the_event_loop(kind: str) -> None:
    serving = 0
    script = obey({"RDY": _deliver})

    async def counted(peer: Peer) -> None:
        nonlocal serving
        serving += 1
        try:
            await script(peer)
        finally:
            serving -= 1

    async with scripted_lookup() as lookup, scripted_node(counted) as node:
        lookup.set_leaders({0: node}, num=1)
        await anyio.wait_all_tasks_blocked()
        for turns in _TURNS:
            await _once(kind, turns, str(lookup))
            await eventually(lambda: serving == 0)
    gc.collect()  # coroutines and resources left open cause warnings, which fail the test


async def _once(kind: str, turns: int, lookup: str) -> None:
    before = len(get_running_tasks())
    consumer = Consumer("t", "ch", lookupd=lookup, max_in_flight=2, **_OPTIONS)

    @consumer.handler
    async def handle(message: Message) -> None:
        await checkpoint()

    async with create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            tasks.start_soon(_cancel_after, turns, scope)
            if kind == "run":
                await consumer.serve()
            async with consumer:
                if kind == "body":
                    await anyio.sleep_forever()
                async for message in consumer:
                    await message.finish()
                    await checkpoint()
        assert scope.cancelled_caught
    await _settled(before)
