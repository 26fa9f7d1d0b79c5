"""Ready middleware: timeout of handlers, rate limit, deduplication, decompression; for messages and batches."""

from __future__ import annotations

import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import anyio

from nsqext.client.consumer.handler_signals import Reject
from nsqext.client.consumer.handlers.batches import MessageBatch
from nsqext.errors import InvalidSetting
from nsqext.middleware.base import CallNext, Handling, Middleware

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message

__all__ = ("Decompress", "Deduplicate", "HandlerTimeout", "RateLimit")

_clock = time.monotonic
_Entry = tuple[str, object]


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise InvalidSetting(f"{name}={value!r} is not positive")


class HandlerTimeout(Middleware):
    """Cancels a handler that runs too long: `TimeoutError`, so that its message is requeued as for any other error.

    Args:
        seconds: how long a handler may run, for one message or for one batch.
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
    """Hands messages to handlers at a limited rate; all clients with the same object share it.

    A batch counts as its messages: the next one begins when its own rate allows. Messages wait in the consumer, where
    they are touched before they time out. Lower ``max_in_flight`` with a low rate, so that other consumers receive what
    would wait.

    Args:
        per_second: messages that handlers may begin with in a second.
        burst: messages that handlers may begin with at once after a pause.
    """

    def __init__(self, per_second: float, *, burst: int = 1) -> None:
        _check_positive("per_second", per_second)
        _check_positive("burst", burst)
        self._interval = 1 / per_second
        self._allowance = (burst - 1) * self._interval
        self._next = 0.0

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Wait for the turn of the messages, and call the handler."""
        now = _clock()
        turn = max(self._next, now - self._allowance)
        self._next = turn + self._interval * len(handling.messages)
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
        self._handled: OrderedDict[_Entry, float] = OrderedDict()

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Call the handler for messages that were not handled before."""
        oldest = _clock() - self._seconds
        fresh: list[Message] = []
        entries: list[tuple[Message, _Entry]] = []
        for message in handling.messages:
            key = self._key(message)
            entry = (handling.channel, key)
            if key is None:
                fresh.append(message)
            elif self._handled.get(entry, float("-inf")) < oldest:
                fresh.append(message)
                entries.append((message, entry))
            else:
                message.finish_now()  # it must not be requeued with the others of its batch
        if not fresh:
            return None
        handling.messages = fresh
        result = await call_next(handling)
        for message, entry in entries:
            if not message.answered:  # what the handler answered by hand may be requeued
                self._remember(entry)
        return result

    def _remember(self, entry: _Entry) -> None:
        self._handled.pop(entry, None)
        self._handled[entry] = _clock()
        while len(self._handled) > self._window:
            self._handled.popitem(last=False)


class Decompress(Middleware):
    """Decompresses bodies whose publisher says so in the header ``content-encoding``: ``gzip`` or ``deflate``.

    Bodies that this package compressed are decompressed by the consumer itself. A body that cannot be decompressed is
    rejected (`nsqext.Reject`); of a batch, after the handler has handled the others.

    Args:
        max_size: largest decompressed body, in bytes.
    """

    def __init__(self, *, max_size: int = 64 << 20) -> None:
        _check_positive("max_size", max_size)
        self._max_size = max_size

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Replace compressed bodies, and call the handler."""
        if not handling.batch:
            self._restore(handling.message)
            return await call_next(handling)
        good: list[Message] = []
        rejections: list[Reject] = []
        for message in handling.messages:
            try:
                self._restore(message)
            except Reject as error:
                rejections.append(error)
            else:
                good.append(message)
        handling.messages = good
        result = await call_next(handling)
        if rejections:
            MessageBatch(good).finish_now()
            raise rejections[0]
        return result

    def _restore(self, message: Message) -> None:
        encoding = message.header_value("content-encoding") if message.header else None
        if encoding in ("gzip", "deflate"):
            message.replace_body(self._decompressed(message.body, encoding), "content-encoding")

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
