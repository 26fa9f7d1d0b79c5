"""Publish single messages in batches in the background; bounded, every failure is reported."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio
from attrs import define, frozen

from nsqext.arguments import check_counts, check_time
from nsqext.client.producer.attempt_errors import delivery_unknown
from nsqext.client.producer.publishing import OutgoingMessage, Publishing
from nsqext.client.producer.request import MessageRequest, key_bytes
from nsqext.errors import BatchFailed, DeliveryUnknown, InvalidInput, InvalidState, NsqError, PublishFailed
from nsqext.protocol.names import check_topic
from nsqext.waits import Waiters

if TYPE_CHECKING:
    from nsqext.client.producer.keys import Place
    from nsqext.client.producer.options import ProducerOptions
    from nsqext.client.producer.publisher import Publisher
    from nsqext.client.producer.publishing import TopicKey
    from nsqext.client.producer.request import Outcome
    from nsqext.client.tasks import BackgroundTasks
    from nsqext.types import Receipt

logger: logging.Logger = logging.getLogger("nsqext.producer")


@frozen
class BatcherLimits:
    """Limits of a batcher."""

    linger: float = 0.005  #: seconds that a message waits for others
    max_count: int = 1000  #: messages per batch
    max_bytes: int = 1 << 20  #: bytes per batch
    max_pending: int = 10_000  #: accepted messages not yet stored; failed messages until `Batcher.take_failed`

    def __attrs_post_init__(self) -> None:
        check_time("linger", self.linger)
        check_counts(self, "max_count", "max_bytes", "max_pending")


@define(eq=False)
class _Turn:
    """A key's pending messages, in a place that no other publish separates."""

    key: TopicKey
    place: Place
    messages: int = 0


_Pending = tuple[MessageRequest, int, "_Turn | None"]  # a message, its size in bytes, and its key's place


class Batcher:
    """Publish messages in batches, one after another, so that keys keep their order.

    A message takes its place among all publishes of its key when it is added.

    Use it, from `nsqext.Producer.batcher`, as an asynchronous context manager inside the producer's; its exit publishes
    the pending messages. Memory is bounded: `add` waits while ``max_pending`` messages are not stored.

    Raises:
        BatchFailed: from `add`, `flush` and the exit, if messages of `add` failed; see `take_failed`. An exit by
            another exception or a cancellation logs their number.
    """

    def __init__(
        self,
        publisher: Publisher,
        options: ProducerOptions,
        tasks: BackgroundTasks,
        topic: str,
        limits: BatcherLimits,
    ) -> None:
        self._publisher = publisher
        self._turns: dict[TopicKey, _Turn] = {}
        self._line = anyio.Lock()
        self._options = options
        self._tasks = tasks
        self._topic = check_topic(topic)
        self._limits = limits
        self._queue: deque[_Pending] = deque()
        self._bytes = 0
        self._flying: list[_Pending] = []
        self._failed: list[tuple[bytes | OutgoingMessage, NsqError]] = []
        self._flushing = 0
        self._taken = 0
        self._done = 0
        self._open = False
        self._begun = False
        self._left = False  # by an exception: nothing raises the errors of failed messages any more
        self._logged = 0  # of the failed messages
        self._work = Waiters()
        self._progress = Waiters()

    @property
    def pending(self) -> int:
        """Number of accepted messages not yet stored."""
        return len(self._queue) + len(self._flying)

    # Opening and closing

    async def __aenter__(self) -> Self:
        if self._begun:
            raise InvalidState("a batcher is opened once", topic=self._topic, hint="create a new one")
        self._tasks.start_soon(self._run)
        self._open = self._begun = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left = error is not None
        try:
            await self.end()
        except BaseException:
            self._left = True
            raise
        finally:
            self._log_failed()
        if error is None:
            self._raise_failed()

    async def end(self) -> None:
        """Accept no further messages; return when all are stored or failed. Cancellation ends only the wait."""
        self._open = False
        await self._settled(self._taken)

    # Adding messages

    async def add(self, message: bytes | OutgoingMessage) -> None:
        """Accept a message; return when there is room, before it is stored.

        Raises:
            InvalidInput: invalid message.
            BatchFailed: ``max_pending`` messages failed, and `take_failed` was not called.
            InvalidState: the batcher is not open, or was opened in another event loop.

        When cancelled, the message is not accepted.
        """
        await self._take(message)

    async def publish(self, message: bytes | OutgoingMessage) -> Receipt:
        """Accept a message and wait until it is stored.

        Raises:
            InvalidInput: invalid message.
            NsqError: it was not stored.
            InvalidState: the batcher is not open.

        When cancelled, the message may be stored or not.
        """
        settled = anyio.Event()
        request = await self._take(message, settled.set)
        await settled.wait()
        return request.result()

    async def flush(self) -> None:
        """Publish pending messages without ``linger``; return when they are stored. Cancellation ends only the wait.

        Raises:
            BatchFailed: messages of `add` failed, now or before.
        """
        await self._settled(self._taken)
        self._raise_failed()

    def take_failed(self) -> list[tuple[bytes | OutgoingMessage, NsqError]]:
        """Return the failed messages with their errors, oldest first, and forget them."""
        self._logged = 0
        failed, self._failed = self._failed, []
        self._progress.wake()
        return failed

    def _log_failed(self) -> None:
        """Log failed messages that no exception reports."""
        unseen = self._failed[self._logged :] if self._left else []
        if unseen:
            self._logged = len(self._failed)
            text = "%d messages of a batcher that was left by an exception were not stored: %s"
            logger.error(text, len(unseen), unseen[0][1], extra={"topic": self._topic})

    def _raise_failed(self) -> None:
        if self._failed:
            raise BatchFailed([error for _, error in self._failed], topic=self._topic, hint="see take_failed()")

    # Publishing

    async def _take(
        self, message: bytes | OutgoingMessage, on_outcome: Callable[[], object] | None = None
    ) -> MessageRequest:
        if not self._queue:  # once for a batch
            self._tasks.check_event_loop()
        key = key_bytes(message.key) if isinstance(message, OutgoingMessage) and message.key is not None else None
        request = MessageRequest(self._options, self._topic, message, key=key)
        request.on_outcome = on_outcome
        size = request.size()  # raises for an invalid message, so that others do not fail with it
        turn = None if key is None else self._turn_of((self._topic, key))
        try:
            await self._admit()
        except BaseException:
            self._leave(turn)
            raise
        self._queue.append((request, size, turn))
        self._bytes += size
        self._taken += 1
        self._work.wake()
        return request

    @property
    def _full(self) -> bool:
        return self._open and self.pending + len(self._failed) >= self._limits.max_pending

    async def _admit(self) -> None:
        if self._full or self._line.locked():
            async with self._line:  # messages of a key are accepted in the order of the calls
                while self._full:
                    if len(self._failed) >= self._limits.max_pending:
                        self._raise_failed()
                    await self._progress.wait()
        if not self._open:
            raise InvalidState("the batcher is not open", topic=self._topic, hint="use it inside 'async with'")

    def _turn_of(self, key: TopicKey) -> _Turn:
        """Return a message's place for its key, shared by messages without another publish between them."""
        turn, lock = self._turns.get(key), self._publisher.keys.lock
        if turn is None or not lock.is_last(turn.place, key):
            turn = self._turns[key] = _Turn(key, lock.queue((key,)))
        turn.messages += 1
        return turn

    def _leave(self, turn: _Turn | None) -> None:
        if turn is None:
            return
        turn.messages -= 1
        if not turn.messages:
            turn.place.leave()
            if self._turns.get(turn.key) is turn:
                del self._turns[turn.key]

    @property
    def _due(self) -> bool:
        limits = self._limits
        return bool(self._queue) and (
            self._flushing > 0 or len(self._queue) >= limits.max_count or self._bytes >= limits.max_bytes
        )

    async def _run(self) -> None:
        try:
            while self._open or self._queue:
                await self._next_work(lambda: bool(self._queue) or not self._open)
                with anyio.move_on_after(self._limits.linger):
                    await self._next_work(lambda: self._due or not self._open)
                if self._queue and await self._enter(self._queue[0]):
                    await self._publish(self._cut())
        finally:
            self._open = False
            self._give_up()

    async def _next_work(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await self._work.wait()

    async def _enter(self, entry: _Pending) -> bool:
        """Wait for the next message's key; return whether it can be published."""
        _, size, turn = entry
        if turn is None:
            return True
        try:
            await turn.place.enter(self._options.timeout)
        except PublishFailed as error:
            self._bytes -= size
            self._settle([self._queue.popleft()], [error])
            return False
        return True

    def _cut(self) -> list[_Pending]:
        """Take the next batch from the queue; a message whose key is in use begins another."""
        batch = self._flying
        total = 0
        while self._queue and len(batch) < self._limits.max_count:
            _, size, turn = self._queue[0]
            if batch and (total + size > self._limits.max_bytes or (turn is not None and turn.place.missing)):
                break
            batch.append(self._queue.popleft())
            total += size
        self._bytes -= total
        return batch

    async def _publish(self, batch: list[_Pending]) -> None:
        outcomes: Sequence[Outcome] = ()
        while batch and not outcomes:
            keys = {turn.key for _, _, turn in batch if turn is not None}
            messages = [request.message for request, _, _ in batch]
            call = Publishing(topic=self._topic, messages=messages, batch=True, entered=keys)
            try:
                outcomes = await self._publisher.publish(call)
            except InvalidInput as error:
                if error.index is None or error.index >= len(batch) or call.receipts:
                    outcomes = self._outcomes_of(error, call, len(batch))
                else:  # nothing was sent: the other messages are published without it
                    self._settle([batch.pop(error.index)], [error])
            except Exception as error:
                outcomes = self._outcomes_of(error, call, len(batch))
        self._flying = []
        self._settle(batch, outcomes)

    def _outcomes_of(self, error: Exception, call: Publishing, count: int) -> Sequence[Outcome]:
        """Return the outcomes of messages whose publish raised an error, maybe of the program's middleware."""
        if isinstance(error, NsqError) and not call.receipts:
            if isinstance(error, InvalidState):
                unsent = self._unsent()
                unsent.__cause__ = error
                return [unsent] * count
            outcomes = error.outcomes if isinstance(error, BatchFailed) else [error] * count
            if len(outcomes) == count:
                return outcomes
        unknown = delivery_unknown(f"{type(error).__name__}: {error}", topic=self._topic)
        unknown.__cause__ = error
        return [unknown] * count

    def _settle(self, batch: Sequence[_Pending], outcomes: Sequence[Outcome]) -> None:
        for (request, _, turn), outcome in zip(batch, outcomes, strict=True):
            self._leave(turn)
            request.settle(outcome)
            if isinstance(outcome, NsqError):
                self._publisher.counters.count(outcome)
                if request.on_outcome is None:
                    self._failed.append((request.message, outcome))
        self._done += len(batch)
        self._log_failed()
        self._progress.wake()

    def _give_up(self) -> None:
        """Settle the messages pending at the close of the producer."""
        flying, self._flying = self._flying, []
        waiting = list(self._queue)
        self._queue.clear()
        unknown = DeliveryUnknown("the producer was closed before the response was received", topic=self._topic)
        self._settle([*flying, *waiting], [unknown] * len(flying) + [self._unsent()] * len(waiting))
        self._done = self._taken  # whatever has ended the task, no flush waits any more
        self._progress.wake()

    def _unsent(self) -> PublishFailed:
        return PublishFailed("not published before the producer was closed", topic=self._topic)

    async def _settled(self, number: int) -> None:
        self._flushing += 1
        self._work.wake()
        try:
            while self._done < number:
                await self._progress.wait()
        finally:
            self._flushing -= 1
