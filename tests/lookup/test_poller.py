"""Polling for several at once: one of them does the work, and the next takes over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest
from anyio.lowlevel import checkpoint

from nsqext.lookup.options import LookupOptions
from nsqext.lookup.poller import Poller
from nsqext.lookup.refresher import Refresher
from tests.support.fake_lookupd import eventually, told

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nsqext.lookup.responses import LookupAnswer

pytestmark = pytest.mark.anyio


class Asked:
    """A topic whose questions are counted; some of them hang."""

    def __init__(self, interval: float = 60.0) -> None:
        self.count = 0
        self.hanging = 0
        self.refresher = Refresher(
            "t", "r", self._ask, LookupOptions(poll_interval=interval, poll_jitter=0), lambda view: None
        )
        self.refresher.poll_at = float("-inf")

    async def _ask(self) -> Sequence[LookupAnswer]:
        self.count += 1
        if self.hanging:
            self.hanging -= 1
            await anyio.sleep_forever()
        await checkpoint()
        return (told("a", {0: "n1"}, num=1),)


async def test_several_that_run_it_poll_once() -> None:
    asked = Asked()
    poller = Poller(lambda: [asked.refresher])
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(poller.run)
            await eventually(lambda: asked.refresher.view is not None)
            await anyio.wait_all_tasks_blocked()
            assert asked.count == 1
            poller.stop()


async def test_the_next_takes_over_what_was_cut_off() -> None:
    asked = Asked()
    asked.hanging = 1
    poller = Poller(lambda: [asked.refresher])
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            async with anyio.create_task_group() as first:
                first.start_soon(poller.run)
                await eventually(lambda: asked.count == 1)
                tasks.start_soon(poller.run)
                await anyio.wait_all_tasks_blocked()
                first.cancel_scope.cancel()
            await eventually(lambda: asked.refresher.view is not None)
            assert asked.count == 2
            tasks.cancel_scope.cancel()


async def test_one_that_waits_for_its_turn_can_go() -> None:
    asked = Asked(interval=0.01)
    poller = Poller(lambda: [asked.refresher])
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(poller.run)
            await eventually(lambda: asked.count == 1)
            async with anyio.create_task_group() as second:
                second.start_soon(poller.run)
                await anyio.wait_all_tasks_blocked()
                second.cancel_scope.cancel()
            polled = asked.count
            await eventually(lambda: asked.count > polled + 1)
            poller.stop()


async def test_it_does_not_begin_once_it_was_stopped() -> None:
    asked = Asked()
    poller = Poller(lambda: [asked.refresher])
    poller.stop()
    with anyio.fail_after(5):
        await poller.run()
    assert asked.count == 0
