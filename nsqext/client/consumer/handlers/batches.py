"""Messages in flight, which are touched before they time out, and batches: for a loop, a handler, or on request."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from math import inf
from typing import Protocol, Self, TypeVar, overload

import anyio
from attrs import frozen

from nsqext.arguments import check_number, check_time
from nsqext.client.consumer.message import Message, check_delay, check_requeue_delay
from nsqext.errors import InvalidInput, InvalidState, MessageNotInFlight

logger: logging.Logger = logging.getLogger("nsqext.consumer")

TOUCHES = 16
"""Looks at the messages in flight within a timeout. A message is touched when half to 9/16 of it have passed."""

_DRAIN_LOOK = 0.01  # seconds between two looks whether all held messages were answered, while the consumer closes
_SPARE_HOLDINGS = 16
"""Holdings that are kept, beyond twice those with unanswered messages, until the others are forgotten."""


def touch_due(messages: Iterable[Message], now: float, *, requeued: bool = False) -> int:
    """Touch the messages of which half the timeout has passed; return how many.

    Call it `TOUCHES` times within the shortest timeout. A message is not touched beyond the total time that its server
    allows (``max_msg_timeout``). Answered ones are skipped, unless they were ``requeued`` and no REQ was sent.
    """
    count = 0
    for message in messages:
        if message.answered and not requeued:
            continue
        owner = message.owner
        half = owner.msg_timeout / 2
        if now - message.received >= half and now - message.delivered + half < owner.max_msg_timeout:
            try:
                owner.touch(message)
            except MessageNotInFlight:
                continue
            count += 1
    return count


@frozen(eq=False)
class _Holding:
    """Messages that were handed out together, and the task that received them; None for a handler."""

    messages: Sequence[Message]
    task: int | None


class HeldMessages:
    """Messages in flight that the program answers later: batches, and messages that handlers left unanswered.

    The program answers them at any time. They are touched for as long as the server allows; an error is logged when it
    takes one back. A consumer that closes waits for their answers and then requeues the others.
    """

    def __init__(self) -> None:
        self._holdings: list[_Holding] = []
        self._limit = _SPARE_HOLDINGS

    def add(self, messages: Sequence[Message], task: int | None = None) -> None:
        """Add messages that were handed out; ``task`` is the id of the one that received them, None for handlers."""
        self._holdings.append(_Holding(messages, task))
        if len(self._holdings) > self._limit:
            self.unanswered()
            self._limit = 2 * len(self._holdings) + _SPARE_HOLDINGS

    def unanswered(self) -> list[Message]:
        """Return the messages that are in flight and not answered; forget the others."""
        found: list[Message] = []
        holdings: list[_Holding] = []
        for holding in self._holdings:
            left = []
            for message in holding.messages:
                if message.answered:
                    continue
                if message.received >= message.owner.horizon:
                    left.append(message)
                elif message.owner.horizon < inf:  # otherwise its connection ended
                    _log_timeout(message)
            if left:
                found += left
                holdings.append(_Holding(left, holding.task))
        self._holdings = holdings
        return found

    def requeue(self, task: int | None = None) -> None:
        """Requeue the messages that one task holds, or all."""
        holdings, self._holdings = self._holdings, []
        for holding in holdings:
            if task is None or holding.task == task:
                requeue_unanswered(holding.messages)
            else:
                self._holdings.append(holding)

    async def wait(self) -> None:
        """Wait until all are answered, or not in flight any more."""
        while self.unanswered():  # noqa: ASYNC110 - messages do not report their answers, to keep them cheap
            await anyio.sleep(_DRAIN_LOOK)


def _log_timeout(message: Message) -> None:
    logger.error(
        "a message was not answered within %.0f s, and the server delivers it again: it stays in flight for "
        "-max-msg-timeout (%.0f s) at most",
        time.monotonic() - message.delivered,
        message.owner.max_msg_timeout,
        extra={"topic": message.topic, "partition": message.partition, "message_id": message.id.hex()},
    )


def requeue_unanswered(messages: Iterable[Message]) -> None:
    """Requeue the messages that are in flight and not answered."""
    for message in messages:
        if not message.answered and message.received >= message.owner.horizon:
            message.requeue_now(0.0, backoff=False)


_clock = time.monotonic


@frozen
class BatchLimits:
    """When a batch is complete."""

    max_count: int = 500  # messages of a batch, at most; ``max_in_flight`` bounds it too
    max_wait: float = 0.2  # seconds that its first message waits for further ones

    def __attrs_post_init__(self) -> None:
        check_number("max_count", self.max_count, 1)
        check_time("max_wait", self.max_wait)


class _Answerable(Protocol):
    """A message of an asynchronous or a blocking consumer."""

    @property
    def answered(self) -> bool: ...


M = TypeVar("M", bound=_Answerable)


class MessageSequence(Sequence[M]):
    """The messages of a batch; what the batches of asynchronous and blocking consumers share."""

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
        """The messages that were neither finished nor requeued."""
        return [message for message in self._messages if not message.answered]


class MessageBatch(MessageSequence[Message]):
    """Messages that are handled together, in the order received.

    Each message is answered once: all at once with `finish`, from the front with `finish_up_to`, or one by one with
    `Message.finish` and `Message.requeue`. Until then they are touched before they time out. Answers are sent together
    in the next turn of the event loop; awaiting them does not wait for the server.
    """

    __slots__ = ()

    async def finish(self) -> None:
        """Acknowledge all messages that are not answered.

        Like `Message.finish` it does not wait, so it is not a cancellation point.

        Raises:
            MessageNotInFlight: some of them are not in flight any more and will be delivered again; all others are
                acknowledged. Not with ``on_lost="ignore"``.
        """
        _answer(self._messages)

    async def finish_up_to(self, last: Message | int) -> None:
        """Acknowledge the messages up to and including one, except for those that are answered.

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

    async def requeue(
        self, messages: Iterable[Message] | None = None, delay: float = 0.0, *, backoff: bool = False
    ) -> None:
        """Requeue messages: they will be delivered again, with one attempt more.

        Args:
            messages: messages of the batch; by default all that are not answered.
            delay: seconds until then; 0 on ordered channels, see `Message.requeue`.
            backoff: slow the consumer down, as for a handler that raises.

        Raises:
            InvalidInput: the delay is negative, too long or on an ordered channel, or a message is not in the batch.
            InvalidState: one of the given messages was answered before; no message is requeued.
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
        """Finish the rest after its handler returned; log how many are not in flight any more."""
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
    limits: BatchLimits  # when a batch is complete


def _answer(messages: Sequence[Message], requeue_after: float | None = None, *, backoff: bool = False) -> None:
    """Finish or requeue the messages that are not answered; raise afterwards if some are not in flight any more."""
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
                message.mark_answered()
    if lost is not None:
        _report_lost(messages, lost)


def _report_lost(messages: Sequence[Message], error: MessageNotInFlight) -> None:
    """Raise because messages were not answered, or log it where the options say so."""
    lost = [message for message in messages if not message.answered]
    text = f"{len(lost)} of {len(messages)} messages of a batch were not answered; one of them: {error.message}"
    if not lost[0].owner.ignore_lost:
        raise MessageNotInFlight(text, hint="they will be delivered again", **error.where) from error
    for message in lost:
        message.mark_answered()
    logger.info("%s", text, extra={"topic": error.topic})


class MessageBatches:
    """The batches of a consumer, for ``async for``; made by `Consumer.batches`.

    Leaving the loop with ``break`` or an exception requeues the messages of its batch that are not answered, at once if
    the loop holds the only reference to this object, and otherwise with `aclose`. The next turn of the loop leaves
    them in flight: they are answered later, for example by another task.
    """

    def __init__(self, take: Callable[[], Awaitable[MessageBatch]], same_loop: Callable[[], bool]) -> None:
        self._take = take  # returns the next batch
        self._same_loop = same_loop  # whether the caller runs in the event loop of the consumer
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
        self._batch = batch = await self._take()
        return batch

    async def aclose(self) -> None:
        """Requeue the messages of the last batch that are not answered."""
        batch, self._batch = self._batch, None
        if batch is not None:
            requeue_unanswered(batch)

    def __del__(self) -> None:
        # the loop was left; the garbage collector may call this in any thread
        if self._batch is not None and self._same_loop():
            requeue_unanswered(self._batch)
