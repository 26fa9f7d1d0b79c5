"""Background tasks that belong to an object."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from contextvars import ContextVar
from weakref import ref

import anyio
import anyio.to_thread
import pytest
from anyio.lowlevel import checkpoint

from nsqext.client.tasks import BackgroundTasks, Runnable, first_error
from nsqext.errors import InvalidState

pytestmark = pytest.mark.anyio


def test_the_first_error_of_nested_groups() -> None:
    first = KeyError("first")
    inner = ExceptionGroup("inner", [first, ValueError("second")])
    assert first_error(ExceptionGroup("outer", [inner, ValueError("third")])) is first


_VARIABLE: ContextVar[str] = ContextVar("_VARIABLE", default="")


class Owner:
    """Counts how often it was closed, and whether its task still ran then."""

    def __init__(self) -> None:
        self.tasks = BackgroundTasks("owner", self.close)
        self.running = False
        self.closed: list[bool] = []

    async def run(self) -> None:
        """Run until cancelled."""
        self.running = True
        try:
            await anyio.sleep_forever()
        finally:
            self.running = False

    async def close(self) -> None:
        """Record whether the task runs."""
        await checkpoint()
        self.closed.append(self.running)


async def _running() -> Owner:
    owner = Owner()
    await owner.tasks.start()
    owner.tasks.start_soon(owner.run)
    await anyio.wait_all_tasks_blocked()
    return owner


async def test_closing_runs_once_while_the_tasks_still_run() -> None:
    owner = await _running()
    assert owner.running
    assert not owner.tasks.closing
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(owner.tasks.aclose)
    assert owner.tasks.closing
    assert owner.closed == [True]
    assert not owner.running
    await owner.tasks.aclose()
    assert owner.closed == [True]
    with pytest.raises(InvalidState, match="the owner is closed"):
        owner.tasks.start_soon(owner.run)
    with pytest.raises(InvalidState, match="this owner was opened before"):
        await owner.tasks.start()


async def test_tasks_are_refused_before_the_start_and_closing_does_nothing() -> None:
    owner = Owner()
    with pytest.raises(InvalidState, match=r"await owner.start\(\) first"):
        owner.tasks.start_soon(owner.run)
    await owner.tasks.aclose()
    owner.tasks.abandon()
    assert owner.closed == []


async def test_closing_from_a_task_of_the_object_does_not_wait_for_that_task() -> None:
    owner = await _running()
    closed = anyio.Event()

    async def handler() -> None:
        async with anyio.create_task_group() as inner:  # tasks that a handler starts count as well
            inner.start_soon(owner.tasks.aclose)
        await owner.tasks.aclose()
        closed.set()

    with anyio.fail_after(25):
        owner.tasks.start_soon(handler)
        await closed.wait()
        await owner.tasks.aclose()
    assert owner.closed == [True]


async def test_a_cancelled_caller_still_waits_for_the_close() -> None:
    owner = await _running()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await owner.tasks.aclose()
    assert owner.closed == [True]
    assert not owner.running


@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_tasks_see_the_context_of_the_task_that_started_them() -> None:
    seen: list[str] = []

    async def read() -> None:
        seen.append(_VARIABLE.get())

    async def close() -> None:
        seen.append(_VARIABLE.get())

    _VARIABLE.set("opened")
    tasks = BackgroundTasks("owner", close)
    await tasks.start()
    _VARIABLE.set("started")
    tasks.start_soon(read)
    await anyio.wait_all_tasks_blocked()
    await tasks.aclose()
    assert seen == ["started", "opened"]


@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
async def test_the_error_of_a_background_task_closes_the_object_and_is_raised_once(error: BaseException) -> None:
    owner = await _running()

    async def fail() -> None:
        raise BaseExceptionGroup("inner", [error, asyncio.CancelledError()])

    owner.tasks.start_soon(fail)
    with anyio.fail_after(25):
        while owner.tasks.left_open or not owner.closed:  # noqa: ASYNC110 - there is no event for it
            await anyio.sleep(0.001)
    assert owner.closed == [True]
    with pytest.raises(InvalidState, match="the owner has failed") as refused:
        owner.tasks.start_soon(fail)
    assert refused.value.__cause__ is error
    with pytest.raises(type(error)) as caught:
        await owner.tasks.aclose()
    assert caught.value is error
    await owner.tasks.aclose()


async def test_an_error_of_the_close_is_raised_and_the_tasks_end() -> None:
    async def close() -> None:
        raise KeyError("close")

    tasks = BackgroundTasks("owner", close)
    await tasks.start()
    ended: list[bool] = []

    async def serve() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    tasks.start_soon(serve)
    await anyio.wait_all_tasks_blocked()
    with pytest.raises(KeyError, match="close"):
        await tasks.aclose()
    assert ended == [True]


async def test_a_start_that_is_cancelled_leaves_a_host_that_can_be_closed() -> None:
    owner = Owner()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await owner.tasks.start()
        owner.tasks.start_soon(owner.run)
    await anyio.wait_all_tasks_blocked()
    await owner.tasks.aclose()
    assert owner.closed == [True]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_end_of_the_event_loop_ends_tasks_that_were_not_closed(backend: str) -> None:
    async def main() -> Owner:
        return await _running()

    owner = anyio.run(main, backend=backend)
    assert not owner.running
    assert owner.closed == []
    assert (owner.tasks.left_open, owner.tasks.state) == (True, "ended with its event loop")
    with pytest.raises(
        InvalidState, match="another event loop opened this owner, and ended before the owner was closed"
    ):
        owner.tasks.check()
    owner.tasks.abandon()


async def test_an_object_that_another_thread_abandons_ends_without_being_closed() -> None:
    owner = await _running()
    with anyio.fail_after(25):
        await anyio.to_thread.run_sync(owner.tasks.abandon)
        while owner.running:
            await checkpoint()
    assert owner.closed == []


async def _in_event_loop(tasks: BackgroundTasks) -> bool:
    return tasks.in_event_loop()


def test_another_event_loop_of_the_same_thread_is_not_that_of_the_tasks() -> None:
    tasks = BackgroundTasks("owner")
    loop, other = asyncio.new_event_loop(), asyncio.new_event_loop()
    try:
        loop.run_until_complete(tasks.start())
        assert not tasks.in_event_loop()
        assert not other.run_until_complete(_in_event_loop(tasks))
        assert loop.run_until_complete(_in_event_loop(tasks))
        loop.run_until_complete(tasks.aclose())
    finally:
        loop.close()
        other.close()


_FORK = """
import asyncio, os
from nsqext.client.tasks import BackgroundTasks

async def main():
    tasks = BackgroundTasks("owner")
    await tasks.start()
    child = os.fork()
    if not child:
        os._exit(3 if tasks.in_event_loop() else 0)
    assert tasks.in_event_loop()
    assert os.waitpid(child, 0)[1] == 0
    await tasks.aclose()

asyncio.run(main())
"""


def test_a_forked_process_is_not_in_the_event_loop_of_the_tasks() -> None:
    subprocess.run([sys.executable, "-c", _FORK], check=True, timeout=60)


def test_run_serves_as_it_is_told() -> None:
    class Client(Runnable):
        async def serve(self, *, signals: bool | None = None) -> None:
            served.append(signals)

    served: list[bool | None] = []
    for signals in (False, None):
        Client().run(signals=signals)
    assert served == [False, None]


async def test_no_task_can_be_started_while_the_tasks_end() -> None:
    owner, ending, end = await _running(), anyio.Event(), anyio.Event()

    async def end_slowly() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ending.set()
            with anyio.CancelScope(shield=True):
                await end.wait()

    owner.tasks.start_soon(end_slowly)
    await anyio.wait_all_tasks_blocked()
    async with anyio.create_task_group() as group:
        group.start_soon(owner.tasks.aclose)
        await ending.wait()
        try:
            with pytest.raises(InvalidState, match="the owner is closed"):
                owner.tasks.start_soon(owner.run)
        finally:
            end.set()


async def test_the_first_error_of_the_tasks_is_raised() -> None:
    tasks, first = BackgroundTasks("producer"), KeyError("first")

    async def fail(error: Exception) -> None:
        raise error

    async def fail_when_cancelled() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            await fail(KeyError("second"))

    await tasks.start()
    tasks.start_soon(fail_when_cancelled)
    await anyio.wait_all_tasks_blocked()
    tasks.start_soon(fail, first)
    with pytest.raises(KeyError) as caught:
        await tasks.aclose()
    assert caught.value is first


async def test_a_task_may_start_another_while_the_object_ends() -> None:
    owner, started = await _running(), list[str]()

    async def note() -> None:
        started.append("last")

    async def end() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            owner.tasks.start_soon(note)

    owner.tasks.start_soon(end)
    await anyio.wait_all_tasks_blocked()
    await owner.tasks.aclose()
    assert started == ["last"]


async def test_an_object_that_is_dropped_while_it_is_open_is_freed() -> None:
    """Its finalizer says that it was not closed."""
    owner = Owner()
    await owner.tasks.start()
    tasks, known = owner.tasks, ref(owner)
    del owner
    gc.collect()
    assert known() is None
    await tasks.aclose()


def test_a_task_that_ends_with_its_coroutine_has_not_failed() -> None:
    """As when an event loop is freed that did not end its tasks."""
    tasks = BackgroundTasks("owner")
    waiting = tasks._keep_error(asyncio.sleep, 0)
    waiting.send(None)
    waiting.close()
    assert tasks.error is None
