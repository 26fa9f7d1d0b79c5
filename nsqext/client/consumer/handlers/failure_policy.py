"""Decide about messages whose handler raised: requeue, send to the dead letters, or do what the error asks for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import anyio
from attrs import define

from nsqext.client.consumer.message import Finish, HandlerSignal, Message, Reject, Requeue
from nsqext.protocol.messages import KEY_HEADER
from nsqext.waits import chance

if TYPE_CHECKING:
    from nsqext.client.consumer.options import DeadLetterHook, FailureOptions
    from nsqext.client.consumer.subscriptions.early_messages import EarlyMessages
    from nsqext.client.consumer.subscriptions.subscription_group import RejectedCounts

logger: logging.Logger = logging.getLogger("nsqext.consumer")

_clock = time.monotonic
_AT_ONCE = 32  # dead letters of a batch that are published at the same time


@define(eq=False)
class FailurePolicy:
    """Decides about messages whose handler raised, or that were delivered too often."""

    _options: FailureOptions
    _dead_letters: DeadLetterHook | None  # None to drop the messages
    _early: Callable[[], EarlyMessages]  # keeps messages of ordered channels until they are requeued
    _counts: RejectedCounts
    _chance: Callable[[], float] = lambda: chance.uniform(-1, 1)  # jitter

    def delay(self, message: Message) -> float:
        """Return the delay of a message that failed, in seconds."""
        options = self._options
        delay = options.requeue_delay * message.attempts * (1 + options.requeue_jitter * self._chance())
        return min(delay, options.max_requeue_delay)

    def attempts_exhausted(self, message: Message) -> bool:
        """Return whether earlier consumers used up all attempts and crashed."""
        return 0 < self._options.max_attempts < message.attempts and self._may_reject(message)

    async def failed(self, message: Message, error: Exception) -> None:
        """Answer the message of a failed handler; if it was answered before, only log the error."""
        if not isinstance(error, HandlerSignal):
            logger.error(
                "the handler failed for %r: %s", message, text_of(error), exc_info=error, extra=_where(message)
            )
        if not message.answered and not self._answer(message, error):
            await self.dead_letter(message, error)

    async def batch_failed(self, messages: Sequence[Message], error: Exception) -> None:
        """Answer the unanswered messages of a batch whose handler raised; log the error once."""
        if not isinstance(error, HandlerSignal):
            logger.error(
                "the handler failed for a batch, %d messages of it are not answered: %s",
                len(messages),
                text_of(error),
                exc_info=error,
                extra=_where(messages[0]) if messages else {},
            )
        await self.dead_letter_all([message for message in messages if not self._answer(message, error)], error)

    def _answer(self, message: Message, error: Exception) -> bool:
        """Finish or requeue a message as its error says; return False for a dead letter."""
        limit = self._options.max_attempts
        if isinstance(error, Finish):
            message.finish_now()
        elif isinstance(error, Requeue):
            self.requeue(message, error.delay, backoff=error.backoff)
        elif isinstance(error, Reject) or (limit and message.attempts >= limit and self._may_reject(message)):
            return False
        else:
            self.requeue(message, None, backoff=True)
        return True

    def requeue(self, message: Message, delay: float | None, *, backoff: bool) -> None:
        """Requeue a message after a delay in seconds; None for the delay of failed messages."""
        wait = self.delay(message) if delay is None else delay
        if not message.in_order or not wait:
            message.requeue_now(wait, backoff=backoff)
            if message.budget is not None:  # in a lane it waits in memory
                message.budget.pack(message)
            return
        message.owner.record_outcome(backoff)
        self._early().keep(message, _clock() + wait)

    async def dead_letter(self, message: Message, error: Exception | None) -> None:
        """Send a message to the dead letters and finish it; requeue it if that fails or is not allowed.

        Without dead letters the message is dropped.
        """
        where = _where(message)
        if not self._may_reject(message):
            logger.warning(
                "an ordered message is not rejected, it blocks its partition; set reject_ordered=True to skip it: %r",
                message,
                extra=where,
            )
            self.requeue(message, None, backoff=True)
            return
        try:
            if self._dead_letters is not None:
                await self._dead_letters(message, error)
        except Exception:
            logger.exception("%r was not sent to the dead letters", message, extra=where)
            if not message.answered:
                self.requeue(message, None, backoff=True)
            return
        attempts = f"{message.attempts} attempt{'' if message.attempts == 1 else 's'}"
        if self._dead_letters is None:
            self._counts.dropped += 1
            logger.error(
                "dropped after %s, no dead_letter is set: %r: %s", attempts, message, reason_of(error), extra=where
            )
        else:
            self._counts.dead_letters += 1
            logger.error("sent to the dead letters after %s: %r: %s", attempts, message, reason_of(error), extra=where)
        if not message.answered:
            message.finish_now()

    async def dead_letter_all(self, messages: Sequence[Message], error: Exception | None) -> None:
        """Call `dead_letter` for messages of a batch.

        Messages are published concurrently, but in order for each key. A user's hook need not expect concurrent calls.
        """
        if not isinstance(self._options.dead_letter, str):
            for message in messages:
                await self.dead_letter(message, error)
            return
        from nsqext.client.consumer.handlers.message_keys import key_reader

        key_of = key_reader(KEY_HEADER)
        by_key: dict[bytes, list[Message]] = {}
        for message in messages:
            by_key.setdefault(key_of(message), []).append(message)
        left = iter(by_key.values())

        async def publish() -> None:
            for of_key in left:
                for message in of_key:
                    await self.dead_letter(message, error)

        async with anyio.create_task_group() as tasks:
            for _ in range(min(_AT_ONCE, len(by_key))):
                tasks.start_soon(publish)

    def _may_reject(self, message: Message) -> bool:
        return self._options.reject_ordered or not message.in_order


def text_of(error: Exception) -> str:
    """Return the text of a user's error, whose ``__str__`` may raise."""
    try:
        return str(error)
    except Exception as failure:
        return f"<no text: {type(failure).__name__}>"


def reason_of(error: Exception | None) -> str:
    """Return the reason of a dead letter; without an error, earlier consumers used up its attempts."""
    return "delivered too often" if error is None else f"{type(error).__name__}: {text_of(error)}"


def warn_of_drops(places: Sequence[str], options: FailureOptions) -> None:
    """Warn that failed messages of these topics and channels are dropped."""
    logger.warning(
        "messages of %s%s are dropped after max_attempts=%d, because dead_letter is not set; set it to keep them",
        ", ".join(places),
        "" if options.reject_ordered else ", except on ordered topics,",
        options.max_attempts,
    )


def _where(message: Message) -> dict[str, object]:
    return {"topic": message.topic, "partition": message.partition, "attempts": message.attempts}
