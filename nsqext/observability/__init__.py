"""Logs, spans and metrics of publishes and handled messages.

Observers are middleware that keeps outcomes: pass `LogObserver` (structured log records),
`nsqext.observability.otel.OpenTelemetry` (extra ``otel``) or `nsqext.observability.prometheus.Prometheus` (extra
``prometheus``) to `nsqext.App` or to the clients of `nsqext.middleware`.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from attrs import frozen

from nsqext.arguments import check_number, check_time
from nsqext.client.consumer.message import HandlerSignal
from nsqext.client.middleware import CallNext, Handling, Middleware, SendNext

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message
    from nsqext.client.producer.publishing import OutgoingMessage, Publishing
    from nsqext.types import Receipt

__all__ = ("LogObserver", "Observer", "TopicRelay", "TopicRelayStatistics")

logger: logging.Logger = logging.getLogger("nsqext.observability")

UNOBSERVED: AbstractContextManager[None] = nullcontext()
"""An `Observer` returns it for an operation that it does not observe, at no cost."""


@frozen
class TopicRelayStatistics:
    """The progress of a relay of a topic (`nsqext relay`)."""

    topic: str
    channel: str  #: of the relay
    target: str  #: topic or URL that receives the messages
    relayed: int  #: messages sent since the start
    lag: int | None  #: unfinished messages of the channel; None if unknown
    in_flight: int  #: messages received and not yet finished


class TopicRelay(ABC):
    """Sends the messages of a topic to a topic or URL, and reports its progress."""

    @abstractmethod
    def statistics(self) -> TopicRelayStatistics:
        """Return the progress."""


class Observer(Middleware):
    """Observes publishes and handled messages through context managers, which receive the outcome.

    Its errors are logged, and it cannot suppress an error: a failing metric must not repeat a publish.
    """

    def publishing(self, publishing: Publishing) -> AbstractContextManager[object]:
        """Return the context manager for a publish, with all its attempts."""
        return UNOBSERVED

    def handling(self, handling: Handling) -> AbstractContextManager[object]:
        """Return the context manager for a handled message or batch; see also `failure`."""
        return UNOBSERVED

    async def publish(self, publishing: Publishing, send_next: SendNext) -> Sequence[Receipt]:
        """Observe a publish."""
        manager = _entered(self.publishing, publishing)
        if manager is None:
            return await send_next(publishing)
        try:
            receipts = await send_next(publishing)
        except BaseException as error:
            _leave(manager, error)
            raise
        _leave(manager)
        return receipts

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Observe a handler."""
        manager = _entered(self.handling, handling)
        if manager is None:
            return await call_next(handling)
        try:
            result = await call_next(handling)
        except BaseException as error:
            _leave(manager, error)
            raise
        _leave(manager)
        return result


_Observed = TypeVar("_Observed")


def _entered(
    make: Callable[[_Observed], AbstractContextManager[object]], observed: _Observed
) -> AbstractContextManager[object] | None:
    """Return an entered context manager; None if it observes nothing, or failed."""
    try:
        manager = make(observed)
        if manager is UNOBSERVED:
            return None
        manager.__enter__()
    except Exception:
        logger.exception("an observer failed before the observed operation")
        return None
    return manager


def _leave(manager: AbstractContextManager[object], error: BaseException | None = None) -> None:
    """Leave a context manager, whose error is logged, and which cannot suppress the operation's error."""
    try:
        if error is None:
            manager.__exit__(None, None, None)
        else:
            manager.__exit__(type(error), error, error.__traceback__)
    except Exception as own:
        if own is not error:
            logger.exception("an observer failed after the observed operation")


def size_of(message: bytes | OutgoingMessage) -> int:
    """Return the bytes of the body of a message of `Publishing.given`."""
    return len(message) if type(message) is bytes else len(message.body)  # type: ignore[union-attr]


def failure(error: BaseException | None) -> str | None:
    """Return the name of an error's type; None without an error, and for `nsqext.Requeue` and the like."""
    if error is None or isinstance(error, HandlerSignal):
        return None
    return type(error).__qualname__


class LogObserver(Observer):
    """Logs a record for every publish and every handled message or batch, without bodies and header values.

    The text is ``published``, ``publish failed``, ``handled`` or ``handler failed``; the rest are attributes of the
    record (``extra``): event, topic, partition, channel, count, bytes, seconds, attempts, message_id, trace_id, error.

    Args:
        logger: logger or its name.
        level: level of successful operations; failures are warnings.
        slow: seconds after which a successful operation is a warning, too; None for never.

    Raises:
        InvalidSetting: a level that is no number, or an invalid time.
    """

    def __init__(
        self, logger: str | logging.Logger = "nsqext.events", *, level: int = logging.DEBUG, slow: float | None = None
    ) -> None:
        check_number("level", level)
        if slow is not None:
            check_time("slow", slow)
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self._level = level
        self._slow = slow

    def publishing(self, publishing: Publishing) -> AbstractContextManager[object]:
        """Log the outcome of a publish."""
        messages = publishing.given

        def fields() -> dict[str, object]:
            size = sum(map(size_of, messages))
            stored = {"partition": _partitions(publishing.receipts)} if publishing.receipts else {}
            return {"topic": publishing.topic, "count": len(messages), "bytes": size, **stored}

        return _Logged(self, ("published", "publish failed"), fields)

    def handling(self, handling: Handling) -> AbstractContextManager[object]:
        """Log the outcome of a handler."""
        fields = partial(_of_batch if handling.batch else _of_message, handling.messages, handling.channel)
        return _Logged(self, ("handled", "handler failed"), fields)

    def write(
        self, event: str, seconds: float, fields: Callable[[], dict[str, object]], error: BaseException | None
    ) -> None:
        """Log a record; its fields are computed only if it is written."""
        late = self._slow is not None and seconds >= self._slow
        level = logging.WARNING if late or failure(error) else self._level
        if self._logger.isEnabledFor(level):
            outcome = None if error is None else type(error).__qualname__
            self._logger.log(level, event, extra={**fields(), "event": event, "seconds": seconds, "error": outcome})


class _Logged:
    """Logs the outcome of an operation."""

    __slots__ = ("_events", "_fields", "_observer", "_started")

    def __init__(self, observer: LogObserver, events: tuple[str, str], fields: Callable[[], dict[str, object]]) -> None:
        self._observer = observer
        self._events = events
        self._fields = fields

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        succeeded, failed = self._events
        event = failed if failure(error) else succeeded
        self._observer.write(event, time.monotonic() - self._started, self._fields, error)


def _partitions(stored: Iterable[Receipt | Message]) -> list[int]:
    return sorted({one.partition for one in stored if one.partition is not None})


def _of_message(messages: Sequence[Message], channel: str) -> dict[str, object]:
    message = messages[0]
    return {
        "topic": message.topic,
        "partition": message.partition,
        "channel": channel,
        "attempts": message.attempts,
        "message_id": message.internal_id,
        "trace_id": message.trace_id,
        "bytes": len(message.body),
    }


def _of_batch(messages: Sequence[Message], channel: str) -> dict[str, object]:
    return {
        "topic": ",".join(sorted({message.topic for message in messages})),
        "partition": _partitions(messages),
        "channel": channel,
        "count": len(messages),
        "attempts": max((message.attempts for message in messages), default=0),
        "bytes": sum(len(message.body) for message in messages),
    }
