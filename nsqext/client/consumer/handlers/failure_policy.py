"""What becomes of a message whose handler raised: requeued, given up to the dead letters, or as the handler said."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from nsqext.client.consumer.handler_signals import Finish, Reject, Requeue
from nsqext.client.consumer.message import Message

if TYPE_CHECKING:
    from nsqext.client.consumer.options import FailureOptions

__all__ = ("DelayedRequeues", "FailurePolicy")

logger: logging.Logger = logging.getLogger("nsqext.consumer")

_clock = time.monotonic

DeadLetters = Callable[[Message, Exception | None], Awaitable[object]]


class DelayedRequeues:
    """Requeues that are held back here, because servers ignore the delay on ordered channels (captured:
    sub_ordered_requeue).

    Attributes:
        held: messages that wait.
    """

    def __init__(self) -> None:
        self.held: set[Message] = set()
        self._due: list[tuple[float, Message]] = []

    def hold(self, message: Message, due: float) -> None:
        """Requeue a message at a time."""
        self.held.add(message)
        self._due.append((due, message))

    def tick(self, now: float) -> None:
        """Requeue what is due."""
        if not self._due:
            return
        ready = [message for due, message in self._due if due <= now]
        self._due = [entry for entry in self._due if entry[0] > now]
        for message in ready:
            self.held.discard(message)
            if not message.answered:
                message.requeue_now(0.0, backoff=False)


class FailurePolicy:
    """Decides about messages that were not simply handled.

    Args:
        options: the policy.
        dead_letters: takes messages that are given up; None where nothing does.
        delays: holds requeues on ordered channels back.
        chance: gives a number from -1 to 1 for the jitter.
    """

    def __init__(
        self,
        options: FailureOptions,
        dead_letters: DeadLetters | None,
        delays: DelayedRequeues,
        chance: Callable[[], float] = lambda: random.uniform(-1, 1),
    ) -> None:
        self._options = options
        self._dead_letters = dead_letters
        self._delays = delays
        self._chance = chance

    def delay(self, message: Message) -> float:
        """Return the delay of a message that failed, in seconds."""
        options = self._options
        delay = options.requeue_delay * message.attempts * (1 + options.jitter * self._chance())
        return min(delay, options.max_requeue_delay)

    def attempts_exhausted(self, message: Message) -> bool:
        """Return whether a message was delivered more often than it may fail, and nobody lived to say so."""
        return 0 < self._options.max_attempts < message.attempts and self._may_give_up(message)

    async def failed(self, message: Message, error: Exception) -> None:
        """Act on the exception of a handler; one that came after the answer is only logged."""
        if isinstance(error, Finish):
            if not message.answered:
                message.finish_now()
        elif isinstance(error, Requeue):
            if not message.answered:
                self.requeue(message, error.delay, backoff=error.backoff)
        elif isinstance(error, Reject):
            if not message.answered:
                await self.dead_letter(message, error)
        else:
            await self._broke(message, error)

    async def _broke(self, message: Message, error: Exception) -> None:
        logger.error("the handler failed on %r: %s", message, error, exc_info=error, extra=_where(message))
        if message.answered:
            return
        limit = self._options.max_attempts
        if limit and message.attempts >= limit and self._may_give_up(message):
            await self.dead_letter(message, error)
        else:
            self.requeue(message, None, backoff=True)

    def requeue(self, message: Message, delay: float | None, *, backoff: bool) -> None:
        """Give a message back.

        Args:
            message: the message.
            delay: seconds; None for what the policy says.
            backoff: count it as a failure.
        """
        wait = self.delay(message) if delay is None else delay
        if not message.in_order or not wait:
            message.requeue_now(wait, backoff=backoff)
            return
        message.owner.record_outcome(backoff)
        self._delays.hold(message, _clock() + wait)

    async def dead_letter(self, message: Message, error: Exception | None) -> None:
        """Hand a message to the dead letters and finish it; where that fails, or may not be, requeue it."""
        where = _where(message)
        if not self._may_give_up(message):
            logger.warning("an ordered message is not given up, it blocks its partition: %r", message, extra=where)
            self.requeue(message, None, backoff=True)
            return
        try:
            if self._dead_letters is not None:
                await self._dead_letters(message, error)
        except Exception:
            logger.exception("the dead letters did not take %r", message, extra=where)
            if not message.answered:
                self.requeue(message, None, backoff=True)
            return
        logger.error("given up after %d attempts: %r", message.attempts, message, extra=where)
        if not message.answered:
            message.finish_now()

    def _may_give_up(self, message: Message) -> bool:
        return self._options.reject_ordered or not message.in_order


def _where(message: Message) -> dict[str, object]:
    return {"topic": message.topic, "partition": message.partition, "attempts": message.attempts}
