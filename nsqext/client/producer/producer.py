"""The producer."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Never, Self, Unpack
from weakref import WeakSet

import anyio
from anyio.lowlevel import checkpoint

from nsqext.arguments import refuse_unknown
from nsqext.client.events import ClientEvents, tracing
from nsqext.client.producer.connection_pool import ConnectionPool
from nsqext.client.producer.options import ProducerOptions
from nsqext.client.producer.publisher import Publisher
from nsqext.client.producer.publishing import OutgoingMessage, Publishing
from nsqext.client.producer.request import MessageRequest, encode_parts, key_bytes, message_command, read_receipt
from nsqext.client.producer.route import RouteTable, no_node
from nsqext.client.producer.sender import Counters, Sender, out_of_step
from nsqext.client.settings import HelpText, producer_schema, producer_settings
from nsqext.client.tasks import BackgroundTasks
from nsqext.errors import InvalidSetting, NsqError, ProtocolError
from nsqext.lookup.metadata import metadata_cache, values_of
from nsqext.settings import build
from nsqext.types import Address, ProcessBound

if TYPE_CHECKING:
    from nsqext.client.events import ClientEvent
    from nsqext.client.middleware import Middleware
    from nsqext.client.producer.batcher import Batcher
    from nsqext.client.producer.route import Route, Target
    from nsqext.client.producer.settings import ProducerSettings
    from nsqext.client.producer.statistics import ProducerStatistics
    from nsqext.lookup.lookup import Lookup
    from nsqext.types import Receipt, TopicMeta

_CLOSE_POLL = 0.01  # seconds between checks for pending publishes during the close
# turns of the event loop without a pending publish before a producer closes: a publish with a failed request is not in
# flight until its task begins the next attempt
_IDLE_TURNS = 3
_clock = time.monotonic


class Producer(ProcessBound):
    """Publishes messages to the leaders of their partitions.

    Use it as an asynchronous context manager, or call `start` and `aclose`, on asyncio or trio. Closing waits for
    publishes in flight, at most ``close_timeout`` seconds, then closes the connections. A producer serves any number of
    topics and tasks of an event loop.

    Args:
        lookupd: ``host:port`` of nsqlookupd's HTTP side: a list, or text with commas; a URL with addresses and
            settings: ``nsq://lookupd:4161?timeout=5``; or a shared `nsqext.Lookup`.
        nsqd: TCP addresses of nsqd, without lookup; fine for the original NSQ.
        env: prefix of environment variables with further settings. Without any address, it is ``NSQEXT_``:
            ``NSQEXT_URL``, ``NSQEXT_LOOKUPD`` and so on.
        middleware: around every publish, also of batchers; the first is the outermost.
        settings: see `ProducerSettings`.

    Raises:
        InvalidSetting: no address, both kinds of addresses, or an invalid value.
        UnknownSetting: the error suggests a known name.
    """

    def __init__(
        self,
        lookupd: str | Sequence[str] | Lookup = (),
        *,
        nsqd: str | Sequence[str] = (),
        env: str | None = None,
        middleware: Sequence[Middleware] = (),
        **settings: Unpack[ProducerSettings],
    ) -> None:
        schema = producer_schema()
        given = schema.collect(lookupd, nsqd, env, settings)
        self._options = build(ProducerOptions, schema.own, values_of(given))
        over_http = self._options.transport == "http"
        self._metadata = metadata_cache(given, self._options.lookup, over_http=over_http)
        if over_http and self._options.connection.tls and not self._metadata.has_https:
            raise InvalidSetting(
                "tls has no effect with transport='http' without https:// addresses of nodes",
                hint="give nsqd='https://...'",
            )
        self._events = ClientEvents()
        self._tasks = BackgroundTasks("producer", self._close)
        settles = self._options.on_unknown == "settle"
        self._pool = ConnectionPool(
            self._options.connection,
            self._events,
            self._tasks if over_http else None,
            self._options.settle_timeout if settles else None,
        )
        self._routes = RouteTable(self._options, self._metadata, self._pool, self._events)
        self._sender = Sender(self._options, self._routes, self._pool)
        self.counters: Counters = self._sender.counters  #: of `statistics`; final when the producer is deleted
        self._publisher = Publisher(self._sender, self._tasks)
        self._batchers: WeakSet[Batcher] = WeakSet()
        self._joined = False
        largest = self._options.max_message_size - 1  # logs of extend topics need another byte
        if self._options.compresses:
            largest = min(largest, self._options.compression_min - 1)
        # largest body that is never compressed and fits into any topic; 0 if every message needs a trace id
        self._plain_size = largest
        if settles:
            self._settle()
        if middleware != ():
            self._surround(middleware)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._metadata.place}, {self._tasks.state})"

    def _settle(self) -> None:
        if not self._metadata.has_lookup:
            raise InvalidSetting("on_unknown='settle' needs lookupd, which names the leaders whose logs are searched")
        from nsqext.client.producer.settling import Settler

        self._sender.settler = Settler(self._options, self._metadata)
        self._plain_size = 0

    def _surround(self, middleware: Sequence[Middleware]) -> None:
        from nsqext.client.middleware import check_middleware, enabled, send_with

        around = check_middleware(middleware)
        self._publisher.around = send_with(around, self._publisher.send)
        self._publisher.enabled = enabled(around, "publish")
        for each in around:
            each.attach(self)

    @property
    def settings(self) -> Mapping[str, object]:
        """All settings by name, with defaults; secrets are ``***``."""
        return producer_schema().effective(self._options)

    # Opening and closing

    async def start(self) -> Self:
        """Open the producer, as ``async with`` does; `aclose` closes it, in any task.

        Raises:
            InvalidState: it was opened before, or shares a `nsqext.Lookup` that another event loop uses.
            LookupFailed: with ``connect``, no lookup node responds.
            NsqError: with ``connect``, no node can be reached; the first node's error.
        """
        await self._tasks.start()
        try:
            self._tasks.check()  # `aclose` may have ended it: nothing would release the metadata
            self._metadata.acquire()
            self._joined = self._publisher.open = True
            self._routes.tasks = self._tasks
            for run in (self._pool.run, self._metadata.run, self._routes.run):
                self._tasks.start_soon(run)
            if self._options.connect:
                await self._connect_all(every=False)
        except BaseException:
            await self._tasks.aclose()
            raise
        return self

    async def aclose(self) -> None:
        """Wait for publishes in flight, at most ``close_timeout`` seconds, and close the connections.

        Callable from any task of the event loop, repeatedly. Cancellation does not shorten it.

        Raises:
            InvalidState: called from another event loop.
        """
        await self._tasks.aclose()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _close(self) -> None:
        """Close in order, in the host of the background tasks."""
        if not self._joined:
            return
        try:
            await self._finish()
            await self._pool.aclose()
        finally:
            self._publisher.open = False
            self._routes.close()
            await self._metadata.release()

    async def _finish(self) -> None:
        """Wait until no publish is pending; after ``close_timeout`` abort the rest."""
        deadline = anyio.current_time() + self._options.close_timeout
        with anyio.CancelScope(deadline=deadline):
            for batcher in tuple(self._batchers):
                await batcher.end()
        self._publisher.open = False
        with anyio.CancelScope(deadline=deadline):
            await self._until_idle()
        self._sender.close()
        # cancelled publishes report their outcomes before metadata and connections are closed
        while self._sender.attempts:  # noqa: ASYNC110 - no event
            await anyio.sleep(_CLOSE_POLL)

    async def _until_idle(self) -> None:
        turns = 0
        while turns < _IDLE_TURNS:
            if self._pool.in_flight or not self._publisher.idle:
                turns = 0
                await anyio.sleep(_CLOSE_POLL)
            else:
                turns += 1
                await checkpoint()

    def __del__(self) -> None:
        publisher: Publisher | None = vars(self).get("_publisher")  # None if the constructor raised an error
        if publisher is not None and publisher.open:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)
            self._tasks.abandon()

    # Health

    async def ping(self) -> None:
        """Check that lookup responds, and connect to all its nodes; unneeded connections are closed later.

        Raises:
            LookupFailed: no lookup node returned a usable response.
            PartitionUnavailable: lookup knows no node.
            NsqError: a node cannot be reached.
            InvalidState: the producer is not open.
        """
        self._publisher.check_open()
        await self._connect_all(every=True)

    async def _connect_all(self, *, every: bool) -> None:
        """Connect to all nodes; raise if no node can be reached, or with ``every``, if any cannot."""
        nodes: Sequence[Address] = self._metadata.addresses
        if self._metadata.has_lookup:
            listed = await self._sender.wait_for_lookup(self._metadata.nodes, retry=not every)
            nodes = [self._pool.node(node.tcp, node.http).address for node in listed]
            if not nodes:
                raise no_node()
        errors = await self._pool.connect_all(nodes)
        if errors and (every or len(errors) == len(nodes)):
            raise errors[0]

    async def meta(self, topic: str) -> TopicMeta:
        """Return a topic's metadata: 0 or False on the original NSQ, where the topic may not exist yet.

        Lookup is asked about a topic not used before.

        Raises:
            TopicNotFound: lookup does not know the topic, and knows redesigned nodes.
            PublishFailed: lookup knew no node within ``timeout``.
            NsqError: as for `publish`.
        """
        return await self._publisher.meta(topic)

    def statistics(self) -> ProducerStatistics:
        """Return the statistics of this producer, at any time and without cost per message."""
        from nsqext.client.producer.statistics import ProducerStatistics

        return ProducerStatistics(
            connections=self._pool.connections,
            pending=self._pool.in_flight,
            **vars(self.counters),
            lookup_age=self._metadata.answer_age,
            lookup_failures=self._metadata.failures,
        )

    def on_event(self, callback: Callable[[ClientEvent], object]) -> Callable[[ClientEvent], object]:
        """Decorator: call a function when a node is connected or disconnected, or a partition's leader moves.

        Called in the event loop, it must not block; its errors are logged. The end of an idle connection is reported
        within a second.
        """
        self._events.add(callback)
        return callback

    # Publishing

    async def publish(
        self,
        topic: str,
        body: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        tag: str | None = None,
        trace_id: int | None = None,
        key: str | bytes | int | None = None,
        partition: int | None = None,
        delay: float | None = None,
        via: Literal["consumer", "relay"] | None = None,
        identity: str | None = None,
        header: bytes | None = None,
        **unknown: Never,
    ) -> Receipt:
        """Publish a message and wait until it is stored.

        Args:
            body: not empty.
            headers: extend headers; the topic must support them.
            tag: consumers with this tag receive the message first; the topic must support extend headers.
            trace_id: 0 to 2**64 - 1; the receipt then has message id, offset and size.
            key: messages with the same key are stored in one partition, in the order of the calls; text, bytes, or a
                number for its decimal digits. On topics with extend support consumers receive it (`Message.key`), in
                the header ``##key``.
            partition: by default partitions are used in turn.
            delay: seconds until handlers receive it. The original NSQ keeps it, without headers. Consumers of the
                redesigned NSQ requeue it until then; its topic needs extend headers and must not be ordered.
            via: overrides ``delay_via`` for ``delay``. With ``relay``, the receipt names ``delay_topic``.
            identity: of a message that a relay delays, for `cancel_delayed`; of messages with the same identity, the
                relay publishes the first.
            header: the extend header as bytes, stored as they are, to publish a received message again
                (`Message.header`); not together with headers or tag. Its trace id is its ``##trace_id``; a key decides
                the partition only. Empty bytes stand for no header, and allow a trace id.

        Returns:
            The receipt, with partition and node.

        Raises:
            InvalidInput: invalid argument; nothing was sent.
            TopicNotFound: lookup does not know the topic, and knows nodes.
            TopicNotReady: the topic has no channel yet: lookup does not offer it to producers.
            LookupFailed: no lookup node responds; for ``lookup_timeout`` if it never did.
            PublishFailed: not stored within ``timeout``, with retries.
            DeliveryUnknown: possibly stored.
            ServerError, NegotiationFailed, ProtocolError: the node refused the message or the connection permanently.
            InvalidState: the producer is not open, or another event loop opened it.

        When cancelled, the message may be stored or not.
        """
        if unknown:
            refuse_unknown(Producer.publish, unknown)
        publisher = self._publisher
        rare = delay is not None or via is not None or identity is not None or header is not None
        try:
            if not rare and (publisher.around is None or not (publisher.enabled is None or publisher.enabled())):
                return await self._publish_message(topic, body, headers, tag, trace_id, key, partition)
            plain = type(body) is bytes and not rare and (headers, tag, trace_id, key) == (None, None, None, None)
            given = [body if plain else OutgoingMessage(body, headers, tag, trace_id, key, header=header)]
            publishing = Publishing(
                topic=topic, messages=given, batch=False, partition=partition, at_once=self._publish_message
            )
            if rare:
                publishing.delay, publishing.via, publishing.identity = delay, via, identity
            return (await publisher.publish(publishing))[0]
        except NsqError as error:
            self.counters.count(error)
            raise

    async def _publish_message(
        self,
        topic: str,
        body: bytes,
        headers: Mapping[str, str] | None,
        tag: str | None,
        trace_id: int | None,
        key: str | bytes | int | None,
        partition: int | None,
    ) -> Receipt:
        """Publish a message, what surrounds it apart: without a request object where it can be sent now."""
        publisher = self._publisher
        data = None if key is None else key_bytes(key)
        turn = None if data is None else (topic, data)
        if turn is not None and turn in publisher.keys.lock and publisher.open and self._tasks.in_event_loop():
            request = publisher.keys.waiting(turn, body, headers, tag, trace_id) if partition is None else None
            if request is not None:
                return await publisher.keys.publish(request, turn)
        target = self._ready_target(topic, body, partition, data) if self._tasks.in_event_loop() else None
        connection = None if target is None else target.node.connection
        if target is None or connection is None or not (turn is None or publisher.keys.lock.try_enter(turn)):
            message = OutgoingMessage(body, headers, tag, trace_id, key)
            return await publisher.message(topic, message, data, partition)
        started = _clock()
        try:
            try:
                bare = headers is None and tag is None and trace_id is None and not self._options.key_tags
                if bare and (data is None or not target.meta.extend_support):
                    command = target.pub(body)
                else:
                    encoded = encode_parts(self._options, target.meta, body, headers, tag, trace_id, data)
                    command = message_command(target, *encoded)
                response = await connection.request(command, started + self._options.timeout)
            except NsqError as error:
                message = OutgoingMessage(body, headers, tag, trace_id)
                options = self._routes.topic_options.of(topic)
                request = MessageRequest(options, topic, message, key=data, partition=partition, started=started)
                failure = request.refined(error)
                return (await self._sender.publish_again(request, self._routes.by_topic.get(topic), target, failure))[0]
            counters = self.counters
            if trace_id is None and response == b"OK":
                receipt = target.receipt  # as `read_receipt`, without a call: 1 % of a publish
            else:
                try:
                    receipt = read_receipt(target, response, trace_id)
                except ProtocolError as error:
                    raise out_of_step(target, connection, error) from error
            counters.stored += 1
            counters.bytes_sent += len(command)
            return receipt
        finally:
            if turn is not None:
                publisher.keys.lock.leave(turn)

    def _ready_target(self, topic: str, body: bytes, partition: int | None, key: bytes | None) -> Target | None:
        """Return the target of a message that can be sent now; None for the slow path."""
        route = self._routes.by_topic.get(topic)
        if (
            route is None
            or not route.targets
            or route.view is not self._metadata.cached(topic, "w")
            or not self._publisher.open
            or type(body) is not bytes
            or not 0 < len(body) <= self._plain_size
            or tracing.log is not None
        ):
            return None
        if key is not None:
            target = self._target_of_key(route, key) if partition is None else None
        elif partition is None:
            target = route.next()
        elif type(partition) is int and partition in route.partitions:
            target = route.at(partition)
        else:
            return None
        if target is None:
            return None
        connection = target.node.connection
        if connection is None or connection.error is not None or target.rest_until:
            if partition is None and key is None:
                route.give_back()
            return None
        return target

    def _target_of_key(self, route: Route, key: bytes) -> Target | None:
        """Return the target of a key; None if the slow path must wait or raise."""
        try:
            target = route.partitions.get(route.partition_of(key, self._routes.key_hash))
        except NsqError:
            return None
        route.used = route.used or target is not None
        return target

    async def cancel_delayed(self, identity: str) -> Receipt:
        """Ask the relays not to publish a delayed message; a published message stays.

        Args:
            identity: the identity given to `publish`, which may follow this call.

        Raises:
            InvalidInput: invalid identity; nothing was sent.
            NsqError: as for `publish`.
        """
        from nsqext.client.producer.delay import cancellation

        message = OutgoingMessage(cancellation(identity))
        try:
            return await self._publisher.message(self._options.delay_topic, message)
        except NsqError as error:
            self.counters.count(error)
            raise

    async def publish_many(
        self,
        topic: str,
        messages: Iterable[bytes | OutgoingMessage],
        *,
        key: str | bytes | int | None = None,
        partition: int | None = None,
        trace_ids: Sequence[int] = (),
        headers: Mapping[str, Sequence[str]] | None = None,
        **unknown: Never,
    ) -> list[Receipt]:
        """Publish messages in batches by partition, each stored wholly or not at all.

        Messages without key are stored in one partition, in order, unless too many for one batch. After a failed batch
        of a key or of a chosen partition, later batches of the partition are not sent.

        Args:
            messages: bodies, or `OutgoingMessage` objects for messages with headers, tag, trace id or key.
            key: for all messages without their own key.
            partition: for all messages; not together with keys.
            trace_ids: a trace id per message, if all are bodies; costs half of objects.
            headers: extend headers, if all are bodies: by name, a text per message; costs a third of objects.

        Returns:
            A receipt for each message, in order.

        Raises:
            InvalidInput: a message is invalid, see ``index``; nothing was sent.
            BatchFailed: not all messages were stored; see ``outcomes``.
            NsqError: nothing was sent: TopicNotFound, TopicNotReady, LookupFailed and InvalidState as for `publish`,
                PublishFailed if lookup knew no node for ``timeout``.

        When cancelled, any batch may be stored or not.
        """
        if unknown:
            refuse_unknown(Producer.publish_many, unknown)
        listed: Sequence[bytes | OutgoingMessage]
        if type(messages) is list and not (trace_ids or headers):
            listed = messages
        else:
            from nsqext.client.producer.batch import check_arguments

            listed = check_arguments(messages, topic, trace_ids, headers or {})
        publishing = Publishing(
            topic=topic, messages=listed, batch=True, key=key, partition=partition, trace_ids=trace_ids
        )
        if headers:
            publishing.header_columns = headers
        try:
            return list(await self._publisher.publish(publishing))
        except NsqError as error:
            self.counters.count(error, len(listed))
            raise

    def batcher(
        self,
        topic: str,
        *,
        linger: float = 0.005,
        max_count: int = 1000,
        max_bytes: int = 1 << 20,
        max_pending: int = 10_000,
    ) -> Batcher:
        """Return a batcher, which publishes single messages in batches in the background.

        Use it as an asynchronous context manager inside the producer's; see `Batcher`.

        Args:
            linger: seconds that a message waits for others; after ``timeout``, publishes of its key behind it fail.
            max_count: messages per batch.
            max_bytes: bytes per batch.
            max_pending: accepted messages not yet stored; then `Batcher.add` waits.

        Raises:
            InvalidInput: invalid name or number.
            InvalidState: the producer is not open.
        """
        publisher = self._publisher
        publisher.check_open()
        from nsqext.client.producer.batcher import Batcher, BatcherLimits

        limits = BatcherLimits(linger, max_count, max_bytes, max_pending)
        batcher = Batcher(publisher, self._options, self._tasks, topic, limits)
        self._batchers.add(batcher)
        return batcher


Producer.__doc__ = HelpText(Producer.__doc__, producer_settings)  # type: ignore[assignment] # text when it is read
