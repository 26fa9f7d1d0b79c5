"""The unacknowledged messages of a channel."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kombu.transport import virtual

from nsqext.errors import MessageNotInFlight
from nsqext.integrations import log_lost

if TYPE_CHECKING:
    from nsqext.integrations.celery.queue_consumer import QueueConsumer
    from nsqext.sync.message import Message

logger: logging.Logger = logging.getLogger("nsqext.celery")


class Deliveries(virtual.QoS):  # type: ignore[misc]
    """The unacknowledged messages of a channel; acknowledging one finishes it, from any thread."""

    restore_at_shutdown: bool = False  # servers deliver them again when the connection ends

    def __init__(self, channel: virtual.Channel, prefetch_count: int = 0) -> None:
        super().__init__(channel, prefetch_count)
        self._answers: dict[object, tuple[Message, QueueConsumer]] = {}

    def hold(self, delivery_tag: object, message: Message, source: QueueConsumer) -> None:
        """Remember which NSQ message a delivery tag stands for, and its consumer."""
        self._answers[delivery_tag] = (message, source)

    def holds(self, source: QueueConsumer) -> bool:
        """Return whether a message of a consumer is not acknowledged."""
        return any(held is source for _, held in self._answers.values())

    def ack(self, delivery_tag: object) -> None:
        """Finish the message."""
        self._answer(delivery_tag, lambda message: message.finish())

    def reject(self, delivery_tag: object, requeue: bool = False) -> None:
        """Requeue or finish the message."""
        self._answer(delivery_tag, lambda message: message.requeue() if requeue else message.finish())

    def _answer(self, delivery_tag: object, answer: Callable[[Message], None]) -> None:
        super().ack(delivery_tag)
        held = self._answers.pop(delivery_tag, None)
        if held is None:
            return
        message, source = held
        try:
            answer(message)
        except MessageNotInFlight as error:
            log_lost(logger, error, source.queue)
        if source.single:
            source.consumer.close()

    def restore_unacked(self) -> list[Any]:
        """Requeue all unacknowledged messages."""
        for delivery_tag in tuple(self._answers):
            self.reject(delivery_tag, requeue=True)
        self._flush()
        self._delivered.clear()
        return []

    def restore_unacked_once(self, stderr: object = None) -> None:
        """Nothing: closing the consumers requeues what is not acknowledged."""
        self._on_collect.cancel()
