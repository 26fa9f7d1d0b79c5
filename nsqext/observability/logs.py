"""Structured log records of publishes and handled messages."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nsqext.observability.observer import Observer, failure

if TYPE_CHECKING:
    from nsqext.client.middleware import Handling, Publishing


class LogObserver(Observer):
    """Logs a record for every publish and every handled message or batch, without bodies and header values.

    The text of a record is one of ``published``, ``publish failed``, ``handled`` and ``handler failed``; everything
    else is an attribute of the record (``extra``): event, topic, partition, channel, count, bytes, seconds, attempts,
    message_id, trace_id, error.

    Args:
        logger: logger or its name.
        level: level of successful operations; failures are warnings.
        slow: seconds after which a successful operation is logged as a warning too; None for never.
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
        partitions = sorted({receipt.partition for receipt in publishing.receipts})
        self._write("published", started, {**fields, "partition": partitions})

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
        "partition": sorted({message.partition for message in messages}),
        "channel": handling.channel,
        "count": len(messages),
        "attempts": max((message.attempts for message in messages), default=0),
        "bytes": sum(len(message.body) for message in messages),
    }
