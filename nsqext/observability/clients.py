"""Producer and consumer that tell observers what they do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from nsqext.client.consumer.consumer import Consumer
from nsqext.client.consumer.handlers.workers import Handler
from nsqext.client.producer.producer import Producer
from nsqext.client.producer.request import OutgoingMessage
from nsqext.errors import InvalidSetting
from nsqext.observability.observer import Observed, Observer, Processing, Publishing

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message
    from nsqext.client.consumer.options import ConsumerOptions
    from nsqext.client.producer.options import ProducerOptions
    from nsqext.lookup.metadata import Lookup
    from nsqext.types import Receipt

__all__ = ("ObservedConsumer", "ObservedProducer")

H = TypeVar("H", bound=Handler)


def _checked(observers: Sequence[Observer]) -> tuple[Observer, ...]:
    for observer in observers:
        if not (callable(getattr(observer, "publishing", None)) and callable(getattr(observer, "processing", None))):
            raise InvalidSetting(f"{observer!r} is not an observer", hint="it needs publishing() and processing()")
    return tuple(observers)


class ObservedProducer(Producer):
    """A `nsqext.Producer` that tells observers of every publish.

    Args:
        lookupd: see `nsqext.Producer`.
        nsqd: see `nsqext.Producer`.
        options: see `nsqext.Producer`.
        observers: who is told, the first one outermost.
    """

    def __init__(
        self,
        lookupd: str | Sequence[str] | Lookup = (),
        *,
        nsqd: str | Sequence[str] = (),
        options: ProducerOptions | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        super().__init__(lookupd, nsqd=nsqd, options=options)
        self._observers = _checked(observers)

    def _surrounding(self, publishing: Publishing) -> Observed:
        return Observed(functools.partial(observer.publishing, publishing) for observer in self._observers)

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
        publishing = Publishing(topic, [OutgoingMessage(body, headers, tag, trace_id, key)], batch=False)
        with self._surrounding(publishing):
            draft = publishing.drafts[0]
            receipt = await super().publish(
                topic,
                draft.body,
                headers=draft.headers,
                tag=draft.tag,
                trace_id=draft.trace_id,
                key=draft.key,
                partition=partition,
                delay=delay,
            )
            publishing.receipts = (receipt,)
        return receipt

    async def publish_many(
        self,
        topic: str,
        messages: Iterable[bytes | OutgoingMessage],
        *,
        key: str | bytes | None = None,
        partition: int | None = None,
    ) -> list[Receipt]:
        """Publish messages in batches; see `nsqext.Producer.publish_many`."""
        drafts = [message if isinstance(message, OutgoingMessage) else OutgoingMessage(message) for message in messages]
        publishing = Publishing(topic, drafts, batch=True)
        with self._surrounding(publishing):
            receipts = await super().publish_many(topic, publishing.drafts, key=key, partition=partition)
            publishing.receipts = receipts
        return receipts


class ObservedConsumer(Consumer):
    """A `nsqext.Consumer` that tells observers of every message that its handler works on.

    Iteration is not observed: nobody but its user knows when work on a message begins and ends.

    Args:
        topic: see `nsqext.Consumer`.
        channel: see `nsqext.Consumer`.
        observers: who is told, the first one outermost.
        options: see `nsqext.Consumer`.
        others: lookupd, nsqd, tag, max_in_flight, concurrency, key and dispatch of `nsqext.Consumer`.
    """

    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        observers: Sequence[Observer] = (),
        options: ConsumerOptions | None = None,
        **others: Any,
    ) -> None:
        super().__init__(topic, channel, options=options, **others)
        self._observers = _checked(observers)

    def handler(self, function: H) -> H:
        """Decorator: let a coroutine function handle the messages; see `nsqext.Consumer.handler`."""
        call = type(function).__call__
        if not self._observers or not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)):
            return super().handler(function)

        @functools.wraps(function, updated=())
        async def handle(message: Message) -> None:
            processing = Processing(message, self.channel)
            with Observed(functools.partial(observer.processing, processing) for observer in self._observers):
                await function(message)

        super().handler(handle)
        return function
