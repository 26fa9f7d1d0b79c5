"""Messages that have arrived and wait for somebody to take them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message

__all__ = ("MessageQueue",)


class MessageQueue:
    """A row of messages; any number of tasks may wait for them.

    Attributes:
        messages: oldest first.
        stopped: nothing further is given out.
    """

    __slots__ = ("_wake", "messages", "stopped")

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.stopped: bool = False
        self._wake = anyio.Event()

    def put(self, messages: list[Message]) -> None:
        """Append messages; after the stop they are left to their next delivery."""
        if not self.stopped:
            self.messages.extend(messages)
            self._wake.set()

    def stop(self) -> None:
        """Give out nothing further, and wake all who wait."""
        self.stopped = True
        self.messages.clear()
        self._wake.set()

    def wake(self) -> None:
        """Wake all who wait, because something else happened."""
        self._wake.set()

    async def wait(self) -> None:
        """Wait until something has happened since the last time that somebody began to wait."""
        if self._wake.is_set():
            self._wake = anyio.Event()
        await self._wake.wait()
