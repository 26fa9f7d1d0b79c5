"""What producers and consumers report: events to callbacks of the program, messages to the trace log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, Protocol

from attrs import define, frozen

from nsqext.arguments import check_plain_function

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message
    from nsqext.types import Receipt

logger: logging.Logger = logging.getLogger("nsqext.client")

EventKind = Literal["connected", "disconnected", "leader_moved", "backoff", "failed"]


@frozen
class ClientEvent:
    """An event of a producer or a consumer."""

    #: ``connected`` (a consumer to a partition, a producer to a node), ``disconnected``, ``leader_moved`` (lookup
    #: returned another leader), ``backoff`` (of a consumer changed its level), or ``failed`` (it cannot continue)
    kind: EventKind
    topic: str | None  #: None if it concerns all topics
    partition: int | None  #: None on the original NSQ, or if it concerns all partitions
    node: str  #: ``host:port``; empty if it concerns all nodes
    detail: str  #: the reason


class ClientEvents:
    """Calls the callbacks of a client."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[ClientEvent], object]] = []

    def add(self, callback: Callable[[ClientEvent], object]) -> None:
        """Call a function on each event; raises InvalidSetting."""
        check_plain_function("callback", callback)
        self.callbacks.append(callback)

    def emit(self, kind: EventKind, topic: str | None, partition: int | None, node: str, detail: str = "") -> None:
        """Call all callbacks; their errors are logged."""
        event = ClientEvent(kind, topic, partition, node, detail)
        for callback in tuple(self.callbacks):
            try:
                callback(event)
            except Exception:
                logger.exception("a callback for events failed: %r", event)


class Tracer(Protocol):
    """The trace log, see `nsqext.client.trace_log`."""

    def wants(self, topic: str) -> bool:
        """Return whether a topic is traced."""

    def published(self, receipts: Iterable[Receipt], local: str = "") -> None:
        """Log stored messages of traced topics."""

    def consumed(self, messages: Iterable[Message], channel: str, local: str) -> None:
        """Log received messages of a traced topic."""


@define
class Tracing:
    """Where clients find the trace log."""

    log: Tracer | None = None  #: None while no topic is traced


tracing: Tracing = Tracing()
