"""Pauses between attempts: numbers, and strategies of tenacity."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
import tenacity
from hypothesis import given
from hypothesis import strategies as st

import nsqext
from nsqext import Consumer, Producer
from nsqext.broker import Cluster
from nsqext.errors import ConnectionLost, DeliveryUnknown, InvalidSetting, PublishFailed
from nsqext.waits import Doubling, Waiters, Wakeup, pause_after


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
