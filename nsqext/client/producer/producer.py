"""The producer."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Self, Unpack
from weakref import WeakSet

import anyio
from anyio.lowlevel import checkpoint
from attrs import asdict

from nsqext.client.events import ClientEvent, ClientEvents
from nsqext.client.middleware import Middleware, Publishing, check_middleware, send_with
from nsqext.client.producer.batch_publisher import BatchCall, BatchPublisher
from nsqext.client.producer.connection_pool import ConnectionPool
from nsqext.client.producer.delay import cancellation, check_for_topic, check_way, delayed_body
from nsqext.client.producer.keys import KeyGroups, KeyLock
from nsqext.client.producer.options import ProducerOptions, ProducerSettings
from nsqext.client.producer.request import (
    MessageRequest,
    OutgoingMessage,
    check_choice,
    encode_parts,
    key_bytes,
    keys_of,
    message_command,
    read_receipt,
)
from nsqext.client.producer.route import RouteTable
from nsqext.client.producer.sender import ProducerStatistics, PublishAttempt, Sender, out_of_step
from nsqext.client.settings import producer_schema
from nsqext.client.tasks import BackgroundTasks
from nsqext.client.trace_log import trace_log
from nsqext.errors import InvalidBody, InvalidSetting, InvalidState, NsqError, PartitionUnavailable, ProtocolError
from nsqext.lookup.lookup import Lookup, metadata_cache, values_of
from nsqext.protocol.client.body_compression import compresses
from nsqext.settings import build

if TYPE_CHECKING:
    from nsqext.client.producer.batcher import Batcher
    from nsqext.client.producer.request import TopicKey
    from nsqext.client.producer.route import Route, Target
    from nsqext.types import Address, Receipt, TopicMeta

_CLOSE_POLL = 0.01  # seconds between two checks for pending publishes while a producer closes
_IDLE_TURNS = 3
"""Turns of the event loop without a pending publish before a producer closes.

A publish whose request has failed is not in flight until its task runs and begins the next attempt.
"""
_clock = time.monotonic


class Producer:
    """Publishes messages to the leaders of their partitions.

    Use it as an asynchronous context manager, or call `start` and `aclose`, on asyncio or trio. Closing waits for
    publishes in flight, ``close_timeout`` seconds at most, and closes the connections. One producer serves any
    number of topics and tasks of one event loop.

    Args:
        lookupd: lookup addresses, ``host:port`` of nsqlookupd's HTTP side: a list, or text with commas. Or a URL with
            addresses and settings: ``nsq://lookupd:4161?timeout=5``. Or a `nsqext.Lookup` that is shared with other
            clients.
        nsqd: nsqd addresses (TCP) to publish to without lookup; fine for the original NSQ.
        env: prefix of the environment variables with further settings. Without any address, they are read from
            ``NSQEXT_URL``, ``NSQEXT_LOOKUPD`` and so on.
        middleware: around every publish, also those of a `Batcher`; the first one is the outermost.
        settings: see `ProducerSettings`.

    Raises:
        InvalidSetting: no address, both kinds of addresses, or an invalid value.
        UnknownSetting: an unknown setting; the error suggests the right one.
    """

    _open = False

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
        self._pool = ConnectionPool(self._options.connection, self._events, self._tasks if over_http else None)
        self._routes = RouteTable(self._options, self._metadata, self._pool, self._events)
        settles = self._options.on_unknown == "settle"
        if settles and not self._metadata.has_lookup:
            raise InvalidSetting("on_unknown='settle' needs lookupd, which names the leaders whose logs are searched")
        self._sender = Sender(self._options, self._routes, self._pool)
        if settles:
            from nsqext.client.producer.settling import Settler

            self._sender.settler = Settler(self._options, self._metadata)
        self._counters = self._sender.counters
        self._key_lock = KeyLock()
        self._batches = BatchPublisher(self._sender, self._key_lock)
        self._key_groups = KeyGroups(self._sender, self._key_lock, self._tasks.start_soon)
        self._batch_calls = 0
        self._batchers: WeakSet[Batcher] = WeakSet()
        self._joined = False
        largest = self._options.max_message_size - 1  # logs of extend topics need one more byte
        if compresses(self._options.compression):
            largest = min(largest, self._options.compression_min - 1)
        self._plain_size = 0 if settles else largest
        """Largest body that is never compressed and fits into any topic; 0 where every message needs a trace id."""
        around = check_middleware(middleware)
        self._around = send_with(around, self._send)  # publishes through the middleware; None without any
        for one in around:
            one.attach(self)

    @property
    def settings(self) -> Mapping[str, object]:
        """The values of all settings by name, defaults included; secrets are ``***``."""
        return producer_schema().effective(self._options)

    # Opening and closing

    async def start(self) -> Self:
        """Open the producer, as ``async with`` does; `aclose` closes it, in this task or another one.

        Raises:
            InvalidState: it was opened before, or shares a `nsqext.Lookup` that another event loop uses.
            LookupFailed: with ``connect``, no lookup node responds.
            NsqError: with ``connect``, no node can be reached; the error of one of them.
        """
        await self._tasks.start()
        try:
            self._tasks.check()  # `aclose` may have ended it meanwhile, and nothing would release the metadata
            self._metadata.acquire()
            self._joined = self._open = True
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
        """Wait for publishes in flight, ``close_timeout`` seconds at most, and close the connections.

        May be called from any task of the event loop, and more than once. Cancellation does not shorten it.

        Raises:
            InvalidState: called from another event loop.
        """
        await self._tasks.aclose()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _close(self) -> None:
        """Close in order; runs in the host of the background tasks."""
        if not self._joined:
            return
        try:
            await self._finish()
            await self._pool.aclose()
        finally:
            self._open = False
            self._routes.close()
            await self._metadata.release()

    async def _finish(self) -> None:
        """Wait until no publish is pending, then abort those that still are after ``close_timeout``."""
        deadline = anyio.current_time() + self._options.close_timeout
        with anyio.CancelScope(deadline=deadline):
            for batcher in tuple(self._batchers):
                await batcher.end()
        self._open = False
        with anyio.CancelScope(deadline=deadline):
            await self._until_idle()
        self._sender.close()
        # cancelled publishes report their outcomes before metadata and connections are closed
        while self._sender.attempts:  # noqa: ASYNC110 - no event
            await anyio.sleep(_CLOSE_POLL)

    async def _until_idle(self) -> None:
        turns = 0
        while turns < _IDLE_TURNS:
            if self._pool.in_flight or self._sender.attempts or self._batch_calls or len(self._key_lock):
                turns = 0
                await anyio.sleep(_CLOSE_POLL)
            else:
                turns += 1
                await checkpoint()

    def __del__(self) -> None:
        if self._open:
            warnings.warn(f"{type(self).__name__} was not closed", ResourceWarning, source=self, stacklevel=2)
            self._tasks.abandon()

    # Health

    async def ping(self) -> None:
        """Check that lookup responds, and connect to every node that it lists.

        Connections to nodes that no published topic needs are closed again later.

        Raises:
            LookupFailed: no lookup node returned a usable response.
            PartitionUnavailable: lookup knows no node.
            NsqError: a node cannot be reached.
            InvalidState: the producer is not open.
        """
        self._check_open()
        await self._connect_all(every=True)

    async def _connect_all(self, *, every: bool) -> None:
        """Connect to all nodes; raise if none can be reached, or with ``every``, if any cannot."""
        nodes: Sequence[Address] = self._metadata.addresses
        if self._metadata.has_lookup:
            listed = await self._sender.wait_for_lookup(self._metadata.nodes, retry=not every)
            nodes = [self._pool.node(node.tcp, node.http).address for node in listed]
            if not nodes:
                raise PartitionUnavailable(
                    "the lookup service knows no node", hint="start an nsqd that registers with it"
                )
        errors = await self._pool.connect_all(nodes)
        if errors and (every or len(errors) == len(nodes)):
            raise errors[0]

    async def meta(self, topic: str) -> TopicMeta:
        """Return the number of partitions of a topic, and whether it is ordered and supports extend headers.

        All are 0 or False for a topic of the original NSQ, which may not exist yet. Lookup is asked for a topic that
        was not used before.

        Raises:
            TopicNotFound: lookup does not know the topic, and knows redesigned nodes.
            PublishFailed: lookup knew no node within ``timeout``.
            NsqError: as for `publish`.
        """
        self._check_open()
        return (await self._sender.wait_for_route(topic, _clock())).view.meta

    def statistics(self) -> ProducerStatistics:
        """Return the statistics of this producer; costs nothing per message, and may be called at any time."""
        return ProducerStatistics(
            connections=self._pool.connections,
            pending=self._pool.in_flight,
            **asdict(self._counters),
            lookup_age=self._metadata.answer_age,
            lookup_failures=self._metadata.failures,
        )

    def on_event(self, callback: Callable[[ClientEvent], object]) -> Callable[[ClientEvent], object]:
        """Decorator: call a function when a node is connected or disconnected, or the leader of a partition moves.

        It is called in the event loop and must not block; its errors are logged. A connection that ended while nothing
        was published is reported within a second.
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
    ) -> Receipt:
        """Publish a message and wait until it is stored.

        Args:
            topic: name of the topic.
            body: the body; not empty.
            headers: extend headers, names and values of text; the topic has to support them.
            tag: tag for dispatch: consumers with this tag receive the message first; the topic has to support extend
                headers.
            trace_id: 0 to 2**64 - 1; the receipt then has message id, offset and size.
            key: messages with the same key are stored in one partition, in the order of the calls; text, bytes, or a
                number, which stands for its decimal digits. On topics with extend support consumers receive it
                (`Message.key`), in the header ``##key``.
            partition: the partition; otherwise partitions are used in turn.
            delay: seconds after which handlers receive it. The original NSQ keeps it, without headers. Consumers of the
                redesigned NSQ requeue it until then; its topic needs extend headers and must not be ordered.
            via: overrides the setting ``delay_via``. With ``relay``, the receipt is that of ``delay_topic``.
            identity: identifies a message that a relay delays, for `cancel_delayed`; of several messages with one
                identity, the relay publishes the first.

        Returns:
            The receipt, with partition and node.

        Raises:
            InvalidInput: an argument is not valid; nothing was sent.
            TopicNotFound: lookup does not know the topic, and knows nodes.
            TopicNotReady: the topic has no channel yet, so that lookup does not offer it to producers.
            LookupFailed: no lookup node responds, for ``lookup_timeout`` where none ever did.
            PublishFailed: not stored within ``timeout``, with retries.
            DeliveryUnknown: possibly stored.
            ServerError: the server rejected it permanently.
            InvalidState: the producer is not open, or another event loop opened it.

        When it is cancelled, the message may be stored or not.
        """
        # the fast path of nearly every publish: one coroutine, no request object
        data: bytes | None = None
        turn: TopicKey | None = None
        plain = self._around is None and delay is None and via is None and identity is None
        ready = plain and self._tasks.in_event_loop()
        target = self._ready_target(topic, body, partition, key) if ready else None
        connection = None if target is None else target.node.connection
        if key is not None and target is not None:
            data = key_bytes(key)
            turn = (topic, data)
            if not self._key_lock.try_enter(turn):
                target = None
        if target is not None and connection is not None:
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
                    request = MessageRequest(
                        self._routes.topic_options.of(topic), topic, message, key=data, partition=partition
                    )
                    attempt = PublishAttempt(self._sender, request, started)
                    return (await attempt.run(self._routes.by_topic.get(topic), target, request.refined(error)))[0]
                counters = self._counters
                if trace_id is None and response == b"OK":
                    receipt = target.receipt  # as `read_receipt`, without a call: 1 % of what a publish costs
                else:
                    try:
                        receipt = read_receipt(target, response, trace_id)
                    except ProtocolError as error:
                        counters.unknown += 1
                        raise out_of_step(target, connection, error) from error
                counters.stored += 1
                counters.bytes_sent += len(command)
                return receipt
            finally:
                if turn is not None:
                    self._key_lock.leave(turn)
        message = OutgoingMessage(body, headers, tag, trace_id, key)
        publishing = Publishing(
            topic, [message], batch=False, partition=partition, delay=delay, via=via, identity=identity
        )
        return await self._publish_one(publishing) if self._around is None else (await self._around(publishing))[0]

    def _ready_target(
        self, topic: str, body: bytes, partition: int | None, key: str | bytes | int | None
    ) -> Target | None:
        """Return the target of a message if it can be sent immediately; otherwise None, for the slow path."""
        route = self._routes.by_topic.get(topic)
        if (
            route is None
            or not route.targets
            or route.view is not self._metadata.cached(topic, "w")
            or not self._open
            or type(body) is not bytes
            or not 0 < len(body) <= self._plain_size
            or trace_log.active
        ):
            return None
        if key is not None:
            found = route.partitions.get(self._partition_of(route, key)) if partition is None else None
            if found is None:
                return None
            route.used = True
            target = found
        elif partition is None:
            target = route.next()
        elif type(partition) is int and partition in route.partitions:
            target = route.at(partition)
        else:
            return None
        connection = target.node.connection
        if connection is None or connection.error is not None or target.rest_until:
            if partition is None and key is None:
                route.give_back()
            return None
        return target

    def _partition_of(self, route: Route, key: str | bytes | int) -> int:
        """Return the partition of a key; -1 if the slow path has to raise an error."""
        try:
            return route.partition_of(key_bytes(key), self._routes.key_hash)
        except NsqError:
            return -1

    async def _publish_one(self, publishing: Publishing) -> Receipt:
        """Publish a message to its topic, or to that of the relays."""
        topic, partition, delay = publishing.topic, publishing.partition, publishing.delay
        message = publishing.messages[0]
        way = self._options.delay_via if publishing.via is None else publishing.via
        check_way(way, delay, publishing.identity)
        if not delay or way == "consumer":
            return await self._publish_slowly(topic, message, partition, delay, publishing.entered)
        check_choice(message.key, partition)
        body = delayed_body(publishing, delay)
        check_for_topic(self._options, await self.meta(topic), publishing)
        return await self._publish_slowly(self._options.delay_topic, OutgoingMessage(body))

    async def cancel_delayed(self, identity: str) -> Receipt:
        """Ask the relays not to publish a delayed message; it has no effect on one that was published.

        Args:
            identity: the identity that was given to `publish`; the message may be published later than this call.

        Raises:
            InvalidInput: it is not an identity; nothing was sent.
            NsqError: as for `publish`.
        """
        return await self._publish_slowly(self._options.delay_topic, OutgoingMessage(cancellation(identity)))

    async def _publish_slowly(
        self,
        topic: str,
        message: OutgoingMessage,
        partition: int | None = None,
        delay: float | None = None,
        entered: Collection[TopicKey] = (),
    ) -> Receipt:
        """Publish a message that needs more than a ready connection: a check, a lookup, a connection, or a lock."""
        started = _clock()
        key = message.key
        check_choice(key, partition)
        self._check_open()
        options = self._routes.topic_options.of(topic)
        if key is None:
            request = MessageRequest(options, topic, message, partition=partition, delay=delay)
            request.check()
            return (await self._sender.publish(request, started))[0]
        turn = (topic, key_bytes(key))
        request = MessageRequest(options, topic, message, key=turn[1], delay=delay)
        if topic not in self._routes.by_topic:
            request.check()
        if turn in entered:
            return (await self._sender.publish(request, started))[0]
        return await self._key_groups.publish(request, turn, started)

    async def publish_many(
        self,
        topic: str,
        messages: Iterable[bytes | OutgoingMessage],
        *,
        key: str | bytes | int | None = None,
        partition: int | None = None,
    ) -> list[Receipt]:
        """Publish messages in batches, one for each partition concerned (more where a batch would be too large).

        Messages without key are stored in one partition, in order, unless they are too many for one batch. A batch is
        stored as a whole or not at all. Where a batch of a key or of a chosen partition fails, later ones of the
        partition are not sent.

        Args:
            topic: name of the topic.
            messages: bodies, or `OutgoingMessage` objects for messages with headers, tag, trace id or key.
            key: for all messages without a key of their own.
            partition: for all messages; not together with keys.

        Returns:
            A receipt for each message, in order.

        Raises:
            InvalidInput: a message is invalid, see ``index``; nothing was sent.
            BatchFailed: not all messages were stored; see ``outcomes``.
            NsqError: nothing was sent: TopicNotFound, TopicNotReady, LookupFailed and InvalidState as for `publish`,
                PublishFailed if lookup knew no node at all for ``timeout``.

        When it is cancelled, any of the batches may be stored or not.
        """
        listed = messages if type(messages) is list else _listed(messages, topic)
        return await self._publish_listed(BatchCall(topic, listed, key, partition))

    async def _publish_batch(self, call: BatchCall) -> list[Receipt]:
        self._check_open()
        self._batch_calls += 1
        try:
            return await self._batches.publish(call)
        finally:
            self._batch_calls -= 1

    async def _publish_listed(self, call: BatchCall) -> list[Receipt]:
        """Publish a batch through the middleware."""
        if self._around is None:
            return await self._publish_batch(call)
        given = [one if isinstance(one, OutgoingMessage) else OutgoingMessage(one) for one in call.messages]
        publishing = Publishing(
            call.topic, given, batch=True, key=call.key, partition=call.partition, entered=call.entered
        )
        return list(await self._around(publishing))

    async def _send(self, publishing: Publishing) -> Sequence[Receipt]:
        """Publish what the middleware passes on."""
        if not publishing.on_topic:
            return await self._send_prepared(publishing)
        topic = publishing.topic
        route = self._routes.current(topic)
        if route is not None:
            for call in publishing.on_topic:
                call(route.view.meta)
            return await self._send_prepared(publishing)
        own = keys_of(publishing.messages, publishing.key, publishing.partition)
        keys = {(topic, key) for key in own}.difference(publishing.entered)
        place = self._key_lock.queue(keys)  # before the wait for lookup
        try:
            meta = await self.meta(topic)
            for call in publishing.on_topic:
                call(meta)
            await place.enter(self._options.timeout)
            publishing.entered = {*publishing.entered, *keys}
            return await self._send_prepared(publishing)
        finally:
            place.leave()

    async def _send_prepared(self, publishing: Publishing) -> Sequence[Receipt]:
        if publishing.batch:
            key, partition, entered = publishing.key, publishing.partition, publishing.entered
            call = BatchCall(publishing.topic, publishing.messages, key, partition, entered)
            publishing.receipts = await self._publish_batch(call)
        else:
            publishing.receipts = (await self._publish_one(publishing),)
        return publishing.receipts

    def batcher(
        self,
        topic: str,
        *,
        linger: float = 0.005,
        max_count: int = 1000,
        max_bytes: int = 1 << 20,
        max_pending: int = 10_000,
    ) -> Batcher:
        """Return a batcher, which collects single messages and publishes them in batches in the background.

        Use it as an asynchronous context manager inside the producer's; see `Batcher`.

        Args:
            topic: name of the topic.
            linger: seconds that a message waits for others to join it.
            max_count: messages of one batch.
            max_bytes: bytes of one batch.
            max_pending: messages that are accepted and not stored yet; `Batcher.add` waits beyond.

        Raises:
            InvalidInput: a name or a number that is not valid.
            InvalidState: the producer is not open.
        """
        self._check_open()
        from nsqext.client.producer.batcher import Batcher, BatcherLimits

        limits = BatcherLimits(linger, max_count, max_bytes, max_pending)
        batcher = Batcher(self._publish_listed, self._key_lock, self._options, self._tasks.start_soon, topic, limits)
        self._batchers.add(batcher)
        return batcher

    def _check_open(self) -> None:
        if not self._open or not self._tasks.in_event_loop():
            self._tasks.check()
            raise InvalidState("the producer is closed", hint="create a new one")


def _listed(messages: Iterable[bytes | OutgoingMessage], topic: str) -> Sequence[bytes | OutgoingMessage]:
    if isinstance(messages, (bytes, bytearray, str)):
        raise InvalidBody("publish_many needs a list of bodies, not one body", hint="use publish", topic=topic)
    if not isinstance(messages, Iterable):
        raise InvalidBody(f"publish_many needs a list of bodies, not {type(messages).__name__}", topic=topic)
    return messages if isinstance(messages, Sequence) else list(messages)
