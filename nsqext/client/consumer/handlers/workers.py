"""Run the handler for received messages, in a fixed number of tasks."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import anyio
from anyio import get_cancelled_exc_class
from anyio.lowlevel import checkpoint

from nsqext.client.consumer.message import Message
from nsqext.errors import InvalidState

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from nsqext.client.consumer.handlers.failure_policy import FailurePolicy
    from nsqext.client.consumer.handlers.message_queue import MessageQueue
    from nsqext.client.consumer.handlers.stall import StallWatch
    from nsqext.client.tasks import BackgroundTasks

__all__ = ("Handler", "Workers")

Handler = Callable[[Message], Awaitable[object]]

_clock = time.monotonic
_SLICE = 0.02
"""Seconds after which a worker whose handlers never wait yields to the event loop, and sends its answers."""


class _Slot:
    """The state of one worker."""

    __slots__ = ("message", "queue", "scope")

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue
        self.message: Message | None = None
        self.scope = anyio.CancelScope(shield=True)


class Workers:
    """The tasks that call a handler.

    Args:
        handler: what they call.
        policy: decides about messages whose handler raised.
        stall: records handlers that took long.
        flush: sends all answers.
        expired: called with messages that are not in flight any more when their turn comes.
    """

    def __init__(
        self,
        handler: Handler,
        policy: FailurePolicy,
        stall: StallWatch,
        flush: Callable[[], None],
        expired: Callable[[Message], None],
    ) -> None:
        self._handler = handler
        self._verdict = policy
        self._stall = stall
        self._flush = flush
        self._expired = expired
        self._slots: list[_Slot] = []
        self._busy = 0
        self._ended = anyio.Event()
        self._cancelled: list[Message] = []

    def start(self, tasks: TaskGroup | BackgroundTasks, queues: Sequence[MessageQueue]) -> None:
        """Start one for each of these queues. They are shielded: only `cancel` ends them early."""
        for queue in queues:
            slot = _Slot(queue)
            self._slots.append(slot)
            self._busy += 1
            tasks.start_soon(self._run, slot)

    @property
    def running(self) -> list[Message]:
        """Messages whose handlers run."""
        return [slot.message for slot in self._slots if slot.message is not None]

    async def wait(self) -> None:
        """Wait until all have ended; stop their queues first."""
        while self._busy:
            self._ended = anyio.Event()
            await self._ended.wait()

    def cancel(self) -> None:
        """Cancel the handlers; `take_cancelled` returns their messages."""
        for slot in self._slots:
            slot.scope.cancel()

    def take_cancelled(self) -> list[Message]:
        """Return the messages of cancelled handlers, oldest first, and forget them."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    async def _run(self, slot: _Slot) -> None:
        try:
            with slot.scope:
                await self._work(slot)
        finally:
            if slot.message is not None:
                self._cancelled.append(slot.message)
            slot.message = None
            self._busy -= 1
            self._ended.set()

    async def _work(self, slot: _Slot) -> None:
        queue, handler, attempts_exhausted = slot.queue, self._handler, self._verdict.attempts_exhausted
        messages = queue.messages
        since = _clock()
        while not queue.stopped:
            if not messages:
                self._flush()
                await queue.wait()
                since = _clock()
                continue
            message = messages.popleft()
            if message.received < message.owner.horizon:
                self._expired(message)  # it timed out in the queue, or its connection ended: it is redelivered
                continue
            slot.message = message
            try:
                if message.attempts > 1 and attempts_exhausted(message):
                    await self._verdict.dead_letter(message, None)
                else:
                    await handler(message)
            except Exception as error:
                await self._verdict.failed(message, error)
            except get_cancelled_exc_class() as error:
                if slot.scope.cancel_called:
                    raise
                await self._verdict.failed(message, _interrupted(error))
            else:
                if not message.answered:
                    message.finish_now()
            now = _clock()
            if now - since > _SLICE:
                self._stall.took(message, now - since)
                self._flush()
                await checkpoint()
                since = _clock()
            slot.message = None


def _interrupted(error: BaseException) -> InvalidState:
    """Return the error of a handler that raised a cancellation which the consumer did not request."""
    failure = InvalidState(
        "the handler was cancelled, but not by its consumer", hint="did it await a task that was cancelled elsewhere?"
    )
    failure.__cause__ = error
    return failure
