"""Queue received messages, and run the handler for them, or for batches, in a fixed number of tasks."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio
from anyio import get_cancelled_exc_class
from anyio.lowlevel import checkpoint
from attrs import define, field, frozen

from nsqext.arguments import check_kinds
from nsqext.client.consumer.handlers.batches import BatchHandler, MessageBatch
from nsqext.client.consumer.message import Message
from nsqext.errors import InvalidState
from nsqext.waits import Waiters

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from anyio.abc import TaskGroup

    from nsqext.client.consumer.handlers.batches import BatchLimits, HeldMessages
    from nsqext.client.consumer.handlers.failure_policy import FailurePolicy
    from nsqext.client.tasks import BackgroundTasks

logger: logging.Logger = logging.getLogger("nsqext.consumer")

Handler = Callable[[Message], Awaitable[object]]

_clock = time.monotonic
_SLICE = 0.02  # seconds after which a worker whose handlers never wait yields to the event loop, and sends its answers
_MOST_NAMED = 3  # messages that a report of a blocked event loop names, at most


class MessageQueue:
    """A queue that any number of tasks take messages from."""

    __slots__ = ("_wake", "messages", "stopped")

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()  # oldest first
        self.stopped: bool = False  # no further message is handed out
        self._wake = anyio.Event()

    def put(self, messages: list[Message]) -> None:
        """Append messages; discards them after the stop, the server redelivers them."""
        if not self.stopped:
            self.messages.extend(messages)
            self._wake.set()

    def take_ready(self) -> Message | None:
        """Remove and return the next message if it can be handed out at once; for any thread.

        None if it has expired, must be unpacked, or was delivered before: the event loop decides about it.
        """
        messages = self.messages
        try:
            first = messages[0]
            if self.stopped or first.budget is not None or first.attempts > 1 or not first.may_begin(_clock()):
                return None
            message = messages.popleft()
        except IndexError:
            return None
        if message is not first:  # another thread was quicker
            messages.appendleft(message)
            return None
        return message

    def take_all(self, count: int | None = None) -> list[Message]:
        """Remove and return up to a number of messages, or all, while threads may take some of them."""
        messages = self.messages
        taken: list[Message] = []
        most = len(messages) if count is None else min(count, len(messages))
        with suppress(IndexError):  # the list keeps those before
            taken.extend(messages.popleft() for _ in range(most))
        return taken

    def take(self, count: int) -> list[Message]:
        """Remove up to a number of messages and return those that are in flight, with unpacked bodies.

        Those that do not fit into the budget for unpacked bytes stay.
        """
        messages, now = self.messages, _clock()
        taken = [message for message in self.take_all(count) if message.may_begin(now)]
        for number, message in enumerate(taken):
            if message.budget is not None and not message.try_unpack():
                messages.extendleft(reversed(taken[number:]))
                return taken[:number]
        return taken

    def stop(self) -> None:
        """Hand out no further message, and wake all waiting tasks."""
        self.stopped = True
        self.messages.clear()
        self._wake.set()

    def wake(self) -> None:
        """Wake all waiting tasks."""
        self._wake.set()

    async def wait(self) -> None:
        """Wait for the next call of `put`, `wake` or `stop`; return immediately if there was one since."""
        if self._wake.is_set():
            self._wake = anyio.Event()
        await self._wake.wait()


class BatchCollector:
    """Takes messages from a queue when they make a batch.

    Messages stay in the queue until then: cancelling `collect` loses none.
    """

    def __init__(self, queue: MessageQueue, ended: Callable[[], bool], request_more: Callable[[], float]) -> None:
        self.queue: MessageQueue = queue
        self.ended: Callable[[], bool] = ended  # whether no further batch is handed out
        # sends answers and raises RDY; returns for how many seconds to wait for more messages
        self.request_more: Callable[[], float] = request_more
        self._turn = anyio.Lock()

    async def collect(self, limits: BatchLimits, deadline: float = float("inf")) -> list[Message]:
        """Return the next messages; none at the end of the consumer, or by the deadline on the monotonic clock.

        A batch is handed out early when all messages that may be in flight were received. Concurrent calls take turns.
        """
        messages = self.queue.messages
        async with self._turn:
            while not self.ended():
                if len(messages) < limits.max_count and await self._wait(limits, deadline):
                    continue
                taken = self.take(limits.max_count)
                if taken or _clock() >= deadline:
                    return taken
                if messages and (budget := messages[0].budget) is not None:
                    self.request_more()
                    with anyio.move_on_after(deadline - _clock()):
                        await budget.wait()
        return []

    def take(self, count: int) -> list[Message]:
        """Remove up to a number of messages, and return those that can be handed out."""
        return self.queue.take(count)

    def held_back(self) -> Collection[Message]:
        """Return the messages of the last batch that wait for an earlier one of their key, which was requeued."""
        return ()

    def end(self) -> None:
        """Let requeued messages of the last batch, and those that are held back, wait for their time."""

    async def _wait(self, limits: BatchLimits, deadline: float) -> bool:
        """Wait for further messages; return False if the batch should not wait longer."""
        patience, now, messages = self.request_more(), _clock(), self.queue.messages
        pause = deadline - now
        if messages:
            pause = min(pause, messages[0].delivered + limits.max_wait - now, patience)
        if pause <= 0:
            return False
        with anyio.move_on_after(pause) as scope:
            await self.queue.wait()
        return not scope.cancelled_caught


@define(eq=False)
class Slot:
    """The state of one worker."""

    task: object = None
    message: Message | None = None
    batch: Sequence[Message] = ()
    scope: anyio.CancelScope = field(factory=lambda: anyio.CancelScope(shield=True))


@frozen
class MessageHandler:
    """A function that handles one message at a time."""

    function: Handler
    auto_finish: bool = True  # whether a message is finished when it returns; otherwise the program finishes it later
    # called instead of the function, for one that blocks. It handles the message of the slot and, while they succeed,
    # the next ones of the queue; the slot always has the one that it handles, and the last one is left to the worker.
    burst: Callable[[Slot, MessageQueue], Awaitable[object]] | None = None

    def __attrs_post_init__(self) -> None:
        check_kinds(self)


@define(eq=False)
class StallWatch:
    """Compares the delay of a timer with the durations of handlers."""

    _limit: float  # seconds of delay that are reported; 0 for never
    _name: str  # what handles the messages, for the log
    _slow: list[tuple[float, str]] = field(factory=list)

    def took(self, messages: Sequence[Message], seconds: float) -> None:
        """Record how long the handler of one message, or of a batch, took."""
        if self._limit and seconds > self._limit / 2:
            self._slow.append((seconds, _names(messages)))

    def tick(self, late: float, running: Sequence[Message]) -> None:
        """Report the delay of the timer, in seconds, if it is above the limit; handlers of ``running`` messages run."""
        slow, self._slow = self._slow, []
        if not self._limit or late < self._limit:
            return
        handled = [text for seconds, text in slow if seconds > late / 2][:_MOST_NAMED]
        if not handled and running:
            handled = [_names(running)]
        if handled:
            reason = f"{self._name} was handling {', '.join(handled)}"
        else:
            reason = "no handler of this consumer was running"
        logger.warning(
            "the event loop was blocked for %.1f s; %s; heartbeats cannot be answered meanwhile: "
            "give blocking work to a thread (anyio.to_thread.run_sync)",
            late,
            reason,
            extra={"seconds": late},
        )


def _names(messages: Sequence[Message]) -> str:
    named = ", ".join(map(repr, messages[:_MOST_NAMED]))
    further = len(messages) - _MOST_NAMED
    return f"{named} and {further} further messages" if further > 0 else named


@define(eq=False)
class Workers:
    """The tasks that call a handler."""

    _policy: FailurePolicy  # decides about messages whose handler raised
    _stall: StallWatch  # records handlers that took long
    _held: HeldMessages  # receives messages that are not finished when their handler returns
    _flush: Callable[[], None]  # sends all answers
    _expired: Callable[[Message], None]  # called with messages that are not in flight any more when their turn comes
    _slots: list[Slot] = field(factory=list)
    _busy: int = 0
    _ended: Waiters = field(factory=Waiters)
    _cancelled: list[Message] = field(factory=list)

    def start(
        self, tasks: TaskGroup | BackgroundTasks, handler: MessageHandler, queues: Sequence[MessageQueue]
    ) -> None:
        """Start a worker for each queue. Workers are shielded from cancellation: only `cancel` ends them early."""
        for queue in queues:
            self._start(tasks, partial(self._work, handler=handler, queue=queue))

    def start_batches(
        self, tasks: TaskGroup | BackgroundTasks, handler: BatchHandler, sources: Sequence[BatchCollector]
    ) -> None:
        """Start a worker for each source, which handles batches; only `cancel` ends them early."""
        for source in sources:
            self._start(tasks, partial(self._work_batches, handler=handler, source=source))

    def _start(self, tasks: TaskGroup | BackgroundTasks, work: Callable[[Slot], Awaitable[None]]) -> None:
        slot = Slot()
        self._slots.append(slot)
        self._busy += 1
        tasks.start_soon(self._run, slot, work)

    @property
    def running(self) -> list[Message]:
        """Messages whose handlers run."""
        running = [slot.message for slot in self._slots if slot.message is not None]
        for slot in self._slots:
            running += [message for message in slot.batch if not message.answered]
        return running

    async def wait(self) -> None:
        """Wait until all workers have ended; the caller must have stopped their queues."""
        while self._busy:
            await self._ended.wait()

    def cancel(self) -> None:
        """Cancel the handlers; `take_cancelled` returns their messages."""
        for slot in self._slots:
            slot.scope.cancel()

    def take_cancelled(self) -> list[Message]:
        """Return the messages of cancelled handlers, oldest first, and forget them."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    async def _run(self, slot: Slot, work: Callable[[Slot], Awaitable[None]]) -> None:
        try:
            slot.task = anyio.get_current_task()
            with slot.scope:
                await work(slot)
        finally:
            if slot.message is not None:
                self._cancelled.append(slot.message)
            self._cancelled += slot.batch
            slot.message, slot.batch = None, ()
            self._busy -= 1
            self._ended.wake()

    async def _work(self, slot: Slot, handler: MessageHandler, queue: MessageQueue) -> None:
        handle, auto_finish, attempts_exhausted = handler.function, handler.auto_finish, self._policy.attempts_exhausted
        burst = handler.burst
        if burst is not None:

            def handle(_: Message) -> Awaitable[object]:
                return burst(slot, queue)

        messages = queue.messages
        now = since = _clock()
        while not queue.stopped:
            if not messages:
                self._flush()
                await queue.wait()
                now = since = _clock()
                continue
            try:
                message = messages.popleft()
            except IndexError:  # the thread of another worker has taken it
                continue
            if not message.may_begin(now):
                self._expired(message)  # it timed out in the queue, or its connection ended: it is redelivered
                continue
            slot.message = message
            if message.budget is not None and not await self._unpack(message):
                self._expired(message)
                slot.message = None
                continue
            try:
                if message.attempts > 1 and attempts_exhausted(message):
                    await self._policy.dead_letter(message, None)
                else:
                    await handle(message)
            except Exception as error:
                await self._policy.failed(slot.message, error)
            except BaseException as error:
                await self._policy.failed(slot.message, _interrupted(slot, error))
            else:
                message = slot.message  # a burst has handled others since
                if not message.answered:
                    if auto_finish:
                        message.finish_now()
                    else:
                        self._held.add((message,))
            now = _clock()
            if now - since > _SLICE:
                self._stall.took((message,), now - since)
                self._flush()
                await checkpoint()
                now = since = _clock()
            slot.message = None

    async def _unpack(self, message: Message) -> bool:
        """Decompress a body as soon as the budget allows it; return False if the message expired meanwhile."""
        while message.budget is not None and not message.try_unpack():
            self._flush()
            await message.budget.wait()
        return message.may_begin(_clock())

    async def _work_batches(self, slot: Slot, handler: BatchHandler, source: BatchCollector) -> None:
        while messages := await source.collect(handler.limits):
            slot.batch = messages
            try:
                slot.batch = await self._without_exhausted(messages, source)
                if slot.batch:
                    since = _clock()
                    await self._handle_batch(slot, handler, source)
                    self._stall.took(slot.batch, _clock() - since)
            finally:
                slot.batch = _without_answer(slot.batch, source)  # if it was cancelled, they are requeued
                source.end()
            slot.batch = ()

    async def _without_exhausted(self, messages: list[Message], source: BatchCollector) -> list[Message]:
        """Send messages whose attempts are used up to the dead letters; return the others."""
        exhausted: list[Message] = []
        others: list[Message] = []
        for message in messages:
            used_up = message.attempts > 1 and self._policy.attempts_exhausted(message)
            (exhausted if used_up else others).append(message)
        if exhausted:
            await self._policy.dead_letter_all(exhausted, None)
            return _without_answer(others, source)
        return others

    async def _handle_batch(self, slot: Slot, handler: BatchHandler, source: BatchCollector) -> None:
        batch = MessageBatch(slot.batch)
        try:
            await handler.function(batch)
        except Exception as error:
            await self._policy.batch_failed(_without_answer(batch, source), error)
        except BaseException as error:
            await self._policy.batch_failed(_without_answer(batch, source), _interrupted(slot, error))
        else:
            MessageBatch(_without_answer(batch, source)).finish_now()


def _without_answer(messages: Iterable[Message], source: BatchCollector) -> list[Message]:
    """Return the messages of a batch that were not answered, and are not held back."""
    held_back = source.held_back()
    return [message for message in messages if not message.answered and message not in held_back]


def _interrupted(slot: Slot, error: BaseException) -> InvalidState:
    """Return the failure of a handler that raised a cancellation or GeneratorExit by itself.

    Raises the given error if the worker was cancelled, its event loop has ended, or it is another error.
    """
    try:
        running = anyio.get_current_task() == slot.task
    except RuntimeError:  # the event loop has ended, and Python closes its coroutines
        running = False
    if running and isinstance(error, GeneratorExit):
        failure = InvalidState("the handler raised GeneratorExit", hint="it is raised to close a generator only")
    elif running and isinstance(error, get_cancelled_exc_class()) and not slot.scope.cancel_called:
        failure = InvalidState(
            "the handler was cancelled, but not by its consumer",
            hint="the handler probably awaited a task that was cancelled elsewhere",
        )
    else:
        raise error
    failure.__cause__ = error
    return failure
