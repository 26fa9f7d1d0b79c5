"""Pass received messages to lanes, workers or the program, and drain them when the consumer closes."""

from __future__ import annotations

import time
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from attrs import evolve

from nsqext.client.consumer.handlers.workers import MessageHandler, MessageQueue, StallWatch, Workers
from nsqext.client.consumer.message import TOUCHES, touch_due
from nsqext.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from nsqext.client.consumer.handlers.failure_policy import FailurePolicy
    from nsqext.client.consumer.handlers.iteration import MessageIteration
    from nsqext.client.consumer.handlers.key_lanes import KeyLanes
    from nsqext.client.consumer.handlers.workers import AnyHandler, BatchLimits, ConsumerState
    from nsqext.client.consumer.message import Message
    from nsqext.client.consumer.options import DeadLetterHook
    from nsqext.client.consumer.subscriptions.subscription import Subscription
    from nsqext.client.consumer.subscriptions.subscription_group import SubscriptionGroup
    from nsqext.errors import NsqError


_clock = time.monotonic


class ReceiverQueues:
    """Queues received messages, for all workers or by lane, and runs the workers."""

    def __init__(self, group: SubscriptionGroup, state: ConsumerState, failed: Callable[[NsqError], None]) -> None:
        #: messages for all workers, or for the program; empty with lanes
        self.queue: MessageQueue = MessageQueue()
        self.flush: Callable[[], None] = partial(group.flush_before_wait, self.queue.messages)
        group.schedule.ahead = self.queue.messages
        self.when_cancelled: Callable[[], None] | None = None  #: called after the handlers were cancelled
        self._group = group
        self._state = state
        self._options = options = group.options
        self._failed = failed  # for a key that cannot be read
        self._unstarted: list[Message] = []
        self._closing = False
        self._shortest = inf  # shortest message timeout of any subscription so far
        self._touch_at = 0.0
        self._stall = StallWatch(options.delivery.block_warning, "the loop over the consumer")
        self._iteration: MessageIteration | None = None
        self._lanes: KeyLanes | None = None
        self._workers: Workers | None = None
        self._dead_letters: DeadLetterHook | None = None  # of the workers
        self._policy: FailurePolicy | None = None

    @property
    def iteration(self) -> MessageIteration:
        """Hands messages to the program."""
        if self._iteration is None:
            from nsqext.client.consumer.handlers.iteration import MessageIteration

            self._iteration = MessageIteration(self._state, self.queue, self._group, self.count_in_flight)
        return self._iteration

    def receive(self, messages: list[Message]) -> None:
        """Queue the messages of a read."""
        if messages:
            timeout = messages[0].owner.msg_timeout
            if timeout < self._shortest:
                self._shortest, self._touch_at = timeout, 0.0
        if self.queue.stopped:
            self._keep_unstarted(messages)
        elif self._lanes is not None:
            try:
                self._lanes.put(messages)
            except InvalidInput as error:
                self._failed(error)
        else:
            if messages and messages[0].in_order:
                messages = self._without_running(messages)
            self.queue.put(messages)
            if self._workers is None and messages and messages[0].owner.original:
                self.iteration.keep_read(messages)

    def _without_running(self, messages: list[Message]) -> list[Message]:
        """Return the messages whose handlers do not run, and that do not wait until they are requeued.

        After a lost connection, an ordered message may be redelivered while its handler runs or its delay lasts. These
        continue with the new delivery: the next message would not wait for a second call.
        """
        known_here = {(one.topic, one.partition, one.id): one for one in (*self._kept(), *self._running())}
        others = []
        for message in messages:
            known = known_here.get((message.topic, message.partition, message.id))
            if known is None or known.answered or known.timestamp != message.timestamp:
                others.append(message)
            else:
                known.renew(message)
        return others

    def _kept(self) -> Collection[Message]:
        """Return the messages in flight that are requeued when they are due."""
        early = self._group.early
        return () if early is None else early.kept

    def _running(self) -> list[Message]:
        return self._workers.running if self._workers is not None else []

    def _held(self) -> list[Message]:
        return self._iteration.held() if self._iteration is not None else []

    def count_in_flight(self) -> int:
        """Return the number of messages that are queued, waiting, held or being handled."""
        count = len(self.queue.messages) + len(self._held()) + len(self._running())
        return count if self._lanes is None else count + self._lanes.count_in_flight()

    def tick(self, now: float, late: float) -> None:
        """Requeue due messages, touch messages, and report handlers that block the event loop.

        ``late``: seconds by which this call is late.
        """
        running = self._running()
        early = self._group.early
        if early is not None:
            early.tick(now)
        kept = tuple(self._kept())
        if self._group.unpack_budget is not None:
            self._group.unpack_budget.release_expired()
        lanes = self._lanes
        if lanes is not None:
            try:
                lanes.tick(now, running)
            except InvalidInput as error:
                self._failed(error)
        self._group.flow.widen(len(kept) + (lanes.waiting if lanes is not None else 0))
        if now >= self._touch_at and self._options.delivery.auto_touch:
            queued = lanes.queued() if lanes is not None else self.queue.messages
            touch_due((*running, *self._held(), *kept, *queued), now)
            self._touch_at = now + self._shortest / TOUCHES
        self._stall.tick(late, running)
        if self._iteration is not None:
            self._iteration.look_again()

    def start_workers(self, handler: AnyHandler, dead_letters: DeadLetterHook | None) -> None:
        options, function = self._options, handler.function
        name = getattr(function, "__qualname__", type(function).__qualname__)
        self._stall = StallWatch(options.delivery.block_warning, f"the handler {name}")
        self._dead_letters = dead_letters
        if self._iteration is not None:
            self._iteration.forget_reads()
        self._workers = Workers(self._stall, self, lambda: self._group.tasks.is_cancelled())
        queues = self._queues(options.concurrency)
        if self._lanes is not None and isinstance(handler, MessageHandler):
            handler = evolve(handler, burst=None)  # only the event loop takes messages from lanes
        self._workers.start(self._group.tasks, handler, queues)

    # For the workers

    @property
    def policy(self) -> FailurePolicy:
        """Decides about messages whose handler raised; created on first use."""
        if self._policy is None:
            from nsqext.client.consumer.handlers.failure_policy import FailurePolicy

            group = self._group
            self._policy = FailurePolicy(
                self._options.failure, self._dead_letters, group.early_messages, group.rejected
            )
        return self._policy

    def expired(self, message: Message) -> None:
        if self._lanes is not None:
            self._lanes.expired(message)

    def hold(self, messages: Sequence[Message]) -> None:
        self.iteration.hold(messages)

    async def collect(self, limits: BatchLimits, queue: MessageQueue) -> list[Message]:
        if self._lanes is None:
            return await self.iteration.collect(limits)
        return await self.iteration.collect_from(queue, partial(self._lanes.take, queue), limits)

    def unanswered(self, messages: Iterable[Message], queue: MessageQueue) -> list[Message]:
        held_back = () if self._lanes is None else self._lanes.held_back(queue)
        return [message for message in messages if not message.answered and message not in held_back]

    def end_batch(self, queue: MessageQueue) -> None:
        if self._lanes is not None:
            self._lanes.end_batch(queue)

    def _queues(self, concurrency: int) -> list[MessageQueue]:
        key = self._options.lanes
        if key is None:
            return [self.queue] * concurrency
        from nsqext.client.consumer.handlers.key_lanes import KeyLanes
        from nsqext.client.consumer.handlers.message_keys import key_reader

        self._lanes = lanes = KeyLanes(concurrency, key_reader(key), _clock, self._options.delivery)
        lanes.is_handled = lambda message: message in (*self._running(), *self._kept())
        received = list(self.queue.messages)
        self.queue.messages.clear()
        for message in received:  # perhaps of several subscriptions
            self.receive([message])
        return lanes.lanes

    def forget(self, subscription: Subscription) -> None:
        """Forget an ended key bucket's or a left topic's messages, unless their handlers run."""
        if self._lanes is not None:
            self._lanes.forget(subscription)

    def stop(self) -> None:
        """Hand out no further messages; running handlers continue."""
        self.queue.stopped = True  # first: threads may take messages meanwhile
        self._keep_unstarted(self.queue.take_all())
        self.queue.stop()
        self.wake()
        if self._lanes is not None:
            self._lanes.stop()

    def wake(self) -> None:
        """Wake all tasks that wait for messages: the consumer ends."""
        self.queue.wake()
        if self._group.unpack_budget is not None:
            self._group.unpack_budget.wake()

    def _keep_unstarted(self, messages: Iterable[Message]) -> None:
        """Keep messages of the original NSQ for `requeue_unstarted`; the end of the connection redelivers others."""
        self._unstarted += [message for message in messages if message.owner.original]
        if self._closing:
            self.requeue_unstarted()

    def requeue_unstarted(self) -> None:
        """Requeue messages that no handler started, and later reads; call it after `stop` and RDY 0.

        The original NSQ would redeliver them only after their timeout.
        """
        self._closing = True
        unstarted, self._unstarted = self._unstarted, []
        for message in unstarted:
            if message.in_flight:
                message.requeue_now(0.0, backoff=False)

    def requeue_remaining(self) -> None:
        """Requeue messages of cancelled handlers, held messages, and messages in lanes; call `stop` first.

        On the original NSQ, which would redeliver them only after their timeout, messages of the iteration are requeued
        too; messages of ordered channels are not: the end of the connection keeps their order.
        """
        for message in self._workers.take_cancelled() if self._workers is not None else ():
            if message.in_order or not message.in_flight:
                continue
            if self._lanes is not None:
                self._lanes.send_requeue(message)
            else:
                message.requeue_now(0.0, backoff=False)
        if self._iteration is not None:
            self._iteration.requeue_held()
            self._iteration.requeue_reads()
        if self._lanes is not None:
            self._lanes.requeue_remaining()

    async def wait(self) -> None:
        """Wait until all handlers have ended and all held messages are answered; call `stop` first."""
        await self.wait_for_handlers()
        if self._iteration is not None:
            await self._iteration.wait_for_held()

    def requeue_held(self, task: int) -> None:
        if self._iteration is not None:
            self._iteration.requeue_held(task)

    async def wait_for_handlers(self) -> None:
        if self._workers is not None:
            await self._workers.wait()

    def cancel(self) -> None:
        """Cancel the handlers; `requeue_remaining` requeues their messages."""
        if self._workers is not None:
            self._workers.cancel()
        if self.when_cancelled is not None:
            self.when_cancelled()
