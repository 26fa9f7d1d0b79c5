"""The tasks that run a handler, and the row that they take messages from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest
from anyio import create_task_group

from nsqext import FailureOptions
from nsqext.client.consumer.handlers.failure_policy import DelayedRequeues, FailurePolicy
from nsqext.client.consumer.handlers.message_queue import MessageQueue
from nsqext.client.consumer.handlers.stall import StallWatch
from nsqext.client.consumer.handlers.workers import Workers
from tests.support.messages import RecordingOwner, make_message

if TYPE_CHECKING:
    from nsqext.client.consumer.handlers.workers import Handler
    from nsqext.client.consumer.message import Message

pytestmark = pytest.mark.anyio


def workers(handler: Handler, **members: int) -> tuple[Workers, list[str]]:
    """Return workers, and where their flushes are counted."""
    flushes: list[str] = []
    policy = FailurePolicy(FailureOptions(requeue_delay=0, **members), None, DelayedRequeues())  # type: ignore[arg-type]
    missed: list[Message] = []
    return Workers(handler, policy, StallWatch(0.0, "it"), lambda: flushes.append("flush"), missed.append), flushes


async def _drain(subject: Workers, queue: MessageQueue) -> None:
    await anyio.wait_all_tasks_blocked()
    queue.stop()
    await subject.wait()


async def test_messages_are_finished_in_their_order_and_flushed_when_none_is_left() -> None:
    owner, queue, seen = RecordingOwner(), MessageQueue(), list[int]()

    async def handle(message: Message) -> None:
        seen.append(message.internal_id)

    subject, flushes = workers(handle)
    async with create_task_group() as tasks:
        subject.start(tasks, [queue])
        queue.put([make_message(owner, number) for number in range(5)])
        await _drain(subject, queue)
    assert seen == [0, 1, 2, 3, 4]
    assert owner.commands == [f"FIN {number}" for number in range(5)]
    assert len(flushes) == 1


async def test_what_is_lost_while_it_waits_is_not_handled() -> None:
    owner, queue = RecordingOwner(), MessageQueue()

    async def handle(message: Message) -> None:
        raise AssertionError("it was handled")

    subject, _ = workers(handle)
    owner.horizon = 1.0
    queue.put([make_message(owner)])
    async with create_task_group() as tasks:
        subject.start(tasks, [queue])
        await _drain(subject, queue)
    assert owner.commands == []


async def test_worn_out_messages_do_not_reach_the_handler() -> None:
    owner, queue = RecordingOwner(), MessageQueue()

    async def handle(message: Message) -> None:
        raise AssertionError("it was handled")

    subject, _ = workers(handle, max_attempts=3)
    queue.put([make_message(owner, attempts=4)])
    async with create_task_group() as tasks:
        subject.start(tasks, [queue])
        await _drain(subject, queue)
    assert owner.commands == ["FIN 1"]


async def test_an_answer_by_hand_is_not_repeated() -> None:
    owner, queue = RecordingOwner(), MessageQueue()

    async def handle(message: Message) -> None:
        await message.requeue(1.0)

    subject, _ = workers(handle)
    queue.put([make_message(owner)])
    async with create_task_group() as tasks:
        subject.start(tasks, [queue])
        await _drain(subject, queue)
    assert owner.commands == ["REQ 1 1"]


async def test_those_at_work_are_known_and_can_be_cancelled() -> None:
    owner, queue = RecordingOwner(), MessageQueue()

    async def handle(message: Message) -> None:
        await anyio.sleep_forever()

    subject, _ = workers(handle)
    async with create_task_group() as tasks:
        subject.start(tasks, [queue, queue])
        queue.put([make_message(owner, number) for number in (1, 2, 3)])
        await anyio.wait_all_tasks_blocked()
        running = sorted(message.internal_id for message in subject.running)
        queue.stop()
        subject.cancel()
        with anyio.fail_after(5):
            await subject.wait()
    assert running == [1, 2]
    assert owner.commands == []
    assert subject.running == []


async def test_a_stopped_inbox_gives_out_nothing() -> None:
    queue = MessageQueue()
    queue.put([make_message(RecordingOwner())])
    queue.stop()
    queue.put([make_message(RecordingOwner())])
    assert not queue.messages
    with anyio.fail_after(5):
        async with create_task_group() as tasks:
            tasks.start_soon(queue.wait)
            await anyio.wait_all_tasks_blocked()
            queue.wake()
