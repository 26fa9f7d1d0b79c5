"""Which client gets a message: by tag, and the one that waits longest."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsqext.broker.engine.consumer_state import Client

__all__ = ("TagSelector",)


class TagSelector:
    """The clients of a channel in one line for each dispatch tag, and one for those without.

    A message whose tag a connected client asked for goes to clients of that tag and to nobody else; every other message
    goes to clients without a tag (captured: tag_dispatch, tag_fallback, tag_head_of_line).

    Attributes:
        tagged: whether a client with a tag is there.
    """

    __slots__ = ("_lines", "_members", "tagged")

    def __init__(self) -> None:
        self.tagged: bool = False
        self._lines: dict[str, deque[Client]] = {"": deque()}
        self._members: dict[str, int] = {}

    def add(self, client: Client) -> None:
        """Take a client in."""
        if client.tag:
            self._members[client.tag] = self._members.get(client.tag, 0) + 1
            self._lines.setdefault(client.tag, deque())
            self.tagged = True
        self.offer(client)

    def remove(self, client: Client) -> None:
        """Let a client go."""
        if client.queued:
            self._lines[client.tag].remove(client)
            client.queued = False
        if client.tag:
            self._members[client.tag] -= 1
            if not self._members[client.tag]:
                del self._members[client.tag], self._lines[client.tag]
            self.tagged = bool(self._members)

    def offer(self, client: Client) -> None:
        """Put a client at the end of its line when it can take a message and does not wait already."""
        if not client.queued and client.in_flight < client.window:
            client.queued = True
            self._lines[client.tag].append(client)

    def renew(self, client: Client) -> None:
        """Put a client at the end of its line, because it got room or another RDY: it waits anew (captured: turns)."""
        if not client.queued:
            self.offer(client)
            return
        line = self._lines[client.tag]
        if line[-1] is not client:
            line.remove(client)
            line.append(client)

    def pick(self, tag: str) -> Client | None:
        """Take the client out of line that is to get a message with this tag; None when nobody can take it now."""
        line = self._lines.get(tag)
        if line is None:
            line = self._lines[""]
        while line:
            client = line.popleft()
            client.queued = False
            if client.in_flight < client.window:
                return client
        return None
