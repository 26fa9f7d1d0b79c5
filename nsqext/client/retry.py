"""What follows when a publish fails: the flags of the errors decide, tenacity counts."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_never, wait_random_exponential

from nsqext.client.options import ProducerOptions
from nsqext.client.publication import Publication
from nsqext.errors import ConnectionLost, DeliveryUnknown, NotSent, NsqError, PublishFailed

__all__ = ("RetryPolicy", "outcome_unknown")

T = TypeVar("T")


def outcome_unknown(error: NsqError) -> bool:
    """Return whether a publish that failed so may have been stored."""
    return error.maybe_stored or (isinstance(error, ConnectionLost) and not isinstance(error, NotSent))


class RetryPolicy:
    """Goes on with a publish that failed once, until it is stored, refused for good, or out of time.

    Args:
        options: times, and what to do about unknown outcomes.
    """

    def __init__(self, options: ProducerOptions) -> None:
        self._options = options
        self._wait = wait_random_exponential(multiplier=options.retry_wait, max=options.max_retry_wait)

    def final(self, error: NsqError) -> bool:
        """Return whether nothing further is tried after this error."""
        return not error.retryable or (self._options.on_unknown == "raise" and outcome_unknown(error))

    async def go_on(
        self, publication: Publication, first: NsqError, again: Callable[[NsqError], Awaitable[T]], started: float
    ) -> T:
        """Try again after the first failure.

        Args:
            publication: what is published.
            first: what happened.
            again: makes another attempt, told how the one before ended.
            started: when the publish began, in seconds of the monotonic clock.

        Raises:
            NsqError: refused for good.
            PublishFailed: out of time, and certainly not stored.
            DeliveryUnknown: out of time or not to be retried, and possibly stored.
        """
        errors = [first]
        if self.final(first):
            raise self._refused(errors)
        with anyio.move_on_after(max(0.0, started + self._options.timeout - time.monotonic())):
            return await self._loop(errors, again)
        raise self._out_of_time(publication, errors)

    async def _loop(self, errors: list[NsqError], again: Callable[[NsqError], Awaitable[T]]) -> T:
        def keep(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome is not None else None
            if isinstance(error, NsqError) and error is not errors[-1]:
                errors.append(error)

        async def attempt() -> T:
            return await again(errors[-1])

        retrying = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, NsqError) and not self.final(error)),
            wait=self._wait,
            stop=stop_never,
            sleep=anyio.sleep,
            after=keep,
            reraise=True,
        )
        await anyio.sleep(min(self._options.retry_wait, self._options.max_retry_wait))
        try:
            return await retrying(attempt)
        except NsqError as error:
            errors.append(error)
            raise self._refused(errors) from error.__cause__

    def _refused(self, errors: list[NsqError]) -> NsqError:
        if any(outcome_unknown(error) for error in errors):
            return _unknown(errors)
        last = errors[-1]
        last.attempts = tuple(errors[:-1])
        return last

    def _out_of_time(self, publication: Publication, errors: list[NsqError]) -> NsqError:
        if publication.in_doubt or any(outcome_unknown(error) for error in errors):
            return _unknown(errors)
        last = errors[-1]
        failed = PublishFailed(
            f"not stored within {self._options.timeout:g} s, at last: {last.message}",
            topic=last.topic,
            partition=last.partition,
            node=last.node,
            hint=last.hint,
        )
        failed.attempts = tuple(errors)
        failed.__cause__ = last
        return failed


def _unknown(errors: list[NsqError]) -> DeliveryUnknown:
    last = errors[-1]
    unknown = DeliveryUnknown(
        f"the message may have been stored: {last.message}",
        topic=last.topic,
        partition=last.partition,
        node=last.node,
        hint="publishing it again may store it twice",
    )
    unknown.attempts = tuple(errors)
    unknown.__cause__ = last
    return unknown
