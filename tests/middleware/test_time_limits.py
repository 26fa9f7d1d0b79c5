"""`HandlerTimeout`: what is cancelled, when and how often, on each event loop."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from nsqext.client.middleware import Handling
from nsqext.middleware import HandlerTimeout
from nsqext.middleware.time_limits import TimerLoop
from tests.conftest import EVERY_LOOP
from tests.support.messages import RecordingOwner, make_message

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", EVERY_LOOP.values(), ids=list(EVERY_LOOP), indirect=True),
]

SHORT = 0.01


def handling() -> Handling:
    """Return a call of a handler for one message."""
    return Handling([make_message(RecordingOwner())], "ch")


async def call(middleware: HandlerTimeout, handle: Callable[[], Awaitable[object]]) -> object:
    """Call a handler through the middleware, which alone raises TimeoutError and must not take long."""
    with anyio.move_on_after(25):
        return await middleware.handle(handling(), lambda _: handle())
    raise AssertionError("the handler was not cancelled")


async def test_late_handlers_are_cancelled_each_time_and_others_are_not() -> None:
    middleware, ended = HandlerTimeout(SHORT), list[str]()

    async def late(name: str) -> None:
        with pytest.raises(TimeoutError, match=r"longer than 0.01 s"):
            await call(middleware, anyio.sleep_forever)
        ended.append(name)

    async def quick() -> None:
        began = anyio.current_time()
        try:
            await call(middleware, anyio.lowlevel.checkpoint)
        except TimeoutError:  # the machine stood still
            assert anyio.current_time() - began > SHORT

    for _ in range(2):  # after a time without handlers, too
        async with anyio.create_task_group() as tasks:
            for number in range(3):
                tasks.start_soon(late, f"late {number}")
                await quick()
    assert sorted(ended) == sorted([f"late {number}" for number in range(3)] * 2)


async def test_handlers_that_begin_later_have_their_whole_time() -> None:
    middleware, took = HandlerTimeout(0.05), list[float]()

    async def late(pause: float) -> None:
        await anyio.sleep(pause)
        began = anyio.current_time()
        with pytest.raises(TimeoutError):
            await call(middleware, anyio.sleep_forever)
        took.append(anyio.current_time() - began)

    async with anyio.create_task_group() as tasks:
        for number in range(4):
            tasks.start_soon(late, number * 0.01)  # no handler begins, and sets the timer, after the first end
    assert min(took) > 0.045, took  # uvloop counts milliseconds


async def test_a_handler_that_has_ended_keeps_nothing_until_the_end_of_its_time() -> None:
    middleware = HandlerTimeout(3600)

    async def handle() -> object:
        return object()

    for _ in range(20):
        await call(middleware, handle)
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one).__name__ == "TimedScope"]


async def test_a_handler_that_catches_its_cancellation_is_cancelled_again() -> None:
    caught = 0

    async def stubborn() -> None:
        nonlocal caught
        while caught < 3:
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                caught += 1
        await anyio.sleep_forever()

    with pytest.raises(TimeoutError):
        await call(HandlerTimeout(SHORT), stubborn)
    assert caught == 3


async def test_a_shielded_part_ends_before_the_handler_is_cancelled() -> None:
    events: list[str] = []

    async def handle() -> None:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(5 * SHORT)
            events.append("shielded part ended")
        await anyio.sleep_forever()

    with pytest.raises(TimeoutError):
        await call(HandlerTimeout(SHORT), handle)
    assert events == ["shielded part ended"]


async def test_the_tasks_of_a_handler_are_cancelled_with_it() -> None:
    cancelled: list[int] = []

    async def child(number: int) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.append(number)

    async def handle() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(child, 1)
            tasks.start_soon(child, 2)

    with pytest.raises(TimeoutError, match=r"longer than 0.01 s"):
        await call(HandlerTimeout(SHORT), handle)
    assert sorted(cancelled) == [1, 2]


async def test_scopes_of_handlers_and_around_them_keep_their_own_deadlines() -> None:
    async def limits_itself() -> str:
        with anyio.move_on_after(SHORT):
            await anyio.sleep_forever()
        await anyio.lowlevel.checkpoint()  # it is not cancelled
        return "continued"

    assert await call(HandlerTimeout(25), limits_itself) == "continued"
    with anyio.move_on_after(SHORT) as around:
        await call(HandlerTimeout(25), anyio.sleep_forever)
    assert around.cancelled_caught

    async def nested() -> object:
        return await call(HandlerTimeout(25), anyio.sleep_forever)

    with pytest.raises(TimeoutError, match=r"longer than 0.01 s"):
        await call(HandlerTimeout(SHORT), nested)


async def test_a_cancellation_around_a_late_handler_is_no_timeout() -> None:
    async def late() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            around.cancel()

    with anyio.CancelScope() as around:
        await call(HandlerTimeout(SHORT), late)
    assert around.cancelled_caught


async def test_the_end_of_the_time_during_the_last_step_changes_nothing() -> None:
    async def busy() -> str:
        time.sleep(2 * SHORT)  # noqa: ASYNC251 (it blocks the event loop)
        return "done"

    middleware = HandlerTimeout(SHORT)
    assert await call(middleware, busy) == "done"
    await anyio.sleep(2 * SHORT)  # the timer of a handler that has ended
    assert await call(middleware, busy) == "done"


async def test_errors_of_a_handler_are_raised() -> None:
    async def broken() -> None:
        await anyio.lowlevel.checkpoint()
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await call(HandlerTimeout(25), broken)


async def test_a_handler_reads_its_deadline() -> None:
    async def left() -> float:
        return anyio.current_effective_deadline() - anyio.current_time()

    found = await HandlerTimeout(25).handle(handling(), lambda _: left())
    assert isinstance(found, float)
    assert 24 < found <= 25
    assert anyio.current_effective_deadline() == math.inf


async def test_event_loops_of_several_threads_and_one_after_another_share_a_middleware(anyio_backend: Any) -> None:
    middleware = HandlerTimeout(SHORT)
    backend, options = anyio_backend
    found: list[str] = []

    def run_twice() -> None:
        for _ in range(2):
            try:
                anyio.run(call, middleware, anyio.sleep_forever, backend=backend, backend_options=options)
            except TimeoutError as error:
                found.append(str(error))

    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(anyio.to_thread.run_sync, run_twice)
        with pytest.raises(TimeoutError):
            await call(middleware, anyio.sleep_forever)
    assert found == ["the handler ran longer than 0.01 s"] * 4


async def test_one_timer_serves_all_handlers_of_an_event_loop(
    monkeypatch: pytest.MonkeyPatch, anyio_backend: Any
) -> None:
    middleware, timers = HandlerTimeout(25), list[float]()
    loop = anyio.lowlevel.current_token().native_token
    if not isinstance(loop, TimerLoop):
        assert anyio_backend[0] == "trio", "it sorts deadlines itself"
        return
    monkeypatch.setattr(loop, "call_at", lambda when, _callback: timers.append(when))
    for _ in range(10):
        await middleware.handle(handling(), lambda _: anyio.lowlevel.checkpoint())
    assert len(timers) == 1
