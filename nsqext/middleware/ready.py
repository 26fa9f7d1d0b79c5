"""Ready middleware: timeout of handlers, rate limit, deduplication, decompression."""

from __future__ import annotations

import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio

from nsqext.client.consumer.handler_signals import Reject
from nsqext.errors import InvalidSetting
from nsqext.middleware.base import CallNext, Handling, Middleware

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message

__all__ = ("Decompress", "Deduplicate", "HandlerTimeout", "RateLimit")

_clock = time.monotonic


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise InvalidSetting(f"{name}={value!r} is not positive")


class HandlerTimeout(Middleware):
    """Cancels a handler that runs too long: `TimeoutError`, so that its message is requeued as for any other error.

    Args:
        seconds: how long a handler may run.
    """

    def __init__(self, seconds: float) -> None:
        _check_positive("seconds", seconds)
        self._seconds = seconds

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Call the handler with a deadline."""
        with anyio.move_on_after(self._seconds):
            return await call_next(handling)
        raise TimeoutError(f"the handler ran longer than {self._seconds:g} s")


class RateLimit(Middleware):
    """Lets handlers begin at a limited rate; all clients with the same object share it.

    Messages wait in the consumer, where they are touched before they time out. Lower ``max_in_flight`` with a low rate,
    so that other consumers receive what would wait.

    Args:
        per_second: handlers that may begin in a second.
        burst: handlers that may begin at once after a pause.
    """

    def __init__(self, per_second: float, *, burst: int = 1) -> None:
        _check_positive("per_second", per_second)
        _check_positive("burst", burst)
        self._interval = 1 / per_second
        self._allowance = (burst - 1) * self._interval
        self._next = 0.0

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Wait for the turn of the message, and call the handler."""
        now = _clock()
        turn = max(self._next, now - self._allowance)
        self._next = turn + self._interval
        if turn > now:
            await anyio.sleep(turn - now)
        return await call_next(handling)


def _place_and_id(message: Message) -> object:
    return message.topic, message.partition, message.id


class Deduplicate(Middleware):
    """Finishes a message that this process has handled already, without calling the handler.

    It remembers the ids of messages whose handlers returned. A message that is redelivered to another process, or after
    a restart, is handled again: handlers have to be idempotent all the same.

    Args:
        window: how many ids are remembered.
        seconds: how long an id is remembered.
        key: what identifies a message; by default its topic, partition and id. A message whose key is None is handled.
    """

    def __init__(
        self, window: int = 100_000, *, seconds: float = 3600.0, key: Callable[[Message], object] = _place_and_id
    ) -> None:
        _check_positive("window", window)
        _check_positive("seconds", seconds)
        self._window = window
        self._seconds = seconds
        self._key = key
        self._handled: OrderedDict[tuple[str, object], float] = OrderedDict()

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Call the handler for a message that was not handled before."""
        key = self._key(handling.message)
        if key is None:
            return await call_next(handling)
        entry = (handling.channel, key)
        now = _clock()
        if now - self._handled.get(entry, float("-inf")) <= self._seconds:
            return None
        result = await call_next(handling)
        if not handling.message.answered:  # what the handler answered by hand may be requeued
            self._handled.pop(entry, None)
            self._handled[entry] = _clock()
            while len(self._handled) > self._window:
                self._handled.popitem(last=False)
        return result


class Decompress(Middleware):
    """Decompresses bodies whose publisher says so in the header ``content-encoding``: ``gzip`` or ``deflate``.

    Bodies that this package compressed are decompressed by the consumer itself. A body that cannot be decompressed is
    rejected (`nsqext.Reject`).

    Args:
        max_size: largest decompressed body, in bytes.
    """

    def __init__(self, *, max_size: int = 64 << 20) -> None:
        _check_positive("max_size", max_size)
        self._max_size = max_size

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Replace a compressed body, and call the handler."""
        message = handling.message
        encoding = message.header_value("content-encoding") if message.header else None
        if encoding in ("gzip", "deflate"):
            message.replace_body(self._decompressed(message.body, encoding), "content-encoding")
        return await call_next(handling)

    def _decompressed(self, body: bytes, encoding: str) -> bytes:
        engine = zlib.decompressobj(16 + zlib.MAX_WBITS if encoding == "gzip" else zlib.MAX_WBITS)
        try:
            found = engine.decompress(body, self._max_size)
        except zlib.error as error:
            raise Reject(f"the body is not valid {encoding}: {error}") from error
        if engine.unconsumed_tail:
            raise Reject(f"the {encoding} body is larger than {self._max_size} bytes")
        if not engine.eof:
            raise Reject(f"the {encoding} body is cut off")
        return found
