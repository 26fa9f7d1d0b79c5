"""The detection of pauses of the machine."""

from __future__ import annotations

import subprocess
import time

import anyio
import pytest

from tests.support.machine_pauses import PauseWatch, unless_paused

_STOP_US = "kill -STOP $PPID; sleep 0.4; kill -CONT $PPID"


def test_a_pause_of_the_process_is_measured() -> None:
    with PauseWatch() as watch:
        subprocess.run(["sh", "-c", _STOP_US], check=True)
    assert watch.total >= watch.longest > 0.2


@pytest.mark.anyio
async def test_a_failure_during_a_pause_is_repeated() -> None:
    tries: list[int] = []

    async def attempt(number: int) -> None:
        tries.append(number)
        if number == 0:
            await anyio.run_process(["sh", "-c", _STOP_US])
            raise AssertionError("too late")

    await unless_paused(attempt, 0.2)
    assert tries[-1] == 1


@pytest.mark.anyio
async def test_a_failure_while_the_event_loop_stood_still_is_repeated() -> None:
    tries: list[int] = []

    async def attempt(number: int) -> None:
        tries.append(number)
        if number == 0:
            await anyio.sleep(0.05)
            time.sleep(0.4)  # noqa: ASYNC251 - the thread that measures runs on
            await anyio.sleep(0.05)
            raise AssertionError("too late")

    await unless_paused(attempt, 0.2)
    assert tries[-1] == 1


@pytest.mark.anyio
async def test_a_failure_without_a_pause_is_raised() -> None:
    tries: list[int] = []

    async def attempt(number: int) -> None:
        tries.append(number)
        raise AssertionError("wrong")

    with pytest.raises(AssertionError, match="wrong"):
        await unless_paused(attempt, 60.0)
    assert tries == [0]
