"""Tasks that only their owner ends."""

from __future__ import annotations

import anyio
import pytest

from nsqext.client.tasks import OrderedTasks, first_error

pytestmark = pytest.mark.anyio


def test_the_first_error_of_nested_groups() -> None:
    first = KeyError("first")
    inner = ExceptionGroup("inner", [first, ValueError("second")])
    assert first_error(ExceptionGroup("outer", [inner, ValueError("third")])) is first


async def test_a_task_outlives_the_cancellation_until_it_is_left() -> None:
    tasks = OrderedTasks()
    seen: list[str] = []
    started = anyio.Event()

    async def run() -> None:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            seen.append("ended")

    await tasks.enter()
    tasks.start(run)
    await started.wait()
    tasks.group.cancel_scope.cancel()
    with anyio.CancelScope(shield=True):
        await anyio.wait_all_tasks_blocked()
        assert seen == []
    await tasks.leave(None)
    assert seen == ["ended"]


async def test_the_error_of_a_task_comes_out_alone() -> None:
    async def fail() -> None:
        raise KeyError("mine")

    tasks = OrderedTasks()
    await tasks.enter()
    tasks.start(fail)
    with anyio.CancelScope(shield=True):
        await anyio.wait_all_tasks_blocked()
    with pytest.raises(KeyError, match="mine"):
        await tasks.leave(None)
