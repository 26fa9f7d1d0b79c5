"""The producer."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

import anyio

from nsqext.client.producer.batcher import Batcher, BatcherLimits
from nsqext.client.producer.connection_pool import ConnectionPool
from nsqext.client.producer.delivery import PublishAttempt, deliver
from nsqext.client.producer.key_lock import KeyLock
from nsqext.client.producer.options import ProducerOptions
from nsqext.client.producer.publish_many import BatchPublisher
from nsqext.client.producer.request import OutgoingMessage, Single, check_choice, key_bytes, marked_command
from nsqext.client.producer.sender import Sender
from nsqext.client.tasks import BackgroundTasks
from nsqext.client.trace_log import trace_log
from nsqext.errors import InvalidState, NsqError
from nsqext.lookup.shared import Lookup, find_directory

if TYPE_CHECKING:
    from nsqext.client.producer.routing import Target
    from nsqext.types import Receipt

__all__ = ("Producer",)

_LOOK = 0.01
"""Seconds between two looks at what is still under way, while a producer closes."""
_clock = time.monotonic


class Producer:
    """Publishes messages to the leaders of their partitions.

    Use it as an asynchronous context manager, or call `start` and `aclose`, on asyncio or trio. Closing waits for
    publishes in flight, ``options.close_timeout`` seconds at most, and closes the connections. One producer serves any
    number of topics and tasks of one event loop.

    Args:
        lookupd: lookup addresses, ``host:port`` of nsqlookupd's HTTP side; a list, or text with commas. Or a
            `nsqext.Lookup` that others use as well.
        nsqd: nsqd addresses (TCP) to publish to without lookup; fine for the original NSQ.
        options: everything else.

    Raises:
        InvalidSetting: neither or both kinds of addresses, or an address that is none.
    """

    def __init__(
        self,
        lookupd: str | Sequence[str] | Lookup = (),
        *,
        nsqd: str | Sequence[str] = (),
        options: ProducerOptions | None = None,
    ) -> None:
        self._open = False
        self.options: ProducerOptions = options or ProducerOptions()
        self._directory = find_directory(lookupd, nsqd, self.options.lookup)
        self._pool = ConnectionPool(self.options.connection)
        self._sender = Sender(self.options, self._directory, self._pool)
        self._turns = KeyLock()
        self._many = BatchPublisher(self._sender, self._turns)
        self._batchers: WeakSet[Batcher] = WeakSet()
        self._tasks = BackgroundTasks("producer", self._close)
        self._joined = False
        compresses = self.options.compression != "none"
        self._plain_size = min(
            self.options.max_message_size, self.options.compression_min - 1 if compresses else 1 << 62
        )
        """Largest body that is published as it is, whatever the topic."""

    @classmethod
    def from_url(cls, url: str | None = None, **settings: Any) -> Self:
        """Return a producer with settings from keywords, a URL and the environment, in this order.

        Args:
            url: ``nsq://lookupd:4161,lookupd2:4161?timeout=5``; ``NSQEXT_URL`` where it is None.
            settings: see the reference of settings.

        Raises:
            InvalidSetting: an unknown setting, or settings that contradict each other.
        """
        from nsqext.client.from_url import load_producer

        found = load_producer(url, settings)
        return cls(found.lookupd, nsqd=found.nsqd, options=found.options)

    # Opening and closing

    async def start(self) -> Self:
        """Open the producer, as ``async with`` does; `aclose` closes it, in this task or another one.

        Raises:
            InvalidState: it was opened before, or shares a `nsqext.Lookup` that another event loop uses.
        """
        await self._tasks.start()
        try:
            self._directory.join()
        except BaseException:
            await self._tasks.aclose()
            raise
        self._joined = self._open = True
        self._sender.tasks = self._tasks
        for run in (self._pool.run, self._directory.run, self._sender.run):
            self._tasks.start_soon(run)
        return self

    async def aclose(self) -> None:
        """Wait for publishes in flight, ``options.close_timeout`` seconds at most, and close the connections.

        May be called from any task of the event loop, and more than once. Cancellation does not shorten it.

        Raises:
            InvalidState: called from another event loop.
        """
        await self._tasks.aclose()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            self._sender.forget()
            await self._directory.leave()

    async def _finish(self) -> None:
        """Wait until no publish is pending, then abort those that still are after ``options.close_timeout``."""
        with anyio.move_on_after(self.options.close_timeout):
            for batcher in tuple(self._batchers):
                await batcher.end()
            self._open = False
            while self._pool.in_flight or self._sender.running or len(self._turns):  # noqa: ASYNC110 - they end silently
                await anyio.sleep(_LOOK)
        self._open = False
        self._sender.stop()

    def __del__(self) -> None:
        if self._open:
            warnings.warn(f"{type(self).__name__} was not closed", ResourceWarning, source=self, stacklevel=2)
            self._tasks.abandon()

    # Publishing

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
        """Publish a message and wait until it is stored.

        Args:
            topic: name of the topic.
            body: what is published; not empty.
            headers: extend headers, names and values of text; the topic has to support them.
            tag: consumers that ask for this tag get the message first; the topic has to support extend headers.
            trace_id: 0 to 2**64 - 1; the receipt then tells message id, offset and size.
            key: messages of one key go to one partition, and are stored in the order of the calls. On topics with
                extend support they carry it to consumers (`Message.key`), in the header ``##key``.
            partition: the partition; otherwise partitions take turns.
            delay: seconds after which consumers get it; only the original NSQ can do this.

        Returns:
            Where it was stored.

        Raises:
            InvalidInput: something given cannot be right; nothing was sent.
            TopicNotFound: lookup does not know the topic, and knows nodes.
            LookupFailed: no lookup address answers.
            PublishFailed: not stored within ``options.timeout``, although it was tried again.
            DeliveryUnknown: possibly stored.
            ServerError: refused by the server for good.

        When it is cancelled, the message may be stored or not.
        """
        # nearly every publish goes this way, which is as short as it can be made
        if key is None and delay is None:
            target = self._at_hand(topic, body, partition)
            connection = None if target is None else target.node.connection
            if target is not None and connection is not None:
                started = _clock()
                try:
                    if headers is None and tag is None and trace_id is None:
                        command = target.pub(body)
                    else:
                        command = marked_command(target, body, headers, tag, trace_id, self.options.max_message_size)
                    reply = await connection.request(command, started + self.options.timeout)
                except NsqError as error:
                    publication = Single(topic, body, self.options, headers, tag, trace_id)
                    publication.partition = partition
                    return await self._recover(publication, target, error, started)
                if reply == b"OK" and trace_id is None:
                    return target.receipt
                return self._sender.receipt(target, connection, reply, traced=trace_id is not None)
        publication = Single(topic, body, self.options, headers, tag, trace_id, delay)
        return await self._publish_chosen(publication, key, partition)

    async def _publish_chosen(self, publication: Single, key: str | bytes | None, partition: int | None) -> Receipt:
        check_choice(key, partition)
        self._check_open()
        publication.partition = partition
        if key is None:
            return (await deliver(self._sender, publication))[0]
        started = _clock()
        publication.key = key_bytes(key)
        turn = (publication.topic, publication.key)
        if not self._turns.try_enter(turn):
            await self._turns.enter_all([turn], [], self.options.timeout)
        try:
            return (await deliver(self._sender, publication, started))[0]
        finally:
            self._turns.leave(turn)

    def _at_hand(self, topic: str, body: bytes, partition: int | None) -> Target | None:
        """Return the target of a message without key, where nothing stands against sending it at once."""
        route = self._sender.routes.get(topic)
        if (
            route is None
            or not route.targets
            or route.view is not self._directory.peek(topic, "w")
            or not self._open
            or self._tasks.running_loop() is not self._tasks.loop
            or type(body) is not bytes
            or not 0 < len(body) <= self._plain_size
            or trace_log.active
        ):
            return None
        if partition is None:
            target = route.next()
        elif type(partition) is int and partition in route.partitions:
            target = route.at(partition)
        else:
            return None
        connection = target.node.connection
        if connection is None or connection.protocol.error is not None or target.rest_until:
            if partition is None:
                route.give_back()
            return None
        return target

    async def _recover(self, publication: Single, target: Target, error: NsqError, started: float) -> Receipt:
        """Go on with a publish whose first attempt failed."""
        delivery = PublishAttempt(self._sender, publication, started)
        error.at(topic=target.topic, partition=target.partition, node=target.node.node)
        return (await delivery.run(self._sender.routes.get(target.topic), target, error))[0]

    async def publish_many(
        self,
        topic: str,
        messages: Iterable[bytes | OutgoingMessage],
        *,
        key: str | bytes | None = None,
        partition: int | None = None,
    ) -> list[Receipt]:
        """Publish messages in batches, one for each partition concerned (more where a batch would grow too large).

        Messages without key go to one partition, in their order, unless they are too many for one batch. A batch is
        stored as a whole or not at all. Where a batch of a key or of a chosen partition fails, the ones behind it are
        not tried.

        Args:
            topic: name of the topic.
            messages: bodies, or `OutgoingMessage` objects for messages with headers, tag, trace id or key.
            key: for all messages that have none of their own.
            partition: for all messages; not together with keys.

        Returns:
            A receipt for each message, in order.

        Raises:
            InvalidInput: a message cannot be right, its ``index`` tells which; nothing was sent.
            BatchFailed: not all were stored; its ``outcomes`` tell for each message.
            TopicNotFound: lookup does not know the topic, and knows nodes.
            LookupFailed: no lookup address answers.
            PublishFailed: lookup knew of no node at all for ``options.timeout``.

        When it is cancelled, any of the batches may be stored or not.
        """
        self._check_open()
        return await self._many.publish(topic, messages, key, partition)

    def batcher(
        self,
        topic: str,
        *,
        linger: float = 0.005,
        max_count: int = 1000,
        max_bytes: int = 1 << 20,
        max_pending: int = 10_000,
    ) -> Batcher:
        """Return a batcher: it takes messages one by one and publishes them in batches, in the background.

        Use it as an asynchronous context manager inside the producer's; see `Batcher`.

        Args:
            topic: name of the topic.
            linger: seconds that a message waits for others to join it.
            max_count: messages of one batch.
            max_bytes: bytes of one batch.
            max_pending: messages that are taken and not stored yet; `Batcher.add` waits beyond.

        Raises:
            InvalidInput: a name or a number that cannot be right.
            InvalidState: the producer is not open.
        """
        self._check_open()
        batcher = Batcher(self, self._tasks.start_soon, topic, BatcherLimits(linger, max_count, max_bytes, max_pending))
        self._batchers.add(batcher)
        return batcher

    def _check_open(self) -> None:
        self._tasks.check()
        if not self._open:
            raise InvalidState("the producer is closed", hint="make a new one")
