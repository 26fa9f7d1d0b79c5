"""Locks of keys: in order of acquisition; a cancelled caller does not block the others."""

from __future__ import annotations

import anyio
import pytest

from nsqext.client.producer.key_lock import KeyLock
from tests.support.fake_nsqd import until

pytestmark = pytest.mark.anyio

_KEY = ("t", b"k")


async def test_turns_are_granted_in_order() -> None:
    turns, order = KeyLock(), list[int]()
    assert turns.try_enter(_KEY)
    assert not turns.try_enter(_KEY)
    assert turns.try_enter(("t", b"other"))

    async def take(number: int) -> None:
        await turns.enter(_KEY)
        order.append(number)
        turns.leave(_KEY)

    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(take, number)
            await until(lambda: len(turns._waiting[_KEY]) > number)  # noqa: B023
        turns.leave(_KEY)
    assert order == [0, 1, 2, 3]
    turns.leave(("t", b"other"))
    assert len(turns) == 0


@pytest.mark.parametrize("woken", [False, True])
async def test_a_cancelled_waiter_leaves_the_queue(woken: bool) -> None:
    turns = KeyLock()
    await turns.enter(_KEY)
    scope, entered = anyio.CancelScope(), anyio.Event()

    async def cancelled() -> None:
        with scope:
            await turns.enter(_KEY)
            raise AssertionError("entered")

    async def patient() -> None:
        await turns.enter(_KEY)
        entered.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancelled)
        await until(lambda: len(turns._waiting[_KEY]) == 1)
        tasks.start_soon(patient)
        await until(lambda: len(turns._waiting[_KEY]) == 2)
        scope.cancel()
        if woken:
            turns.leave(_KEY)
        else:
            await until(lambda: len(turns._waiting[_KEY]) == 1)
            turns.leave(_KEY)
        with anyio.fail_after(25):
            await entered.wait()
    turns.leave(_KEY)
    assert len(turns) == 0
