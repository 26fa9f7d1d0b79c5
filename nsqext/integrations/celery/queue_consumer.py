"""The consumer of one queue, and the messages of a channel that are not acknowledged yet."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kombu.transport import virtual

from nsqext.client.consumer.message import ACCEPTED_DELAY
from nsqext.errors import MessageNotInFlight
from nsqext.integrations import log_lost
from nsqext.integrations.celery.envelope import decode_message, due_time, expires_after, foreign_message

if TYPE_CHECKING:
    from nsqext import sync
    from nsqext.integrations.celery.nsq_clients import NsqClients
    from nsqext.integrations.celery.routing import QueueSpec
    from nsqext.sync.message import Message

logger: logging.Logger = logging.getLogger("nsqext.celery")

DEFAULT_PREFETCH = 200  # messages in flight without a prefetch count

Receive = Callable[["QueueConsumer", dict[str, Any], "Message"], None]
"""Called in a thread of the consumer with a decoded message."""


class QueueConsumer:
    """Receives the messages of a queue, and drops those that no binding selects or that have expired.

    A task whose ``eta`` is later than ``eta_hold`` goes back to the server until then: the worker would keep it in
    flight, for longer than servers allow. A prefetch count of 0 stands for the default.
    """

    def __init__(self, clients: NsqClients, spec: QueueSpec, prefetch: int, receive: Receive) -> None:
        self.queue: str = spec.name
        self.single: bool = False  # whether it was opened for one message, and is closed when that is answered
        self._leaving = False
        self._lock = threading.Lock()  # makes `leave` wait for a handler that hands a message over
        self._hold = clients.eta_hold
        self._spec = spec
        self._receive = receive
        self.consumer: sync.Consumer = clients.consumer(spec.topics, spec.channel, prefetch or DEFAULT_PREFETCH)
        self.consumer.handler(auto_finish=False)(self._handle)

    def leave(self) -> None:
        """Pause, and return messages that still arrive to the server; to be closed then."""
        self.consumer.pause()
        with self._lock:
            self._leaving = True

    def _handle(self, message: Message) -> None:
        decoded = decode_message(message.body, message.headers) or foreign_message(message.body, self.queue)
        route = decoded["properties"]["delivery_info"]
        if not self._spec.selects(route.get("exchange", ""), route["routing_key"]):
            message.finish()
            return
        lifetime = expires_after(decoded)
        if lifetime is not None and time.time() > message.timestamp / 1e9 + lifetime:
            message.finish()
            return
        due = due_time(decoded)
        wait = 0.0 if due is None else due - time.time() - self._hold
        if wait > 0:
            message.requeue(min(wait, ACCEPTED_DELAY))
            return
        if message.attempts > 1:
            route["redelivered"] = True
        with self._lock:
            if not self._leaving:
                self._receive(self, decoded, message)
                return
        message.requeue()


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
