"""A queue of received messages."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message

__all__ = ("MessageQueue",)

_clock = time.monotonic


class MessageQueue:
    """A queue that any number of tasks take messages from.

    Attributes:
        messages: oldest first.
        stopped: no further message is handed out.
    """

    __slots__ = ("_wake", "messages", "stopped")

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.stopped: bool = False
        self._wake = anyio.Event()

    def put(self, messages: list[Message]) -> None:
        """Append messages; discards them after the stop, the server redelivers them."""
        if not self.stopped:
            self.messages.extend(messages)
            self._wake.set()

    def take_ready(self) -> Message | None:
        """Remove and return the next message if it can be handed out at once; for any thread.

        None if it has expired, must be unpacked, or was delivered before: the event loop decides about it.
        """
        messages = self.messages
        try:
            first = messages[0]
            if self.stopped or first.budget is not None or first.attempts > 1 or not first.may_begin(_clock()):
                return None
            message = messages.popleft()
        except IndexError:
            return None
        if message is not first:  # another thread was quicker
            messages.appendleft(message)
            return None
        return message

    def take_all(self, count: int | None = None) -> list[Message]:
        """Remove and return up to a number of messages, or all, while threads may take some of them."""
        messages = self.messages
        taken: list[Message] = []
        most = len(messages) if count is None else min(count, len(messages))
        with suppress(IndexError):  # the list keeps those before
            taken.extend(messages.popleft() for _ in range(most))
        return taken

    def take(self, count: int) -> list[Message]:
        """Remove up to a number of messages and return those that are in flight, with unpacked bodies.

        Those that do not fit into the budget for unpacked bytes stay.
        """
        messages, now = self.messages, _clock()
        taken = [message for message in self.take_all(count) if message.may_begin(now)]
        for number, message in enumerate(taken):
            if message.budget is not None and not message.try_unpack():
                messages.extendleft(reversed(taken[number:]))
                return taken[:number]
        return taken

    def stop(self) -> None:
        """Hand out no further message, and wake all waiting tasks."""
        self.stopped = True
        self.messages.clear()
        self._wake.set()

    def wake(self) -> None:
        """Wake all waiting tasks."""
        self._wake.set()

    async def wait(self) -> None:
        """Wait for the next call of `put`, `wake` or `stop`; return immediately if there was one since."""
        if self._wake.is_set():
            self._wake = anyio.Event()
        await self._wake.wait()
