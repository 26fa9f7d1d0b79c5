"""What follows when a publish fails: the flags of the errors decide, tenacity counts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import anyio
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_never, wait_random_exponential

from nsqext.errors import (
    ConnectionLost,
    DeliveryUnknown,
    LookupFailed,
    NotSent,
    NsqError,
    PublishFailed,
    TopicNotFound,
)

if TYPE_CHECKING:
    from nsqext.client.producer.options import ProducerOptions

__all__ = ("Attempts", "RetryPolicy", "outcome_unknown")

T = TypeVar("T")

_PACED = 0.1
"""Longest pause, in seconds, before an attempt that waits for lookup, too."""


def outcome_unknown(error: NsqError) -> bool:
    """Return whether a publish that failed so may have been stored."""
    return error.maybe_stored or (isinstance(error, ConnectionLost) and not isinstance(error, NotSent))


class Attempts(Protocol):
    """What is tried again and again."""

    errors: list[NsqError]
    """How the attempts so far ended, oldest first."""

    @property
    def moves(self) -> bool:
        """Whether the next attempt goes somewhere that has not failed yet, so that nothing has to be waited for."""

    @property
    def paced(self) -> bool:
        """Whether the next attempt waits for an answer of lookup, which paces itself."""


class RetryPolicy:
    """Goes on with a publish that failed, until it is stored, or refused for good; somebody else watches the time.

    Args:
        options: times, and what to do about unknown outcomes.
    """

    def __init__(self, options: ProducerOptions) -> None:
        self._options = options
        self._jitter = wait_random_exponential(multiplier=options.retry_wait, max=options.max_retry_wait)

    def final(self, errors: Sequence[NsqError]) -> bool:
        """Return whether nothing further is tried after the last of these errors."""
        last = errors[-1]
        if len(errors) == 1 and isinstance(last, (TopicNotFound, LookupFailed)):
            # a name or an address that was never right is told at once
            return True
        return not last.retryable or (self._options.on_unknown == "raise" and outcome_unknown(last))

    async def go_on(self, attempts: Attempts, again: Callable[[], Awaitable[T]]) -> T:
        """Try again after a first failure, which is in ``attempts.errors``.

        Raises:
            NsqError: refused for good.
            DeliveryUnknown: not to be retried, and possibly stored.
        """
        errors = attempts.errors
        begun = False

        async def attempt() -> T:
            nonlocal begun
            if not begun:
                begun = True
                raise errors[0]
            return await again()

        def keep(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome is not None else None
            if isinstance(error, NsqError) and error is not errors[-1]:
                errors.append(error)

        def wait(state: RetryCallState) -> float:
            if attempts.moves and not errors[-1].overload:
                return 0.0
            pause = self._jitter(state)
            return min(pause, _PACED) if attempts.paced else pause

        def goes_on(error: BaseException) -> bool:
            tried = errors if error is errors[-1] else [*errors, error]
            return isinstance(error, NsqError) and not self.final(tried)  # type: ignore[arg-type]

        retrying = AsyncRetrying(
            retry=retry_if_exception(goes_on),
            wait=wait,
            stop=stop_never,
            sleep=anyio.sleep,
            after=keep,
            reraise=True,
        )
        try:
            return await retrying(attempt)
        except NsqError as error:
            if error is not errors[-1]:
                errors.append(error)
            raise refusal(errors) from error.__cause__


def refusal(errors: Sequence[NsqError]) -> NsqError:
    """Return the error of a publish that is not tried again."""
    last = errors[-1]
    if isinstance(last, DeliveryUnknown):
        last.attempts = tuple(errors[:-1])
        return last
    if any(outcome_unknown(error) for error in errors):
        return _unknown(errors, last.message)
    last.attempts = tuple(errors[:-1])
    return last


def given_up(reason: str, errors: Sequence[NsqError], in_doubt: bool) -> NsqError:
    """Return the error of a publish that was not finished.

    Args:
        reason: why it was not.
        errors: of its attempts.
        in_doubt: the last attempt had been sent, and was not answered.
    """
    last = errors[-1] if errors else NsqError("no answer came" if in_doubt else "no connection came about")
    if in_doubt or any(outcome_unknown(error) for error in errors):
        return _unknown(errors, reason)
    failed = PublishFailed(
        f"not stored {reason}, at last: {last.message}",
        topic=last.topic,
        partition=last.partition,
        node=last.node,
        hint=last.hint,
    )
    failed.attempts = tuple(errors)
    failed.__cause__ = last if errors else None
    return failed


def _unknown(errors: Sequence[NsqError], reason: str) -> DeliveryUnknown:
    last = errors[-1] if errors else NsqError("")
    unknown = DeliveryUnknown(
        f"the message may have been stored: {reason}",
        topic=last.topic,
        partition=last.partition,
        node=last.node,
        hint="publishing it again may store it twice",
    )
    unknown.attempts = tuple(errors)
    unknown.__cause__ = last if errors else None
    return unknown
