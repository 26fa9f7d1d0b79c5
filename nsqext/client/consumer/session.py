"""An open consumer: its background tasks, from the first subscription to the drain."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from anyio.lowlevel import checkpoint

from nsqext.client.consumer.handlers.batches import BatchCollector, BatchHandler, MessageBatch
from nsqext.client.consumer.handlers.dispatcher import MessageDispatcher
from nsqext.client.consumer.statistics import ConsumerConnection, ConsumerStatistics
from nsqext.client.consumer.subscriptions.backoff import Backoff
from nsqext.client.consumer.subscriptions.rdy_distributor import RdyDistributor
from nsqext.client.consumer.subscriptions.subscriber import SubscriberContext
from nsqext.client.consumer.subscriptions.subscription_group import SubscriptionGroup
from nsqext.client.consumer.subscriptions.topics import TopicSelection, TopicSubscriptions
from nsqext.client.events import ClientEvents
from nsqext.client.tasks import BackgroundTasks
from nsqext.errors import InvalidState, NsqError
from nsqext.transport.event_loop import call_in_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from nsqext.client.consumer.handlers.batches import BatchLimits
    from nsqext.client.consumer.handlers.dead_letter import DeadLetterTopic
    from nsqext.client.consumer.handlers.workers import MessageHandler
    from nsqext.client.consumer.message import Message
    from nsqext.client.consumer.position import Position
    from nsqext.client.consumer.subscriptions.assignment import SubscriptionSpec
    from nsqext.client.consumer.subscriptions.subscription import Subscription
    from nsqext.lookup.metadata import MetadataCache

__all__ = ("ConsumerSession",)

logger: logging.Logger = logging.getLogger("nsqext.consumer")

_clock = time.monotonic
_SLICE = 0.02
"""Seconds after which an iteration that never waits yields to the event loop."""
_FULL_WAIT = 0.005
"""Seconds that a batch waits for other connections after one has used up its RDY."""
_CANCELLED_TIMEOUT = 2.0
"""Seconds that cancelled handlers have to end before the connections are closed."""


class ConsumerSession:
    """What a consumer does between `open` and `close`; used once.

    Args:
        selection: the topics.
        spec: how they are consumed.
        metadata: where leaders are looked up.
        dead_letters: publishes dead letters; None without a topic for them.

    Attributes:
        flow: distributes RDY.
        group: the open subscriptions.
        topics: keeps the partitions of all topics subscribed.
        dispatcher: queues received messages and dispatches them to handlers.
        events: calls the callbacks of the user.
        ended: set when no further message will be delivered.
        error: why; None if the consumer was stopped.
    """

    def __init__(
        self,
        selection: TopicSelection,
        spec: SubscriptionSpec,
        metadata: MetadataCache,
        dead_letters: DeadLetterTopic | None,
    ) -> None:
        backoff = Backoff(spec.options.backoff)
        self.events: ClientEvents = ClientEvents()
        self.flow: RdyDistributor[Subscription] = RdyDistributor(
            spec.options.max_in_flight, backoff, spec.options.max_in_flight_bytes, spec.options.initial_ready
        )
        self.dispatcher: MessageDispatcher = MessageDispatcher(spec.options, self.flow, self.fail)
        self._tasks = BackgroundTasks("consumer", self._close)
        self.group: SubscriptionGroup = SubscriptionGroup(
            self.flow,
            backoff,
            self.dispatcher.tick,
            self.events,
            self.dispatcher.unpack_budget,
            self.dispatcher.early,
            self._tasks.check_event_loop,
            metadata.poll_soon,
        )
        self.topics: TopicSubscriptions = TopicSubscriptions(
            selection,
            SubscriberContext(spec, self.group, metadata, self.dispatcher.dispatch, self.events, self._tasks),
            self.fail,
        )
        self.ended: anyio.Event = anyio.Event()
        self.error: NsqError | None = None
        self._channel = spec.channel
        self._options = spec.options
        self._metadata = metadata
        self._dead_letters = dead_letters
        self._joined = False
        self._raises = True  # whether an error is raised in the caller: while it opens, and while the caller waits
        self._given_at = 0.0
        self._flush = partial(self.group.flush_before_wait, self.dispatcher.queue.messages)
        self._batches = BatchCollector(self.dispatcher.queue, self.ended.is_set, self.request_more)

    @property
    def _topic(self) -> str:
        return str(self.topics.selection)

    @property
    def in_event_loop(self) -> bool:
        """Whether the caller runs in the event loop of the consumer."""
        return self._tasks.in_event_loop()

    # Opening and closing

    async def open(self, *background: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Subscribe; return when all partitions are subscribed, or after ``start_timeout``.

        Args:
            background: further tasks, which are cancelled when the consumer has closed.

        Raises:
            InvalidState: it was opened before.
            NsqError: the consumer cannot start.
        """
        await self._tasks.start()
        try:
            self._tasks.check()  # `close` may have ended it meanwhile, and nothing would release the metadata
            self._metadata.acquire()
            self._joined = True
            tasks = [*background, self._subscribe, self.group.run_flush, self.group.run_timer, self._metadata.run]
            if self._dead_letters is not None:
                tasks.append(self._dead_letters.run)
            for task in tasks:
                self._tasks.start_soon(task)
            with anyio.move_on_after(self._options.start_timeout):
                await self.topics.started.wait()
        except BaseException:
            await self._tasks.aclose()
            raise
        if self.error is not None:
            await self._tasks.aclose()
            raise self.error
        self._raises = False

    async def wait(self) -> None:
        """Wait for the end and close; see `Consumer.wait`."""
        if self._tasks.loop is None:
            self._tasks.check()
        if not self.ended.is_set():
            self._tasks.check_event_loop()
        self._raises = True
        try:
            await self.ended.wait()
        finally:
            await self.close()
        if self.error is not None:
            raise self.error

    async def close(self) -> None:
        """Drain, close the connections and end all tasks; from a handler: start to do so and return.

        Does nothing if it was never opened. Cancellation does not shorten it. Messages of batches that the caller holds
        are requeued at once, because it does not answer them while it waits.
        """
        if self._joined and self.in_event_loop:
            self._stop_receiving()
            self.dispatcher.held.requeue(anyio.get_current_task().id)
        await self._tasks.aclose()

    async def _subscribe(self) -> None:
        try:
            await self.topics.run()
        except NsqError as error:
            self.fail(error)

    async def _close(self) -> None:
        """Drain and close; runs in the host of the background tasks."""
        if not self._joined:
            return
        try:
            await self._drain()
        finally:
            self.dispatcher.cancel()
            self.topics.forget()
            await self._metadata.release()
        logger.info("drained and closed %s/%s", self._topic, self._channel, extra={"topic": self._topic})

    async def _drain(self) -> None:
        """Send RDY 0, wait for handlers or cancel them, send answers, requeue what was not handled, send CLS."""
        self._stop_receiving()
        self._stop()
        self.dispatcher.requeue_unstarted()
        timeout = self._options.close_timeout
        with anyio.move_on_after(timeout) as scope:
            await self.dispatcher.wait()
        if scope.cancelled_caught:
            logger.warning(
                "handlers did not end, or messages were not answered, within %g s",
                timeout,
                extra={"topic": self._topic},
            )
            self.dispatcher.cancel()
            # while the connections are open, so that their messages are delivered again at once
            with anyio.move_on_after(_CANCELLED_TIMEOUT):
                await self.dispatcher.wait_for_handlers()
        self.dispatcher.requeue_remaining()
        await self.topics.close()

    def _stop_receiving(self) -> None:
        """Send RDY 0 before messages are requeued: the server would deliver them to this consumer again."""
        self.pause()
        self.group.flush()

    def fail(self, error: NsqError) -> None:
        """End because the consumer cannot continue; the first error is kept.

        An error that prevents the start is logged only if it is not raised in the caller.
        """
        if self.error is None:
            self.error = error
            if self.topics.started.is_set() or not self._raises:
                logger.error("the consumer cannot continue: %s", error, extra={"topic": self._topic})
        self.topics.started.set()
        self.dispatcher.queue.wake()
        self.dispatcher.unpack_budget.wake()
        self.ended.set()

    def stop(self) -> None:
        """End on request of the user, from any thread; running handlers continue."""
        call_in_loop(self._tasks.loop, self._stop)

    def _stop(self) -> None:
        self.dispatcher.stop()
        self.topics.started.set()  # nothing waits for subscriptions any more
        self.ended.set()

    # Handlers and iteration

    def work(self, handler: MessageHandler | BatchHandler, concurrency: int) -> None:
        """Start the handlers.

        Args:
            handler: the function, and how it is called.
            concurrency: how many calls run at the same time.
        """
        per_call = handler.limits.max_count if isinstance(handler, BatchHandler) else 1
        self.flow.concurrency = concurrency * per_call
        dead_letters = self._options.failure.dead_letter
        hook = None if isinstance(dead_letters, str) else dead_letters
        if self._dead_letters is not None:
            hook = self._dead_letters.publish
        self.dispatcher.start_workers(self._tasks, handler, concurrency, hook, self._flush, self._batches)

    async def next(self) -> Message:
        """Return the next message; see `Consumer.__anext__`."""
        if not self._joined:
            self._tasks.check()
        queue = self.dispatcher.queue
        if queue.messages and _clock() - self._given_at > _SLICE:
            self._tasks.check_event_loop()
            self._flush()
            await checkpoint()
            self._given_at = _clock()
        while True:
            if self.error is not None:
                raise self.error
            if queue.stopped:
                raise StopAsyncIteration
            if not queue.messages:
                self._tasks.check_event_loop()
                self._raises = True
                self._flush()
                await queue.wait()
                self._given_at = _clock()
                continue
            try:
                message = queue.messages.popleft()
            except IndexError:  # a thread of the blocking client has taken it
                continue
            if message.budget is not None and message.received >= message.owner.horizon and not message.try_unpack():
                queue.messages.appendleft(message)
                self._flush()
                await message.budget.wait()
                continue
            if message.may_begin(_clock()):
                return message

    def request_more(self) -> float:
        """Send answers, raise RDY, and return for how many seconds a batch should wait for more messages.

        A connection that has used up its RDY receives nothing before messages are answered. So a batch waits only
        briefly for the other connections.
        """
        self.group.grow()
        self.group.flush()
        subscriptions = self.group.subscriptions
        full = sum(0 < subscription.ready <= subscription.in_flight for subscription in subscriptions)
        if not full and self.group.backoff.state == "running" and not self.flow.paused:
            return float("inf")
        ready = sum(subscription.ready for subscription in subscriptions)
        # the counters of the subscriptions include messages that timed out
        return _FULL_WAIT if self.dispatcher.count_in_flight() < ready else 0.0

    async def next_batch(self, limits: BatchLimits, timeout: float | None = None) -> MessageBatch:
        """Return the next messages as a batch; empty after the timeout.

        Raises:
            StopAsyncIteration: the consumer was stopped.
            InvalidState: the consumer is not open.
            NsqError: the consumer cannot continue.
        """
        if not self._joined:
            self._tasks.check()
        self._tasks.check_event_loop()
        self.flow.concurrency = max(self.flow.concurrency, limits.max_count)
        self._raises = True
        messages = await self._batches.collect(limits, float("inf") if timeout is None else _clock() + timeout)
        if not messages:
            if self.error is not None:
                raise self.error
            if self.ended.is_set():
                raise StopAsyncIteration
        self.dispatcher.held.add(messages, anyio.get_current_task().id)
        return MessageBatch(messages)

    # Control

    def pause(self) -> None:
        """Request no further messages."""
        self.flow.paused = True
        self.group.rebalance()

    def resume(self) -> None:
        """Request messages again, unless the consumer was stopped."""
        if not self.dispatcher.stopped:
            self.flow.paused = False
            self.group.rebalance()

    @property
    def paused(self) -> bool:
        """Whether no further messages are requested."""
        return self.flow.paused

    @property
    def max_in_flight(self) -> int:
        """Messages that may be received and not answered, over all connections."""
        return self.flow.max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        self.flow.max_in_flight = count
        self.group.rebalance()

    async def seek(self, position: Position, partitions: Sequence[int] | None, topic: str | None) -> None:
        """Move the channel; see `Consumer.seek`."""
        self._tasks.check()
        # imported lazily: it pulls in the HTTP client
        from nsqext.client.consumer.position import check_position

        check_position(position)
        if self.dispatcher.stopped:
            raise InvalidState("the consumer is closed", topic=self._topic)
        await self.topics.seek(position, partitions, topic)

    # Statistics

    @property
    def subscribed(self) -> bool:
        """Whether it has subscribed to all partitions once, and has not ended."""
        return self._joined and self.topics.started.is_set() and not self.ended.is_set()

    @property
    def connections(self) -> tuple[ConsumerConnection, ...]:
        """The open connections."""
        return tuple(
            ConsumerConnection(one.topic, one.partition, one.node, one.ready, one.in_flight, one.backoff.level)
            for one in self.group.subscriptions
        )

    def statistics(self) -> ConsumerStatistics:
        """Return the counters; see `Consumer.statistics`."""
        if not self._joined:
            self._tasks.check()
        received, requeued, lost, size = self.group.closed_counts
        in_flight = 0
        for subscription in tuple(self.group.live):
            received += subscription.received
            requeued += subscription.requeued
            lost += subscription.timed_out
            in_flight += subscription.in_flight
            size += subscription.received_bytes
        return ConsumerStatistics(
            connections=self.connections,
            reconnects=self.group.reconnects,
            received=received,
            # every received message is in one of these states: counted without work per message
            finished=received - requeued - lost - in_flight,
            requeued=requeued,
            lost=lost,
            in_flight=in_flight,
            bytes_received=size,
            lookup_age=self._metadata.answer_age,
            lookup_failures=self._metadata.failures,
        )
