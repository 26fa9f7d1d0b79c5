"""The transport of kombu: connections and channels."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from kombu.exceptions import ChannelError
from kombu.transport import virtual

import nsqext
from nsqext.errors import (
    ConnectionFailed,
    ConnectionLost,
    DeliveryUnknown,
    InvalidInput,
    InvalidState,
    LookupFailed,
    NotSent,
    NsqError,
    OperationNotSupported,
    PartitionUnavailable,
    PublishFailed,
    RequestTimeout,
    ServerError,
)
from nsqext.integrations.celery.envelope import (
    Binding,
    Exchange,
    QueueSpec,
    due_time,
    encode_message,
    nsq_name,
    topic_of,
)
from nsqext.integrations.celery.nsq_clients import (
    DEFAULT_PREFETCH,
    Deliveries,
    Failed,
    NsqClients,
    QueueConsumer,
    Receive,
)

if TYPE_CHECKING:
    from nsqext.sync.message import Message


def _with_subclasses(base: type[NsqError]) -> Iterator[type[NsqError]]:
    yield base
    for found in base.__subclasses__():
        yield from _with_subclasses(found)


logger: logging.Logger = logging.getLogger("nsqext.celery")

# errors after which kombu connects again and repeats the operation, which may store a publish twice
_UNREACHABLE: tuple[type[NsqError], ...] = (
    ConnectionFailed,
    ConnectionLost,
    DeliveryUnknown,
    LookupFailed,
    PartitionUnavailable,
    PublishFailed,
    RequestTimeout,
    *(refusal for refusal in _with_subclasses(ServerError) if refusal.retryable),
)
_TYPES = ("direct", "fanout", "topic")


class KombuChannel(virtual.Channel):  # type: ignore[misc]
    """A channel of a connection: declares queues, publishes, consumes."""

    QoS: type[Deliveries] = Deliveries
    supports_fanout: bool = True
    do_restore: bool = False
    from_transport_options: tuple[str, ...] = ()
    body_encoding: str | None = None

    def __init__(self, connection: Transport, **options: object) -> None:
        super().__init__(connection, **options)
        self._sources: dict[str, QueueConsumer] = {}
        # queue, callback and no_ack by consumer tag
        self._callbacks: dict[str, tuple[str, Callable[[Any], object], bool]] = {}

    @property
    def clients(self) -> NsqClients:
        return self.connection.clients  # type: ignore[no-any-return]

    @property
    def state(self) -> Any:
        """Exchanges and bindings of the connection; raises NotSent, after which kombu opens another channel."""
        if self.connection is None:
            raise NotSent("the channel is closed", hint="use another channel of the connection")
        return self.connection.state

    # Exchanges and queues

    def exchange_declare(self, exchange: str | None = None, type: str = "direct", **options: Any) -> None:
        if (type or "direct") not in _TYPES:
            raise ChannelError(f"exchange {exchange!r}: NSQ has no exchanges of type {type!r}; use {', '.join(_TYPES)}")
        super().exchange_declare(exchange, type, **options)

    def _exchange(self, name: str) -> Exchange:
        declared = self.state.exchanges.get(name)
        if declared is None:
            return Exchange(name)
        return Exchange(name, declared["type"], bool(declared["durable"]))

    def _queue(self, name: str) -> QueueSpec:
        queues: dict[str, QueueSpec] = self.connection.queues
        return queues.setdefault(name, QueueSpec(name))

    def prepare_queue_arguments(self, arguments: Any, **options: Any) -> Any:
        """Return the arguments of a queue; refuse priorities, which NSQ lacks."""
        if options.get("max_priority"):
            raise ChannelError("NSQ has no priorities; use a queue for each of them")
        return arguments

    def _new_queue(self, queue: str, **options: Any) -> None:
        if (options.get("arguments") or {}).get("x-max-priority"):
            raise ChannelError(f"queue {queue!r}: NSQ has no priorities; use a queue for each of them")
        spec = self._queue(queue)
        spec.transient = bool(options.get("exclusive") or options.get("auto_delete"))
        if not spec.transient:
            self.clients.create(nsq_name(queue), spec.channel)

    def _has_queue(self, queue: str, **_: Any) -> bool:
        spec = self._queue(queue)
        return any(self.clients.exists(topic, spec.channel) for topic in spec.topics)

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        spec, binding = self._queue(queue), Binding(self._exchange(exchange), routing_key or "")
        if binding not in spec.bindings:
            spec.bindings.append(binding)
        self.clients.create(binding.topic, spec.channel)
        self._update_topics(spec)

    def queue_unbind(self, queue: str, exchange: str | None = None, routing_key: str = "", **options: Any) -> None:
        """Remove a binding; its messages are dropped from now on."""
        super().queue_unbind(queue, exchange, routing_key, **options)
        spec = self._queue(queue)
        spec.bindings = [
            one for one in spec.bindings if (one.exchange.name, one.routing_key) != (exchange, routing_key)
        ]
        self._update_topics(spec)

    def _update_topics(self, spec: QueueSpec) -> None:
        source = self._sources.get(spec.name)
        if source is not None:
            source.consumer.topics = tuple(spec.topics)

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **options: Any) -> None:
        """Delete a queue with its messages, unless `if_unused` and it is consumed, or `if_empty` and messages wait."""
        spec = self._queue(queue)
        if if_empty and self._size(queue):
            return
        if if_unused and self._is_consumed(queue):
            return
        self._close_source(queue)
        if self.clients.has_lookup and not spec.transient:  # servers delete a transient queue's channel
            self.clients.delete(spec.topics, spec.channel)
        self.state.queue_bindings_delete(queue)
        self.connection.queues.pop(queue, None)

    def _is_consumed(self, queue: str) -> bool:
        spec = self._queue(queue)
        if spec.transient:
            return queue in self._sources
        return self.clients.has_consumers(spec.topics, spec.channel)

    def _size(self, queue: str) -> int:
        spec = self._queue(queue)
        return 0 if spec.transient else self.clients.waiting(spec.topics, spec.channel)

    def _purge(self, queue: str) -> int:
        spec = self._queue(queue)
        return self.clients.empty(spec.topics, spec.channel)

    # Publishing

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **options: Any) -> None:
        """Publish a message and wait until it is stored; without a bound queue it is dropped, as in AMQP.

        A dropped message is logged, unless it was for an exchange that need not have receivers: of events and replies.
        """
        properties = message["properties"]
        if properties.get("priority"):
            raise OperationNotSupported(
                f"the message has the priority {properties['priority']}, and NSQ has no priorities",
                topic=routing_key,
                hint="use a queue for each of them",
            )
        properties["delivery_info"].update(exchange=exchange, routing_key=routing_key)
        target = self._exchange(exchange)
        topic = topic_of(target, routing_key or "")
        body, headers = encode_message(message, extend=self.clients.extend_support(topic))
        stored = self.clients.publish(topic, body, headers, due_time(message))
        if not (stored or target.has_one_topic):
            logger.warning(
                "a message is dropped, because no queue is bound: exchange %r, routing key %r", exchange, routing_key
            )

    # Consuming

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], object], consumer_tag: str, **options: Any
    ) -> None:
        """Consume a queue; `Transport.drain_events` delivers messages."""
        self._callbacks[consumer_tag] = (queue, callback, no_ack)
        self._consumers.add(consumer_tag)
        source = self._sources.get(queue)
        if source is not None and source.error is not None:
            self._close_source(queue)
        elif source is not None:
            source.consumer.resume()
            return
        source = self._open_source(queue, self.qos.prefetch_count, *self.connection.received(self))
        self._sources[queue] = source

    def _open_source(self, queue: str, prefetch: int, *callbacks: Callable[..., None]) -> QueueConsumer:
        spec = self._queue(queue)
        for topic in spec.topics:
            self.clients.create(topic, spec.channel)
        source = QueueConsumer(self.clients, spec, prefetch, *callbacks)
        source.consumer.start()
        return source

    def basic_cancel(self, consumer_tag: str) -> None:
        """Stop consuming; delivered messages can be acknowledged until the channel is closed.

        A transient queue ends with its last consumer, as in AMQP, unless it has such messages.
        """
        self._consumers.discard(consumer_tag)
        queue, *_ = self._callbacks.pop(consumer_tag, ("",))
        source = self._sources.get(queue)
        if source is None or any(one == queue for one, *_ in self._callbacks.values()):
            return
        if self._queue(queue).transient and not self.qos.holds(source):
            self._close_source(queue)
        else:
            source.consumer.pause()

    def deliver(self, source: QueueConsumer, decoded: dict[str, Any], message: Message) -> None:
        """Call a queue's callback; requeue the message if the queue is not consumed any more.

        A message that waited so long here that the server redelivers it is dropped.
        """
        if message.expired:
            return
        found = [(callback, no_ack) for queue, callback, no_ack in self._callbacks.values() if queue == source.queue]
        if not found:
            with suppress(NsqError):  # the consumer may be closed
                message.requeue()
            return
        callback, no_ack = found[0]
        callback(self._message(decoded, message, source, no_ack=no_ack))

    def consumes(self, source: QueueConsumer) -> bool:
        """Return whether the messages of a source are delivered."""
        consumed = any(queue == source.queue for queue, *_ in self._callbacks.values())
        return consumed and self._sources.get(source.queue) is source

    def _message(self, decoded: dict[str, Any], message: Message, source: QueueConsumer, *, no_ack: bool) -> Any:
        tag = decoded["properties"]["delivery_tag"] = self._next_delivery_tag()
        received = self.Message(decoded, channel=self)
        if no_ack:
            message.finish()
        else:
            self.qos.append(received, tag)
            self.qos.hold(tag, message, source)
        return received

    def basic_get(self, queue: str, no_ack: bool = False, **options: Any) -> Any:
        """Return the next message, or None after `Transport.get_timeout` seconds; raises if its consumer has failed."""
        inbox: SimpleQueue[tuple[dict[str, Any], Message]] = SimpleQueue()
        source = self._open_source(queue, 1, lambda _, decoded, message: inbox.put((decoded, message)))
        source.single = True
        try:
            decoded, message = inbox.get(timeout=self.connection.get_timeout)
        except BaseException as error:  # also a time limit of a task: the source would keep the next message
            source.leave()
            with suppress(Empty, NsqError):
                inbox.get(block=False)[1].requeue()
            source.consumer.close()
            if isinstance(error, Empty):
                if source.error is not None:
                    raise source.error from None
                return None
            raise
        source.consumer.pause()
        received = self._message(decoded, message, source, no_ack=no_ack)
        if no_ack:
            source.consumer.close()
        return received

    def basic_qos(self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False) -> None:
        """Set the number of unacknowledged messages of each queue."""
        self.qos.prefetch_count = prefetch_count
        for source in self._sources.values():
            source.consumer.max_in_flight = prefetch_count or DEFAULT_PREFETCH

    def close(self) -> None:
        """Close the consumers; unacknowledged messages are redelivered at once."""
        if not self.closed:
            for source in self._sources.values():
                source.leave()
            self.qos.restore_unacked()
            for queue in tuple(self._sources):
                self._close_source(queue)
        super().close()

    def _close_source(self, queue: str) -> None:
        source = self._sources.pop(queue, None)
        if source is not None:
            source.leave()
            self.connection.return_undelivered(source)
            source.consumer.close()


class Transport(virtual.Transport):  # type: ignore[misc]
    """A connection of kombu to an NSQ cluster, by lookup.

    Messages arrive in threads of the NSQ clients; `drain_events` delivers them, or Celery's event loop, which a pipe
    wakes.

    Args:
        client: the `kombu.Connection`, whose transport options are settings of nsqext and of `NsqClients`.

    Raises:
        InvalidSetting: an unknown or invalid transport option.
    """

    Channel: Any = KombuChannel
    driver_type: str = "nsq"
    driver_name: str = "nsqext"
    default_port: int = 4161
    address_kind: str = "lookupd"
    #: seconds that `KombuChannel.basic_get` waits, because servers do not report an empty queue
    get_timeout: float = 1.0

    connection_errors: tuple[type[Exception], ...] = (*virtual.Transport.connection_errors, *_UNREACHABLE)
    channel_errors: tuple[type[Exception], ...] = (*virtual.Transport.channel_errors, InvalidInput)
    implements: Any = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(_TYPES), heartbeats=False
    )

    def __init__(self, client: Any, **options: object) -> None:
        super().__init__(client, **options)
        self.queues: dict[str, QueueSpec] = {}
        # channel, source, decoded and received message; without message for a source that has failed
        self._inbox: SimpleQueue[tuple[KombuChannel, QueueConsumer, dict[str, Any], Message | None]] = SimpleQueue()
        self._wake: tuple[int, int] | None = None
        address = f"{client.hostname}:{client.port or self.default_port}"
        addresses = {self.address_kind: address} if client.hostname else {}
        self.clients: NsqClients = NsqClients(addresses, client.transport_options)

    def driver_version(self) -> str:
        return nsqext.__version__

    def establish_connection(self) -> Any:
        """Check that the servers respond.

        Raises:
            NsqError: they do not.
            InvalidState: a new connection would not help: the servers are no lookup service or not trusted; gevent or
                eventlet replaced threads or sockets.
        """
        try:
            self.clients.producer.ping()
        except BaseException as error:
            self.clients.close()
            if isinstance(error, _UNREACHABLE) and not error.retryable:
                raise InvalidState(str(error)) from error  # kombu repeats the operation after all subclasses, too
            raise
        return super().establish_connection()

    def close_connection(self, connection: object) -> None:
        """Close the channels and the NSQ clients, after the publishes in flight."""
        super().close_connection(connection)
        self.clients.close()
        if self._wake is not None:
            for end in self._wake:
                os.close(end)
            self._wake = None

    # Receiving

    def received(self, channel: KombuChannel) -> tuple[Receive, Failed]:
        """Return the functions that a channel's consumers call with each message, and at their failure."""

        def receive(source: QueueConsumer, decoded: dict[str, Any], message: Message | None) -> None:
            self._inbox.put((channel, source, decoded, message))
            wake = self._wake
            if wake is not None:
                with suppress(BlockingIOError):  # a full pipe wakes the loop anyway
                    os.write(wake[1], b".")

        return receive, lambda source: receive(source, {}, None)

    def return_undelivered(self, source: QueueConsumer) -> None:
        """Requeue received messages of a closing consumer, which waits for these answers."""
        for _ in range(self._inbox.qsize()):
            with suppress(Empty):
                item = self._inbox.get(block=False)
                if item[1] is not source:
                    self._inbox.put(item)
                    continue
                message = item[3]
                with suppress(NsqError):
                    if message is not None:
                        message.requeue()

    def drain_events(self, connection: object, timeout: float | None = None) -> None:
        """Deliver the next message; raises TimeoutError after ``timeout`` seconds.

        Raises InvalidState if the consumer of a queue cannot continue, again until the queue is not consumed any more.
        """
        try:
            delivery = self._inbox.get(timeout=timeout) if timeout else self._inbox.get(timeout is None)
        except Empty:
            raise TimeoutError from None
        channel, source, decoded, message = delivery
        if message is not None:
            channel.deliver(source, decoded, message)
        elif source.error is not None and channel.consumes(source):
            self._inbox.put(delivery)
            raise source.error

    def register_with_event_loop(self, connection: object, loop: Any) -> None:
        """Let Celery's event loop deliver messages when the pipe is readable."""
        if self._wake is None:
            self._wake = os.pipe()
            for end in self._wake:
                os.set_blocking(end, False)
        loop.add_reader(self._wake[0], self._deliver_all, connection)
        self._deliver_all(connection)

    def _deliver_all(self, connection: object) -> None:
        if self._wake is not None:
            reading, _ = self._wake
            with suppress(BlockingIOError):
                os.read(reading, 65536)
        for _ in range(self._inbox.qsize()):
            with suppress(TimeoutError):
                self.drain_events(connection, timeout=0)


class DirectTransport(Transport):
    """A connection of kombu to one nsqd of the original NSQ, without lookup.

    Queues are not counted, purged or deleted; nsqd creates the topics.
    """

    default_port: int = 4150
    address_kind: str = "nsqd"
