"""When Taskiq's tasks are acknowledged, and what is done again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from taskiq import Context, SimpleRetryMiddleware, TaskiqDepends, TaskiqResult
from taskiq.acks import AcknowledgeType
from taskiq.brokers.inmemory_broker import InmemoryResultBackend
from taskiq.receiver import Receiver

from nsqext import Admin
from nsqext.integrations.taskiq import NsqBroker
from tests.support.machine_pauses import unless_paused

if TYPE_CHECKING:
    from nsqext.broker import Cluster

Opened = Callable[..., AbstractAsyncContextManager[NsqBroker]]
pytestmark = pytest.mark.anyio
_SECONDS = 25.0
_SETTLE = 0.5
"""Seconds in which an acknowledgement reaches the server."""
NEEDED: Any = TaskiqDepends()
"""Taskiq gives the context of the run."""


@asynccontextmanager
async def working(broker: NsqBroker, ack_type: AcknowledgeType | None = None) -> AsyncIterator[None]:
    """Run the tasks of a broker, as a worker process does."""
    receiver, finish = Receiver(broker, ack_type=ack_type), asyncio.Event()
    running = asyncio.ensure_future(receiver.listen(finish))
    try:
        yield
    finally:
        finish.set()
        await running


async def unacknowledged(cluster: Cluster, queue: str, seconds: float = _SETTLE) -> int:
    """Return the messages of a queue that are not acknowledged, after waiting until there are none."""
    async with Admin(cluster.lookupd) as admin:
        with anyio.move_on_after(seconds):
            while await _lag(admin, queue):  # noqa: ASYNC110 - the server has no event
                await anyio.sleep(0.1)
        return await _lag(admin, queue)


async def _lag(admin: Admin, queue: str) -> int:
    found = await admin.stats(queue, "taskiq")
    return sum(one.lag for partition in found.partitions for one in partition.channels.values())


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    with anyio.fail_after(_SECONDS):
        while not condition():  # noqa: ASYNC110 - a task of a worker has no event
            await anyio.sleep(0.01)


@pytest.mark.parametrize(
    ("ack_type", "expected"),
    [
        (AcknowledgeType.WHEN_RECEIVED, {"running": 0, "saving": 0, "done": 0}),
        (AcknowledgeType.WHEN_EXECUTED, {"running": 1, "saving": 0, "done": 0}),
        (AcknowledgeType.WHEN_SAVED, {"running": 1, "saving": 1, "done": 0}),
        (AcknowledgeType.MANUAL, {"running": 1, "saving": 1, "done": 1}),
    ],
)
async def test_a_task_is_acknowledged_at_the_time_of_its_type(
    cluster: Cluster, opened: Opened, ack_type: AcknowledgeType, expected: dict[str, int]
) -> None:
    found: dict[str, int] = {}

    class Results(InmemoryResultBackend[Any]):
        async def set_result(self, task_id: str, result: TaskiqResult[Any]) -> None:
            found["saving"] = await unacknowledged(cluster, queue)

    async with opened() as broker:
        (queue,) = broker.queues
        broker.with_result_backend(Results())

        @broker.task
        async def note() -> None:
            found["running"] = await unacknowledged(cluster, queue)

        async with working(broker, ack_type):
            await note.kiq()
            await until(lambda: "saving" in found)
            found["done"] = await unacknowledged(cluster, queue)
    assert found == expected


async def test_a_task_acknowledges_itself(cluster: Cluster, opened: Opened) -> None:
    found: list[int] = []
    async with opened() as broker:

        @broker.task(ack_type="manual")
        async def note(context: Context = NEEDED) -> None:
            await context.ack()
            found.append(await unacknowledged(cluster, broker.queues[0], _SECONDS))

        async with working(broker):
            await note.kiq()
            await until(lambda: found)
    assert found == [0]


async def test_a_requeued_task_runs_again_and_leaves_no_message(cluster: Cluster, opened: Opened) -> None:
    labels: list[object] = []
    async with opened() as broker:

        @broker.task
        async def note(context: Context = NEEDED) -> None:
            labels.append(context.message.labels.get("X-Taskiq-requeue"))
            if len(labels) < 3:
                await context.requeue()

        async with working(broker):
            await note.kiq()
            await until(lambda: len(labels) == 3)
            assert await unacknowledged(cluster, broker.queues[0], _SECONDS) == 0
    assert [None if label is None else int(str(label)) for label in labels] == [None, 1, 2]


async def test_rejected_failed_and_unknown_tasks_are_not_delivered_again(cluster: Cluster, opened: Opened) -> None:
    ran: list[str] = []
    async with opened() as broker:

        @broker.task
        async def rejected(context: Context = NEEDED) -> None:
            ran.append("rejected")
            context.reject()

        @broker.task
        async def failed() -> None:
            ran.append("failed")
            raise ValueError("refused")

        @broker.task(task_name="unknown")
        async def unknown() -> None:
            """Never called."""

        await unknown.kiq()
        del broker.local_task_registry["unknown"]
        await rejected.kiq()
        await failed.kiq()
        async with working(broker):
            await until(lambda: len(ran) == 2)
            assert await unacknowledged(cluster, broker.queues[0], _SECONDS) == 0
    assert sorted(ran) == ["failed", "rejected"]


async def test_the_middleware_of_retries_sends_a_failed_task_again(cluster: Cluster, opened: Opened) -> None:
    attempts: list[int] = []
    async with opened() as broker:
        broker.add_middlewares(SimpleRetryMiddleware(default_retry_count=3))

        @broker.task(retry_on_error=True)
        async def note() -> None:
            attempts.append(len(attempts))
            if len(attempts) < 3:
                raise ValueError("not yet")

        async with working(broker):
            await note.kiq()
            await until(lambda: len(attempts) == 3)
            assert await unacknowledged(cluster, broker.queues[0], _SECONDS) == 0


async def test_a_running_task_is_touched_beyond_msg_timeout(opened: Opened) -> None:
    async def attempt(number: int) -> None:
        runs: list[int] = []
        async with opened(msg_timeout=1.0) as broker:

            @broker.task
            async def note() -> None:
                runs.append(1)
                await anyio.sleep(2.5)
                runs.append(2)

            async with working(broker):
                await note.kiq()
                await until(lambda: len(runs) >= 2)
        assert runs == [1, 2]

    await unless_paused(attempt, 0.2)


async def test_a_task_that_is_acknowledged_too_late_is_logged(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(msg_timeout=1.0, auto_touch=False) as broker:
        runs: list[int] = []

        @broker.task
        async def note() -> None:
            runs.append(1)
            if len(runs) == 1:
                await anyio.sleep(2.5)

        with caplog.at_level(logging.ERROR, "nsqext.taskiq"):
            async with working(broker):
                await note.kiq()
                await until(lambda: len(runs) == 2 and caplog.records)
    assert f"queue {broker.queues[0]}: a message was acknowledged after the server had taken it back" in caplog.text
