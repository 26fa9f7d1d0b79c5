"""The errors of a publish's attempts: they decide whether and when it is retried, and what it raises."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from nsqext.errors import (
    ConnectionLost,
    DeliveryUnknown,
    LookupFailed,
    NotSent,
    NsqError,
    PublishFailed,
    RequestTimeout,
    TopicNotFound,
)
from nsqext.waits import pause_after

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nsqext.client.producer.options import ProducerOptions

_PACED = 0.1  # longest pause, in seconds, before an attempt that waits for lookup, which has its own pauses
_KEPT_FIRST = 4
_KEPT_LAST = 16  # of many errors, the first 4 and the last 16 are kept


def outcome_unknown(error: NsqError) -> bool:
    """Return whether a publish with this error may have been stored."""
    return error.maybe_stored or (isinstance(error, ConnectionLost) and not isinstance(error, NotSent))


def delivery_unknown(reason: str, **where: Any) -> DeliveryUnknown:
    """Return the error of a publish whose outcome is unknown."""
    hint = "publishing it again may store it twice"
    return DeliveryUnknown(f"the message may have been stored: {reason}", **{"hint": hint, **where})


class AttemptErrors:
    """The errors of a publish's attempts: they decide whether and when it is retried, and what it raises."""

    __slots__ = ("_first", "_last", "_options", "count", "unknown")

    def __init__(self, options: ProducerOptions, errors: Iterable[NsqError] = ()) -> None:
        self._options = options
        self._first: list[NsqError] = []
        self._last: deque[NsqError] = deque(maxlen=_KEPT_LAST)
        self.count: int = 0  #: failed attempts
        self.unknown: bool = False  #: an attempt's outcome is unknown
        for error in errors:
            self.add(error)

    def add(self, error: NsqError) -> None:
        self.count += 1
        self.unknown = self.unknown or outcome_unknown(error)
        (self._first if len(self._first) < _KEPT_FIRST else self._last).append(error)

    @property
    def kept(self) -> tuple[NsqError, ...]:
        return (*self._first, *self._last)

    @property
    def last(self) -> NsqError:
        return self._last[-1] if self._last else self._first[-1]

    def final(self) -> bool:
        """Return whether the latest error ends the publish."""
        last = self.last
        if self.count == 1 and isinstance(last, TopicNotFound):
            return True  # a wrong name is reported at once
        return not last.retryable or (self._options.on_unknown != "retry" and outcome_unknown(last))

    def pause(self, *, paced: bool) -> float:
        """Return the seconds until the next attempt, by ``retry_wait``."""
        options = self._options
        pause = pause_after(options.retry_wait, options.max_retry_wait, self.count, self.last)
        return min(pause, _PACED) if paced else pause

    def refusal(self) -> NsqError:
        """Return the error of a publish whose latest error is final."""
        last = self.last
        if self.unknown and not isinstance(last, DeliveryUnknown):
            return self._unknown(last.message)
        last.attempts = self.kept[:-1]
        return last

    def given_up(self, reason: str, in_doubt: bool = False) -> NsqError:
        """Return the final error of a publish, with the reason, as in "not stored within 5 s"."""
        if in_doubt:
            self.add(RequestTimeout(f"no response {reason}"))
        if self.unknown:
            ended = "" if in_doubt else f"no attempt succeeded {reason}; last error: "
            return self._unknown(f"{ended}{self.last.message}")
        if not self.count:
            return PublishFailed(f"not stored {reason}: it waited for lookup or a connection")
        last = self.last
        if isinstance(last, LookupFailed):
            return self.refusal()
        failed = PublishFailed(f"not stored {reason}; last error: {last.message}", hint=last.hint, **last.where)
        failed.attempts = self.kept
        failed.__cause__ = last
        return failed

    def _unknown(self, reason: str) -> DeliveryUnknown:
        unknown = delivery_unknown(reason, **self.last.where)
        unknown.attempts = self.kept
        unknown.__cause__ = self.last
        return unknown
