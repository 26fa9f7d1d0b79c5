"""Publish what cannot be sent at once: single and keyed messages, batches, and messages for a relay.

Batches, the order of keys and delayed messages are loaded with the first such call.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from nsqext.client.producer.publishing import OutgoingMessage
from nsqext.client.producer.request import MessageRequest, check_choice, key_bytes
from nsqext.errors import InvalidState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from nsqext.client.middleware import SendNext
    from nsqext.client.producer.batch_publisher import BatchPublisher
    from nsqext.client.producer.keys import KeyGroups, Place
    from nsqext.client.producer.publishing import Publishing, TopicKey
    from nsqext.client.producer.sender import Counters, Sender
    from nsqext.client.tasks import BackgroundTasks
    from nsqext.types import Receipt, TopicMeta


class Publisher:
    """Publishes the calls of a producer, through its middleware."""

    def __init__(self, sender: Sender, tasks: BackgroundTasks) -> None:
        self.around: SendNext | None = None  #: publishes through the middleware
        #: whether the middleware has anything to do at the moment; None for always
        self.enabled: Callable[[], bool] | None = None
        self.open: bool = False
        #: of stored messages; each public call counts the errors that it raises
        self.counters: Counters = sender.counters
        self._sender = sender
        self._routes = sender.routes
        self._options = sender.options
        self._tasks = tasks
        self._batch_calls = 0

    @cached_property
    def keys(self) -> KeyGroups:
        """The order of keys among all publishes of the producer."""
        from nsqext.client.producer.keys import KeyGroups, KeyLock

        return KeyGroups(self._sender, KeyLock(), self._tasks.start_soon)

    @cached_property
    def _batches(self) -> BatchPublisher:
        from nsqext.client.producer.batch_publisher import BatchPublisher

        return BatchPublisher(self._sender, self.keys.lock)

    @property
    def idle(self) -> bool:
        """Whether no call is pending, apart from requests in flight."""
        waits_for_key = "keys" in vars(self) and len(self.keys.lock) > 0
        return not (self._sender.attempts or self._batch_calls or waits_for_key)

    def check_open(self) -> None:
        """Raise InvalidState if the producer is not open, or this is not its event loop."""
        if not self.open or not self._tasks.in_event_loop():
            self._tasks.check()
            raise InvalidState("the producer is closed", hint="create a new one")

    async def meta(self, topic: str) -> TopicMeta:
        """See `nsqext.Producer.meta`."""
        self.check_open()
        return (await self._sender.wait_for_route(topic)).view.meta

    def publish(self, publishing: Publishing) -> Awaitable[Sequence[Receipt]]:
        """Publish a call through the middleware; return a receipt per message."""
        return (self.around or self.send)(publishing)

    async def send(self, publishing: Publishing) -> Sequence[Receipt]:
        """Publish what the middleware passes on."""
        place = await self._prepare(publishing) if publishing.on_topic else None
        try:
            if publishing.batch:
                publishing.receipts = await self._send_batch(publishing)
            elif publishing.delay is not None or publishing.via is not None or publishing.identity is not None:
                publishing.receipts = (await self._send_delayed(publishing),)
            else:
                publishing.receipts = (await self._send_message(publishing),)
        finally:
            if place is not None:
                place.leave()
        return publishing.receipts

    async def _prepare(self, publishing: Publishing) -> Place | None:
        """Call what waits for the topic's meta; return the place among the keys, if lookup had to be asked."""
        topic = publishing.topic
        publishing.max_message_size = self._routes.topic_options.of(topic).max_message_size
        route = self._routes.current(topic)
        if route is not None:
            for call in publishing.on_topic:
                call(route.view.meta)
            return None
        from nsqext.client.producer.keys import keys_of

        own = keys_of(publishing.given, publishing.key, publishing.partition)
        keys = {(topic, key) for key in own}.difference(publishing.entered)
        place = self.keys.lock.queue(keys)  # before the wait for lookup
        try:
            meta = await self.meta(topic)
            for call in publishing.on_topic:
                call(meta)
            await place.enter(self._options.timeout)
            publishing.entered = {*publishing.entered, *keys}
        except BaseException:
            place.leave()
            raise
        return place

    async def _send_batch(self, publishing: Publishing) -> list[Receipt]:
        self.check_open()
        self._batch_calls += 1
        try:
            return await self._batches.publish(publishing)
        finally:
            self._batch_calls -= 1

    async def _send_delayed(self, publishing: Publishing) -> Receipt:
        """Publish a message to its topic, whose consumers delay it, or to the relays' topic."""
        from nsqext.client.producer.delay import check_for_topic, relayed

        body = relayed(self._options, publishing)
        if body is None:
            return await self._send_message(publishing)
        check_for_topic(self._options, await self.meta(publishing.topic), publishing)
        return await self.message(self._options.delay_topic, OutgoingMessage(body))

    def _send_message(self, publishing: Publishing) -> Awaitable[Receipt]:
        """Publish a message to its topic."""
        topic, partition, first = publishing.topic, publishing.partition, publishing.given[0]
        at_once = None if publishing.delay is not None or publishing.entered else publishing.at_once
        if at_once is not None and type(first) is bytes:
            return at_once(topic, first, None, None, None, None, partition)
        message = publishing.messages[0]
        if at_once is not None and message.header is None:
            return at_once(topic, message.body, message.headers, message.tag, message.trace_id, message.key, partition)
        key = None if message.key is None else key_bytes(message.key)
        return self.message(topic, message, key, partition, publishing.delay, publishing.entered)

    async def message(
        self,
        topic: str,
        message: OutgoingMessage,
        key: bytes | None = None,
        partition: int | None = None,
        delay: float | None = None,
        entered: Collection[TopicKey] = (),
    ) -> Receipt:
        """Publish a message to its topic, without middleware."""
        check_choice(key, partition)
        self.check_open()
        options = self._routes.topic_options.of(topic)
        if delay is None:
            request = MessageRequest(options, topic, message, key=key, partition=partition)
        else:
            from nsqext.client.producer.delayed_request import delayed

            request = delayed(options, topic, message, delay, key=key, partition=partition)
        if topic not in self._routes.by_topic:
            request.check()  # before the wait for lookup; the command checks all the rest
        turn = None if key is None else (topic, key)
        if turn is None or turn in entered:
            return (await self._sender.publish(request))[0]
        return await self.keys.publish(request, turn)
