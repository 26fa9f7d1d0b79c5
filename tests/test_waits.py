"""Pauses between attempts: numbers, and strategies of tenacity."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import tenacity
from anyio.lowlevel import checkpoint
from hypothesis import given
from hypothesis import strategies as st

import nsqext
from nsqext import Consumer, Producer
from nsqext.broker import Cluster
from nsqext.errors import ConnectionLost, DeliveryUnknown, InvalidSetting, PublishFailed
from nsqext.waits import Doubling, Waiter, Waiters, Wakeup, gather, pause_after, turns_of


@given(st.floats(0.001, 10), st.floats(0.001, 100), st.integers(0, 100))
def test_a_number_doubles_with_full_jitter_up_to_its_bound(first: float, longest: float, attempts: int) -> None:
    bound = min(longest, first * 2 ** max(attempts - 1, 0))
    assert 0 <= pause_after(first, longest, attempts) <= bound * 1.000001


def test_pauses_are_drawn_without_the_state_of_the_module_random() -> None:
    """A client in a background thread would otherwise change the numbers of a seeded application, or of hypothesis."""
    imports = re.compile(r"^ *(import random$|from random import (?!Random$))", re.MULTILINE)
    package = Path(nsqext.__file__).parent
    files = [path.relative_to(package) for path in package.rglob("*.py") if imports.search(path.read_text("utf-8"))]
    assert {path.parts[:2] for path in files} == {("testing", "simulation")}


def test_forked_workers_draw_different_pauses() -> None:
    program = """
import os
from nsqext.waits import chance
child = os.fork()
os.write(1, b"%.17f\\n" % chance.random())
if child and os.waitpid(child, 0)[1]:
    raise SystemExit("the forked process failed")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    first, second = done.stdout.split()
    assert first != second


def test_a_strategy_decides_alone() -> None:
    assert [pause_after(tenacity.wait_fixed(0.3), 0.1, count) for count in (1, 5)] == [0.3, 0.3]
    growing = tenacity.wait_incrementing(start=1, increment=2)
    assert [pause_after(growing, 0.1, count) for count in (1, 2, 3)] == [1, 3, 5]


def test_a_strategy_sees_the_error() -> None:
    strategy = tenacity.wait_exception(lambda error: 2.0 if isinstance(error, ConnectionLost) else 0.0)
    assert pause_after(strategy, 0.1, 1, ConnectionLost("lost")) == 2.0
    assert pause_after(strategy, 0.1, 1, PublishFailed("late")) == 0.0


def test_pauses_of_a_poll_double() -> None:
    pauses = Doubling(0.1, 0.5)
    assert [pauses.next() for _ in range(5)] == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"retry_wait": 0}, "retry_wait=0 is not positive"),
        ({"retry_wait": "1"}, "neither a number of seconds nor a wait strategy"),
        ({"retry_wait": True}, "neither a number of seconds nor a wait strategy"),
        ({"retry_wait": tenacity.stop_after_delay(1)}, "neither a number of seconds nor a wait strategy"),
        ({"retry_wait": tenacity.wait_fixed(1), "max_retry_wait": 3.0}, "max_retry_wait has no effect with a strategy"),
    ],
)
def test_other_values_and_ignored_bounds_are_refused(settings: Any, reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason):
        Producer("127.0.0.1:1", **settings)


@pytest.mark.anyio
async def test_clients_wait_by_strategies() -> None:
    asked: list[str] = []

    def wait(name: str) -> tenacity.wait.wait_base:
        def pause(state: tenacity.RetryCallState) -> float:
            asked.append(name)
            return 0.01

        return tenacity.wait_combine(tenacity.wait_none(), _Called(pause))

    with Cluster(nodes=1) as cluster:
        cluster.create_topic("orders", channels=["ch"])
        async with Producer(cluster.lookupd, retry_wait=wait("publish"), timeout=1.0) as producer:
            await producer.publish("orders", b"x")
            assert asked == []  # no attempt failed
            async with Consumer("orders", "ch", cluster.lookupd, reconnect_wait=wait("consume")) as consumer:
                cluster.kill("n1")
                with pytest.raises((PublishFailed, DeliveryUnknown)):
                    await producer.publish("orders", b"y")
                assert consumer.connections == ()
    assert {"publish", "consume"} <= set(asked)


class _Called(tenacity.wait.wait_base):
    """A strategy that calls a function."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        found: float = self._function(retry_state)
        return found


@pytest.mark.anyio
async def test_a_wakeup_is_not_missed_and_occurs_once() -> None:
    wakeup = Wakeup()
    wakeup.wake()
    wakeup.wake()
    await wakeup.wait()
    with anyio.move_on_after(0.01) as scope:
        await wakeup.wait()
    assert scope.cancelled_caught
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wakeup.wait)
        await anyio.wait_all_tasks_blocked()
        wakeup.wake()


@pytest.mark.anyio
async def test_a_cancelled_wait_leaves_a_wakeup_to_the_next() -> None:
    wakeup = Wakeup()
    wakeup.wake()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await wakeup.wait()
    with anyio.fail_after(25):
        await wakeup.wait()
    assert scope.cancelled_caught


@pytest.mark.anyio
async def test_waiters_are_woken_together_and_later_ones_wait_for_the_next_call() -> None:
    waiters, woken = Waiters(), []

    async def wait(name: str) -> None:
        await waiters.wait()
        woken.append(name)

    waiters.wake()  # no task waits yet
    async with anyio.create_task_group() as tasks:
        for name in ("a", "b"):
            tasks.start_soon(wait, name)
        await anyio.wait_all_tasks_blocked()
        assert woken == []
        waiters.wake()
        tasks.start_soon(wait, "c")
        await anyio.wait_all_tasks_blocked()
        assert sorted(woken) == ["a", "b"]
        waiters.wake()


def test_a_poll_begins_again_with_its_first_pause() -> None:
    pauses = Doubling(0.1, 0.5)
    assert [pauses.next(), pauses.next()] == pytest.approx([0.1, 0.2])
    pauses.reset()
    assert [pauses.next(), pauses.next()] == pytest.approx([0.1, 0.2])
    assert Doubling(3.0, 0.5).next() == 0.5


def test_pauses_of_the_same_attempt_differ() -> None:
    assert len({pause_after(1.0, 10.0, 3) for _ in range(5)}) > 1


@pytest.mark.anyio
async def test_a_cancelled_wait_is_forgotten() -> None:
    waiters = Waiters()
    with anyio.move_on_after(0):
        await waiters.wait()
    assert not waiters._waiting


@pytest.mark.anyio
async def test_concurrent_calls_are_bounded_and_answer_in_the_order_of_their_keys() -> None:
    running, most, called = 0, 0, list[int]()

    async def call(key: int) -> int:
        nonlocal running, most
        called.append(key)
        running += 1
        most = max(most, running)
        for _ in range(5 - key):  # the first is the last to end
            await checkpoint()
        running -= 1
        return 10 * key

    found = await gather([1, 2, 1, 3, 4], call, at_once=2)
    assert list(found.items()) == [(1, 10), (2, 20), (3, 30), (4, 40)]
    assert (most, sorted(called)) == (2, [1, 2, 3, 4])


@pytest.mark.anyio
async def test_the_first_error_cancels_the_other_calls() -> None:
    ended: list[str] = []

    async def call(key: str) -> None:
        try:
            if key == "waits":
                await anyio.sleep_forever()
            await anyio.wait_all_tasks_blocked()
        finally:
            ended.append(key)
        raise PublishFailed(key)

    with anyio.fail_after(25), pytest.raises(PublishFailed, match="first"):
        await gather(["waits", "first"], call)
    assert sorted(ended) == ["first", "waits"]


@pytest.mark.anyio
async def test_of_two_errors_the_first_is_raised() -> None:
    failed = anyio.Event()

    async def call(key: str) -> None:
        if key == "first":
            failed.set()
            raise PublishFailed(key)
        with anyio.CancelScope(shield=True):
            await failed.wait()
            await checkpoint()
        raise PublishFailed(key)

    with anyio.fail_after(25), pytest.raises(PublishFailed, match="first"):
        await gather(["second", "first"], call)


def test_a_negative_pause_of_a_strategy_is_none() -> None:
    assert pause_after(_Called(lambda _: -1.0), 1.0, 1) == 0.0


async def _woken_once(waiters: Waiters) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(waiters.wait)
        await anyio.wait_all_tasks_blocked()
        waiters.wake()


def test_event_loops_that_follow_each_other_have_waits_of_their_own() -> None:
    same = Waiters()
    for _ in range(2):
        other = Waiters()
        for waiters in (same, other):
            anyio.run(_woken_once, waiters, backend="asyncio")
        kept = other  # and with it the waits of its event loop
    assert not (same._waiting or kept._waiting)


def test_event_loops_of_two_threads_have_waits_of_their_own() -> None:
    waiters = Waiters()

    async def wait_in_both() -> None:
        await _woken_once(waiters)
        await anyio.to_thread.run_sync(partial(anyio.run, _woken_once, waiters, backend="asyncio"))

    anyio.run(wait_in_both, backend="asyncio")
    assert not waiters._waiting


def test_a_task_that_ends_the_program_does_not_keep_the_others_waiting() -> None:
    async def wake_both() -> list[str]:
        later: list[Callable[[], None]] = []
        seen: list[str] = []
        turns = turns_of(asyncio.get_running_loop())
        turns.call_soon = later.append

        def end(_: Waiter) -> None:
            raise SystemExit

        for callback in (end, lambda _: seen.append("second")):
            waiter = Waiter(turns)
            waiter.add_done_callback(callback, context=copy_context())
            waiter.set()
        with pytest.raises(SystemExit):
            later.pop()()
        assert seen == []
        later.pop()()
        return seen

    assert asyncio.run(wake_both()) == ["second"]
