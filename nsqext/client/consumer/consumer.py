"""The consumer."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

import anyio

from nsqext.arguments import check_number, check_time
from nsqext.client.consumer.handlers.receiver_queues import ReceiverQueues
from nsqext.client.consumer.handlers.workers import BatchLimits, ConsumerState, MessageHandler
from nsqext.client.consumer.options import ConsumerOptions
from nsqext.client.consumer.subscriptions.assignment import SubscriberContext
from nsqext.client.consumer.subscriptions.subscription_group import SubscriptionGroup
from nsqext.client.consumer.subscriptions.topics import TopicSubscriptions, select_topics
from nsqext.client.events import ClientEvents
from nsqext.client.settings import HelpText, consumer_schema, consumer_settings
from nsqext.client.tasks import BackgroundTasks, Runnable
from nsqext.errors import InvalidSetting, InvalidState, NsqError
from nsqext.lookup.metadata import metadata_cache, values_of
from nsqext.protocol.names import check_channel, check_topic
from nsqext.settings import build
from nsqext.transport.event_loop import call_in_loop

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from nsqext.client.consumer.handlers.batches import BatchFunction, BatchHandler, MessageBatch, MessageBatches
    from nsqext.client.consumer.handlers.dead_letter import DeadLetterTopic
    from nsqext.client.consumer.handlers.iteration import MessageIteration
    from nsqext.client.consumer.handlers.workers import Handler
    from nsqext.client.consumer.message import Message
    from nsqext.client.consumer.position import Position
    from nsqext.client.consumer.settings import ConsumerSettings
    from nsqext.client.consumer.statistics import ConsumerConnection, ConsumerStatistics
    from nsqext.client.consumer.subscriptions.backoff import Backoff
    from nsqext.client.events import ClientEvent
    from nsqext.client.middleware import Middleware
    from nsqext.lookup.lookup import Lookup

logger: logging.Logger = logging.getLogger("nsqext.consumer")

H = TypeVar("H", bound=Callable[..., object])
B = TypeVar("B", bound="Callable[[MessageBatch], object]")

_CANCELLED_TIMEOUT = 2.0  # seconds that cancelled handlers have to end before the connections are closed


class Consumer(Runnable):
    """Consumes topics through a channel, from the leaders of all partitions, on asyncio and trio.

    With a handler: `run`, `serve` in an event loop, or `start` and later `aclose`. Without a handler: open it with
    ``async with`` (or `start`) and iterate over it.

    Topics share ``max_in_flight``, the handlers and the backoff. Topics that match a pattern are consumed with
    the next poll (``lookup_poll_interval``) after the lookup service lists them, and left when they are deleted.

    Args:
        topics: a topic, a pattern (``orders.*``: ``*`` stands for any characters, ``?`` for a single character), or a
            sequence of both. Patterns need ``lookupd``, and do not match the topic of ``dead_letter``.
        channel: the channel of all topics.
        lookupd: ``host:port`` of nsqlookupd's HTTP side: a list, or text with commas; a URL with addresses and
            settings: ``nsq://lookupd:4161?max_in_flight=50``; or a shared `nsqext.Lookup`.
        nsqd: TCP addresses of nsqd, without lookup; fine for the original NSQ.
        env: prefix of environment variables with further settings. Without any address, it is ``NSQEXT_``:
            ``NSQEXT_URL``, ``NSQEXT_LOOKUPD`` and so on.
        middleware: around every call of the handler, the first is the outermost; not around iteration.
        settings: see `ConsumerSettings`.

    Raises:
        InvalidName: a topic, pattern, channel or tag that servers refuse.
        InvalidSetting: no address, both kinds of addresses, an invalid value, or a setting for a single topic.
        UnknownSetting: the error suggests a known name.
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
        self._dead_letters: DeadLetterTopic | None = None
        if isinstance(self._options.failure.dead_letter, str):
            from nsqext.client.consumer.handlers.dead_letter import DeadLetterTopic
            from nsqext.lookup.lookup import share_lookup

            given = share_lookup(given)  # with the producer of dead letters
            self._dead_letters = DeadLetterTopic.of(self._options.failure.dead_letter, channel, given)
        self._metadata = metadata_cache(given, self._options.lookup)
        self._middleware: tuple[Middleware, ...] = ()
        self._state = ConsumerState()
        self._tasks = BackgroundTasks("consumer", self._close)
        self._events = ClientEvents()
        self._group = SubscriptionGroup(self._options, self._metadata, self._events, self._tasks)
        #: The backoff, read-only; its level increases while handlers fail.
        self.backoff: Backoff = self._group.backoff
        #: Whether its start warns of ``max_attempts`` without ``dead_letter``; apps warn once for all consumers.
        self.warns_of_drops: bool = self._options.failure.drops
        #: Whether its start warns if dead letters cannot be published; apps warn once for each topic.
        self.warns_of_dead_letters: bool = True
        self._receiver = ReceiverQueues(self._group, self._state, self._fail)
        self._iteration: MessageIteration | None = None
        selection = select_topics(topics, self._options, has_lookup=self._metadata.has_lookup)
        context = SubscriberContext(self.channel, self._group, self._receiver)
        self._topics = TopicSubscriptions(selection, context, self._fail)
        if middleware != ():
            from nsqext.client.middleware import check_middleware

            self._middleware = check_middleware(middleware)
            for one in self._middleware:
                one.attach(self)

    def __repr__(self) -> str:
        place = f"{self._name!r}, {self.channel!r}, {self._metadata.place}"
        return f"{type(self).__name__}({place}, {self._tasks.state})"

    @property
    def settings(self) -> Mapping[str, object]:
        """All current settings by name, with defaults; secrets are ``***``."""
        values = consumer_schema().effective(self._options)
        return MappingProxyType({**values, "max_in_flight": self.max_in_flight})

    @property
    def tag(self) -> str | None:
        """The tag of received messages; None for all."""
        return self._options.tag

    @property
    def topics(self) -> tuple[str, ...]:
        """Names and patterns of the topics; may be changed at any time.

        After ``consumer.topics = "orders.*"``, topics no longer selected deliver no further messages, and their
        connections are closed when the messages in flight are answered, or after ``close_timeout``; unanswered
        messages are redelivered.

        Raises:
            InvalidName, InvalidSetting: as for the class; nothing is changed.
            InvalidState: set in another event loop than the open consumer's.
        """
        return self._topics.selection.given

    @topics.setter
    def topics(self, topics: str | Sequence[str]) -> None:
        self._check_event_loop()
        self._topics.select(select_topics(topics, self._options, has_lookup=self._metadata.has_lookup))

    def _check_event_loop(self) -> None:
        """Raise InvalidState in another thread or event loop than the open consumer's, before anything is changed."""
        if self._state.opened and not self._state.ended.is_set():
            self._tasks.check_event_loop()

    @property
    def _name(self) -> str:
        return str(self._topics.selection)

    # Handlers

    @overload
    def handler(self, function: H, /) -> H: ...

    @overload
    def handler(self, /, *, auto_finish: bool = True) -> Callable[[H], H]: ...

    def handler(self, function: H | None = None, /, *, auto_finish: bool = True) -> H | Callable[[H], H]:
        """Decorator: register a function as the handler of messages.

        It receives the message, or the values that its annotations select: ``async def bill(order: Order)`` receives
        the body decoded as an ``Order``; see `nsqext.app` for further parameters. An undecodable message is sent to the
        dead letters, or without them requeued with the longest delay.

        A ``def`` function runs in a thread; ``concurrency`` limits their number. A thread cannot be interrupted: a
        closing consumer waits for it, and its result answers the message.

        When it returns, the message is finished unless it was answered. When it raises, the message is requeued with a
        delay that grows with its attempts, and the consumer slows down (``requeue_delay`` and ``backoff``). Raise
        `Finish`, `Requeue` or `Reject` for another outcome.

        Args:
            function: the function.
            auto_finish: whether its return finishes the message. Otherwise any task of the program (with `nsqext.sync`
                any thread) answers it later. Until then it counts towards ``max_in_flight``, it is touched as long as
                its server allows (``max_msg_timeout``, 15 minutes by default; then it is redelivered), and a closing
                consumer waits for it. With ``key``, the next message of its key begins when the handler returns.

        Raises:
            InvalidSetting: no function, a generator, a parameter without known source, or a second handler.
            InvalidState: the consumer was opened before.
        """
        from nsqext.client.consumer.handler_functions import takes_message

        def register(function: H) -> H:
            call: Handler = self._check_handler(function)
            if not takes_message(function):
                from nsqext.client.consumer.typed.parameters import message_handler

                call = message_handler(call, self._options.failure)
            if self._middleware:
                from nsqext.client.middleware import surround_handler

                call = surround_handler(self._middleware, call, self.channel, auto_finish=auto_finish)
            self._handler = MessageHandler(call, auto_finish, origin=function)
            return function

        return register if function is None else register(function)

    def batch_handler(self, *, max_count: int = 500, max_wait: float = 0.2) -> Callable[[B], B]:
        """Decorator: register a handler of batches, of which ``concurrency`` run at the same time.

        When it returns, unanswered messages are finished. When it raises, each counts as failed: it is requeued with a
        delay, or sent to the dead letters after too many attempts; `Finish`, `Requeue` and `Reject` decide about all.

        With ``key`` or ``dispatch="key_failover"`` a batch has messages of the keys of a single lane, in order. A
        requeued message holds back later messages of its key: unanswered messages of the batch are not finished when
        the handler returns, but handed out again after it, without counting an attempt.

        Args:
            max_count, max_wait: see `batches`.

        Raises:
            InvalidSetting: no function, a second handler, or an invalid limit.
            InvalidState: the consumer was opened before.
        """
        from nsqext.client.consumer.handlers.batches import BatchHandler

        limits = BatchLimits(max_count, max_wait)

        def register(function: B) -> B:
            call: BatchFunction = self._check_handler(function)
            if self._middleware:
                from nsqext.client.middleware import surround_batch_handler

                call = surround_batch_handler(self._middleware, call, self.channel)
            self._handler = BatchHandler(call, limits, function)
            return function

        return register

    def _check_handler(self, function: Callable[..., object]) -> Callable[..., Awaitable[object]]:
        from nsqext.client.consumer.handler_functions import check_unopened, coroutine_handler

        call = coroutine_handler(function)
        if self._handler is not None:
            raise InvalidSetting("the consumer has a handler already", topic=self._name)
        check_unopened(self._tasks.loop, self._name)
        return call

    # Opening and closing

    async def serve(self, *, signals: bool | None = None) -> None:
        """Consume with the handler until cancelled, until SIGTERM or SIGINT, or until `stop`; then drain and close.

        Args:
            signals: whether SIGTERM and SIGINT stop it; by default in the main thread of a program without a handler
                for SIGTERM (a web server keeps its handler). A second after the first signal, both have their default
                effect again.

        Raises:
            InvalidState: no handler, or the consumer was opened before.
            LookupFailed: no lookup node returned a usable response within ``lookup_timeout``, or an address is not
                nsqlookupd's.
            ProtocolError: no address is an nsqd's.
            NegotiationFailed: no node grants the required TLS or compression.
            ServerError, InvalidSetting, InvalidPartition, DataLoss: a subscription is refused permanently.

        On cancellation, running handlers have ``close_timeout`` seconds to end; then they are cancelled and their
        messages are requeued.
        """
        if self._handler is None:
            raise InvalidState("the consumer has no handler", hint="decorate a function with @consumer.handler")
        from nsqext.client.signals import stop_on_signals, takes_signals

        await self._start(*([partial(stop_on_signals, self.stop, logger)] if takes_signals(signals) else []))
        await self.wait()

    async def wait(self) -> None:
        """After `start`: wait until the consumer is stopped or fails; then drain and close.

        Raises:
            InvalidState: it was not started, or another event loop opened it.
            NsqError: the consumer cannot continue.

        Cancellation drains and closes it.
        """
        if self._tasks.loop is None:
            self._tasks.check()
        state = self._state
        if not state.ended.is_set():
            self._tasks.check_event_loop()
        state.raises = True
        try:
            await state.ended.wait()
        finally:
            await self.aclose()
        if state.error is not None:
            raise state.error

    async def start(self) -> Self:
        """Open the consumer, as ``async with`` does; `aclose` closes it, in this or another task.

        Returns when all partitions are subscribed, or after ``start_timeout``; subscribing then continues. A handler
        consumes in the background. Signals are left to the program.

        Raises:
            InvalidState: it was opened before, or shares a `nsqext.Lookup` that another event loop uses.
            NsqError: it cannot start, as for `serve`.
        """
        await self._start()
        return self

    async def _start(self, *background: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Subscribe; start the handlers, and further tasks that are cancelled after the close."""
        state, topics = self._state, self._topics
        await self._tasks.start()
        try:
            if self._middleware:
                from nsqext.client.middleware import start_middleware

                await start_middleware(self._middleware, iterated=self._handler is None)
            self._tasks.check()  # `aclose` may have ended it meanwhile; then the metadata would not be released
            self._metadata.acquire()
            state.opened = True
            group, schedule = self._group, self._group.schedule
            tasks = [*background, self._subscribe, schedule.run, schedule.run_collected, group.run_narrow]
            tasks += [partial(group.run_timer, self._receiver.tick), self._metadata.run]
            if self._dead_letters is not None:
                tasks.append(partial(self._dead_letters.run, check=self.warns_of_dead_letters))
            for task in tasks:
                self._tasks.start_soon(task)
            with anyio.move_on_after(self._options.start_timeout):
                await topics.started.wait()
        except BaseException:
            await self._tasks.aclose()
            raise
        if state.error is not None:
            await self._tasks.aclose()
            raise state.error
        state.raises = False
        if self._handler is not None:
            self._start_workers(self._handler)

    async def _subscribe(self) -> None:
        try:
            await self._topics.run()
        except NsqError as error:
            self._fail(error)

    def _start_workers(self, handler: MessageHandler | BatchHandler) -> None:
        options = self._options
        per_call = 1 if isinstance(handler, MessageHandler) else handler.limits.max_count
        self._group.flow.concurrency = options.concurrency * per_call
        dead_letter = options.failure.dead_letter
        hook = None if isinstance(dead_letter, str) else dead_letter
        if self._dead_letters is not None:
            hook = self._dead_letters.publish
        if self.warns_of_drops:
            from nsqext.client.consumer.handlers.failure_policy import warn_of_drops

            warn_of_drops([f"{self._name}/{self.channel}"], options.failure)
        self._receiver.start_workers(handler, hook)

    async def aclose(self) -> None:
        """Drain and close: running handlers have ``close_timeout`` seconds, then their messages are requeued.

        Callable from any task of the event loop, repeatedly. In a handler of this consumer it begins to close and
        returns: the handler has to end first. Cancellation does not shorten it.

        Raises:
            InvalidState: called from another event loop.
        """
        if self._state.opened and self._tasks.in_event_loop():
            self._stop_receiving()
            # while the caller waits it cannot answer its batches
            self._receiver.requeue_held(anyio.get_current_task().id)
        await self._tasks.aclose()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        tasks: BackgroundTasks | None = vars(self).get("_tasks")  # None if the constructor raised an error
        if tasks is not None and tasks.left_open:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)

    def stop(self) -> None:
        """Make `run` or `serve` drain and return, or end the iteration; does not wait, for handlers and any thread."""
        call_in_loop(self._tasks.loop, self._stop)

    def _stop(self) -> None:
        self._receiver.stop()
        self._topics.started.set()  # no task waits for subscriptions any more
        self._state.ended.set()

    def _fail(self, error: NsqError) -> None:
        """End with the first error; an error that prevents the start is logged only if the caller does not get it."""
        state, started = self._state, self._topics.started
        if state.error is None:
            state.error = error
            self._events.emit("failed", None, None, "", str(error))
            if started.is_set() or not state.raises:
                logger.error("the consumer cannot continue: %s", error, extra={"topic": self._name})
        started.set()
        self._receiver.wake()
        state.ended.set()

    async def _close(self) -> None:
        """Drain and close, in the host of the background tasks."""
        if not self._state.opened:
            return
        try:
            await self._drain()
        finally:
            self._receiver.cancel()
            self._topics.forget()
            await self._metadata.release()
        logger.info("drained and closed %s/%s", self._name, self.channel, extra={"topic": self._name})

    async def _drain(self) -> None:
        """Send RDY 0, wait for handlers or cancel them, send answers, requeue unhandled messages, send CLS."""
        receiver, timeout = self._receiver, self._options.close_timeout
        self._stop_receiving()
        self._stop()
        receiver.requeue_unstarted()
        with anyio.move_on_after(timeout) as scope:
            await receiver.wait()
        if scope.cancelled_caught:
            logger.warning(
                "handlers did not end, or messages were not answered, within %g s", timeout, extra={"topic": self._name}
            )
            receiver.cancel()
            # before connections are closed: their messages are redelivered at once
            with anyio.move_on_after(_CANCELLED_TIMEOUT):
                await receiver.wait_for_handlers()
            handler = self._handler
            if handler is not None and getattr(handler.function, "runs_in_thread", False):
                # a thread cannot be cancelled
                await receiver.wait_for_handlers()
        receiver.requeue_remaining()
        await self._topics.close()

    def _stop_receiving(self) -> None:
        """Send RDY 0 before messages are requeued, which this consumer would receive again."""
        self.pause()
        self._group.flush()

    # Control and statistics

    def pause(self, topic: str | None = None) -> None:
        """Request no further messages until `resume`; received messages are still handled.

        Args:
            topic: a topic, which is resumed separately; None for all.

        Raises:
            InvalidName: no name of a topic.
            InvalidState: called from another event loop than the open consumer's.
        """
        self._check_event_loop()
        if topic is not None:
            self._group.pause(check_topic(topic), paused=True)
            return
        self._group.flow.paused = True
        self._group.rebalance()

    def resume(self, topic: str | None = None) -> None:
        """Request messages again, unless the consumer was stopped; see `pause`."""
        self._check_event_loop()
        if topic is not None:
            self._group.pause(check_topic(topic), paused=False)
        elif not self._receiver.queue.stopped:
            self._group.flow.paused = False
            self._group.rebalance()

    @property
    def paused(self) -> bool:
        """Whether no topic requests further messages."""
        return self._group.flow.paused

    @property
    def paused_topics(self) -> frozenset[str]:
        """Topics that were paused by name."""
        return frozenset(self._group.paused_topics)

    @property
    def is_starved(self) -> bool:
        """Whether any connection has 85 % of its RDY count in flight, as in the Go client, so a batch need not wait."""
        from nsqext.client.consumer.statistics import is_starved

        return any(is_starved(one.ready, one.in_flight) for one in self._group.subscriptions)

    @property
    def subscribed(self) -> bool:
        """Whether the open consumer has subscribed to all partitions of its topics once."""
        return self._state.opened and self._topics.started.is_set() and not self._state.ended.is_set()

    @property
    def max_in_flight(self) -> int:
        """Received messages that may be unanswered, over all connections; may be changed at any time.

        Raises:
            InvalidSetting: not a positive number.
            InvalidState: set in another event loop than the open consumer's.
        """
        return self._group.flow.max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        self._check_event_loop()
        self._group.flow.max_in_flight = check_number("max_in_flight", count, 1)
        self._group.rebalance()

    @property
    def connections(self) -> tuple[ConsumerConnection, ...]:
        """The open connections."""
        from nsqext.client.consumer.statistics import connections_of

        return connections_of(self._group)

    def statistics(self) -> ConsumerStatistics:
        """Return the open connections and the counters since the consumer was opened.

        Raises:
            InvalidState: the consumer was not opened yet, or another event loop uses it.
        """
        if not self._state.opened:
            self._tasks.check()
        from nsqext.client.consumer.statistics import statistics_of

        return statistics_of(self._group, self._topics.blocked)

    def on_event(self, callback: Callable[[ClientEvent], object]) -> Callable[[ClientEvent], object]:
        """Decorator: call a function when a connection opens or ends, a leader moves, the backoff changes, or it fails.

        It is called in the event loop and must not block; its errors are logged.
        """
        self._events.add(callback)
        return callback

    async def seek(
        self, position: Position, partitions: Sequence[int] | None = None, *, topic: str | None = None
    ) -> None:
        """Move the channel to a position, for all its consumers; return when all partitions have moved.

        Messages received before are not in flight any more, see `Message.expired`. With ``queue_position``, and on
        ordered channels, no message that precedes an offset is delivered; otherwise a single message may be.

        Args:
            position: the position.
            partitions: the partitions to move; all by default.
            topic: the topic to move; all by default.

        Raises:
            InvalidState: the consumer is not open.
            InvalidPartition: a partition that this consumer does not consume.
            InvalidInput: no position, no topic yet, one that it does not consume, or partitions without ``topic``.
            InvalidSetting: the original NSQ cannot seek.
            PartitionUnavailable: lookup has returned no leader of a partition since the start; nothing is moved.

        Waits for partitions that have lost their leader. Cancellation does not revoke the move, which continues later.
        """
        self._tasks.check()
        from nsqext.client.consumer.position import check_position

        check_position(position)
        if self._receiver.queue.stopped:
            raise InvalidState("the consumer is closed", topic=self._name)
        await self._topics.seek(position, partitions, topic)

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
        if self._iteration is None:
            self._iteration = self._receiver.iteration
        return self._iteration.next()  # no coroutine function: called for every message

    def batches(self, *, max_count: int = 500, max_wait: float = 0.2) -> MessageBatches:
        """Return an asynchronous iterator over batches of messages, in the order received.

        A batch is handed out when it is full, when its first message has waited for ``max_wait``, or when all messages
        that may be in flight were received: ``max_in_flight`` is the largest batch, and twice ``max_count`` lets
        servers send the next batch meanwhile. The caller answers the messages, which are touched until then, see
        `MessageBatch`. Leaving the loop requeues the rest of its batch.

        On ordered channels a batch has at most one message of each partition.

        Args:
            max_count: messages of a batch, at most.
            max_wait: seconds that the first message of a batch waits for more.

        Raises:
            InvalidSetting: a limit is invalid, or the options require the order of keys.
        """
        if self._options.lanes is not None:
            raise InvalidSetting(
                "a loop over batches does not keep the order of keys",
                topic=self._name,
                hint="use batch_handler, or leave out key and dispatch='key_failover'",
            )
        from nsqext.client.consumer.handlers.batches import MessageBatches

        return MessageBatches(self._receiver.iteration, BatchLimits(max_count, max_wait))

    async def fetch(self, n: int, timeout: float | None = None) -> MessageBatch:
        """Return the next messages; an empty batch if the timeout passes without any.

        Returns when ``n`` messages, or all that may be in flight, were received, or after the timeout. The caller
        answers them; they are touched until then.

        Args:
            n: messages, at most; ``max_in_flight`` is a bound too.
            timeout: seconds; None waits for ``n`` messages.

        Raises:
            InvalidSetting: a number or time is invalid, or the options require the order of keys.
            InvalidState: the consumer is not open, or was stopped.
            NsqError: the consumer cannot continue.
        """
        batches = self.batches(max_count=n, max_wait=float("inf"))
        if timeout is not None:
            check_time("timeout", timeout)
        try:
            return await batches.take(timeout)
        except StopAsyncIteration:
            raise InvalidState("the consumer was stopped", topic=self._name) from None


Consumer.__doc__ = HelpText(Consumer.__doc__, consumer_settings)  # type: ignore[assignment] # text when it is read
