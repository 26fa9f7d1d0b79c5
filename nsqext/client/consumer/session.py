"""A consumer while it is open: its tasks, from the first subscription to the drain."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import anyio
from anyio.lowlevel import checkpoint

from nsqext.client.consumer.handlers.dispatcher import MessageDispatcher
from nsqext.client.consumer.subscriptions.assignment import Listener
from nsqext.client.consumer.subscriptions.backoff import Backoff
from nsqext.client.consumer.subscriptions.coordinator import SubscriptionGroup
from nsqext.client.consumer.subscriptions.flow_control import RdyDistributor
from nsqext.client.consumer.subscriptions.subscriber import Subscriber
from nsqext.client.tasks import OrderedTasks, first_error
from nsqext.errors import InvalidState, NsqError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from nsqext.client.consumer.handlers.dead_letter import DeadLetterTopic
    from nsqext.client.consumer.handlers.workers import Handler
    from nsqext.client.consumer.message import Message
    from nsqext.client.consumer.position import Position
    from nsqext.client.consumer.subscriptions.assignment import SubscriptionSpec
    from nsqext.client.consumer.subscriptions.subscription import Subscription
    from nsqext.lookup.metadata import MetadataCache

__all__ = ("ConsumerSession",)

logger: logging.Logger = logging.getLogger("nsqext.consumer")

_clock = time.monotonic
_SLICE = 0.02
"""Seconds after which an iteration that never waits lets everything else have a turn."""
_LAST = 2.0
"""Seconds that handlers which were cancelled may take to end before the connections are closed without them."""


class ConsumerSession:
    """What a consumer does between being opened and being closed; used once.

    Args:
        source: what is consumed.
        directory: where leaders are found.
        max_in_flight: messages that may be here unanswered.
        dead_letters: publishes dead letters; None for nobody.

    Attributes:
        flow: shares the messages in flight out.
        upkeep: the subscriptions that work.
        keeper: keeps the places subscribed.
        dispatcher: the messages that are here.
        ended: nothing further will come.
        error: why; None where somebody wanted it.
    """

    def __init__(
        self,
        source: SubscriptionSpec,
        directory: MetadataCache,
        max_in_flight: int,
        dead_letters: DeadLetterTopic | None,
    ) -> None:
        backoff = Backoff(source.options.backoff)
        self.flow: RdyDistributor[Subscription] = RdyDistributor(max_in_flight, backoff)
        self.dispatcher: MessageDispatcher = MessageDispatcher(source, self.flow, self.fail)
        listener = Listener(self.dispatcher.arrived, self.fail, self.dispatcher.ticked)
        self.upkeep: SubscriptionGroup = SubscriptionGroup(self.flow, backoff, listener)
        self.keeper: Subscriber = Subscriber(source, self.upkeep, directory, listener)
        self.ended: anyio.Event = anyio.Event()
        self.error: NsqError | None = None
        self._topic = source.topic
        self._options = source.options
        self._directory = directory
        self._dead_letters = dead_letters
        self._tasks: OrderedTasks | None = None
        self._given = 0.0

    async def open(self) -> None:
        """Subscribe; returns when all partitions are, or when ``options.start_timeout`` is over.

        Raises:
            InvalidState: it was opened before.
            NsqError: nothing will ever come.
        """
        if self._tasks is not None:
            raise InvalidState("a consumer is used once", topic=self._topic, hint="make a new one")
        self._directory.join()
        self._tasks = tasks = OrderedTasks()
        await tasks.enter()
        tasks.start(self._subscribe)
        tasks.start(self._directory.run)
        if self._dead_letters is not None:
            tasks.start(self._dead_letters.run)
        try:
            with anyio.move_on_after(self._options.start_timeout):
                await self.keeper.started.wait()
        except BaseException as error:
            await self.close(error)
            raise
        if self.error is not None:
            await self.close(None)
            raise self.error

    async def close(self, error: BaseException | None) -> None:
        """Drain and end all tasks.

        Args:
            error: what the user's code raised.
        """
        tasks = self._opened()
        try:
            with anyio.CancelScope(shield=True):
                await self._drain()
        finally:
            self.dispatcher.cancel()
            try:
                await tasks.leave(error)
            finally:
                self.keeper.forget()
                await self._directory.leave()

    def _opened(self) -> OrderedTasks:
        if self._tasks is None:
            raise InvalidState("the consumer is not open", hint="use it inside 'async with Consumer(...) as consumer'")
        return self._tasks

    async def _subscribe(self) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                await self.keeper.run(tasks)
        except* NsqError as errors:
            self.fail(first_error(errors))

    async def _drain(self) -> None:
        """RDY 0; handlers end, or are cut off; answers go out; what was not handled goes back; CLS; the sockets."""
        self.flow.paused = True
        self.upkeep.rebalance()
        self.upkeep.flush()
        self.dispatcher.stop()
        with anyio.move_on_after(self._options.close_timeout) as scope:
            await self.dispatcher.wait()
        if scope.cancelled_caught:
            timeout = self._options.close_timeout
            logger.warning("handlers did not end within %g s", timeout, extra={"topic": self._topic})
            self.dispatcher.cancel()
            # while the connections still work, so that their messages come again at once
            with anyio.move_on_after(_LAST):
                await self.dispatcher.wait()
        self.dispatcher.give_back()
        await self.keeper.close()

    def fail(self, error: NsqError) -> None:
        """End because nothing further makes sense; the first error counts."""
        if self.error is None:
            self.error = error
        self.keeper.started.set()
        self.dispatcher.queue.wake()
        self.ended.set()

    def stop(self) -> None:
        """End because somebody wants it; handlers that run go on."""
        self.dispatcher.stop()
        self.ended.set()

    def start(self, function: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Start a task that is cancelled with the session."""
        self._opened().group.start_soon(function)

    def work(self, handler: Handler, concurrency: int) -> None:
        """Let handlers work on the messages.

        Args:
            handler: what is run.
            concurrency: how many at the same time.
        """
        dead_letters = self._options.failure.dead_letter
        hook = None if isinstance(dead_letters, str) else dead_letters
        if self._dead_letters is not None:
            hook = self._dead_letters.take
        self.dispatcher.work(self._opened().group, handler, concurrency, hook, self.upkeep.flush)

    async def next(self) -> Message:
        """Return the next message; see `Consumer.__anext__`."""
        self._opened()
        queue = self.dispatcher.queue
        if queue.messages and _clock() - self._given > _SLICE:
            self.upkeep.flush()
            await checkpoint()
            self._given = _clock()
        while True:
            if self.error is not None:
                raise self.error
            if queue.stopped:
                raise StopAsyncIteration
            if not queue.messages:
                self.upkeep.flush()
                await queue.wait()
                self._given = _clock()
                continue
            message = queue.messages.popleft()
            if message.received >= message.owner.horizon:
                return message

    async def seek(self, position: Position, partitions: Sequence[int] | None) -> None:
        """Move the channel; see `Consumer.seek`."""
        if self._tasks is None or self.dispatcher.stopped:
            raise InvalidState("the consumer is not open", topic=self._topic)
        await self.keeper.seeker.seek(position, partitions)
