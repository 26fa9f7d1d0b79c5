"""The tasks that run a handler, and their message queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio import create_task_group
from anyio.lowlevel import checkpoint

from nsqext import Reject
from nsqext.client.consumer.handlers.batches import BatchHandler
from nsqext.client.consumer.handlers.failure_policy import FailurePolicy
from nsqext.client.consumer.handlers.workers import (
    BatchLimits,
    MessageHandler,
    MessageQueue,
    StallWatch,
    Workers,
)
from nsqext.client.consumer.message import touch_due
from nsqext.client.consumer.options import FailureOptions
from nsqext.client.consumer.subscriptions.early_messages import EarlyMessages
from nsqext.client.consumer.subscriptions.subscription_group import RejectedCounts
from nsqext.client.consumer.unpacking import UnpackBudget
from nsqext.errors import InvalidSetting
from tests.support.clock import replace_clock
from tests.support.messages import RecordingOwner, make_message

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nsqext import MessageBatch
    from nsqext.client.consumer.message import Message
    from nsqext.client.consumer.options import DeadLetterHook

pytestmark = pytest.mark.anyio


class Source:
    """Where workers take messages from: calls are recorded, and batches are taken as soon as there are messages."""

    def __init__(self, policy: FailurePolicy) -> None:
        self.policy = policy
        self.flushes = self.ends = 0
        self.lost: list[Message] = []
        self.held: list[Message] = []

    def flush(self) -> None:
        self.flushes += 1

    def expired(self, message: Message) -> None:
        self.lost.append(message)

    def hold(self, messages: Sequence[Message]) -> None:
        self.held += messages

    async def collect(self, limits: BatchLimits, queue: MessageQueue) -> list[Message]:
        while not queue.messages and not queue.stopped:
            await queue.wait()
        return queue.take(limits.max_count)

    def unanswered(self, messages: Iterable[Message], queue: MessageQueue) -> list[Message]:
        return [message for message in messages if not message.answered]

    def end_batch(self, queue: MessageQueue) -> None:
        self.ends += 1


class Stalls(StallWatch):
    """Keeps the durations of handlers that are more than half of the limit."""

    def __init__(self, limit: float, name: str) -> None:
        super().__init__(limit, name)
        self.seconds: list[float] = []
        self._least = limit / 2

    def took(self, messages: Sequence[Message], seconds: float) -> None:
        if seconds > self._least:
            self.seconds.append(round(seconds, 3))


def workers(dead_letters: DeadLetterHook | None = None, **members: Any) -> tuple[Workers, Source]:
    """Return workers, and what they take messages from."""
    policy = FailurePolicy(FailureOptions(requeue_delay=0, **members), dead_letters, EarlyMessages, RejectedCounts())
    source = Source(policy)
    return Workers(StallWatch(0.0, "it"), source), source


def test_threads_take_messages_that_need_no_decision_of_the_event_loop() -> None:
    owner, ended, queue = RecordingOwner(), RecordingOwner(), MessageQueue()
    ended.horizon = 1.0
    one, two, again, packed = (make_message(owner, number) for number in range(1, 5))
    assert queue.take_ready() is None
    queue.put([one, two])
    assert [queue.take_ready(), queue.take_ready(), queue.take_ready()] == [one, two, None]
    again.attempts, packed.budget = 2, UnpackBudget(1000)
    for message in (again, packed, make_message(ended, 5)):
        queue.put([message, one])
        assert queue.take_ready() is None
        assert queue.take_all() == [message, one], "it stays the first"
        queue.put([one])
        assert queue.take_ready() is one
    queue.put([one, two, again])
    assert (queue.take(2), queue.take_all()) == ([one, two], [again])
    queue.put([one])
    queue.stop()
    queue.put([two])
    assert (queue.take_ready(), queue.take_all()) == (None, [])


class _Raced(deque["Message"]):
    """A queue of which another thread takes the first message, while one is looking at it."""

    def popleft(self) -> Message:
        super().popleft()
        return super().popleft()


def test_a_message_that_no_thread_looked_at_stays_the_first_one() -> None:
    owner, queue = RecordingOwner(), MessageQueue()
    one, two, three = (make_message(owner, number) for number in range(1, 4))
    queue.messages = _Raced([one, two, three])
    assert queue.take_ready() is None
    assert list(queue.messages) == [two, three]


async def _handled(subject: Workers, handler: MessageHandler | BatchHandler, *messages: Message) -> None:
    """Run a worker until it has handled some messages."""
    queue = MessageQueue()
    queue.put(list(messages))
    with anyio.fail_after(25):
        async with create_task_group() as tasks:
            subject.start(tasks, handler, [queue])
            while queue.messages or subject.running:
                await checkpoint()
            queue.stop()
            await subject.wait()


async def test_messages_are_finished_in_order_and_answers_are_flushed_when_the_queue_is_empty() -> None:
    owner, seen = RecordingOwner(), list[int]()

    async def handle(message: Message) -> None:
        seen.append(message.internal_id)

    subject, source = workers()
    await _handled(subject, MessageHandler(handle), *(make_message(owner, number) for number in range(5)))
    assert seen == [0, 1, 2, 3, 4]
    assert owner.commands == [f"FIN {number}" for number in range(5)]
    assert source.flushes == 1


async def test_an_answer_by_hand_is_not_repeated() -> None:
    owner = RecordingOwner()

    async def handle(message: Message) -> None:
        await message.requeue(1.0)

    await _handled(workers()[0], MessageHandler(handle), make_message(owner))
    assert owner.commands == ["REQ 1 1"]


async def test_without_auto_finish_the_message_stays_in_flight_after_its_handler() -> None:
    owner = RecordingOwner()

    async def handle(message: Message) -> None:
        if message.internal_id == 2:
            await message.finish()

    subject, source = workers()
    messages = [make_message(owner, number) for number in (1, 2, 3)]
    await _handled(subject, MessageHandler(handle, auto_finish=False), *messages)
    assert owner.commands == ["FIN 2"]
    assert [message.internal_id for message in source.held if not message.answered] == [1, 3]


async def test_running_handlers_can_be_cancelled() -> None:
    owner, queue = RecordingOwner(), MessageQueue()

    async def handle(message: Message) -> None:
        await anyio.sleep_forever()

    subject, _ = workers()
    async with create_task_group() as tasks:
        subject.start(tasks, MessageHandler(handle), [queue, queue])
        queue.put([make_message(owner, number) for number in (1, 2, 3)])
        await anyio.wait_all_tasks_blocked()
        running = sorted(message.internal_id for message in subject.running)
        queue.stop()
        subject.cancel()
        with anyio.fail_after(25):
            await subject.wait()
        assert subject.running == []
    assert running == [1, 2]
    assert owner.commands == []
    assert sorted(message.internal_id for message in subject.take_cancelled()) == [1, 2]
    assert subject.take_cancelled() == []


@asynccontextmanager
async def _handling(
    subject: Workers, handle: Callable[[MessageBatch], Awaitable[None]], queue: MessageQueue
) -> AsyncIterator[None]:
    """Handle batches of three messages; at the end, wait for the workers, which the test stops."""
    with anyio.fail_after(25):
        async with create_task_group() as tasks:
            subject.start(tasks, BatchHandler(handle, BatchLimits(max_count=3)), [queue])
            yield
            await subject.wait()


@pytest.mark.parametrize("error", [None, ValueError("no"), GeneratorExit()])
async def test_the_rest_of_a_batch_is_answered_by_the_end_of_its_handler(
    error: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, now = RecordingOwner(), [100.0]
    replace_clock(monkeypatch, lambda: now[0])

    async def handle(batch: MessageBatch) -> None:
        await batch[1].finish()
        now[0] += 0.03
        if error is not None:
            raise error

    subject, source = workers()
    subject.stall = stall = Stalls(0.04, "it")
    messages = [make_message(owner, number) for number in (1, 2, 3)]
    await _handled(subject, BatchHandler(handle, BatchLimits(max_count=3)), *messages)
    rest = ["FIN 1", "FIN 3"] if error is None else ["REQ 1 0!", "REQ 3 0!"]
    assert (owner.commands, source.ends) == (["FIN 2", *rest], 1)
    assert stall.seconds == [0.03]


async def test_the_batch_of_a_cancelled_handler_is_known_without_what_it_has_answered() -> None:
    owner, queue = RecordingOwner(), MessageQueue()

    async def handle(batch: MessageBatch) -> None:
        await batch[0].finish()
        await anyio.sleep_forever()

    subject, _ = workers()
    queue.put([make_message(owner, number) for number in (1, 2, 3)])
    async with _handling(subject, handle, queue):
        while len(owner.commands) < 1:
            await checkpoint()
        assert [message.internal_id for message in subject.running] == [2, 3]
        subject.cancel()
    assert [message.internal_id for message in subject.take_cancelled()] == [2, 3]
    assert owner.commands == ["FIN 1"]


def this_task() -> asyncio.Task[Any]:
    """Return the current task of asyncio."""
    task = asyncio.current_task()
    assert task is not None
    return task


def cancel_this_task() -> None:
    """Cancel the current task, which notices it at its next await; on trio this would take a scope."""
    this_task().cancel()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("times", [1, 2])
async def test_a_worker_that_was_cancelled_outside_of_a_call_continues(
    caplog: pytest.LogCaptureFixture, times: int
) -> None:
    owner, groups, left = RecordingOwner(), list[BaseException](), list[int]()

    async def fail() -> None:
        raise ValueError("one of several")

    async def handle(message: Message) -> None:
        if message.internal_id == 1:
            for _ in range(times):
                cancel_this_task()
        elif message.internal_id == 2:
            left.append(this_task().cancelling())
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(fail())
            except ExceptionGroup as group:
                groups.extend(group.exceptions)

    subject, _ = workers()
    queue = MessageQueue()
    async with create_task_group() as tasks:
        subject.start(tasks, MessageHandler(handle), [queue])
        for number in (1, 2):
            queue.put([make_message(owner, number)])
            await anyio.wait_all_tasks_blocked()
        queue.stop()
        await subject.wait()
    assert owner.commands == ["FIN 1", "FIN 2"]
    assert [str(error) for error in groups] == ["one of several"]
    assert left == [0], "asyncio's groups count cancellations"
    assert "cancelled, but not by its consumer, and continues" in caplog.text


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("batches", [False, True])
async def test_a_message_whose_dead_letter_was_cancelled_is_requeued(batches: bool) -> None:
    owner = RecordingOwner()

    async def publish(message: Message, error: Exception | None) -> None:
        if message.internal_id == 1:
            other = asyncio.ensure_future(anyio.sleep_forever())
            other.cancel()
            await other

    async def handle(_: object) -> None:
        raise Reject

    subject, _ = workers(publish, max_attempts=1, dead_letter=publish)
    handler = BatchHandler(handle, BatchLimits(1)) if batches else MessageHandler(handle)
    await _handled(subject, handler, make_message(owner, 1), make_message(owner, 2))
    assert owner.commands == ["REQ 1 0!", "FIN 2"]


@pytest.mark.parametrize("auto_finish", ["no", 0, None])
def test_the_kind_of_a_setting_of_handlers_is_checked(auto_finish: Any) -> None:
    async def handle(message: Message) -> None: ...

    with pytest.raises(InvalidSetting, match="auto_finish"):
        MessageHandler(handle, auto_finish=auto_finish)


async def test_messages_of_a_failed_batch_are_touched_while_their_dead_letters_are_published() -> None:
    owner, queue, stored = RecordingOwner(), MessageQueue(), anyio.Semaphore(0)
    begun, letters = anyio.create_memory_object_stream[int](3)

    async def take(message: Message, error: Exception | None) -> None:
        begun.send_nowait(message.internal_id)
        await stored.acquire()

    async def handle(batch: MessageBatch) -> None:
        raise Reject

    options = FailureOptions(max_attempts=2, dead_letter="dead")
    policy = FailurePolicy(options, take, EarlyMessages, RejectedCounts())
    subject = Workers(StallWatch(0.0, "it"), Source(policy))
    # the last message has used up its attempts, and is rejected before the handler is called
    queue.put([make_message(owner, number, attempts=number) for number in (1, 2, 3)])
    async with _handling(subject, handle, queue):
        for published, touched in (([3], ["TOUCH 1", "TOUCH 2", "TOUCH 3"]), ([1, 2], ["TOUCH 1", "TOUCH 2"])):
            assert sorted([await letters.receive() for _ in published]) == published
            assert touch_due(subject.running, 40.0) == len(touched)
            assert owner.commands[-len(touched) :] == touched
            for _ in published:
                stored.release()
        queue.stop()
    begun.close()
    letters.close()
    assert sorted(command for command in owner.commands if "FIN" in command) == ["FIN 1", "FIN 2", "FIN 3"]


class Unprintable(Exception):
    """An error whose text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    "error", [ValueError("no"), GeneratorExit(), Unprintable()], ids=lambda error: type(error).__name__
)
async def test_a_handler_that_fails_has_its_message_requeued(error: BaseException) -> None:
    owner = RecordingOwner()

    async def handle(message: Message) -> None:
        if message.internal_id == 1:
            raise error

    subject, _ = workers()
    await _handled(subject, MessageHandler(handle), make_message(owner, 1), make_message(owner, 2, attempts=5))
    assert owner.commands == ["REQ 1 0!", "FIN 2"]


async def test_expired_messages_and_those_without_attempts_are_not_handled() -> None:
    owner, handled = RecordingOwner(), list["Message"]()

    async def handle(message: Message) -> None:
        handled.append(message)

    async def keep(message: Message, error: Exception | None) -> None:
        letters.append(message)

    letters = list["Message"]()
    subject, source = workers(keep, max_attempts=1)
    lost, used_up, first = (make_message(owner, number, attempts=attempts) for number, attempts in enumerate((1, 2, 1)))
    owner.horizon, used_up.received, first.received = 1.0, 2.0, 2.0
    await _handled(subject, MessageHandler(handle), lost, used_up, first)
    assert (source.lost, handled, letters, owner.commands) == ([lost], [first], [used_up], ["FIN 1", "FIN 2"])


@pytest.mark.parametrize("expires", [False, True])
async def test_a_message_waits_for_the_budget_until_it_expires(expires: bool) -> None:
    owner, budget, handled = RecordingOwner(), UnpackBudget(4), list["Message"]()

    async def handle(message: Message) -> None:
        handled.append(message)

    other, waiting = make_message(owner, 1), make_message(owner, 2)
    waiting.budget = other.budget = budget
    assert other.try_unpack()
    subject, source = workers()
    queue = MessageQueue()
    queue.put([waiting])
    with anyio.fail_after(25):
        async with create_task_group() as tasks:
            subject.start(tasks, MessageHandler(handle), [queue])
            while not source.flushes:
                await checkpoint()
            assert (subject.running, handled) == ([waiting], [])
            waiting.received = -1.0
            owner.horizon = 0.0 if expires else -2.0
            other.finish_now()
            while subject.running:
                await checkpoint()
            queue.stop()
    assert (handled, source.lost) == (([], [waiting]) if expires else ([waiting], []))
    assert owner.commands == ["FIN 1"] + ["FIN 2"] * (not expires)


async def test_a_worker_whose_handlers_never_wait_yields_and_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, now = RecordingOwner(), [100.0]
    replace_clock(monkeypatch, lambda: now[0])
    subject, source = workers()
    subject.stall = stall = Stalls(0.04, "it")
    flushed: list[int] = []
    turns: set[int] = set()

    async def handle(message: Message) -> None:
        flushed.append(source.flushes)
        now[0] += 0.011 if message.internal_id < 6 else 0.03

    async def others() -> None:
        while len(flushed) < 8:
            turns.add(len(flushed))
            await checkpoint()

    async with create_task_group() as tasks:
        tasks.start_soon(others)
        await _handled(subject, MessageHandler(handle), *(make_message(owner, number) for number in range(8)))
    assert flushed == [0, 0, 1, 1, 2, 2, 3, 4], "after more than 0.02 s"
    assert turns & {2, 4, 6, 7}, "others run then"
    assert stall.seconds == [0.022, 0.022, 0.022, 0.03, 0.03]


async def test_the_wait_for_a_message_is_no_time_of_its_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, now, queue = RecordingOwner(), [100.0], MessageQueue()
    replace_clock(monkeypatch, lambda: now[0])
    subject, _ = workers()
    subject.stall = stall = Stalls(0.04, "it")

    async def handle(message: Message) -> None:
        pass

    async with create_task_group() as tasks:
        subject.start(tasks, MessageHandler(handle), [queue])
        await anyio.wait_all_tasks_blocked()
        now[0] += 60.0
        queue.put([make_message(owner, 1)])
        await anyio.wait_all_tasks_blocked()
        queue.stop()
        await subject.wait()
    assert (owner.commands, stall.seconds) == (["FIN 1"], [])


async def test_a_stopped_queue_hands_out_nothing() -> None:
    queue = MessageQueue()
    queue.put([make_message(RecordingOwner())])
    queue.stop()
    queue.put([make_message(RecordingOwner())])
    assert not queue.messages
    with anyio.fail_after(25):
        async with create_task_group() as tasks:
            tasks.start_soon(queue.wait)
            await anyio.wait_all_tasks_blocked()
            queue.wake()


async def test_a_batch_lacks_what_was_answered_while_its_dead_letters_were_published() -> None:
    owner, seen = RecordingOwner(), list[list[int]]()
    messages = [make_message(owner, number, attempts=9 if number == 1 else 1) for number in (1, 2, 3)]

    async def bury(message: Message, error: Exception | None) -> None:
        await messages[1].finish()

    async def handle(batch: MessageBatch) -> None:
        seen.append([message.internal_id for message in batch])

    subject, _ = workers(bury, max_attempts=3)
    await _handled(subject, BatchHandler(handle, BatchLimits(max_count=3)), *messages)
    assert (seen, owner.commands) == ([[3]], ["FIN 2", "FIN 1", "FIN 3"])
