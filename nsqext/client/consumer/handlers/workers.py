"""Runs the handler on the messages that arrive: a fixed number of tasks, none for a single message."""

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
"""Seconds after which a worker whose handlers never wait lets others have a turn, and sends what is finished."""


class _Slot:
    """What one worker is at."""

    __slots__ = ("message", "queue", "scope")

    def __init__(self, queue: MessageQueue) -> None:
        self.queue = queue
        self.message: Message | None = None
        self.scope = anyio.CancelScope(shield=True)


class Workers:
    """The tasks that run a handler.

    Args:
        handler: what is run.
        policy: decides about messages whose handler raised.
        stall: told of handlers that took long.
        flush: sends all answers.
        missed: told of messages that were no longer ours when their turn came.
    """

    def __init__(
        self,
        handler: Handler,
        policy: FailurePolicy,
        stall: StallWatch,
        flush: Callable[[], None],
        missed: Callable[[Message], None],
    ) -> None:
        self._handler = handler
        self._verdict = policy
        self._stall = stall
        self._flush = flush
        self._missed = missed
        self._slots: list[_Slot] = []
        self._busy = 0
        self._ended = anyio.Event()
        self._cut_off: list[Message] = []

    def start(self, tasks: TaskGroup | BackgroundTasks, queues: Sequence[MessageQueue]) -> None:
        """Start one for each of these queues. They are shielded: only `cancel` ends them early."""
        for queue in queues:
            slot = _Slot(queue)
            self._slots.append(slot)
            self._busy += 1
            tasks.start_soon(self._run, slot)

    @property
    def running(self) -> list[Message]:
        """Messages whose handlers are at work."""
        return [slot.message for slot in self._slots if slot.message is not None]

    async def wait(self) -> None:
        """Wait until all have ended, which they do when their queues are stopped."""
        while self._busy:
            self._ended = anyio.Event()
            await self._ended.wait()

    def cancel(self) -> None:
        """Cancel the handlers; see `take_cut_off` for their messages."""
        for slot in self._slots:
            slot.scope.cancel()

    def take_cut_off(self) -> list[Message]:
        """Return the messages whose handlers did not come to their end, oldest first, and forget them."""
        cut_off, self._cut_off = self._cut_off, []
        return cut_off

    async def _run(self, slot: _Slot) -> None:
        try:
            with slot.scope:
                await self._work(slot)
        finally:
            if slot.message is not None:
                self._cut_off.append(slot.message)
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
                self._missed(message)  # it waited here too long, or its connection is gone: it comes again
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
    """Return what to report of a handler that let a cancellation out which nobody here asked for."""
    failure = InvalidState(
        "the handler was cancelled from outside", hint="it waited for a task that somebody else cancelled"
    )
    failure.__cause__ = error
    return failure
