"""Logs, spans and metrics of publishes and handled messages.

Observers are middleware that keeps outcomes: pass `LogObserver` (structured log records),
`nsqext.observability.otel.OpenTelemetry` (extra ``otel``) or `nsqext.observability.prometheus.Prometheus` (extra
``prometheus``) to `nsqext.App` or to the clients of `nsqext.middleware`.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from attrs import frozen

from nsqext.client.consumer.message import HandlerSignal
from nsqext.client.middleware import CallNext, Handling, Middleware, SendNext

if TYPE_CHECKING:
    from types import TracebackType

    from nsqext.client.consumer.message import Message
    from nsqext.client.producer.request import Publishing
    from nsqext.types import Receipt

__all__ = ("LogObserver", "Observer", "TopicRelay", "TopicRelayStatistics")

logger: logging.Logger = logging.getLogger("nsqext.observability")


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
        return nullcontext()

    def handling(self, handling: Handling) -> AbstractContextManager[object]:
        """Return the context manager for a handled message or batch; see also `failure`."""
        return nullcontext()

    async def publish(self, publishing: Publishing, send_next: SendNext) -> Sequence[Receipt]:
        """Observe a publish."""
        with _Harmless(lambda: self.publishing(publishing)):
            return await send_next(publishing)

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Observe a handler."""
        with _Harmless(lambda: self.handling(handling)):
            return await call_next(handling)


class _Harmless:
    """Makes a context manager neither raise nor suppress errors."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make
        self._manager: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        try:
            manager = self._make()
            manager.__enter__()
        except Exception:
            logger.exception("an observer failed before the observed operation")
        else:
            self._manager = manager

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._manager is None:
            return
        try:
            self._manager.__exit__(kind, error, trace)
        except Exception as own:
            if own is not error:
                logger.exception("an observer failed after the observed operation")


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
    """

    def __init__(
        self, logger: str | logging.Logger = "nsqext.events", *, level: int = logging.DEBUG, slow: float | None = None
    ) -> None:
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self._level = level
        self._slow = slow

    @contextmanager
    def publishing(self, publishing: Publishing) -> Iterator[None]:
        """Log the outcome of a publish."""
        size = sum(len(message.body) for message in publishing.messages)
        fields: dict[str, object] = {"topic": publishing.topic, "count": len(publishing.messages), "bytes": size}
        started = time.monotonic()
        try:
            yield
        except BaseException as error:
            self._write("publish failed", started, fields, error)
            raise
        self._write("published", started, {**fields, "partition": _partitions(publishing.receipts)})

    @contextmanager
    def handling(self, handling: Handling) -> Iterator[None]:
        """Log the outcome of a handler."""
        fields = _of_batch(handling) if handling.batch else _of_message(handling)
        started = time.monotonic()
        try:
            yield
        except BaseException as error:
            self._write("handler failed" if failure(error) else "handled", started, fields, error)
            raise
        self._write("handled", started, fields)

    def _write(
        self, event: str, started: float, fields: Mapping[str, object], error: BaseException | None = None
    ) -> None:
        seconds = time.monotonic() - started
        late = self._slow is not None and seconds >= self._slow
        level = logging.WARNING if late or failure(error) else self._level
        if self._logger.isEnabledFor(level):
            outcome = None if error is None else type(error).__qualname__
            self._logger.log(level, event, extra={**fields, "event": event, "seconds": seconds, "error": outcome})


def _partitions(stored: Iterable[Receipt | Message]) -> list[int]:
    return sorted({one.partition for one in stored if one.partition is not None})


def _of_message(handling: Handling) -> dict[str, object]:
    message = handling.message
    return {
        "topic": message.topic,
        "partition": message.partition,
        "channel": handling.channel,
        "attempts": message.attempts,
        "message_id": message.internal_id,
        "trace_id": message.trace_id,
        "bytes": len(message.body),
    }


def _of_batch(handling: Handling) -> dict[str, object]:
    messages = handling.messages
    return {
        "topic": ",".join(sorted({message.topic for message in messages})),
        "partition": _partitions(messages),
        "channel": handling.channel,
        "count": len(messages),
        "attempts": max((message.attempts for message in messages), default=0),
        "bytes": sum(len(message.body) for message in messages),
    }
