"""Hand messages to the program, alone or in batches, and keep the messages that it answers later."""

from __future__ import annotations

import logging
import time
from math import inf
from typing import TYPE_CHECKING

import anyio
from anyio.lowlevel import checkpoint
from attrs import frozen

from nsqext.client.consumer.message import requeue_unanswered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nsqext.client.consumer.handlers.workers import BatchLimits, ConsumerState, MessageQueue
    from nsqext.client.consumer.message import Message
    from nsqext.client.consumer.subscriptions.subscription_group import SubscriptionGroup

logger: logging.Logger = logging.getLogger("nsqext.consumer")

_clock = time.monotonic
_SLICE = 0.02  # seconds after which an iteration that never waits yields to the event loop
_FULL_WAIT = 0.005  # seconds that a batch waits for other connections after a connection has used up its RDY
_DRAIN_LOOK = 0.01  # seconds between two checks of held messages during the close
_SPARE = 16  # groups beyond twice the unanswered groups, before answered groups are forgotten


@frozen(eq=False)
class _Holding:
    """Messages handed out together, and the task that received them (None: a handler)."""

    messages: Sequence[Message]
    task: int | None


class MessageIteration:
    """Hands messages and batches to loops and handlers, and holds messages that are answered later.

    Held are the messages of batches, and messages that a handler left unanswered: they are touched for as long as the
    server allows, and an error is logged when it takes a message back. A closing consumer waits for the answers and
    then requeues the rest.
    """

    def __init__(
        self, state: ConsumerState, queue: MessageQueue, group: SubscriptionGroup, count_in_flight: Callable[[], int]
    ) -> None:
        self._state = state
        self._queue = queue
        self._group = group
        self._tasks = group.tasks
        self._count_in_flight = count_in_flight
        self._given_at = 0.0
        self._turn = anyio.Lock()
        self._holdings: list[_Holding] = []
        self._holdings_limit = _SPARE
        # reads from the original NSQ whose messages a loop receives or has received
        self._reads: list[list[Message]] = []
        self._reads_limit = _SPARE

    # Single messages

    async def next(self) -> Message:
        """See `Consumer.__anext__`."""
        state, queue = self._state, self._queue
        if not state.opened:
            self._tasks.check()
        if queue.messages and _clock() - self._given_at > _SLICE:
            self._tasks.check_event_loop()
            self._group.flush_before_wait(queue.messages)
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
                self._group.flush_before_wait(queue.messages)
                await queue.wait()
                self._given_at = _clock()
                continue
            try:
                message = queue.messages.popleft()
            except IndexError:  # a thread of the blocking client has taken it
                continue
            if message.budget is not None and not message.lost and not message.try_unpack():
                queue.messages.appendleft(message)
                self._group.flush_before_wait(queue.messages)
                await message.budget.wait()
                continue
            if message.may_begin(_clock()):
                return message

    def keep_read(self, messages: list[Message]) -> None:
        """Keep a read from the original NSQ for `requeue_reads`, until all its messages are answered."""
        self._reads.append(messages)
        if len(self._reads) > self._reads_limit:
            # costs nothing per message
            self._reads = [read for read in self._reads if any(message.in_flight for message in read)]
            self._reads_limit = 2 * len(self._reads) + _SPARE

    def forget_reads(self) -> None:
        """Forget the reads: workers have the messages."""
        self._reads.clear()

    def requeue_reads(self) -> None:
        """Requeue unanswered messages of a loop, which the original NSQ would keep in flight."""
        for read in self._reads:
            for message in read:
                if message.in_flight:
                    message.owner.requeue(message, 0.0, backoff=False)
                    message.mark_returned()

    # Batches

    async def next_batch(self, limits: BatchLimits, timeout: float | None = None) -> list[Message]:
        """Return the next batch, empty after the timeout in seconds; raises as `Consumer.__anext__`."""
        state, flow = self._state, self._group.flow
        if not state.opened:
            self._tasks.check()
        self._tasks.check_event_loop()
        flow.concurrency = max(flow.concurrency, limits.max_count)
        state.raises = True
        messages = await self.collect(limits, inf if timeout is None else _clock() + timeout)
        if not messages:
            if state.error is not None:
                raise state.error
            if state.ended.is_set():
                raise StopAsyncIteration
        self.hold(messages, anyio.get_current_task().id)
        return messages

    async def collect(self, limits: BatchLimits, deadline: float = inf) -> list[Message]:
        """Return the next batch; empty when the consumer ends, or at the deadline.

        It is handed out early when all messages that may be in flight were received. Concurrent calls take turns, until
        their deadline. Messages stay in the queue until then: a cancelled call loses no message.
        """
        with anyio.move_on_after(deadline - _clock() if self._turn.locked() else inf) as waiting:
            await self._turn.acquire()
        if waiting.cancelled_caught:
            return []
        try:
            return await self.collect_from(self._queue, self._queue.take, limits, deadline)
        finally:
            self._turn.release()

    async def collect_from(
        self, queue: MessageQueue, take: Callable[[int], list[Message]], limits: BatchLimits, deadline: float = inf
    ) -> list[Message]:
        """As `collect`, from a queue of which no other task takes messages.

        Args:
            take: removes up to a number of messages from the queue; returns those that can be handed out.
        """
        messages = queue.messages
        while not self._state.ended.is_set():
            if len(messages) < limits.max_count and await self._wait(queue, limits, deadline):
                continue
            taken = take(limits.max_count)
            if taken or _clock() >= deadline:
                return taken
            if messages and (budget := messages[0].budget) is not None:
                self.request_more()
                with anyio.move_on_after(deadline - _clock()):
                    await budget.wait()
        return []

    def look_again(self) -> None:
        """Let a waiting batch decide again: fewer messages may be in flight than when it began to wait."""
        if self._queue.messages and self._turn.locked():
            self._queue.wake()

    async def _wait(self, queue: MessageQueue, limits: BatchLimits, deadline: float) -> bool:
        """Wait for further messages; return False if the batch should not wait longer."""
        patience, now, messages = self.request_more(), _clock(), queue.messages
        pause = deadline - now
        if messages:
            pause = min(pause, messages[0].delivered + limits.max_wait - now, patience)
        if pause <= 0:
            return False
        with anyio.move_on_after(pause) as scope:
            await queue.wait()
        return not scope.cancelled_caught

    def request_more(self) -> float:
        """Send answers, fit RDY, and return how many seconds a batch should wait for more messages.

        A connection that has used up its RDY receives nothing before messages are answered: a batch waits only briefly
        for other connections.
        """
        group = self._group
        group.fit_windows()
        group.flush()
        subscriptions = group.subscriptions
        full = any(subscription.ready <= subscription.in_flight > 0 for subscription in subscriptions)
        if not full and group.backoff.state == "running" and not group.flow.paused:
            return inf
        # after its turn, a connection has messages in flight and RDY 0
        ready = sum(max(subscription.ready, subscription.in_flight) for subscription in subscriptions)
        # counters of subscriptions include messages that timed out
        return _FULL_WAIT if self._count_in_flight() < ready else 0.0

    # Messages that the program answers later

    def hold(self, messages: Sequence[Message], task: int | None = None) -> None:
        """Hold messages that were handed out to a task (its id), or with None to a handler."""
        self._holdings.append(_Holding(messages, task))
        if len(self._holdings) > self._holdings_limit:
            self.held()
            self._holdings_limit = 2 * len(self._holdings) + _SPARE

    def held(self) -> list[Message]:
        """Return the unanswered messages in flight; forget the others."""
        found: list[Message] = []
        holdings: list[_Holding] = []
        for holding in self._holdings:
            left = []
            for message in holding.messages:
                if message.answered:
                    continue
                if not message.lost:
                    left.append(message)
                elif message.owner.horizon < inf:  # otherwise its connection ended
                    _log_timeout(message)
            if left:
                found += left
                holdings.append(_Holding(left, holding.task))
        self._holdings = holdings
        return found

    def requeue_held(self, task: int | None = None) -> None:
        """Requeue the messages that a task holds; without a task, all."""
        holdings, self._holdings = self._holdings, []
        for holding in holdings:
            if task is None or holding.task == task:
                requeue_unanswered(holding.messages)
            else:
                self._holdings.append(holding)

    def in_event_loop(self) -> bool:
        return self._tasks.in_event_loop()

    async def wait_for_held(self) -> None:
        """Wait until no held message is in flight and unanswered."""
        while self.held():  # noqa: ASYNC110 - messages do not report their answers, to keep them cheap
            await anyio.sleep(_DRAIN_LOOK)


def _log_timeout(message: Message) -> None:
    logger.error(
        "a message was not answered within %.0f s, and the server delivers it again: it stays in flight for "
        "-max-msg-timeout (%.0f s) at most",
        time.monotonic() - message.delivered,
        message.owner.max_msg_timeout,
        extra={"topic": message.topic, "partition": message.partition, "message_id": message.id.hex()},
    )
