"""Queue received messages, and dispatch them to handlers, or hand them out to the caller."""

from __future__ import annotations

import time
from functools import partial
from itertools import chain
from math import inf
from typing import TYPE_CHECKING

import anyio
from anyio.lowlevel import checkpoint
from attrs import define, evolve, field

from nsqext.client.consumer.handlers.batches import TOUCHES, BatchHandler, HeldMessages, MessageBatch, touch_due
from nsqext.client.consumer.handlers.failure_policy import FailurePolicy
from nsqext.client.consumer.handlers.key_lanes import KeyLanes
from nsqext.client.consumer.handlers.partition_order import KeyLaneOwner, is_lost
from nsqext.client.consumer.handlers.workers import BatchCollector, MessageQueue, StallWatch, Workers
from nsqext.client.consumer.message import key_reader
from nsqext.errors import InvalidInput
from nsqext.protocol.messages import is_text_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from anyio.abc import TaskGroup

    from nsqext.client.consumer.handlers.batches import BatchLimits
    from nsqext.client.consumer.handlers.workers import MessageHandler
    from nsqext.client.consumer.message import Message
    from nsqext.client.consumer.options import DeadLetterHook
    from nsqext.client.consumer.subscriptions.subscription import Subscription
    from nsqext.client.consumer.subscriptions.subscription_group import SubscriptionGroup
    from nsqext.client.tasks import BackgroundTasks
    from nsqext.errors import NsqError


_clock = time.monotonic
_SPARE_READS = 4
"""Reads whose messages are all answered that are kept, beyond as many as there are others, until they are dropped."""


class MessageDispatcher:
    """Queues received messages, in one queue or in one for each worker, and runs the workers."""

    def __init__(self, group: SubscriptionGroup, failed: Callable[[NsqError], None]) -> None:
        # what all workers, or the iteration, take messages from; empty with lanes
        self.queue: MessageQueue = MessageQueue()
        # messages in flight that the program answers later, outside of a handler
        self.held: HeldMessages = HeldMessages()
        self._unstarted: list[Message] = []
        self._iterated: list[list[Message]] = []
        """Reads from the original NSQ whose messages the iteration hands out, or has handed out."""
        self._iterated_limit = _SPARE_READS
        self._closing = False
        self._group = group  # the open subscriptions
        self._options = options = group.options
        self._failed = failed  # called when the key of a message cannot be read
        self._shortest = inf  # the shortest message timeout of any subscription so far
        self._touch_at = 0.0
        self._stall = StallWatch(options.delivery.block_warning, "the loop over the consumer")
        self._lanes: KeyLanes | None = None
        self._workers: Workers | None = None

    def dispatch(self, messages: list[Message]) -> None:
        """Queue the messages of one read of a subscription."""
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
            if self._workers is None and messages and is_text_id(messages[0].id):
                self._keep_read(messages)

    def _keep_read(self, messages: list[Message]) -> None:
        """Keep the messages of a read for `requeue_remaining`, until all of them are answered."""
        reads = self._iterated
        reads.append(messages)
        if len(reads) > self._iterated_limit:
            # costs nothing per message that is handed out
            reads[:] = [read for read in reads if any(map(_in_flight, read))]
            self._iterated_limit = 2 * len(reads) + _SPARE_READS

    def _without_running(self, messages: list[Message]) -> list[Message]:
        """Return the messages whose handlers do not run.

        An ordered message whose connection was lost may be redelivered while its handler still runs. The handler
        continues with the new delivery: a second call would run beside it, and the next message would not wait for it.
        """
        running = {(message.topic, message.partition, message.id): message for message in self._running()}
        others = []
        for message in messages:
            known = running.get((message.topic, message.partition, message.id))
            if known is None or known.answered or known.timestamp != message.timestamp:
                others.append(message)
            else:
                known.renew(message)
        return others

    def _running(self) -> list[Message]:
        return self._workers.running if self._workers is not None else []

    def count_in_flight(self) -> int:
        """Return how many messages are queued, wait for their key, are held, or handled at this time."""
        count = len(self.queue.messages) + len(self.held.unanswered()) + len(self._running())
        return count if self._lanes is None else count + self._lanes.count_in_flight()

    def tick(self, now: float, late: float) -> None:
        """Requeue what is due, touch messages, and report handlers that block the event loop.

        ``late``: seconds by which this call is late.
        """
        running = self._running()
        early = self._group.early
        if early is not None:
            early.tick(now)
        kept = () if early is None else tuple(early.kept)
        self._group.unpack_budget.release_expired()
        lanes = self._lanes
        if lanes is not None:
            try:
                lanes.tick(now)
            except InvalidInput as error:
                self._failed(error)
        self._group.flow.widen(len(kept) + (lanes.waiting if lanes is not None else 0))
        if now >= self._touch_at and self._options.delivery.auto_touch:
            queued = lanes.queued() if lanes is not None else self.queue.messages
            touch_due((*running, *self.held.unanswered(), *kept, *queued), now)
            self._touch_at = now + self._shortest / TOUCHES
        self._stall.tick(late, running)

    def start_workers(
        self,
        tasks: TaskGroup | BackgroundTasks,
        handler: MessageHandler | BatchHandler,
        dead_letters: DeadLetterHook | None,
        flush: Callable[[], None],
        batches: BatchCollector,
    ) -> None:
        """Start the workers.

        Args:
            flush: sends all answers.
            batches: what a batch handler takes messages from, without lanes.
        """
        options, function = self._options, handler.function
        name = getattr(function, "__qualname__", type(function).__qualname__)
        self._stall = StallWatch(options.delivery.block_warning, f"the handler {name}")
        policy = FailurePolicy(options.failure, dead_letters, self._group.early_messages)
        self._iterated.clear()  # the workers have the messages
        self._workers = Workers(policy, self._stall, self.held, flush, self._expired)
        queues = self._queues(options.concurrency)
        lanes = self._lanes
        if isinstance(handler, BatchHandler):
            sources = [batches if lanes is None else LaneBatches(lanes, queue, batches) for queue in queues]
            self._workers.start_batches(tasks, handler, sources)
            return
        if lanes is not None:
            handler = evolve(handler, burst=None)  # only the event loop takes messages from lanes
        self._workers.start(tasks, handler, queues)

    def _expired(self, message: Message) -> None:
        if self._lanes is not None:
            self._lanes.expired(message)

    def _queues(self, concurrency: int) -> list[MessageQueue]:
        """Return the queue of each worker."""
        key = self._options.lanes
        if key is None:
            return [self.queue] * concurrency
        self._lanes = lanes = KeyLanes(concurrency, key_reader(key), _clock, self._options.delivery)
        received = list(self.queue.messages)
        self.queue.messages.clear()
        for message in received:  # of several subscriptions
            self.dispatch([message])
        return lanes.lanes

    def forget(self, subscription: Subscription) -> None:
        """Forget the messages of a bucket of keys whose subscription ended, except for those whose handlers run."""
        if self._lanes is not None:
            self._lanes.forget(subscription)

    def stop(self) -> None:
        """Dispatch no further message; running handlers continue."""
        self.queue.stopped = True  # first: threads may take messages meanwhile
        self._keep_unstarted(self.queue.take_all())
        self.queue.stop()
        self._group.unpack_budget.wake()
        if self._lanes is not None:
            self._lanes.stop()

    def _keep_unstarted(self, messages: Iterable[Message]) -> None:
        """Keep messages that will not be handled, for `requeue_unstarted`.

        Those of the redesigned NSQ are dropped: it redelivers them when the connection ends.
        """
        self._unstarted += [message for message in messages if is_text_id(message.id)]
        if self._closing:
            self.requeue_unstarted()

    def requeue_unstarted(self) -> None:
        """Requeue messages that no handler began with, and those received from now on; call it after `stop` and RDY 0.

        The original NSQ would redeliver them only when they have timed out.
        """
        self._closing = True
        unstarted, self._unstarted = self._unstarted, []
        for message in unstarted:
            if not message.answered and not message.expired:
                message.requeue_now(0.0, backoff=False)

    def requeue_remaining(self) -> None:
        """Requeue the messages of cancelled handlers, held ones, and those that wait in lanes; call `stop` first.

        On the original NSQ, which would redeliver them only when they have timed out, those that the iteration has
        handed out too. Messages of ordered channels are not requeued, because the end of the connection keeps their
        order.
        """
        for message in self._workers.take_cancelled() if self._workers is not None else ():
            if message.answered or message.in_order or message.expired:
                continue
            if isinstance(message.owner, KeyLaneOwner):
                message.owner.send_requeue(message)
            else:
                message.requeue_now(0.0, backoff=False)
        self.held.requeue()
        if self._lanes is not None:
            self._lanes.requeue_remaining(lambda message: is_text_id(message.id))
        for message in filter(_in_flight, chain.from_iterable(self._iterated)):
            message.owner.requeue(message, 0.0, backoff=False)
            message.received = float("-inf")  # so that its answer raises `MessageNotInFlight`

    async def wait(self) -> None:
        """Wait until all handlers have ended and held messages are answered; call `stop` first."""
        await self.wait_for_handlers()
        await self.held.wait()

    async def wait_for_handlers(self) -> None:
        """Wait until all handlers have ended."""
        if self._workers is not None:
            await self._workers.wait()

    def cancel(self) -> None:
        """Cancel the handlers; `requeue_remaining` requeues their messages."""
        if self._workers is not None:
            self._workers.cancel()


class LaneBatches(BatchCollector):
    """Takes batches from a lane: messages of the keys that it serves, in their order; each has an outcome of its own.

    One that is requeued is handled again before the later ones of its key: those of the same batch that were not
    answered are held back with it, and handed out again behind it.
    """

    def __init__(self, lanes: KeyLanes, lane: MessageQueue, others: BatchCollector) -> None:
        super().__init__(lane, others.ended, others.request_more)
        self._lanes = lanes
        self._keys: dict[Message, bytes] = {}  # the messages that the handler has, in their order, and their keys

    def take(self, count: int) -> list[Message]:
        """Remove up to a number of messages and return those that are in flight, with unpacked bodies.

        Those that do not fit into the budget for unpacked bytes stay. `end` has to follow.
        """
        lanes, messages, keys = self._lanes, self.queue.messages, self._keys
        now = lanes.clock()
        while messages and len(keys) < count:
            message = messages.popleft()
            if not message.may_begin(now):
                lanes.expired(message)  # takes the later ones of its key out of the lane
            elif message.budget is not None and not message.try_unpack():
                messages.appendleft(message)
                break
            else:
                keys[message] = lanes.key(message)
        lanes.handed_out |= dict.fromkeys(keys)
        return list(keys)

    def _rows(self) -> list[list[Message]]:
        """Return the first requeued message of each key, and those behind it that are requeued or not answered."""
        rows: dict[bytes, list[Message]] = {}
        for message, key in self._keys.items():
            if self._lanes.handed_out[message] is not None:
                rows.setdefault(key, []).append(message)
            elif key in rows and not message.answered:
                rows[key].append(message)
        return list(rows.values())

    def held_back(self) -> set[Message]:
        due = self._lanes.handed_out
        return {message for row in self._rows() for message in row if due[message] is None}

    def end(self) -> None:
        """Let the requeued messages, and those that are held back, wait for the longest delay of their key.

        Those that were requeued are handed out with one attempt more.
        """
        rows, keys = self._rows(), self._keys
        due = {message: self._lanes.handed_out.pop(message) for message in keys}
        self._keys = {}
        for row in rows:
            for message in row:
                if due[message] is not None:
                    message.answered = False
                    if message is not row[0] and not is_lost(message):
                        message.attempts += 1  # that of the first one is counted at the end of the wait
                elif message.budget is not None:
                    message.budget.release(message)
            self._lanes.delay_all(keys[row[0]], row, self.queue, max(due[message] or 0.0 for message in row))


def _in_flight(message: Message) -> bool:
    return not message.answered and not message.expired


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

    def __init__(self, state: ConsumerState, dispatcher: MessageDispatcher, group: SubscriptionGroup) -> None:
        self._state = state
        self._tasks = group.tasks
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
