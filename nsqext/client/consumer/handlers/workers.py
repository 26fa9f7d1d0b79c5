"""Queue received messages, and run the handler in a fixed number of tasks."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Protocol

import anyio
from anyio import get_cancelled_exc_class
from anyio.lowlevel import checkpoint
from attrs import define, field, frozen

from nsqext.arguments import check_kinds, check_number, check_time
from nsqext.client.consumer.message import Message
from nsqext.waits import Waiters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anyio.abc import TaskGroup

    from nsqext.client.consumer.handlers.failure_policy import FailurePolicy
    from nsqext.client.consumer.handlers.unused_result import UnusedResult
    from nsqext.client.tasks import BackgroundTasks
    from nsqext.errors import InvalidState, NsqError

logger: logging.Logger = logging.getLogger("nsqext.consumer")

Handler = Callable[[Message], Awaitable[object]]

_clock = time.monotonic
_SLICE = 0.02  # seconds after which a worker whose handlers never wait yields, and sends its answers
_MOST_NAMED = 3  # messages named in a report of a blocked event loop


class MessageQueue:
    """A queue for any number of tasks."""

    __slots__ = ("_waiting", "messages", "stopped")

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()  #: oldest first
        self.stopped: bool = False
        self._waiting = Waiters()

    def put(self, messages: list[Message]) -> None:
        """Append messages; after `stop` discard them: the server redelivers them."""
        if not self.stopped:
            self.messages.extend(messages)
            self._waiting.wake()

    def take_ready(self) -> Message | None:
        """Remove and return the next message, for any thread.

        None if the event loop must decide: it has expired, must be unpacked, or was delivered before.
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

    def take_all(self) -> list[Message]:
        """Remove and return all messages, while threads may take some."""
        messages = self.messages
        taken: list[Message] = []
        with suppress(IndexError):  # the list keeps messages taken before
            taken.extend(messages.popleft() for _ in range(len(messages)))
        return taken

    def take(
        self, count: int, expired: Callable[[Message], object] | None = None, now: float | None = None
    ) -> list[Message]:
        """Remove and return up to a number of messages in flight, with unpacked bodies, within the budget for these.

        Threads may take some meanwhile. ``expired`` is called with each message that is not in flight any more.
        """
        messages, now = self.messages, _clock() if now is None else now
        taken: list[Message] = []
        while len(taken) < count:
            try:
                message = messages.popleft()
            except IndexError:
                break
            if not message.may_begin(now):
                if expired is not None:
                    expired(message)
            elif message.budget is not None and not message.try_unpack():
                messages.appendleft(message)
                break
            else:
                taken.append(message)
        return taken

    def stop(self) -> None:
        """Hand out no further messages; wake all waiting tasks."""
        self.stopped = True
        self.messages.clear()
        self._waiting.wake()

    def wake(self) -> None:
        self._waiting.wake()

    async def wait(self) -> None:
        """Wait for `put`, `wake` or `stop`."""
        await self._waiting.wait()


@define(eq=False)
class ConsumerState:
    """Whether a consumer is open, and why it ended."""

    opened: bool = False
    ended: anyio.Event = field(factory=lambda: anyio.Event())  #: no further message will be delivered
    error: NsqError | None = None  #: None if the consumer was stopped
    raises: bool = True  #: whether the caller gets the error, while it opens and while it waits


@define(eq=False)
class Slot:
    """The state of a worker."""

    task: object = None
    message: Message | None = None
    batch: Sequence[Message] = ()
    scope: anyio.CancelScope = field(factory=anyio.CancelScope)


@frozen
class BatchLimits:
    """When a batch is complete."""

    max_count: int = 500  #: at most; ``max_in_flight`` is a bound too
    max_wait: float = 0.2  #: seconds that the first message waits for more

    def __attrs_post_init__(self) -> None:
        check_number("max_count", self.max_count, 1)
        check_time("max_wait", self.max_wait)


@frozen
class MessageHandler:
    """A function that handles a message at a time."""

    function: Handler
    auto_finish: bool = True  #: whether its return finishes the message
    #: called instead of a function that blocks; handles the message of the slot and, while calls succeed, the next
    #: messages of the queue. The slot always has the message in hand; the worker answers the last.
    burst: Callable[[Slot, MessageQueue], Awaitable[object]] | None = None
    origin: object = None  #: the program's function, for the log

    def __attrs_post_init__(self) -> None:
        check_kinds(self)

    async def work(self, workers: Workers, slot: Slot, queue: MessageQueue) -> None:
        """Handle messages until the queue is stopped, as the worker of a slot."""
        await workers.handle(self, slot, queue)


@define(eq=False)
class StallWatch:
    """Compares the delay of a timer with the durations of handlers."""

    _limit: float  # reported delay in seconds; 0 for never
    _name: str  # the handler, for the log
    _slow: list[tuple[float, str]] = field(factory=list)

    def took(self, messages: Sequence[Message], seconds: float) -> None:
        """Record the duration of a handler."""
        if self._limit and seconds > self._limit / 2:
            self._slow.append((seconds, _names(messages)))

    def tick(self, late: float, running: Sequence[Message]) -> None:
        """Log a delay of the timer in seconds above the limit, with the ``running`` messages."""
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
            "the event loop was blocked for %.1f s; %s; heartbeats, and answers of the last milliseconds before, are "
            "not sent meanwhile: give blocking work to a thread (anyio.to_thread.run_sync)",
            late,
            reason,
            extra={"seconds": late},
        )


def _names(messages: Sequence[Message]) -> str:
    named = ", ".join(map(repr, messages[:_MOST_NAMED]))
    further = len(messages) - _MOST_NAMED
    return f"{named} and {further} further messages" if further > 0 else named


class AnyHandler(Protocol):
    """A `MessageHandler` or `BatchHandler`."""

    @property
    def function(self) -> Callable[..., Awaitable[object]]:
        """The function to call."""

    @property
    def origin(self) -> object:
        """The program's function, for the log."""

    async def work(self, workers: Workers, slot: Slot, queue: MessageQueue) -> None:
        """Handle messages until the queue is stopped."""


class MessageSource(Protocol):
    """Where workers take messages from."""

    @property
    def flush(self) -> Callable[[], None]:
        """Sends all answers, before a worker waits."""

    @property
    def policy(self) -> FailurePolicy:
        """Decides about messages whose handler raised."""

    def expired(self, message: Message) -> None:
        """Keep the place of a message that is not in flight any more when its turn comes."""

    def hold(self, messages: Sequence[Message]) -> None:
        """Hold messages whose handler returned, until the program answers them."""

    async def collect(self, limits: BatchLimits, queue: MessageQueue) -> list[Message]:
        """Return the next batch; empty at the end of the consumer."""

    def unanswered(self, messages: Iterable[Message], queue: MessageQueue) -> list[Message]:
        """Return the messages of a batch that are neither answered nor held back."""

    def end_batch(self, queue: MessageQueue) -> None:
        """Record the end of the handler of a queue's last batch."""


@define(eq=False)
class Workers:
    """The tasks that call a handler."""

    stall: StallWatch
    source: MessageSource
    # whether the program, or the event loop's end, cancels all tasks
    _all_cancelled: Callable[[], bool] = lambda: False
    _slots: list[Slot] = field(factory=list, init=False)
    _busy: int = field(default=0, init=False)
    _ended: Waiters = field(factory=Waiters, init=False)
    _cancelled: list[Message] = field(factory=list, init=False)
    _unused: UnusedResult | None = field(default=None, init=False)

    def start(self, tasks: TaskGroup | BackgroundTasks, handler: AnyHandler, queues: Sequence[MessageQueue]) -> None:
        """Start a worker for each queue, which ends when its queue is stopped, or when it is cancelled."""
        for queue in queues:
            slot = Slot()
            self._slots.append(slot)
            self._busy += 1
            tasks.start_soon(self._run, slot, partial(handler.work, self, slot, queue))

    @property
    def running(self) -> list[Message]:
        """Messages whose handlers run."""
        running = [slot.message for slot in self._slots if slot.message is not None]
        for slot in self._slots:
            running += [message for message in slot.batch if not message.answered]
        return running

    async def wait(self) -> None:
        """Wait until all workers have ended; their queues must be stopped."""
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

    async def _run(self, slot: Slot, work: Callable[[], Awaitable[None]]) -> None:
        try:
            slot.task = anyio.get_current_task()
            with slot.scope:
                while True:
                    try:
                        await work()
                        break
                    except get_cancelled_exc_class() as error:
                        self._continue(slot, error)
        finally:
            if slot.message is not None:
                self._cancelled.append(slot.message)
            self._cancelled += slot.batch
            slot.message, slot.batch = None, ()
            self._busy -= 1
            self._ended.wake()

    def _continue(self, slot: Slot, error: BaseException) -> None:
        """Continue a worker that was cancelled outside of a handler's call; raises the error if it has to end."""
        self._raise_if_ending(slot, error)
        from nsqext.client.consumer.handlers.interruptions import log_cancelled_worker

        log_cancelled_worker(error)
        in_hand = slot.batch if slot.message is None else (slot.message, *slot.batch)
        slot.message, slot.batch = None, ()
        for message in in_hand:
            if not message.answered:
                self.source.policy.requeue(message, None, backoff=True)

    async def handle(self, handler: MessageHandler, slot: Slot, queue: MessageQueue) -> None:
        """Call a handler for each message of a queue."""
        handle, burst, auto_finish = handler.function, handler.burst, handler.auto_finish
        flush = self.source.flush
        if burst is not None:

            def handle(_: Message) -> Awaitable[object]:
                return burst(slot, queue)

        messages = queue.messages
        now = since = _clock()
        while not queue.stopped:
            if not messages:
                flush()
                await queue.wait()
                now = since = _clock()
                continue
            try:
                message = messages.popleft()
            except IndexError:  # another worker's thread has taken it
                continue
            if not message.may_begin(now):
                self.source.expired(message)
                continue
            slot.message = message
            if message.budget is not None and not await self._unpack(message):
                self.source.expired(message)
                slot.message = None
                continue
            try:
                if message.attempts > 1 and self.source.policy.attempts_exhausted(message):
                    await self.source.policy.dead_letter(message, None)
                else:
                    result = await handle(message)
                    if result is not None:
                        self.note_unused(handler, result)
            except Exception as error:
                await self.source.policy.failed(slot.message, error)
            except BaseException as error:
                await self.source.policy.failed(slot.message, self.interrupted(slot, error))
            else:
                message = slot.message  # a burst may have handled others
                if not message.answered:
                    if not auto_finish:
                        self.source.hold((message,))
                    elif message.requeue_called:
                        await self._failed_by_forgotten_await(message)
                    else:
                        message.finish_now()
            now = _clock()
            if now - since > _SLICE:
                self.stall.took((message,), now - since)
                flush()
                await checkpoint()
                now = since = _clock()
            slot.message = None

    async def _failed_by_forgotten_await(self, message: Message) -> None:
        from nsqext.client.consumer.handlers.forgotten_await import requeue_not_awaited

        await self.source.policy.failed(message, requeue_not_awaited())

    def note_unused(self, handler: AnyHandler, result: object) -> None:
        """Log once that nothing uses what a handler returned; raises InvalidState for a coroutine."""
        from nsqext.client.consumer.handlers.forgotten_await import check_awaited

        check_awaited(result)
        if self._unused is None:
            from nsqext.client.consumer.handlers.unused_result import UnusedResult

            self._unused = UnusedResult(handler.origin or handler.function)
        self._unused(result)

    async def _unpack(self, message: Message) -> bool:
        """Decompress a body once the budget allows it; return False if the message expired meanwhile."""
        while message.budget is not None and not message.try_unpack():
            self.source.flush()
            await message.budget.wait()
        return message.may_begin(_clock())

    def interrupted(self, slot: Slot, error: BaseException) -> InvalidState:
        """Return the failure of a handler that raised a cancellation or GeneratorExit itself.

        Raises the error if the worker was cancelled, its event loop has ended, or it is another error.
        """
        self._raise_if_ending(slot, error)
        from nsqext.client.consumer.handlers.interruptions import failure_of

        return failure_of(error)

    def _raise_if_ending(self, slot: Slot, error: BaseException) -> None:
        try:
            running = anyio.get_current_task() == slot.task
        except RuntimeError:  # the event loop has ended: Python closes its coroutines
            running = False
        if not running or anyio.current_effective_deadline() == -inf or self._all_cancelled():
            raise error
