"""Batches of messages: for a loop, a handler, or on request."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, Self, TypeVar, overload

from attrs import frozen

from nsqext.client.consumer.handlers.forgotten_await import requeue_not_awaited
from nsqext.client.consumer.message import Message, check_delay, check_requeue_delay, notes_call, requeue_unanswered
from nsqext.errors import InvalidInput, InvalidState, MessageNotInFlight

if TYPE_CHECKING:
    from nsqext.client.consumer.handlers.iteration import MessageIteration
    from nsqext.client.consumer.handlers.workers import BatchLimits, MessageQueue, Slot, Workers

logger: logging.Logger = logging.getLogger("nsqext.consumer")

_clock = time.monotonic


class _Answerable(Protocol):
    """A message of an asynchronous or a blocking consumer."""

    @property
    def answered(self) -> bool: ...


M = TypeVar("M", bound=_Answerable)


class MessageSequence(Sequence[M]):
    """The messages of a batch, for asynchronous and blocking consumers."""

    __slots__ = ("_messages",)

    def __init__(self, messages: Sequence[M]) -> None:
        self._messages: Sequence[M] = messages

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[M]:
        return iter(self._messages)

    @overload
    def __getitem__(self, index: int) -> M: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[M]: ...

    def __getitem__(self, index: int | slice) -> M | Sequence[M]:
        return self._messages[index]

    @property
    def unanswered(self) -> list[M]:
        """The messages neither finished nor requeued."""
        return [message for message in self._messages if not message.answered]


class MessageBatch(MessageSequence[Message]):
    """Messages that are handled together, in the order received.

    Each message is answered once: with `finish`, `finish_up_to`, `Message.finish` or `Message.requeue`. Until then it
    is touched before it times out. As for `Message`, answers do not wait for the server.
    """

    __slots__ = ()

    @property
    def requeue_called(self) -> bool:
        """Whether `requeue`, of the batch or of one of its unanswered messages, was called and not awaited."""
        return any(message.requeue_called for message in self._messages if not message.answered)

    @requeue_called.setter
    def requeue_called(self, called: bool) -> None:
        for message in self.unanswered:
            message.requeue_called = called

    async def finish(self) -> None:
        """Acknowledge all unanswered messages; no cancellation point, like `Message.finish`.

        Raises:
            MessageNotInFlight: some messages are not in flight any more and will be redelivered; the others are
                acknowledged. Not raised with ``on_lost="ignore"``.
        """
        _answer(self._messages)

    async def finish_up_to(self, last: Message | int) -> None:
        """Acknowledge the unanswered messages up to and including a message.

        Args:
            last: a message of the batch, or its index.

        Raises:
            InvalidInput: the message is not in the batch.
            MessageNotInFlight: as for `finish`.
        """
        index = self._index(last) if isinstance(last, Message) else last
        if not -len(self) <= index < len(self):
            raise InvalidInput(f"index {index} is outside of a batch of {len(self)} messages")
        _answer(self._messages[: index % len(self) + 1])

    @notes_call
    async def requeue(
        self, messages: Iterable[Message] | None = None, delay: float = 0.0, *, backoff: bool = False
    ) -> None:
        """Requeue messages, which counts as an attempt.

        Args:
            messages: messages of the batch; by default the unanswered messages.
            delay: seconds until the redelivery; 0 on ordered channels, see `Message.requeue`.
            backoff: slow the consumer down, as after a failed handler.

        Raises:
            InvalidInput: the delay is negative, too long or on an ordered channel, or a message is not in the batch.
            InvalidState: a given message was answered before; no message is requeued.
            MessageNotInFlight: as for `finish`.
        """
        check_delay(delay)
        chosen = self.unanswered if messages is None else list(messages)
        if messages is not None:
            for message in chosen:
                self._index(message)
                if message.answered:
                    raise InvalidState(
                        f"{message!r} was finished or requeued already; no message of the batch was requeued",
                        topic=message.topic,
                        partition=message.partition,
                    )
        for message in chosen:
            check_requeue_delay(message, delay)
        _answer(chosen, delay, backoff=backoff)

    def finish_now(self) -> None:
        """Finish the rest after the handler returned; log how many messages are not in flight any more."""
        try:
            _answer(self._messages)
        except MessageNotInFlight as error:
            logger.warning("messages of a handled batch will be redelivered: %s", error, extra={"topic": error.topic})
            for message in self.unanswered:
                message.mark_answered()  # with lanes, its redelivery is finished without the handler

    def _index(self, wanted: Message) -> int:
        for index, message in enumerate(self._messages):
            if message is wanted:
                return index
        raise InvalidInput(f"{wanted!r} is not in the batch")

    def __repr__(self) -> str:
        return f"<MessageBatch {len(self)} messages, {len(self.unanswered)} unanswered>"


BatchFunction = Callable[[MessageBatch], Awaitable[object]]


@frozen
class BatchHandler:
    """A function that handles batches."""

    function: BatchFunction
    limits: BatchLimits
    origin: object = None  #: the program's function, for the log

    async def work(self, workers: Workers, slot: Slot, queue: MessageQueue) -> None:
        """Handle batches until the consumer ends."""
        source = workers.source
        while messages := await source.collect(self.limits, queue):
            slot.batch = messages
            try:
                slot.batch = await self._without_exhausted(workers, messages, queue)
                if slot.batch:
                    since = _clock()
                    await self._handle(workers, slot, queue)
                    workers.stall.took(slot.batch, _clock() - since)
            finally:
                slot.batch = source.unanswered(slot.batch, queue)  # after a cancellation they are requeued
                source.end_batch(queue)
            slot.batch = ()

    async def _without_exhausted(self, workers: Workers, messages: list[Message], queue: MessageQueue) -> list[Message]:
        """Send messages without attempts left to the dead letters; return the others."""
        policy = workers.source.policy
        exhausted: list[Message] = []
        others: list[Message] = []
        for message in messages:
            used_up = message.attempts > 1 and policy.attempts_exhausted(message)
            (exhausted if used_up else others).append(message)
        if exhausted:
            await policy.dead_letter_all(exhausted, None)
            return workers.source.unanswered(others, queue)
        return others

    async def _handle(self, workers: Workers, slot: Slot, queue: MessageQueue) -> None:
        batch, unanswered = MessageBatch(slot.batch), workers.source.unanswered
        try:
            result = await self.function(batch)
            if result is not None:
                workers.note_unused(self, result)
        except Exception as error:
            await workers.source.policy.batch_failed(unanswered(batch, queue), error)
        except BaseException as error:
            await workers.source.policy.batch_failed(unanswered(batch, queue), workers.interrupted(slot, error))
        else:
            rest = MessageBatch(unanswered(batch, queue))
            if rest.requeue_called:
                await workers.source.policy.batch_failed(list(rest), requeue_not_awaited())
            else:
                rest.finish_now()


def _answer(messages: Sequence[Message], requeue_after: float | None = None, *, backoff: bool = False) -> None:
    """Finish or requeue the unanswered messages; raise afterwards if some are not in flight any more."""
    lost = None
    for message in messages:
        if not message.answered:
            try:
                if requeue_after is None:
                    message.owner.finish(message)
                else:
                    message.owner.requeue(message, requeue_after, backoff=backoff)
            except MessageNotInFlight as error:
                lost = error
            else:
                message.mark_answered() if requeue_after is None else message.mark_requeued()
    if lost is not None:
        _report_lost(messages, lost)


def _report_lost(messages: Sequence[Message], error: MessageNotInFlight) -> None:
    """Raise because messages were not answered, or log it with ``on_lost="ignore"``."""
    lost = [message for message in messages if not message.answered]
    text = f"{len(lost)} of {len(messages)} messages of a batch were not answered; one of them: {error.message}"
    if not lost[0].owner.ignore_lost:
        raise MessageNotInFlight(text, hint="they will be delivered again", **error.where) from error
    for message in lost:
        message.mark_answered()
    logger.info("%s", text, extra={"topic": error.topic})


class MessageBatches:
    """The batches of a consumer, for ``async for``; see `Consumer.batches`.

    Leaving the loop with ``break`` or an exception requeues the unanswered messages of its batch: at once if the loop
    has the only reference to this object, otherwise with `aclose`. The next turn of the loop leaves them in flight:
    they are answered later, for example by another task.
    """

    def __init__(self, iteration: MessageIteration, limits: BatchLimits) -> None:
        self._iteration = iteration
        self._limits = limits
        self._batch: MessageBatch | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> MessageBatch:
        """Return the next batch.

        Raises:
            StopAsyncIteration: the consumer was stopped.
            InvalidState: the consumer is not open.
            NsqError: the consumer cannot continue.
        """
        self._batch = None
        self._batch = batch = await self.take()
        return batch

    async def take(self, timeout: float | None = None) -> MessageBatch:
        """Return the next batch, which the caller keeps; empty after the timeout in seconds."""
        return MessageBatch(await self._iteration.next_batch(self._limits, timeout))

    async def aclose(self) -> None:
        """Requeue the unanswered messages of the last batch."""
        batch, self._batch = self._batch, None
        if batch is not None:
            requeue_unanswered(batch)

    def __del__(self) -> None:
        # the loop was left; garbage collection may run in any thread
        if self._batch is not None and self._iteration.in_event_loop():
            requeue_unanswered(self._batch)
