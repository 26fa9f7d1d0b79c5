"""The consumer of one queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nsqext.client.consumer.handler_signals import ACCEPTED_DELAY
from nsqext.integrations.celery.envelope import decode_message, due_time, expires_after, foreign_message

if TYPE_CHECKING:
    from nsqext import sync
    from nsqext.integrations.celery.nsq_clients import NsqClients
    from nsqext.integrations.celery.routing import QueueSpec
    from nsqext.sync.message import Message

DEFAULT_PREFETCH = 200
"""Messages in flight without a prefetch count."""

Receive = Callable[["QueueConsumer", dict[str, Any], "Message"], None]
"""Called in a thread of the consumer with a decoded message."""


class QueueConsumer:
    """Receives the messages of a queue, and drops those that no binding selects or that have expired.

    A task whose ``eta`` is later than ``eta_hold`` goes back to the server until then: the worker would keep it in
    flight, for longer than servers allow.

    Args:
        prefetch: messages in flight, at most; 0 for the default.
    """

    def __init__(self, clients: NsqClients, spec: QueueSpec, prefetch: int, receive: Receive) -> None:
        self.queue: str = spec.name
        self.single: bool = False
        """Whether it was opened for one message, and is closed when that is answered."""
        self._leaving = False
        self._lock = threading.Lock()
        """Makes `leave` wait for a handler that hands a message over."""
        self._hold = clients.topics.eta_hold
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
