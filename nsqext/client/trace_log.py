"""The trace log of the smart client note: what was published and consumed, message by message, switched on by topic.

Records go to the logger ``nsqext.trace`` with level INFO; each field is an attribute of the record.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from nsqext.protocol.names import check_topic

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nsqext.client.consumer.message import Message
    from nsqext.types import Receipt

__all__ = ("TraceLog", "trace_log")

logger: logging.Logger = logging.getLogger("nsqext.trace")


class TraceLog:
    """Which topics are traced, in all producers and consumers of this process. May be changed at any time, from any
    thread.

    Attributes:
        active: whether any topic is traced: what hot paths look at.
    """

    def __init__(self) -> None:
        self.active: bool = False
        self._topics: frozenset[str] = frozenset()
        self._all = False

    def on(self, topic: str | None = None) -> None:
        """Trace a topic; all without one.

        Raises:
            InvalidName: no topic can be called so.
        """
        if topic is None:
            self._all = True
        else:
            self._topics |= {check_topic(topic)}
        self.active = True

    def off(self, topic: str | None = None) -> None:
        """Trace a topic no more; nothing without one. A topic cannot be left out while all are traced."""
        if topic is None:
            self._all, self._topics = False, frozenset()
        else:
            self._topics -= {topic}
        self.active = self._all or bool(self._topics)

    def wants(self, topic: str) -> bool:
        """Return whether a topic is traced."""
        return self._all or topic in self._topics

    def published(self, receipts: Iterable[Receipt], local: str = "") -> None:
        """Write down what was stored; call it only where ``active``.

        Args:
            receipts: of the publish.
            local: ``host:port`` of this end of the connection.
        """
        for receipt in receipts:
            if self.wants(receipt.topic):
                fields = {
                    "event": "published",
                    "topic": receipt.topic,
                    "partition": receipt.partition,
                    "internal_id": receipt.message_id,
                    "trace_id": receipt.trace_id,
                    "queue_offset": receipt.offset,
                    "queue_size": receipt.size,
                    "local": local,
                    "node": receipt.node,
                }
                logger.info(
                    "published %s[%d] internal_id=%s trace_id=%d queue_offset=%s node=%s",
                    receipt.topic,
                    receipt.partition,
                    receipt.message_id,
                    receipt.trace_id,
                    receipt.offset,
                    receipt.node,
                    extra=fields,
                )

    def consumed(self, messages: Iterable[Message], channel: str, local: str) -> None:
        """Write down what was delivered; call it only where ``active`` and the topic is wanted.

        Args:
            messages: of one topic.
            channel: the channel that they came through.
            local: ``host:port`` of this end of the connection.
        """
        for message in messages:
            fields = {
                "event": "consumed",
                "topic": message.topic,
                "channel": channel,
                "partition": message.partition,
                "internal_id": message.internal_id,
                "trace_id": message.trace_id,
                "queue_offset": message.offset,
                "queue_size": message.size,
                "timestamp": message.timestamp,
                "attempts": message.attempts,
                "local": local,
                "node": message.node,
            }
            logger.info(
                "consumed %s[%d] internal_id=%d trace_id=%d queue_offset=%d queue_size=%d timestamp=%d local=%s "
                "node=%s",
                message.topic,
                message.partition,
                message.internal_id,
                message.trace_id,
                message.offset,
                message.size,
                message.timestamp,
                local,
                message.node,
                extra=fields,
            )


trace_log: TraceLog = TraceLog()
"""The trace log of this process."""
