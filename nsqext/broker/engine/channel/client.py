"""A consumer connection as its channel sees it: window, errors and counters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any

from attrs import define, field

from nsqext.broker.engine.header_filter import compile_filter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from nsqext.protocol.messages import RawMessage
    from nsqext.protocol.record import Record

NO_LIMIT = 50_000
"""Messages that may be in flight at a client without a limit set over HTTP."""

_SLOW_AFTER = 5


@define(eq=False)
class Client(ABC):
    """A consumer connection as its channel sees it; a session subscribes with one of its own."""

    id: int  # number of the client, unique in the node
    name: str  # ``host:port``
    tag: str = ""  # desired dispatch tag; empty for none, and on topics without extend support
    extend: bool = False  # the client reads extend headers
    sample_rate: int = 0  # percentage of messages to deliver; 0 for all
    ext_filter: Mapping[str, Any] = field(factory=dict)  # the member ``ext_filter`` of IDENTIFY; empty for none
    msg_timeout: float = 60.0  # seconds before a delivered message times out
    touch_timeout: float = 60.0  # seconds that TOUCH adds
    ready: int = field(default=0, init=False)  # RDY count; set by `Channel.set_ready`
    matches: Callable[[Record], bool] | None = field(init=False)  # header filter; None without one
    filtered: bool = field(init=False)  # some messages are not delivered to the client
    in_flight: int = field(default=0, init=False)
    window: int = field(default=0, init=False)  # most messages in flight at present
    limit: int = field(default=NO_LIMIT, init=False)  # most messages in flight, as set over HTTP
    errors: int = field(default=0, init=False)
    queued: bool = field(default=False, init=False)  # the client waits in a selector's queue
    # nothing more is delivered: the client disconnected, or its topic was upgraded to extend support without the
    # client having it (captured: upgrade_ext)
    stalled: bool = field(default=False, init=False)
    messages: int = field(default=0, init=False)  # messages delivered
    finished: int = field(default=0, init=False)
    requeued: int = field(default=0, init=False)
    timed_out: int = field(default=0, init=False)  # messages that timed out

    def __attrs_post_init__(self) -> None:
        self.matches = compile_filter(self.ext_filter)
        self.filtered = self.matches is not None or self.sample_rate > 0

    @abstractmethod
    def deliver(self, message: RawMessage) -> None:
        """Send a message; every field of it is set."""

    @abstractmethod
    def closed(self) -> None:
        """Close the connection, because the channel was closed."""

    def refresh(self) -> None:
        """Compute the window from RDY, the limit and recent errors; five or more errors reduce it, down to 1."""
        ready = self.ready
        if ready:
            ready = max(min(ready, ready - self.errors + _SLOW_AFTER), 1)
        self.window = 0 if self.stalled else min(ready, self.limit)

    def stall(self) -> None:
        """Deliver nothing more, heartbeats included; see `stalled`."""
        self.stalled = True
        self.window = 0

    def record_failure(self) -> None:
        """Count a failed FIN or REQ, or a timeout."""
        self.errors = min(self.errors + 1, self.ready + 4 * _SLOW_AFTER)
        self.refresh()

    def record_success(self) -> None:
        """Reduce the error count by two, faster when few errors are left."""
        left = self.errors - 2
        ready = self.ready
        if 0 < left < ready:
            left -= (ready - left) // 4
        self.errors = max(left, 0)
        self.refresh()


@define(eq=False)
class TagSelector:
    """The clients of a channel that can take a message, in one queue per dispatch tag and one for clients without.

    A message whose tag a connected client requested goes only to clients of that tag; every other message goes to
    clients without a tag (captured: tag_dispatch, tag_fallback, tag_head_of_line).
    """

    tagged: bool = field(default=False, init=False)  # a client with a tag is connected
    _queues: dict[str, deque[Client]] = field(factory=lambda: {"": deque()}, init=False)
    _members: dict[str, int] = field(factory=dict, init=False)

    def add(self, client: Client) -> None:
        if client.tag:
            self._members[client.tag] = self._members.get(client.tag, 0) + 1
            self._queues.setdefault(client.tag, deque())
            self.tagged = True
        self.offer(client)

    def remove(self, client: Client) -> None:
        if client.queued:
            self._queues[client.tag].remove(client)
            client.queued = False
        if client.tag:
            self._members[client.tag] -= 1
            if not self._members[client.tag]:
                del self._members[client.tag], self._queues[client.tag]
            self.tagged = bool(self._members)

    def has(self, tag: str) -> bool:
        return tag in self._members

    def offer(self, client: Client) -> None:
        """Queue a client if it can take a message and is not queued."""
        if not client.queued and client.in_flight < client.window:
            client.queued = True
            self._queues[client.tag].append(client)

    def renew(self, client: Client) -> None:
        """Move a client to the end of its queue, because its window or RDY changed (captured: turns)."""
        if not client.queued:
            self.offer(client)
            return
        queue = self._queues[client.tag]
        if queue[-1] is not client:
            queue.remove(client)
            queue.append(client)

    def pick(self, tag: str) -> Client | None:
        """Remove and return the client for a message with this tag; None while no client can take it."""
        queue = self._queues.get(tag)
        if queue is None:
            queue = self._queues[""]
        while queue:
            client = queue.popleft()
            client.queued = False
            if client.in_flight < client.window:
                return client
        return None
