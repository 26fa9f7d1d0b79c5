"""A consumer as its channel sees it: its window of messages, its errors, its counters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from nsqext.broker.engine.filters.header_filter import compile_filter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nsqext.protocol.messages import RawMessage
    from nsqext.protocol.record import Record

__all__ = ("NO_LIMIT", "Client", "Subscriber")

NO_LIMIT = 50_000
"""Messages that a client may have when nobody limited it over HTTP."""

_SLOW = 5


class Subscriber(Protocol):
    """What a session shows to the engine.

    Attributes:
        id: number of the client, unique in the node.
        name: ``host:port``.
        ready: how many messages it takes at a time; `Channel.set_ready` sets it.
        tag: dispatch tag that it asked for; empty for none.
        extend: it reads extend headers.
        detail: it is told queue offsets and sizes.
        sample_rate: percentage of the messages that it wants; 0 for all.
        ext_filter: the member ``ext_filter`` of its IDENTIFY; empty for none.
        msg_timeout: seconds that a message may be with it.
        touch_timeout: seconds that a message may be with it from when it is touched.
    """

    id: int
    name: str
    ready: int
    tag: str
    extend: bool
    detail: bool
    sample_rate: int
    ext_filter: Mapping[str, Any]
    msg_timeout: float
    touch_timeout: float

    def deliver(self, message: RawMessage) -> None:
        """Take a message; every field of it is filled."""

    def closed(self) -> None:
        """Hear that the channel is gone; the session closes its connection."""


class Client:
    """One subscriber of one channel.

    Attributes:
        subscriber: the session.
        tag: its dispatch tag; empty for none, and on topics without extend support.
        matches: its filter; None without one.
        in_flight: messages that it has.
        window: how many it may have at present.
        limit: how many it may have at most, as set over HTTP.
        queued: it waits in line for a message.
        stalled: it gets nothing any more: it has left, or the topic was extended under it (captured: upgrade_ext).
        messages: messages that it was given.
        finished: messages that it finished.
        requeued: messages that went back from it.
        timed_out: messages that it did not answer in time.
    """

    __slots__ = (
        "errors",
        "finished",
        "in_flight",
        "limit",
        "matches",
        "messages",
        "queued",
        "requeued",
        "stalled",
        "subscriber",
        "tag",
        "timed_out",
        "window",
    )

    def __init__(self, subscriber: Subscriber, tag: str) -> None:
        self.subscriber: Subscriber = subscriber
        self.tag: str = tag
        self.matches: Callable[[Record], bool] | None = compile_filter(subscriber.ext_filter)
        self.in_flight: int = 0
        self.window: int = 0
        self.limit: int = NO_LIMIT
        self.errors: int = 0
        self.queued: bool = False
        self.stalled: bool = False
        self.messages: int = 0
        self.finished: int = 0
        self.requeued: int = 0
        self.timed_out: int = 0
        self.refresh()

    def refresh(self) -> None:
        """Work out the window from RDY, the limit and the errors of late: five or more of them narrow it down to 1."""
        ready = self.subscriber.ready
        if self.errors >= _SLOW and ready > 1:
            ready = max(min(ready, ready - self.errors + _SLOW), 1)
        self.window = 0 if self.stalled else min(ready, self.limit)

    def leave(self) -> None:
        """Take nothing any more."""
        self.stalled = True
        self.window = 0

    def fail(self) -> None:
        """Note a failed FIN or REQ, or a timeout."""
        self.errors = min(self.errors + 1, self.subscriber.ready + 4 * _SLOW)
        self.refresh()

    def recover(self) -> None:
        """Note a success: errors go down by two, faster when few are left."""
        left = self.errors - 2
        ready = self.subscriber.ready
        if 0 < left < ready:
            left -= (ready - left) // 4
        self.errors = max(left, 0)
        self.refresh()
