"""The trace log of the smart client note: a record per published and consumed message of chosen topics.

Records go to the logger ``nsqext.trace`` with level INFO; each field is an attribute of the record.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from nsqext.client.events import tracing
from nsqext.protocol.names import check_topic

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nsqext.client.consumer.message import Message
    from nsqext.types import Receipt

logger: logging.Logger = logging.getLogger("nsqext.trace")


class TraceLog:
    """Select the topics to trace, for all clients of this process; at any time, from any thread."""

    def __init__(self) -> None:
        self._topics: frozenset[str] = frozenset()
        self._all = False

    def on(self, topic: str | None = None) -> None:
        """Trace a topic; None for all topics.

        Raises:
            InvalidName: invalid name.
        """
        if topic is None:
            self._all = True
        else:
            self._topics |= {check_topic(topic)}
        tracing.log = self

    def off(self, topic: str | None = None) -> None:
        """Stop tracing a topic; None for all topics. While all are traced, no topic can be excluded."""
        if topic is None:
            self._all, self._topics = False, frozenset()
        else:
            self._topics -= {topic}
        if not (self._all or self._topics):
            tracing.log = None

    def wants(self, topic: str) -> bool:
        """Return whether a topic is traced."""
        return self._all or topic in self._topics

    def published(self, receipts: Iterable[Receipt], local: str = "") -> None:
        """Log stored messages, with ``host:port`` of this end of the connection."""
        for receipt in receipts:
            if self.wants(receipt.topic):
                fields = {
                    "internal_id": receipt.message_id,
                    "trace_id": receipt.trace_id,
                    "queue_offset": receipt.offset,
                    "queue_size": receipt.size,
                }
                _log("published", receipt, local, fields, "internal_id", "trace_id", "queue_offset", "node")

    def consumed(self, messages: Iterable[Message], channel: str, local: str) -> None:
        """Log received messages of a traced topic."""
        for message in messages:
            fields = {
                "channel": channel,
                "internal_id": message.internal_id,
                "trace_id": message.trace_id,
                "queue_offset": message.offset,
                "queue_size": message.size,
                "timestamp": message.timestamp,
                "attempts": message.attempts,
            }
            shown = "internal_id", "trace_id", "queue_offset", "queue_size", "timestamp", "local", "node"
            _log("consumed", message, local, fields, *shown)


def _log(event: str, of: Receipt | Message, local: str, fields: dict[str, Any], *shown: str) -> None:
    where = {"topic": of.topic, "partition": of.partition, "local": local, "node": of.node}
    text = " ".join(f"{name}=%({name})s" for name in shown)
    fields = {"event": event, **where, **fields}
    place = "%(topic)s" if of.partition is None else "%(topic)s[%(partition)d]"
    logger.info(f"{event} {place} {text}", fields, extra=fields)  # noqa: G004 - a format of names


trace_log: TraceLog = TraceLog()
"""The trace log of this process."""
