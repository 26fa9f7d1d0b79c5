"""What a consumer reports about itself: its connections, its counters, and events."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

from attrs import frozen

__all__ = ("ConsumerConnection", "ConsumerEvent", "ConsumerEvents", "ConsumerStatistics", "EventKind")

logger: logging.Logger = logging.getLogger("nsqext.consumer")

EventKind = Literal["connected", "disconnected", "leader_moved", "backoff"]


@frozen
class ConsumerConnection:
    """An open connection of a consumer.

    Attributes:
        partition: the partition; -1 at the original NSQ.
        node: ``host:port`` of the node.
        ready: the RDY count: messages that it may have in flight.
        in_flight: messages that were received and not answered.
        backoff: level of its backoff; 0 while handlers succeed.
    """

    partition: int
    node: str
    ready: int
    in_flight: int
    backoff: int


@frozen
class ConsumerStatistics:
    """The state and the counters of a consumer since it was opened.

    Attributes:
        connections: the open connections.
        reconnects: subscriptions that were made again after a connection had ended.
        received: messages received, redeliveries included.
        finished: messages finished (FIN).
        requeued: messages requeued (REQ).
        lost: messages that were in flight when their connection ended; the server delivers them again.
        in_flight: messages received and not answered.
        bytes_received: bytes of the messages received, headers included.
        lookup_age: seconds since the lookup service answered last; None if it has not, or is not used.
        lookup_failures: rounds in a row in which no lookup node gave a usable answer.
    """

    connections: tuple[ConsumerConnection, ...]
    reconnects: int
    received: int
    finished: int
    requeued: int
    lost: int
    in_flight: int
    bytes_received: int
    lookup_age: float | None
    lookup_failures: int


@frozen
class ConsumerEvent:
    """Something that happened to a consumer.

    Attributes:
        kind: ``connected``: a partition was subscribed; ``disconnected``: a subscription ended; ``leader_moved``: the
            lookup service names another leader; ``backoff``: the level of a backoff changed.
        partition: the partition; -1 at the original NSQ, None where it concerns all.
        node: ``host:port`` of the node; empty where it concerns all.
        detail: the reason, for people.
    """

    kind: EventKind
    partition: int | None
    node: str
    detail: str


class ConsumerEvents:
    """Calls the callbacks of a consumer."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[ConsumerEvent], object]] = []

    def emit(self, kind: EventKind, partition: int | None, node: str, detail: str = "") -> None:
        """Call all callbacks; their errors are logged."""
        if not self.callbacks:
            return
        event = ConsumerEvent(kind, partition, node, detail)
        for callback in tuple(self.callbacks):
            try:
                callback(event)
            except Exception:
                logger.exception("a callback for consumer events failed: %r", event)
