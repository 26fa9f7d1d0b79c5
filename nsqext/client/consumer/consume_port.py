"""The consumer's port for threads that handle messages, as the blocking consumer does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import evolve

from nsqext.client.consumer.handlers.workers import MessageHandler

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from nsqext.client.consumer.consumer import Consumer
    from nsqext.client.consumer.handlers.workers import MessageQueue, Slot
    from nsqext.client.consumer.message import Message


class ConsumePort:
    """Take messages of an open consumer in a thread, and return to its event loop; thread-safe."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def take_ready(self) -> Message | None:
        """Return the next message if it can be handled now; None if the event loop has to wait for it."""
        return self._consumer._receiver.queue.take_ready()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call a function in the event loop of asyncio; raises RuntimeError if the loop has ended."""
        loop: Any = self._consumer._tasks.loop
        loop.call_soon_threadsafe(function)

    def when_cancelled(self, function: Callable[[], None]) -> None:
        """Call a function when the consumer has cancelled its handlers."""
        self._consumer._receiver.when_cancelled = function

    def handle_bursts(
        self, function: Callable[..., object], burst: Callable[[Slot, MessageQueue], Awaitable[object]]
    ) -> None:
        """Call ``burst`` in place of a handler, see `MessageHandler.burst`.

        Has no effect where middleware surrounds the handler, or it does not receive the message alone.
        """
        handler = self._consumer._handler
        if isinstance(handler, MessageHandler) and handler.function is function:
            self._consumer._handler = evolve(handler, burst=burst)
