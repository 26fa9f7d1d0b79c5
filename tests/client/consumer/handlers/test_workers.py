"""The tasks that run a handler, and the row that they take messages from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest
from anyio import create_task_group

from nsqext import FailureOptions
from nsqext.client.consumer.handlers.failure_policy import DelayedRequeues, FailurePolicy
from nsqext.client.consumer.handlers.message_queue import MessageQueue
from nsqext.client.consumer.handlers.workers import Workers
from nsqext.client.consumer.subscriptions.stall import StallWatch
from tests.support.owned_messages import Book, made

if TYPE_CHECKING:
    from nsqext.client.consumer.handlers.workers import Handler
    from nsqext.client.consumer.message import Message

pytestmark = pytest.mark.anyio


def workers(handler: Handler, **members: int) -> tuple[Workers, list[str]]:
    """Return workers, and where their flushes are counted."""
    flushes: list[str] = []
    verdict = FailurePolicy(FailureOptions(requeue_delay=0, **members), None, DelayedRequeues())  # type: ignore[arg-type]
    missed: list[Message] = []
    return Workers(handler, verdict, StallWatch(0.0, "it"), lambda: flushes.append("flush"), missed.append), flushes


async def _drain(subject: Workers, inbox: MessageQueue) -> None:
    await anyio.wait_all_tasks_blocked()
    inbox.stop()
    await subject.wait()


async def test_messages_are_finished_in_their_order_and_flushed_when_none_is_left() -> None:
    book, inbox, seen = Book(), MessageQueue(), list[int]()

    async def handle(message: Message) -> None:
        seen.append(message.internal_id)

    subject, flushes = workers(handle)
    async with create_task_group() as tasks:
        subject.start(tasks, [inbox])
        inbox.put([made(book, number) for number in range(5)])
        await _drain(subject, inbox)
    assert seen == [0, 1, 2, 3, 4]
    assert book.lines == [f"FIN {number}" for number in range(5)]
    assert len(flushes) == 1


async def test_what_is_lost_while_it_waits_is_not_handled() -> None:
    book, inbox = Book(), MessageQueue()

    async def handle(message: Message) -> None:
        raise AssertionError("it was handled")

    subject, _ = workers(handle)
    book.horizon = 1.0
    inbox.put([made(book)])
    async with create_task_group() as tasks:
        subject.start(tasks, [inbox])
        await _drain(subject, inbox)
    assert book.lines == []


async def test_worn_out_messages_do_not_reach_the_handler() -> None:
    book, inbox = Book(), MessageQueue()

    async def handle(message: Message) -> None:
        raise AssertionError("it was handled")

    subject, _ = workers(handle, max_attempts=3)
    inbox.put([made(book, attempts=4)])
    async with create_task_group() as tasks:
        subject.start(tasks, [inbox])
        await _drain(subject, inbox)
    assert book.lines == ["FIN 1"]


async def test_an_answer_by_hand_is_not_repeated() -> None:
    book, inbox = Book(), MessageQueue()

    async def handle(message: Message) -> None:
        await message.requeue(1.0)

    subject, _ = workers(handle)
    inbox.put([made(book)])
    async with create_task_group() as tasks:
        subject.start(tasks, [inbox])
        await _drain(subject, inbox)
    assert book.lines == ["REQ 1 1"]


async def test_those_at_work_are_known_and_can_be_cancelled() -> None:
    book, inbox = Book(), MessageQueue()

    async def handle(message: Message) -> None:
        await anyio.sleep_forever()

    subject, _ = workers(handle)
    async with create_task_group() as tasks:
        subject.start(tasks, [inbox, inbox])
        inbox.put([made(book, number) for number in (1, 2, 3)])
        await anyio.wait_all_tasks_blocked()
        running = sorted(message.internal_id for message in subject.running)
        inbox.stop()
        subject.cancel()
        with anyio.fail_after(5):
            await subject.wait()
    assert running == [1, 2]
    assert book.lines == []
    assert subject.running == []


async def test_a_stopped_inbox_gives_out_nothing() -> None:
    inbox = MessageQueue()
    inbox.put([made(Book())])
    inbox.stop()
    inbox.put([made(Book())])
    assert not inbox.messages
    with anyio.fail_after(5):
        async with create_task_group() as tasks:
            tasks.start_soon(inbox.wait)
            await anyio.wait_all_tasks_blocked()
            inbox.wake()
