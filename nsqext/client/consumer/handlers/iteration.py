"""Hand out messages to the caller, one by one or in batches, and batches to the workers."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import anyio
from anyio.lowlevel import checkpoint
from attrs import define, field

from nsqext.client.consumer.handlers.batches import MessageBatch
from nsqext.client.consumer.handlers.workers import BatchCollector

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqext.client.consumer.handlers.batches import BatchLimits
    from nsqext.client.consumer.handlers.dispatcher import MessageDispatcher
    from nsqext.client.consumer.message import Message
    from nsqext.client.consumer.subscriptions.subscription_group import SubscriptionGroup
    from nsqext.client.tasks import BackgroundTasks
    from nsqext.errors import NsqError

_clock = time.monotonic
_SLICE = 0.02  # seconds after which an iteration that never waits yields to the event loop
_FULL_WAIT = 0.005  # seconds that a batch waits for other connections after one has used up its RDY


@define(eq=False)
class ConsumerState:
    """Whether a consumer is open, and why it ended."""

    opened: bool = False  # whether it was opened
    ended: anyio.Event = field(factory=lambda: anyio.Event())  # set when no further message will be delivered
    error: NsqError | None = None  # why; None if the consumer was stopped
    raises: bool = True  # whether an error is raised in the caller: while it opens, and while the caller waits


class MessageIteration:
    """Source of messages for iteration over a consumer, for its batches, and for the workers of a batch handler."""

    def __init__(
        self, state: ConsumerState, tasks: BackgroundTasks, dispatcher: MessageDispatcher, group: SubscriptionGroup
    ) -> None:
        self._state = state
        self._tasks = tasks
        self._dispatcher = dispatcher  # queues the messages
        self._queue = dispatcher.queue
        self._group = group  # the open subscriptions
        self._given_at = 0.0
        # what the caller and workers take batches from
        self.batches: BatchCollector = BatchCollector(self._queue, state.ended.is_set, self._request_more)
        # sends pending answers before a worker or the caller waits
        self.flush: Callable[[], None] = partial(group.flush_before_wait, self._queue.messages)

    async def next(self) -> Message:
        """Return the next message; see `Consumer.__anext__`."""
        state, queue = self._state, self._queue
        if not state.opened:
            self._tasks.check()
        if queue.messages and _clock() - self._given_at > _SLICE:
            self._tasks.check_event_loop()
            self.flush()
            await checkpoint()
            self._given_at = _clock()
        while True:
            if state.error is not None:
                raise state.error
            if queue.stopped:
                raise StopAsyncIteration
            if not queue.messages:
                self._tasks.check_event_loop()
                state.raises = True
                self.flush()
                await queue.wait()
                self._given_at = _clock()
                continue
            try:
                message = queue.messages.popleft()
            except IndexError:  # a thread of the blocking client has taken it
                continue
            if message.budget is not None and message.received >= message.owner.horizon and not message.try_unpack():
                queue.messages.appendleft(message)
                self.flush()
                await message.budget.wait()
                continue
            if message.may_begin(_clock()):
                return message

    async def next_batch(self, limits: BatchLimits, timeout: float | None = None) -> MessageBatch:
        """Return the next messages as a batch, empty after the timeout; raises as `Consumer.__anext__`."""
        state, flow = self._state, self._group.flow
        if not state.opened:
            self._tasks.check()
        self._tasks.check_event_loop()
        flow.concurrency = max(flow.concurrency, limits.max_count)
        state.raises = True
        messages = await self.batches.collect(limits, float("inf") if timeout is None else _clock() + timeout)
        if not messages:
            if state.error is not None:
                raise state.error
            if state.ended.is_set():
                raise StopAsyncIteration
        self._dispatcher.held.add(messages, anyio.get_current_task().id)
        return MessageBatch(messages)

    def _request_more(self) -> float:
        """Send answers, raise RDY, and return for how many seconds a batch should wait for more messages.

        A connection that has used up its RDY receives nothing before messages are answered. So a batch waits only
        briefly for the other connections.
        """
        group = self._group
        group.grow()
        group.flush()
        subscriptions = group.subscriptions
        full = sum(0 < subscription.ready <= subscription.in_flight for subscription in subscriptions)
        if not full and group.backoff.state == "running" and not group.flow.paused:
            return float("inf")
        ready = sum(subscription.ready for subscription in subscriptions)
        # the counters of the subscriptions include messages that timed out
        return _FULL_WAIT if self._dispatcher.count_in_flight() < ready else 0.0
