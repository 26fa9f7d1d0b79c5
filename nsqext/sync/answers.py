"""Answers that threads give, sent by the event loop."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from nsqext.errors import InvalidState
from nsqext.sync.loop import call, shared_loop

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from nsqext.client.consumer.message import Message


class AnswerQueue:
    """Finished messages of any threads; many of them wake the event loop once."""

    __slots__ = ("_due", "_finished", "_loop", "portal")

    def __init__(self, portal: BlockingPortal, loop: Any) -> None:
        self.portal: BlockingPortal = portal
        self._loop = loop
        self._finished: deque[Message] = deque()
        self._due = False

    def finish(self, message: Message) -> None:
        """Finish a message, as `nsqext.Message.finish` does, without waiting for the event loop."""
        if message.answered or message.expired or self.portal in shared_loop.orphaned:
            call(self.portal, "consumer", message.finish)  # raises, or ignores it
        else:
            self.finish_now(message)

    def finish_now(self, message: Message) -> None:
        """Finish a message after its handler returned, whether or not it is in flight; raises InvalidState."""
        message.answered = True
        self._finished.append(message)
        if not self._due:
            self._due = True
            try:
                self._loop.call_soon_threadsafe(self._send)
            except RuntimeError as error:
                raise InvalidState(f"the consumer cannot be used: {error}", hint="it was closed") from error

    def _send(self) -> None:
        self._due = False  # before: a thread that adds one from now on calls again
        finished = self._finished
        while finished:
            finished.popleft().finish_now()
