"""The messages of a consumer that are here: who takes them, who is at work on them, and what time does to them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nsqext.client.consumer.handlers.auto_touch import AutoTouch
from nsqext.client.consumer.handlers.failure_policy import DelayedRequeues, FailurePolicy
from nsqext.client.consumer.handlers.key_lanes import KeyLaneOwner, KeyLanes, key_reader
from nsqext.client.consumer.handlers.message_queue import MessageQueue
from nsqext.client.consumer.handlers.stall import StallWatch
from nsqext.client.consumer.handlers.workers import Handler, Workers
from nsqext.errors import InvalidInput
from nsqext.protocol.messages import is_text_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from anyio.abc import TaskGroup

    from nsqext.client.consumer.message import Message
    from nsqext.client.consumer.options import DeadLetterHook
    from nsqext.client.consumer.subscriptions.assignment import SubscriptionSpec
    from nsqext.client.consumer.subscriptions.flow_control import RdyDistributor
    from nsqext.client.consumer.subscriptions.subscription import Subscription
    from nsqext.client.tasks import BackgroundTasks
    from nsqext.errors import NsqError

__all__ = ("MessageDispatcher",)

_clock = time.monotonic


class MessageDispatcher:
    """Takes messages in, in one row or in one for each worker, and lets handlers work on them.

    Args:
        source: what is consumed.
        flow: told how many messages wait for their keys.
        failed: told of a message that cannot be sorted in.

    Attributes:
        queue: the row that all take from; with lanes it stays empty.
    """

    def __init__(
        self, source: SubscriptionSpec, flow: RdyDistributor[Subscription], failed: Callable[[NsqError], None]
    ) -> None:
        self.queue: MessageQueue = MessageQueue()
        self._left: list[Message] = []
        self._leaving = False
        self._topic = source.topic
        self._options = source.options
        self._flow = flow
        self._failed = failed
        delivery = source.options.delivery
        self._delays = DelayedRequeues()
        self._auto_touch = AutoTouch() if delivery.auto_touch else None
        self._stall = StallWatch(delivery.block_warning, "the loop over the consumer")
        self._lanes: KeyLanes | None = None
        self._workers: Workers | None = None

    @property
    def stopped(self) -> bool:
        """Whether nothing further is given out."""
        return self.queue.stopped

    def arrived(self, messages: list[Message]) -> None:
        """Take messages in."""
        if self.queue.stopped:
            self._keep_back(messages)
            return
        if self._lanes is None:
            self.queue.put(messages)
            return
        try:
            self._lanes.put(messages)
        except InvalidInput as error:
            self._failed(error)

    def ticked(self, now: float, late: float) -> bool:
        """Let time pass: delays, touches, a look at handlers that block.

        Args:
            now: the time.
            late: seconds by which this comes too late.

        Returns:
            Whether another number of messages may be in flight than before.
        """
        running = self._workers.running if self._workers is not None else []
        self._delays.tick(now)
        lanes = self._lanes
        widened = False
        if lanes is not None:
            lanes.tick(now)
            widened = self._flow.widen(lanes.waiting)
        if self._auto_touch is not None:
            waiting = lanes.here() if lanes is not None else self.queue.messages
            self._auto_touch.tick((*running, *self._delays.held, *waiting), now)
        self._stall.tick(late, running, self._topic)
        return widened

    def work(
        self,
        tasks: TaskGroup | BackgroundTasks,
        handler: Handler,
        concurrency: int,
        hook: DeadLetterHook | None,
        flush: Callable[[], None],
    ) -> None:
        """Start the workers.

        Args:
            tasks: where they run.
            handler: what they run.
            concurrency: how many there are.
            hook: takes dead letters.
            flush: sends all answers.
        """
        options = self._options
        name = getattr(handler, "__qualname__", type(handler).__qualname__)
        self._stall = StallWatch(options.delivery.block_warning, f"the handler {name}")
        policy = FailurePolicy(options.failure, hook, self._delays)
        self._workers = Workers(handler, policy, self._stall, flush, self._missed)
        self._workers.start(tasks, self._rows(concurrency))

    def _missed(self, message: Message) -> None:
        if self._lanes is not None:
            self._lanes.missed(message)

    def _rows(self, concurrency: int) -> list[MessageQueue]:
        """Return where each of the workers takes its messages from."""
        key = self._options.lanes
        if key is None:
            return [self.queue] * concurrency
        self._lanes = lanes = KeyLanes(concurrency, key_reader(key), _clock)
        arrived = list(self.queue.messages)
        self.queue.messages.clear()
        self.arrived(arrived)
        return lanes.rows

    def stop(self) -> None:
        """Give out nothing further; handlers that run go on."""
        self._keep_back(self.queue.messages)
        self.queue.stop()
        if self._lanes is not None:
            self._lanes.stop()

    def _keep_back(self, messages: Iterable[Message]) -> None:
        """Keep what nobody will begin with; the redesigned server hands it on by itself."""
        self._left += [message for message in messages if is_text_id(message.id)]
        if self._leaving:
            self.give_back()

    def give_back(self) -> None:
        """Requeue what nobody has begun with, and what handlers were cut off from.

        The original NSQ would keep it until its timeout has passed; the redesigned one takes back what nobody has begun
        with when the connection ends. On ordered channels everything is left to that.
        """
        self._leaving = True
        for message in self._workers.take_cut_off() if self._workers is not None else ():
            if message.answered or message.in_order or message.expired:
                continue
            if isinstance(message.owner, KeyLaneOwner):
                message.owner.give_back([message])
            else:
                message.requeue_now(0.0, backoff=False)
        if self._lanes is not None:
            self._lanes.give_back(lambda message: is_text_id(message.id))
        left, self._left = self._left, []
        for message in left:
            if not message.answered and not message.expired:
                message.requeue_now(0.0, backoff=False)

    async def wait(self) -> None:
        """Wait until all handlers have ended, which they do once this is stopped."""
        if self._workers is not None:
            await self._workers.wait()

    def cancel(self) -> None:
        """Cancel the handlers; `give_back` requeues their messages."""
        if self._workers is not None:
            self._workers.cancel()
