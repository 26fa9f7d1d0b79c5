"""Producer and consumer with middleware."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nsqext.client.consumer.consumer import Consumer
from nsqext.client.consumer.handlers.batches import BatchFunction, MessageBatch
from nsqext.client.producer.producer import Producer
from nsqext.client.producer.request import OutgoingMessage
from nsqext.middleware.base import (
    CallNext,
    Handling,
    Middleware,
    Publishing,
    SendNext,
    check_middleware,
    handle_with,
    send_with,
)

if TYPE_CHECKING:
    from nsqext.client.consumer.handlers.workers import Handler
    from nsqext.client.consumer.message import Message
    from nsqext.client.consumer.options import ConsumerOptions
    from nsqext.client.producer.options import ProducerOptions
    from nsqext.lookup.lookup import Lookup
    from nsqext.types import Receipt

__all__ = ("MiddlewareConsumer", "MiddlewareProducer", "surround_batch_handler", "surround_handler")


class MiddlewareProducer(Producer):
    """A `nsqext.Producer` whose publishes are surrounded by middleware.

    This includes the batches of a `Batcher`.

    Args:
        lookupd: see `nsqext.Producer`.
        nsqd: see `nsqext.Producer`.
        options: see `nsqext.Producer`.
        middleware: the first one is the outermost.
    """

    def __init__(
        self,
        lookupd: str | Sequence[str] | Lookup = (),
        *,
        nsqd: str | Sequence[str] = (),
        options: ProducerOptions | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> None:
        super().__init__(lookupd, nsqd=nsqd, options=options)
        around = check_middleware(middleware)
        self._send: SendNext = send_with(around, self._send_last)
        for one in around:
            one.attach(self)

    async def _send_last(self, publishing: Publishing) -> Sequence[Receipt]:
        if publishing.batch:
            publishing.receipts = await super().publish_many(
                publishing.topic, publishing.messages, key=publishing.key, partition=publishing.partition
            )
            return publishing.receipts
        message = publishing.messages[0]
        receipt = await super().publish(
            publishing.topic,
            message.body,
            headers=message.headers,
            tag=message.tag,
            trace_id=message.trace_id,
            key=message.key,
            partition=publishing.partition,
            delay=publishing.delay,
        )
        publishing.receipts = (receipt,)
        return publishing.receipts

    async def publish(
        self,
        topic: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        tag: str | None = None,
        trace_id: int | None = None,
        key: str | bytes | None = None,
        partition: int | None = None,
        delay: float | None = None,
    ) -> Receipt:
        """Publish a message and wait until it is stored; see `nsqext.Producer.publish`."""
        message = OutgoingMessage(body, headers, tag, trace_id, key)
        publishing = Publishing(topic, [message], batch=False, partition=partition, delay=delay)
        return (await self._send(publishing))[0]

    async def publish_many(
        self,
        topic: str,
        messages: Iterable[bytes | OutgoingMessage],
        *,
        key: str | bytes | None = None,
        partition: int | None = None,
    ) -> list[Receipt]:
        """Publish messages in batches; see `nsqext.Producer.publish_many`."""
        given = [message if isinstance(message, OutgoingMessage) else OutgoingMessage(message) for message in messages]
        return list(await self._send(Publishing(topic, given, batch=True, key=key, partition=partition)))


class MiddlewareConsumer(Consumer):
    """A `nsqext.Consumer` whose handler, of messages or batches, is surrounded by middleware; iteration is not.

    Args:
        topics: see `nsqext.Consumer`.
        channel: see `nsqext.Consumer`.
        middleware: the first one is the outermost.
        options: see `nsqext.Consumer`.
        others: lookupd, nsqd, tag, max_in_flight, concurrency, key and dispatch of `nsqext.Consumer`.
    """

    def __init__(
        self,
        topics: str | Sequence[str],
        channel: str,
        *,
        middleware: Sequence[Middleware] = (),
        options: ConsumerOptions | None = None,
        **others: Any,
    ) -> None:
        super().__init__(topics, channel, options=options, **others)
        self._middleware = check_middleware(middleware)
        for one in self._middleware:
            one.attach(self)

    def _handler_of_messages(self, function: Callable[..., Awaitable[object]]) -> Handler:
        return surround_handler(self._middleware, super()._handler_of_messages(function), self.channel)

    def _handler_of_batches(self, function: BatchFunction) -> BatchFunction:
        return surround_batch_handler(self._middleware, function, self.channel)


def surround_handler(middleware: Sequence[Middleware], handler: Handler, channel: str) -> Handler:
    """Return a handler of messages surrounded by the middleware; without middleware, the handler itself."""

    async def call_handler(handling: Handling) -> object:
        return await handler(handling.message)

    surrounded: CallNext = handle_with(middleware, call_handler)
    if surrounded is call_handler:
        return handler

    async def handle(message: Message) -> object:
        return await surrounded(Handling([message], channel))

    handle.__qualname__ = getattr(handler, "__qualname__", type(handler).__qualname__)
    return handle


def surround_batch_handler(middleware: Sequence[Middleware], handler: BatchFunction, channel: str) -> BatchFunction:
    """Return a handler of batches surrounded by the middleware; without middleware, the handler itself.

    The handler is not called if the middleware removes all messages.
    """

    async def call_handler(handling: Handling) -> object:
        return await handler(MessageBatch(handling.messages)) if handling.messages else None

    surrounded: CallNext = handle_with(middleware, call_handler)
    if surrounded is call_handler:
        return handler

    async def handle(batch: MessageBatch) -> object:
        return await surrounded(Handling(list(batch), channel, batch=True))

    handle.__qualname__ = getattr(handler, "__qualname__", type(handler).__qualname__)
    return handle
