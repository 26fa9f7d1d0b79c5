"""Publish what handlers return."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsqext.client.consumer.typed.body import encode_body
from nsqext.client.producer.publishing import OutgoingMessage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from nsqext.client.consumer.handlers.workers import Handler
    from nsqext.client.consumer.message import Message
    from nsqext.client.producer.producer import Producer
    from nsqext.types import Receipt


def publish_results(call: Handler, producer: Producer, topics: Iterable[str]) -> Handler:
    """Return a handler that publishes the result of another to topics, before its message is finished."""

    async def handle(message: Message) -> object:
        result = await call(message)
        if result is not None:
            for topic in topics:
                await _published(producer, topic, result)
        return result

    return handle


def _published(producer: Producer, topic: str, result: object) -> Awaitable[Receipt]:
    """Return the publish of a result, to be awaited: a coroutine of its own would take part in each wait."""
    if not isinstance(result, OutgoingMessage):
        return producer.publish(topic, encode_body(result))
    return producer.publish(
        topic,
        result.body,
        headers=result.headers,
        tag=result.tag,
        trace_id=result.trace_id,
        key=result.key,
        header=result.header,
    )
