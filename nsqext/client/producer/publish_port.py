"""The producer's port for threads that publish by themselves, as the blocking producer does."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from nsqext.client.producer.request import MessageRequest
from nsqext.client.producer.sender import Counters, unreadable
from nsqext.errors import NsqError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from nsqext.client.producer.batch import Batch
    from nsqext.client.producer.connection_pool import PooledNode
    from nsqext.client.producer.options import ProducerOptions
    from nsqext.client.producer.producer import Producer
    from nsqext.client.producer.publishing import OutgoingMessage
    from nsqext.client.producer.route import Route, Target
    from nsqext.protocol.client.client_protocol import Reply
    from nsqext.transport.connection import Connection
    from nsqext.types import Receipt


class ReadyPublish(NamedTuple):
    """A message or batch that can be sent now, and where."""

    request: MessageRequest | Batch
    route: Route
    target: Target

    @property
    def node(self) -> PooledNode:
        return self.target.node

    def give_back(self) -> None:
        """Leave the partition to the next publish: this one is not sent."""
        if self.request.partition is None:
            self.route.give_back()


class PublishPort:
    """Publish in a thread, with the routes, checks and retries of an open producer.

    `ready`, `ready_batch` and `post` may be called in any thread, one thread at a time, `batch` and `receipts` in any
    thread; other methods in the producer's event loop.
    """

    def __init__(self, producer: Producer) -> None:
        self.options: ProducerOptions = producer._options
        #: middleware and HTTP need the event loop
        self.in_event_loop_only: bool = producer._publisher.around is not None or self.options.transport == "http"
        self.counters: Counters = Counters()  #: of messages stored by threads
        self._producer = producer
        self._sender = producer._sender
        self._counting = threading.Lock()

    def ready(self, topic: str, message: OutgoingMessage, partition: int | None) -> ReadyPublish | None:
        """Return a message without key that can be sent now; None if the event loop must publish it."""
        routes = self._sender.routes
        route = routes.by_topic.get(topic)
        target = self._producer._ready_target(topic, message.body, partition, None)
        if route is None or target is None:
            return None
        request = MessageRequest(routes.topic_options.of(topic), topic, message, partition=partition)
        return ReadyPublish(request, route, target)

    def batch(
        self, topic: str, messages: list[bytes | OutgoingMessage], partition: int | None, trace_ids: Sequence[int]
    ) -> Batch | None:
        """Return messages as one batch; None if the event loop must check each, or divide them."""
        from nsqext.client.producer.batch import plain_batches  # few programs publish batches

        routes = self._sender.routes
        route = routes.by_topic.get(topic)
        options = routes.topic_options.of(topic)
        if route is None or not messages or options.key_tags:
            return None
        batches = plain_batches(route, partition, messages, options, trace_ids)
        return batches[0] if batches is not None and len(batches) == 1 else None

    def ready_batch(self, batch: Batch) -> ReadyPublish | None:
        """As `ready`, for a batch."""
        route = self._sender.routes.by_topic.get(batch.topic)
        target = self._producer._ready_target(batch.topic, batch.first, batch.partition, None)
        if route is None or target is None:
            return None
        return ReadyPublish(batch, route, target)

    def post(self, publish: ReadyPublish, connection: Connection) -> Reply:
        """Send a message or batch once; return its response, to be set later. Raises InvalidInput or NotSent."""
        request, _, target = publish
        command = request.command(target)
        request.in_doubt, request.sent = True, len(command)
        return connection.post(command, request.started + self.options.timeout, breaks=request.breaks)

    def receipts(self, publish: ReadyPublish, connection: Connection, reply: Reply) -> list[Receipt]:
        """Return the receipts in a response, in any thread; raises the error for `again`."""
        request, _, target = publish
        if reply.error is not None:
            raise reply.error
        request.in_doubt = False
        try:
            receipts = request.receipts(target, reply.data or b"")
        except ProtocolError as error:
            connection.shut_down()  # the thread that reads it fails the other requests
            raise unreadable(target, error) from error
        with self._counting:
            self.counters.stored += len(receipts)
            self.counters.bytes_sent += request.sent
        return receipts

    async def again(self, publish: ReadyPublish, failure: NsqError) -> list[Receipt]:
        """Publish after a failed attempt, with retries; raises as `nsqext.Producer.publish`."""
        try:
            return await self._sender.publish_again(*publish, failure)
        except NsqError as error:
            self._sender.counters.count(error, publish.request.count)
            raise

    def start_soon(self, function: Callable[[], Awaitable[object]]) -> None:
        """Run a coroutine function until the producer closes."""
        self._producer._tasks.start_soon(function)

    def abort(self) -> None:
        """Cancel running publishes, without further attempts."""
        self._sender.close()
