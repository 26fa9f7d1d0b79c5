"""`Middleware`, and the functions that wrap publishes and handlers in it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from attrs import define

from nsqext.arguments import check_plain_function
from nsqext.client.consumer.message import Message  # noqa: TC001 (which Message, for the documentation)
from nsqext.errors import InvalidSetting, InvalidState, ReceiptsMissing

if TYPE_CHECKING:
    from nsqext.client.consumer.handlers.batches import BatchFunction
    from nsqext.client.consumer.handlers.workers import Handler
    from nsqext.client.events import ClientEvent
    from nsqext.client.producer.publishing import Publishing
    from nsqext.types import Receipt

logger: logging.Logger = logging.getLogger("nsqext.middleware")


@define(eq=False)
class Handling:
    """A call of a handler."""

    #: the message, or the messages of a batch. Middleware may remove messages of a batch; they are finished with the
    #: others, unless the middleware answers them.
    messages: list[Message]
    channel: str
    batch: bool = False  #: whether the handler receives a batch

    @property
    def message(self) -> Message:
        """The message of a handler of single messages.

        Raises:
            InvalidState: the handler receives a batch.
        """
        if self.batch:
            raise InvalidState("the handler receives a batch", hint="read handling.messages in the middleware")
        return self.messages[0]

    @property
    def topic_counts(self) -> Mapping[str, int]:
        """The number of its messages by topic."""
        if len(self.messages) == 1:
            return {self.messages[0].topic: 1}
        return Counter(message.topic for message in self.messages)


SendNext = Callable[["Publishing"], Awaitable[Sequence["Receipt"]]]
"""Publishes through the next middleware; raises as `nsqext.Producer.publish`."""

CallNext = Callable[[Handling], Awaitable[object]]
"""Calls the next middleware or the handler; raises as the handler, including `nsqext.Requeue`."""


class Client(Protocol):
    """A producer or consumer as its middleware sees it."""

    @property
    def settings(self) -> Mapping[str, object]:
        """The values of its settings."""

    def on_event(self, callback: Callable[[ClientEvent], object]) -> Callable[[ClientEvent], object]:
        """Call a function on events."""


class Middleware:
    """Base class of middleware around publishes and handled messages.

    A return or exception of `handle` has the effect of a handler's: a return without a call of the next middleware
    finishes the messages. An object may serve several clients and tasks.
    """

    #: hints by what it refuses, ``batches``, ``iteration``, ``auto_finish=False`` or ``a transaction around it``
    unsupported: ClassVar[Mapping[str, str]] = {}
    opens_transaction: ClassVar[bool] = False  #: whether an error behind the handler undoes its effects

    def attach(self, client: Client) -> None:
        """Called with each `nsqext.Producer` and `nsqext.Consumer` of this middleware, at its creation."""

    def is_enabled(self) -> bool:
        """Return whether it has anything to do at the moment: publishes and messages pass it by if not.

        Called before each publish and each call of a handler, in the event loop. All middleware is called while one of
        it is enabled. An exception is logged, and counts as True.
        """
        return True

    async def start(self) -> None:
        """Called when a consumer with a handler or an app starts, before messages are received.

        An app calls it after its lifespans have begun. An exception ends the start.
        """

    async def publish(self, publishing: Publishing, send_next: SendNext) -> Sequence[Receipt]:
        """Surround a publish with all its attempts; return a receipt per message."""
        return await send_next(publishing)

    async def handle(self, handling: Handling, call_next: CallNext) -> object:
        """Surround the call of a handler of messages or batches; see `Handling`."""
        return await call_next(handling)


def check_middleware(middleware: Sequence[Middleware]) -> tuple[Middleware, ...]:
    """Return the middleware as a tuple; raises InvalidSetting."""
    if not isinstance(middleware, Iterable):
        raise InvalidSetting(f"middleware={middleware!r} is not a list", hint="give middleware=[...]")
    for one in middleware:
        if not isinstance(one, Middleware):
            raise InvalidSetting(
                f"{one!r} is not a middleware", hint="derive its class from nsqext.middleware.Middleware"
            )
        for name in ("attach", "is_enabled"):
            check_plain_function(f"{type(one).__name__}.{name}", getattr(one, name))
    return tuple(middleware)


def check_handler_kind(middleware: Iterable[Middleware], *, batch: bool = False, auto_finish: bool = True) -> None:
    """Raise InvalidSetting if middleware cannot surround a handler of batches, or one that answers later."""
    kinds = {"batches"} if batch else set[str]() if auto_finish else {"auto_finish=False"}
    for one in middleware:
        for kind in kinds & one.unsupported.keys():
            raise InvalidSetting(f"{type(one).__name__} cannot be used with {kind}", hint=one.unsupported[kind])
        if one.opens_transaction:
            kinds.add("a transaction around it")


async def start_middleware(middleware: Sequence[Middleware], *, iterated: bool) -> None:
    """Start the middleware of a consumer, around its handler.

    Raises:
        InvalidSetting: the consumer has no handler, and middleware that needs a handler.
    """
    for one in middleware:
        if not iterated:
            await one.start()
        elif "iteration" in one.unsupported:
            raise InvalidSetting(
                f"{type(one).__name__} cannot be used with iteration", hint=one.unsupported["iteration"]
            )


def _overriding(middleware: Iterable[Middleware], method: str) -> list[Middleware]:
    """Return the middleware that has a method of its own."""
    return [one for one in middleware if getattr(type(one), method) is not getattr(Middleware, method)]


def enabled(middleware: Sequence[Middleware], method: Literal["publish", "handle"]) -> Callable[[], bool] | None:
    """Return a function that returns whether middleware with this method is enabled; None for always."""
    around = _overriding(middleware, method)
    if len(around) != len(_overriding(around, "is_enabled")):
        return None

    def any_enabled() -> bool:
        try:
            for one in around:
                if one.is_enabled():
                    return True
        except Exception:
            logger.exception("middleware failed before the operation that it surrounds")
            return True
        return False

    return any_enabled


def send_with(middleware: Sequence[Middleware], send: SendNext) -> SendNext | None:
    """Return a publish surrounded by the middleware, the first outermost; None if it surrounds nothing."""
    around = _overriding(middleware, "publish")
    for one in reversed(around):
        send = partial(one.publish, send_next=send)
    return partial(_with_receipts, send) if around else None


async def _with_receipts(send: SendNext, publishing: Publishing) -> Sequence[Receipt]:
    """Publish through middleware; raises ReceiptsMissing if it did not return a receipt for each message."""
    count = len(publishing.given)
    receipts: object = await send(publishing)
    if isinstance(receipts, Sequence) and len(receipts) == count:
        return receipts
    found = f"{len(receipts)} receipts" if isinstance(receipts, Sequence) else repr(receipts)
    raise ReceiptsMissing(
        f"the message may have been stored: middleware has returned {found}, not a receipt for each message ({count})",
        topic=publishing.topic,
        hint="end its publish with 'return await send_next(publishing)'",
    )


def surround_handler(
    middleware: Sequence[Middleware], handler: Handler, channel: str, *, auto_finish: bool = True
) -> Handler:
    """Return a message handler surrounded by the middleware, or the handler itself.

    Raises InvalidSetting for middleware that cannot surround a handler that answers later (``auto_finish=False``).
    """
    check_handler_kind(middleware, auto_finish=auto_finish)
    if not auto_finish and _overriding(middleware, "handle"):
        return _finishing_uncalled(middleware, handler, channel)
    # without a coroutine, which would be a fifth of a middleware's cost
    return _surrounded(
        middleware,
        handler,
        lambda handling: handler(handling.messages[0]),
        lambda message: Handling([message], channel),
    )


def _finishing_uncalled(middleware: Sequence[Middleware], handler: Handler, channel: str) -> Handler:
    """Return a surrounded handler that finishes the messages that its middleware does not pass on."""
    from nsqext.client.consumer.handler_functions import stand_in

    async def handle(message: Message) -> object:
        called = False

        def call(one: Message) -> Awaitable[object]:
            nonlocal called
            called = True
            return handler(one)

        result = await surround_handler(middleware, call, channel)(message)
        if not (called or message.answered):
            message.finish_now()
        return result

    stand_in(handle, handler)
    return handle


def surround_batch_handler(middleware: Sequence[Middleware], handler: BatchFunction, channel: str) -> BatchFunction:
    """Return a batch handler surrounded by the middleware, or the handler itself.

    The handler is not called if the middleware removes all messages. Raises InvalidSetting for middleware that cannot
    surround it.
    """
    check_handler_kind(middleware, batch=True)
    from nsqext.client.consumer.handlers.batches import MessageBatch  # not at the import of a producer

    async def call_handler(handling: Handling) -> object:
        return await handler(MessageBatch(handling.messages)) if handling.messages else None

    return _surrounded(middleware, handler, call_handler, lambda batch: Handling(list(batch), channel, batch=True))


def _surrounded(
    middleware: Sequence[Middleware],
    handler: Callable[[Any], Awaitable[object]],
    call: CallNext,
    handling_of: Callable[[Any], Handling],
) -> Callable[[object], Awaitable[object]]:
    around = _overriding(middleware, "handle")
    if not around:
        return handler
    any_enabled = enabled(around, "handle")
    for one in reversed(around):
        call = partial(one.handle, call_next=call)

    from nsqext.client.consumer.handler_functions import stand_in  # not at the import of a producer

    async def handle(handled: object) -> object:  # `message_handler` reads the annotation
        if any_enabled is not None and not any_enabled():
            return await handler(handled)
        return await call(handling_of(handled))

    stand_in(handle, handler)
    return handle
