"""When a batch is complete: it is full, old enough, at its deadline, or no further message can be received."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import anyio
import pytest
from anyio import create_task_group

from nsqext.client.consumer.handlers.iteration import MessageIteration
from nsqext.client.consumer.handlers.workers import BatchLimits, ConsumerState, MessageQueue
from nsqext.client.consumer.unpacking import UnpackBudget
from tests.support.clock import replace_clock
from tests.support.messages import RecordingOwner, make_message
from tests.support.sleeps import settled

if TYPE_CHECKING:
    from nsqext.client.consumer.subscriptions.subscription_group import SubscriptionGroup

pytestmark = pytest.mark.anyio

_NOW = 1000.0


class Bench:
    """A queue, and the batches that are collected from it; the clock stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, patience: float = inf) -> None:
        replace_clock(monkeypatch, lambda: _NOW)
        monkeypatch.setattr(MessageIteration, "request_more", self._request_more)
        self.owner = RecordingOwner()
        self.queue = MessageQueue()
        self.requests = 0
        self.state = ConsumerState()
        group = cast("SubscriptionGroup", SimpleNamespace(tasks=None))
        self.collector = MessageIteration(self.state, self.queue, group, lambda: 0)
        self.patience = patience

    def _request_more(self) -> float:
        self.requests += 1
        return self.patience

    def put(self, *numbers: int, age: float = 0.0, budget: UnpackBudget | None = None) -> None:
        """Receive messages that were delivered some seconds ago."""
        messages = [make_message(self.owner, number, b"x" * 9) for number in numbers]
        for message in messages:
            message.delivered = message.received = _NOW - age
            message.budget = budget
        self.queue.put(messages)

    async def collect(
        self, limits: BatchLimits, meanwhile: Callable[[], object] = lambda: None, deadline: float = inf
    ) -> list[int]:
        """Return the numbers of the next batch; something happens as soon as the collector waits."""
        taken: list[int] = []

        async def collect() -> None:
            taken.extend(message.internal_id for message in await self.collector.collect(limits, deadline))

        with anyio.fail_after(25):
            async with create_task_group() as tasks:
                tasks.start_soon(collect)
                await settled()
                meanwhile()
        return taken


async def test_a_full_batch_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.put(1, 2, 3)
    assert await bench.collect(BatchLimits(2, 60.0)) == [1, 2]
    assert bench.requests == 0
    assert await bench.collect(BatchLimits(2, 60.0), lambda: bench.put(4, 5)) == [3, 4]
    assert bench.requests == 1


async def test_a_batch_waits_for_further_messages_until_its_first_one_is_old_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch)
    bench.put(1, age=4.1)
    assert await bench.collect(BatchLimits(2, 4.0), lambda: bench.put(2)) == [1]
    assert await bench.collect(BatchLimits(2, 60.0), lambda: bench.put(3)) == [2, 3]
    bench.put(4, age=3.1)
    assert await bench.collect(BatchLimits(2, 4.0), lambda: bench.put(5)) == [4, 5], "0.9 s are left"
    bench.put(6, age=3.98)
    assert await bench.collect(BatchLimits(2, 4.0)) == [6]


@pytest.mark.parametrize("patience", [0.0, 0.01])
async def test_a_batch_does_not_wait_longer_than_messages_can_be_received(
    monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    bench = Bench(monkeypatch, patience)
    bench.put(1)
    assert await bench.collect(BatchLimits(2, 60.0)) == [1]


async def test_a_batch_is_empty_at_its_deadline_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, 0.0)
    assert await bench.collect(BatchLimits(2, 60.0), deadline=_NOW) == []
    replace_clock(monkeypatch, time.monotonic)
    assert await bench.collect(BatchLimits(2, 60.0), deadline=time.monotonic() + 0.01) == []

    def end() -> None:
        bench.state.ended.set()
        bench.queue.stop()

    assert await bench.collect(BatchLimits(2, 60.0), end) == []
    bench.queue.stopped = False
    bench.put(1)
    assert await bench.collect(BatchLimits(1, 60.0)) == [], "no batch is handed out any more"


async def test_expired_messages_do_not_make_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.owner.horizon = _NOW - 50.0
    bench.put(1, age=60.0)
    assert await bench.collect(BatchLimits(2, 1.0), lambda: bench.put(2, age=2.0)) == [2]


async def test_a_batch_waits_while_others_use_up_the_budget_for_unpacked_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, budget = Bench(monkeypatch), UnpackBudget(20)
    bench.put(1, 2, 3, 4, budget=budget)
    one, two, *_ = bench.queue.messages
    assert await bench.collect(BatchLimits(4, 60.0)) == [1, 2]
    assert [message.internal_id for message in bench.queue.messages] == [3, 4], "those that do not fit stay, in order"
    assert bench.requests == 0
    assert await bench.collect(BatchLimits(2, 60.0), lambda: budget.release(one)) == [3]
    assert bench.requests == 1, "answers are sent before it waits"
    replace_clock(monkeypatch, time.monotonic)
    assert await bench.collect(BatchLimits(1, 60.0), deadline=time.monotonic() + 0.01) == []
    budget.release(two)
    assert await bench.collect(BatchLimits(1, 60.0)) == [4]


async def test_tasks_that_collect_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, batches = Bench(monkeypatch), list[list[int]]()

    async def collect() -> None:
        batches.append(await bench.collect(BatchLimits(2, 60.0)))

    with anyio.fail_after(25):
        async with create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(collect)
            await settled()
            for number in range(4):
                bench.put(number)
                await settled()
    assert batches == [[0, 1], [2, 3]]
