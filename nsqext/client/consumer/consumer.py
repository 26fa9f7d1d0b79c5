"""The consumer."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

from nsqext.arguments import check_handler_function, check_time
from nsqext.client.consumer.handlers.batches import BatchHandler, BatchLimits, MessageBatch, MessageBatches
from nsqext.client.consumer.handlers.workers import MessageHandler
from nsqext.client.consumer.options import ConsumerOptions, ConsumerSettings
from nsqext.client.consumer.session import ConsumerSession
from nsqext.client.consumer.subscriptions.assignment import SubscriptionSpec
from nsqext.client.consumer.subscriptions.topics import TopicSelection
from nsqext.client.consumer.typed.parameters import message_handler
from nsqext.client.middleware import Middleware, check_middleware, surround_batch_handler, surround_handler
from nsqext.client.settings import connection_settings, consumer_schema, settings_for
from nsqext.client.tasks import run_blocking, stop_on_signals, takes_signals
from nsqext.errors import InvalidSetting, InvalidState
from nsqext.lookup.lookup import Lookup, metadata_cache, share_lookup, values_of
from nsqext.protocol.names import check_channel
from nsqext.settings import build

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from types import TracebackType

    from nsqext.client.consumer.handlers.dead_letter import DeadLetterTopic
    from nsqext.client.consumer.handlers.workers import Handler
    from nsqext.client.consumer.message import Message
    from nsqext.client.consumer.position import Position
    from nsqext.client.consumer.statistics import ConsumerConnection, ConsumerStatistics
    from nsqext.client.consumer.subscriptions.backoff import Backoff
    from nsqext.client.events import ClientEvent
    from nsqext.settings import Given

__all__ = ("Consumer",)

logger: logging.Logger = logging.getLogger("nsqext.consumer")

H = TypeVar("H", bound=Callable[..., Awaitable[object]])
B = TypeVar("B", bound=Callable[[MessageBatch], Awaitable[object]])


class Consumer:
    """Consumes one or several topics through a channel, from the leaders of all partitions, on asyncio and trio.

    With a handler: `run` it, or `serve` it in an event loop, or `start` it and `aclose` it later. Without one: open it
    with ``async with`` (or `start`) and iterate over it.

    Several topics share ``max_in_flight``, the handlers and the backoff. Those that match a pattern are consumed as
    soon as the lookup service lists them, within ``lookup_poll_interval``, and left when they are deleted.

    Args:
        topics: name of the topic; or a pattern, where ``*`` stands for any characters and ``?`` for one (``orders.*``);
            or a sequence of both. Patterns need ``lookupd``, and do not match the topic of ``dead_letter``.
        channel: name of the channel, the same for all topics.
        lookupd: lookup addresses, ``host:port`` of nsqlookupd's HTTP side: a list, or text with commas. Or a URL with
            addresses and settings: ``nsq://lookupd:4161?max_in_flight=50``. Or a `nsqext.Lookup` that is shared with
            other clients.
        nsqd: nsqd addresses (TCP) to consume from without lookup; fine for the original NSQ.
        env: prefix of the environment variables with further settings. Without any address, they are read from
            ``NSQEXT_URL``, ``NSQEXT_LOOKUPD`` and so on.
        middleware: around every call of the handler, of messages or batches; the first one is the outermost. Iteration
            is not surrounded.
        settings: see `ConsumerSettings`.

    Raises:
        InvalidName: a topic, pattern, channel or tag that servers refuse.
        InvalidSetting: no address, both kinds of addresses, an invalid value, or a setting for a single topic.
        UnknownSetting: an unknown setting; the error suggests the right one.
    """

    def __init__(
        self,
        topics: str | Sequence[str],
        channel: str,
        lookupd: str | Sequence[str] | Lookup = (),
        *,
        nsqd: str | Sequence[str] = (),
        env: str | None = None,
        middleware: Sequence[Middleware] = (),
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        self.channel: str = check_channel(channel)
        schema = consumer_schema()
        given = schema.collect(lookupd, nsqd, env, settings)
        self._options = build(ConsumerOptions, schema.own, values_of(given))
        self._handler: MessageHandler | BatchHandler | None = None
        if isinstance(self._options.failure.dead_letter, str):
            given = share_lookup(given)  # with the producer of dead letters
        self._metadata = metadata_cache(given, self._options.lookup)
        self._middleware = check_middleware(middleware)
        self._session = ConsumerSession(
            self._select(topics),
            SubscriptionSpec(self.channel, self._options),
            self._metadata,
            self._dead_letter_topic(given),
        )
        self.backoff: Backoff = self._session.group.backoff
        """The backoff of the consumer, read-only: its level increases while handlers fail."""
        for one in self._middleware:
            one.attach(self)

    @property
    def settings(self) -> Mapping[str, object]:
        """The values of all settings by name, defaults included; secrets are ``***``."""
        return consumer_schema().effective(self._options)

    @property
    def tag(self) -> str | None:
        """The tag of the messages that it receives; None for all."""
        return self._options.tag

    def _select(self, topics: str | Sequence[str]) -> TopicSelection:
        options, dead_letter = self._options, self._options.failure.dead_letter
        selection = TopicSelection(topics, dead_letter if isinstance(dead_letter, str) else None)
        if selection.patterns and not self._metadata.has_lookup:
            raise InvalidSetting(
                f"the pattern {selection.patterns[0]!r} needs a list of topics", hint="give lookupd=... instead of nsqd"
            )
        if not selection.single and (options.partitions is not None or isinstance(options.start, Mapping)):
            raise InvalidSetting(
                "partitions are chosen, and there are several topics", hint="make a consumer for each such topic"
            )
        return selection

    @property
    def topics(self) -> tuple[str, ...]:
        """The names and patterns of the topics; may be changed at any time.

        After ``consumer.topics = "orders.*"``, topics that are not selected any more are left: they deliver no further
        messages, and their connections are closed when the messages in flight are answered, or after
        ``close_timeout``; unanswered messages are delivered again.

        Raises:
            InvalidName, InvalidSetting: as for the class; nothing is changed.
        """
        return self._session.topics.selection.given

    @topics.setter
    def topics(self, topics: str | Sequence[str]) -> None:
        self._session.topics.select(self._select(topics))

    @property
    def _name(self) -> str:
        return str(self._session.topics.selection)

    def _dead_letter_topic(self, given: Given) -> DeadLetterTopic | None:
        topic = self._options.failure.dead_letter
        if not isinstance(topic, str):
            return None
        # a consumer without dead letters does not import the producer's modules
        from nsqext.client.consumer.handlers.dead_letter import DeadLetterTopic
        from nsqext.client.producer.producer import Producer

        connection = settings_for(connection_settings(), given.values)
        return DeadLetterTopic(topic, self.channel, Producer(given.lookupd, nsqd=given.nsqd, **connection))

    # Handlers

    @overload
    def handler(self, function: H, /) -> H: ...

    @overload
    def handler(self, /, *, auto_finish: bool = True) -> Callable[[H], H]: ...

    def handler(self, function: H | None = None, /, *, auto_finish: bool = True) -> H | Callable[[H], H]:
        """Decorator: register a coroutine function as the handler of messages.

        It receives the message, or the values that its annotations select: ``async def bill(order: Order)`` receives
        the body decoded as an ``Order``; see `nsqext.app` for further parameters. A message that cannot be decoded is
        sent to the dead letters, or requeued with the longest delay if ``max_attempts`` sets no dead letters.

        When it returns, the message is finished unless it was answered before; when it raises, the message is requeued
        with a delay that grows with its attempts, and the consumer slows down (the settings ``requeue_delay`` and
        ``backoff``). Raise `Finish`, `Requeue` or `Reject` for another outcome.

        Args:
            function: the coroutine function.
            auto_finish: whether a message is finished when the handler returns. Otherwise any task of the program (with
                `nsqext.sync` any thread) finishes or requeues it later. Until then it is in flight: it counts towards
                ``max_in_flight``, it is touched as long as its server allows (``max_msg_timeout``, 15 minutes by
                default; afterwards it is delivered again), and a consumer that closes waits for it.

        Raises:
            InvalidSetting: the function is not a coroutine function, a parameter has no known source, or the consumer
                has a handler already.
        """

        def register(function: H) -> H:
            self._check_handler(function)
            self._handler = MessageHandler(self._surrounded(function), auto_finish)
            return function

        return register if function is None else register(function)

    def batch_handler(self, *, max_count: int = 500, max_wait: float = 0.2) -> Callable[[B], B]:
        """Decorator: register a handler of batches, of which ``concurrency`` run at the same time.

        When it returns, the messages that it did not answer are finished. When it raises, each of them is treated as a
        message whose handler raised: requeued with a delay, or sent to the dead letters after too many attempts;
        `Finish`, `Requeue` and `Reject` decide about all of them.

        Args:
            max_count: messages of a batch, at most; see `batches`.
            max_wait: seconds that the first message of a batch waits for further ones.

        Raises:
            InvalidSetting: the function is not a coroutine function, the consumer has a handler already, a limit is
                invalid, or the options require the order of keys.
        """
        limits = self._batch_limits(max_count, max_wait)

        def register(function: B) -> B:
            self._check_handler(function)
            self._handler = BatchHandler(surround_batch_handler(self._middleware, function, self.channel), limits)
            return function

        return register

    def _surrounded(self, function: Callable[..., Awaitable[object]]) -> Handler:
        return surround_handler(self._middleware, message_handler(function, self._options.failure), self.channel)

    def _check_handler(self, function: object) -> None:
        check_handler_function(function)
        if self._handler is not None:
            raise InvalidSetting("the consumer has a handler already", topic=self._name)

    def _batch_limits(self, max_count: int, max_wait: float) -> BatchLimits:
        if self._options.lanes is not None:
            raise InvalidSetting(
                "batches do not keep the order of keys",
                topic=self._name,
                hint="leave out key and dispatch='key_failover', or use a handler of single messages",
            )
        return BatchLimits(max_count, max_wait)

    # Opening and closing

    def run(
        self,
        *,
        signals: bool | None = None,
        backend: str = "asyncio",
        backend_options: dict[str, Any] | None = None,
    ) -> None:
        """Run `serve` in a new event loop; return when it has drained and closed.

        Args:
            signals: see `serve`.
            backend: ``asyncio`` or ``trio``.
            backend_options: see `anyio.run`, for example ``{"use_uvloop": True}``.

        Raises:
            InvalidState: called in a running event loop; use `serve` there.
            NsqError: as for `serve`.
        """
        run_blocking("consumer", partial(self.serve, signals=signals), backend, backend_options)

    async def serve(self, *, signals: bool | None = None) -> None:
        """Consume with the handler until cancelled, until SIGTERM or SIGINT, or until `stop`; then drain and close.

        Args:
            signals: whether SIGTERM and SIGINT stop it. By default True in the main thread of a program without a
                handler for SIGTERM; a web server keeps its handler. A second after the first signal both have their
                default effect again.

        Raises:
            InvalidState: there is no handler, or the consumer was opened before.
            LookupFailed: no lookup node returned a usable response within ``lookup_timeout``, or an address is
                not that of nsqlookupd.
            ProtocolError: none of the addresses is that of an nsqd.
            NegotiationFailed: no node grants the TLS or compression of the options.
            ServerError: the server permanently refuses the subscription.

        On cancellation, running handlers have ``close_timeout`` seconds to end; then they are cancelled and
        their messages are requeued.
        """
        if self._handler is None:
            raise InvalidState("the consumer has no handler", hint="decorate a function with @consumer.handler")
        await self._start(*([self._stop_on_signals] if takes_signals(signals) else []))
        await self.wait()

    async def wait(self) -> None:
        """After `start`: wait until the consumer was stopped or cannot continue; then drain and close.

        Raises:
            InvalidState: it was not started, or another event loop opened it.
            NsqError: the consumer cannot continue.

        Cancellation drains and closes it.
        """
        await self._session.wait()

    async def start(self) -> Self:
        """Open the consumer, as ``async with`` does; `aclose` closes it, in this task or another one.

        Returns when all partitions are subscribed, or after ``start_timeout``; subscribing continues in the
        background then. If there is a handler, it consumes in the background. Signals are left to the program.

        Raises:
            InvalidState: it was opened before, or shares a `nsqext.Lookup` that another event loop uses.
            NsqError: it cannot start, as for `serve`.
        """
        await self._start()
        return self

    async def _start(self, *background: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await self._session.open(*background)
        if self._handler is not None:
            self._session.work(self._handler, self._options.concurrency)

    async def _stop_on_signals(self) -> None:
        await stop_on_signals(self.stop, logger)

    async def aclose(self) -> None:
        """Drain and close: running handlers have ``close_timeout`` seconds, then their messages are requeued.

        May be called from any task of the event loop, and more than once. Called in a handler of this consumer it
        starts to close and returns, because the handler has to end first. Cancellation does not shorten it.

        Raises:
            InvalidState: called from another event loop.
        """
        await self._session.close()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def stop(self) -> None:
        """Make `run` or `serve` drain and return, or end the iteration. May be called in handlers and from any thread.

        Returns immediately.
        """
        self._session.stop()

    # Control and statistics

    def pause(self) -> None:
        """Request no further messages until `resume`; received messages are still handled."""
        self._session.pause()

    def resume(self) -> None:
        """Request messages again."""
        self._session.resume()

    @property
    def paused(self) -> bool:
        """Whether no further messages are requested."""
        return self._session.paused

    @property
    def subscribed(self) -> bool:
        """Whether the consumer is open and has subscribed to all partitions of its topics once."""
        return self._session.subscribed

    @property
    def max_in_flight(self) -> int:
        """Messages that may be received and not answered, over all connections; may be changed at any time.

        Raises:
            InvalidSetting: the value is not a positive number.
        """
        return self._session.max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        self._session.max_in_flight = count

    @property
    def connections(self) -> tuple[ConsumerConnection, ...]:
        """The open connections."""
        return self._session.connections

    def statistics(self) -> ConsumerStatistics:
        """Return the open connections and the counters since the consumer was opened.

        Raises:
            InvalidState: the consumer was not opened yet, or is used from another event loop.
        """
        return self._session.statistics()

    def on_event(self, callback: Callable[[ClientEvent], object]) -> Callable[[ClientEvent], object]:
        """Decorator: call a function when a partition is connected or disconnected, a leader moves, a backoff changes.

        It is called in the event loop and must not block; its errors are logged.
        """
        self._session.events.add(callback)
        return callback

    async def seek(
        self, position: Position, partitions: Sequence[int] | None = None, *, topic: str | None = None
    ) -> None:
        """Move the channel to a position, for all its consumers; return when this is done at all partitions.

        Messages received before are not in flight any more, see `Message.expired`. With ``queue_position``,
        and on ordered channels, no message that precedes an offset is delivered; otherwise one may be.

        Args:
            position: the position.
            partitions: the partitions to move; all by default.
            topic: the topic to move, of several; all by default.

        Raises:
            InvalidState: the consumer is not open.
            InvalidPartition: a partition that this consumer does not consume.
            InvalidInput: no position, a topic that it does not consume, or partitions without ``topic``.
            InvalidSetting: the original NSQ cannot seek.

        It waits for partitions without a leader. Cancellation does not revoke the move, which continues later.
        """
        await self._session.seek(position, partitions, topic)

    # Iteration

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, Message]:
        """Return the next message, which the caller finishes or requeues.

        Raises:
            StopAsyncIteration: the consumer was stopped.
            InvalidState: the consumer is not open.
            NsqError: the consumer cannot continue.
        """
        return self._session.next()  # not a coroutine function: this is called for every message

    def batches(self, *, max_count: int = 500, max_wait: float = 0.2) -> MessageBatches:
        """Return an asynchronous iterator over batches of messages, in the order received.

        A batch is handed out when it is full, when its first message has waited for ``max_wait``, or when all messages
        that may be in flight were received: ``max_in_flight`` is the largest batch, and twice ``max_count`` lets the
        servers send the next batch while one is processed. The caller answers the messages, see `MessageBatch`; they
        are touched until then. Leaving the loop requeues the rest of its batch, see `MessageBatches`.

        On ordered channels each partition delivers one message at a time, so a batch has at most one of each.

        Args:
            max_count: messages of a batch, at most.
            max_wait: seconds that the first message of a batch waits for further ones.

        Raises:
            InvalidSetting: a limit is invalid, or the options require the order of keys.
        """
        session = self._session
        limits = self._batch_limits(max_count, max_wait)
        return MessageBatches(partial(session.next_batch, limits), lambda: session.in_event_loop)

    async def fetch(self, n: int, timeout: float | None = None) -> MessageBatch:
        """Return the next messages, up to a number of them; an empty batch after the timeout.

        Returns when ``n`` messages, or all that may be in flight, were received, or after the timeout. The caller
        answers them; they are touched until then.

        Args:
            n: messages, at most; ``max_in_flight`` bounds it too.
            timeout: seconds; None waits for ``n`` messages.

        Raises:
            InvalidSetting: a number or time is invalid, or the options require the order of keys.
            InvalidState: the consumer is not open, or was stopped.
            NsqError: the consumer cannot continue.
        """
        limits = self._batch_limits(n, float("inf"))
        if timeout is not None:
            check_time("timeout", timeout)
        try:
            return await self._session.next_batch(limits, timeout)
        except StopAsyncIteration:
            raise InvalidState("the consumer was stopped", topic=self._name) from None
