"""Middleware: code around every publish and every handled message.

A `Middleware` is an argument of `nsqext.Producer`, `nsqext.Consumer`, `nsqext.App` and the blocking clients; the first
is the outermost. Built-in: `HandlerTimeout`, `RateLimit`, `Deduplicate`, `Decompress`; logs, spans and metrics are in
`nsqext.observability`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

import anyio

from nsqext.arguments import check_number, check_plain_function, check_time, is_number
from nsqext.client.consumer.handlers.batches import MessageBatch
from nsqext.client.consumer.handlers.forgotten_await import check_awaited, requeue_not_awaited
from nsqext.client.consumer.handlers.partition_order import held_back
from nsqext.client.consumer.message import Finish, Reject
from nsqext.client.middleware import CallNext, Handling, Middleware, SendNext
from nsqext.client.producer.publishing import Publishing
from nsqext.errors import InvalidSetting, ProtocolError
from nsqext.middleware.time_limits import LimitsOfThreads
from nsqext.protocol.client.body_compression import inflate

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message


__all__ = (
    "CallNext",
    "Decompress",
    "Deduplicate",
    "HandlerTimeout",
    "Handling",
    "Middleware",
    "Publishing",
    "RateLimit",
    "SendNext",
)


_clock = time.monotonic
_Entry = tuple[str, str, object]  # topic, channel and identity


class HandlerTimeout(Middleware):
    """Cancels a handler that runs too long and raises `TimeoutError`, so that its message is requeued.

    A blocking handler in a thread cannot be cancelled: it runs to its end, which answers its message. Only later steps,
    such as the publish of its result, are cancelled.

    Args:
        seconds: time limit of a handler for one message or batch.
    """

    def __init__(self, seconds: float) -> None:
        check_time("seconds", seconds, zero=False)
        self._seconds = seconds
        self._limits = LimitsOfThreads(seconds)

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Call the handler with a deadline."""
        limits = self._limits.current()
        if limits is None:
            with anyio.move_on_after(self._seconds):
                return await call_next(handling)
        else:
            scope = limits.begin()
            try:
                with scope:  # entered before the handler, whose own scopes must be inside
                    return await call_next(handling)
            finally:
                limits.end(scope)
        raise TimeoutError(f"the handler ran longer than {self._seconds:g} s")


class RateLimit(Middleware):
    """Limits the rate of handled messages; all clients with the same object share the limit.

    A batch counts as its messages. Messages wait in the consumer, which touches them before they time out. With a low
    rate, lower ``max_in_flight`` too: other consumers then receive the messages.

    Args:
        per_second: messages per second that handlers may start.
        burst: messages that may start immediately after a pause.
    """

    def __init__(self, per_second: float, *, burst: int = 1) -> None:
        if not is_number(per_second) or not per_second:
            raise InvalidSetting(f"per_second={per_second!r} is not a positive number")
        check_number("burst", burst, 1)
        self._interval = 1 / per_second
        self._allowance = (burst - 1) * self._interval
        self._next = 0.0

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        now = _clock()
        turn = max(self._next, now - self._allowance)
        share = self._interval * len(handling.messages)
        self._next = turn + share
        if turn > now:
            try:
                await anyio.sleep(turn - now)
            except BaseException:  # cancelled, as by a `HandlerTimeout` around it: its turn is free
                self._next -= share
                raise
        return await call_next(handling)


def _place_and_id(message: Message) -> object:
    # the ids of a topic that was created again begin at the first one
    return message.partition, message.id, message.timestamp


class Deduplicate(Middleware):
    """Finishes a message that this process has handled already, without calling the handler.

    Of messages of a batch with the same key, the handler receives the first; the others are answered as the batch.

    Handlers must still be idempotent: a message redelivered to another process, or after a restart, is handled again.

    Args:
        window: number of stored ids.
        seconds: time for which an id is stored.
        key: returns the identity of a message within its topic; by default partition, id and time. With None, the
            message is handled.
    """

    unsupported: ClassVar[Mapping[str, str]] = {
        "auto_finish=False": "a message counts as handled when its handler returns: leave out auto_finish",
        "a transaction around it": "a message would count as handled although its commit fails: give it first",
    }

    def __init__(
        self, window: int = 100_000, *, seconds: float = 3600.0, key: Callable[[Message], object] = _place_and_id
    ) -> None:
        check_number("window", window, 1)
        check_time("seconds", seconds, zero=False)
        check_plain_function("key", key)
        self._window = window
        self._seconds = seconds
        self._key = key
        self._handled: OrderedDict[_Entry, float] = OrderedDict()

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Call the handler for messages not handled yet."""
        oldest = _clock() - self._seconds
        fresh: list[Message] = []
        entries: dict[_Entry, Message] = {}
        for message in handling.messages:
            key = self._key(message)
            entry = (message.topic, handling.channel, key)
            if key is None:
                fresh.append(message)
            elif self._handled.get(entry, float("-inf")) >= oldest:
                message.finish_now()  # it must not be requeued with the others of its batch
            elif entry not in entries:  # a second message is finished, or requeued, with the batch
                fresh.append(message)
                entries[entry] = message
        if not fresh:
            return None
        handling.messages = fresh
        finish: Finish | None = None
        result: object = None
        try:
            result = await call_next(handling)
            check_awaited(result)
        except Finish as signal:
            finish = signal
        again = held_back(fresh)
        for entry, message in entries.items():
            if not message.requeue_called and message not in again:
                self._remember(entry)
        if finish is not None:
            raise finish
        return result

    def _remember(self, entry: _Entry) -> None:
        self._handled.pop(entry, None)
        self._handled[entry] = _clock()
        while len(self._handled) > self._window:
            self._handled.popitem(last=False)


class Decompress(Middleware):
    """Decompresses bodies of messages with the header ``content-encoding``: ``gzip`` or ``deflate``.

    The consumer decompresses bodies that this package compressed. A body that cannot be decompressed is rejected
    (`nsqext.Reject`); in a batch, after the other messages were handled.

    Args:
        max_size: largest decompressed body, in bytes.
    """

    def __init__(self, *, max_size: int = 64 << 20) -> None:
        check_number("max_size", max_size, 1)
        self._max_size = max_size

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Call the handler with decompressed bodies."""
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
        if not rejections:
            return await call_next(handling)
        with suppress(Finish):  # of the others
            check_awaited(await call_next(handling))
        if MessageBatch(good).requeue_called:
            raise requeue_not_awaited()
        again = held_back(good)
        MessageBatch([message for message in good if message not in again]).finish_now()
        raise rejections[0]

    def _restore(self, message: Message) -> None:
        encoding = message.header_value("content-encoding") if message.header else None
        if encoding in ("gzip", "deflate"):
            try:
                message.replace_body(inflate(message.body, self._max_size, encoding), "content-encoding")
            except ProtocolError as error:
                raise Reject(error.message) from error
