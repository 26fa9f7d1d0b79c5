"""Select the client of a message: by dispatch tag, then the client that waits longest."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsqext.broker.engine.channel.client import Client


class TagSelector:
    """The clients of a channel that can take a message, in one queue per dispatch tag and one for clients without.

    A message whose tag a connected client requested goes only to clients of that tag; every other message goes to
    clients without a tag (captured: tag_dispatch, tag_fallback, tag_head_of_line).
    """

    __slots__ = ("_members", "_queues", "tagged")

    def __init__(self) -> None:
        self.tagged: bool = False  # a client with a tag is connected
        self._queues: dict[str, deque[Client]] = {"": deque()}
        self._members: dict[str, int] = {}

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
