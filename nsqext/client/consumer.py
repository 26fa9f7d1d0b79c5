"""The consumer."""

from __future__ import annotations

import inspect
import logging
import signal
import time
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import anyio
from anyio.lowlevel import checkpoint
from attrs import evolve, frozen

from nsqext.client.backoff import Backoff
from nsqext.client.consumer_options import ConsumerOptions, KeyOptions
from nsqext.client.flow import ReadyFlow
from nsqext.client.inbox import Inbox
from nsqext.client.keeper import Keeper
from nsqext.client.lanes import Lanes, key_reader
from nsqext.client.places import Listener, Source
from nsqext.client.stall import StallWatch
from nsqext.client.subscription import Subscription
from nsqext.client.touch import Toucher
from nsqext.client.verdict import LocalDelays, Verdict
from nsqext.client.workers import Handler, Workers
from nsqext.errors import InvalidInput, InvalidSetting, InvalidState, NsqError
from nsqext.lookup.directory import Directory
from nsqext.protocol.names import check_channel, check_tag, check_topic

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

    from anyio.abc import TaskGroup

    from nsqext.client.deadletter import DeadLetterTopic
    from nsqext.client.message import Message
    from nsqext.client.positions import Position

__all__ = ("Consumer", "ConsumerConnection")

logger: logging.Logger = logging.getLogger("nsqext.consumer")

H = TypeVar("H", bound=Handler)
E = TypeVar("E", bound=BaseException)

_clock = time.monotonic
_SLICE = 0.02
"""Seconds after which an iteration that never waits lets everything else have a turn."""


@frozen
class ConsumerConnection:
    """A connection of a consumer, as it is at the moment.

    Attributes:
        partition: the partition; -1 at the original NSQ.
        node: ``host:port`` of the node.
        ready: messages that it may have in flight.
        in_flight: messages that it has in flight.
        backoff: level of its backoff; 0 while all is well.
    """

    partition: int
    node: str
    ready: int
    in_flight: int
    backoff: int


class Consumer:
    """Consumes a topic through a channel, from the leaders of all its partitions.

    Either give it a handler and `run` it, or use it as an asynchronous context manager and iterate over it. Both work
    in asyncio and trio.

    Args:
        topic: name of the topic.
        channel: name of the channel.
        lookupd: lookup addresses, ``host:port`` of nsqlookupd's HTTP side; a list, or text with commas.
        nsqd: nsqd addresses (TCP) to consume from without lookup; fine for the original NSQ.
        tag: messages with this tag come here rather than to consumers without it, and no others do; on topics without
            extend support all messages come.
        max_in_flight: messages that may be here unanswered, over all connections.
        concurrency: handlers that run at the same time.
        options: everything else.
        key: see `ConsumerOptions`; goes before what is there.
        dispatch: the same.

    Raises:
        InvalidName: a topic, channel or tag that no server takes.
        InvalidSetting: neither or both kinds of addresses, or a bad option.
    """

    def __init__(
        self,
        topic: str,
        channel: str,
        *,
        lookupd: str | Sequence[str] = (),
        nsqd: str | Sequence[str] = (),
        tag: str | None = None,
        max_in_flight: int = 200,
        concurrency: int = 1,
        options: ConsumerOptions | None = None,
        **keys: Unpack[KeyOptions],
    ) -> None:
        if keys.keys() - {"key", "dispatch"}:
            raise TypeError(f"unexpected arguments {sorted(keys.keys() - {'key', 'dispatch'})}")
        self.topic: str = check_topic(topic)
        self.channel: str = check_channel(channel)
        self.tag: str | None = None if tag is None else check_tag(tag)
        self.options: ConsumerOptions = evolve(options or ConsumerOptions(), **keys)
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
            raise InvalidSetting(f"concurrency={concurrency!r} is not a positive number")
        self._concurrency = concurrency
        self.backoff: Backoff = Backoff(self.options.backoff)
        """How much the consumer has slowed down because handlers fail; to be looked at, not to be changed."""
        self._flow = ReadyFlow[Subscription](max_in_flight, self.backoff)
        self._directory = Directory(lookupd=lookupd, nsqd=nsqd, options=self.options.lookup)
        self._keeper = Keeper(
            Source(self.topic, self.channel, self.tag, self.options),
            self._flow,
            self.backoff,
            self._directory,
            Listener(self._arrived, self._fail, self._ticked),
        )
        self._letters = self._make_letters(lookupd, nsqd)
        self._delays = LocalDelays()
        self._toucher = Toucher() if self.options.delivery.auto_touch else None
        self._stall = StallWatch(self.options.delivery.block_warning, "the loop over the consumer")
        self._handler: Handler | None = None
        self._workers: Workers | None = None
        self._inbox = Inbox()
        self._lanes: Lanes | None = None
        self._end = anyio.Event()
        self._error: NsqError | None = None
        self._used = False
        self._given = 0.0
        self._tasks: TaskGroup | None = None
        self._scopes: list[anyio.CancelScope] = []

    @classmethod
    def from_url(cls, topic: str, channel: str, url: str | None = None, **settings: Any) -> Self:
        """Return a consumer with settings from keywords, a URL and the environment, in this order.

        Args:
            topic: name of the topic.
            channel: name of the channel.
            url: ``nsq://lookupd:4161,lookupd2:4161?max_in_flight=50``; ``NSQEXT_URL`` where it is None.
            settings: see the reference of settings.

        Raises:
            InvalidSetting: an unknown setting, or settings that contradict each other.
        """
        from nsqext.client.configure import load_consumer

        found = load_consumer(url, settings)
        return cls(topic, channel, lookupd=found.lookupd, nsqd=found.nsqd, options=found.options, **found.others)

    def _make_letters(self, lookupd: str | Sequence[str], nsqd: str | Sequence[str]) -> DeadLetterTopic | None:
        topic = self.options.failure.dead_letter
        if not isinstance(topic, str):
            return None
        # a consumer without dead letters does without the producer's modules
        from nsqext.client.deadletter import DeadLetterTopic
        from nsqext.client.options import ProducerOptions

        options = ProducerOptions(connection=self.options.connection, lookup=self.options.lookup)
        return DeadLetterTopic(topic, lookupd, nsqd, options)

    def handler(self, function: H) -> H:
        """Decorator: let a coroutine function handle the messages.

        When it returns, the message is finished, unless it was answered by hand; when it raises, the message is
        requeued with a delay that grows with its attempts, and the consumer slows down (see `FailureOptions`,
        `BackoffOptions`). `Finish`, `Requeue` and `GiveUp` say otherwise.

        Raises:
            InvalidSetting: it is no coroutine function, or there is a handler already.
        """
        call = type(function).__call__
        if not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)):
            raise InvalidSetting(
                f"the handler {function!r} is not a coroutine function", hint="declare it with 'async def'"
            )
        if self._handler is not None:
            raise InvalidSetting("the consumer has a handler already", topic=self.topic)
        self._handler = function
        return function

    async def run(self, *, signals: bool = True) -> None:
        """Consume with the handler until cancelled, until SIGTERM or SIGINT, or until `stop`; then drain and close.

        Args:
            signals: listen for SIGTERM and SIGINT, where this is the main thread. After the first of them they have
                their usual effect again.

        Raises:
            InvalidState: there is no handler, or the consumer was used before.
            LookupFailed: no lookup address gives a usable answer.
            ProtocolError: no address is that of an nsqd.
            ServerError: the server refuses the subscription for good.

        When it is cancelled, handlers that run may go on for ``options.grace`` seconds.
        """
        handler = self._handler
        if handler is None:
            raise InvalidState("the consumer has no handler", hint="decorate a function with @consumer.handler")
        async with self as consumer:
            tasks = consumer._opened()
            name = getattr(handler, "__qualname__", type(handler).__qualname__)
            self._stall = StallWatch(self.options.delivery.block_warning, f"the handler {name}")
            letters = self.options.failure.dead_letter
            hook = None if isinstance(letters, str) else letters
            if self._letters is not None:
                hook = self._letters.take
            verdict = Verdict(self.options.failure, hook, self._delays)
            self._workers = Workers(handler, verdict, self._stall, self._keeper.flush)
            self._workers.start(tasks, self._rows())
            if signals:
                tasks.start_soon(self._listen)
            await self._end.wait()
        if self._error is not None:
            raise self._error

    def _rows(self) -> list[Inbox]:
        """Return where each of the workers takes its messages from."""
        key = self.options.lanes
        if key is None:
            return [self._inbox] * self._concurrency
        self._lanes = lanes = Lanes(self._concurrency, key_reader(key), _clock)
        arrived = list(self._inbox.messages)
        self._inbox.messages.clear()
        self._arrived(arrived)
        return lanes.rows

    def stop(self) -> None:
        """Let `run` drain and return, or end the iteration. May be called from handlers."""
        self._stop_rows()
        self._end.set()

    # While it runs

    def pause(self) -> None:
        """Ask for no further messages, until `resume`; those that are here go on."""
        self._flow.paused = True
        self._keeper.level()

    def resume(self) -> None:
        """Ask for messages again."""
        if not self._inbox.stopped:
            self._flow.paused = False
            self._keeper.level()

    @property
    def max_in_flight(self) -> int:
        """Messages that may be here unanswered, over all connections; may be changed at any time.

        Raises:
            InvalidSetting: it is no positive number.
        """
        return self._flow.max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        self._flow.max_in_flight = count
        self._keeper.level()

    @property
    def paused(self) -> bool:
        """Whether no further messages are asked for."""
        return self._flow.paused

    @property
    def connections(self) -> tuple[ConsumerConnection, ...]:
        """The connections that work at the moment."""
        return tuple(
            ConsumerConnection(one.partition, one.node, one.ready, one.in_flight, one.backoff.level)
            for one in self._keeper.subscriptions
        )

    async def seek(self, position: Position, partitions: Sequence[int] | None = None) -> None:
        """Let the channel read on from a place, for all its consumers; returns when that is so everywhere.

        Messages that are here are no longer ours afterwards, see `Message.expired`. With ``options.queue_position``,
        and on ordered channels, nothing from before an offset is delivered; otherwise one message may still be.

        Args:
            position: the place.
            partitions: only there; all without.

        Raises:
            InvalidState: the consumer is not open.
            InvalidPartition: a partition that is not consumed here.
            InvalidSetting: the original NSQ cannot do this.

        While a partition has no leader it waits; when it is cancelled, the place holds for the next subscription all
        the same.
        """
        if self._tasks is None or self._inbox.stopped:
            raise InvalidState("the consumer is not open", topic=self.topic)
        await self._keeper.seek(position, partitions)

    # Iteration

    async def __aenter__(self) -> Self:
        if self._used:
            raise InvalidState("a consumer is used once", topic=self.topic, hint="make a new one")
        self._used = True
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._start(self._subscribe)
        self._start(self._directory.run)
        if self._letters is not None:
            self._start(self._letters.run)
        try:
            with anyio.move_on_after(self.options.start_timeout):
                await self._keeper.started.wait()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        if self._error is not None:
            await self.__aexit__(None, None, None)
            raise self._error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = self._opened()
        try:
            with anyio.CancelScope(shield=True):
                await self._drain()
        finally:
            if self._workers is not None:
                self._workers.cancel()
            for scope in self._scopes:
                scope.cancel()
            tasks.cancel_scope.cancel()
            try:
                await tasks.__aexit__(None, None, None)
            except BaseExceptionGroup as errors:
                raise _first(errors) from None
            except anyio.get_cancelled_exc_class():
                if error is None or isinstance(error, anyio.get_cancelled_exc_class()):
                    raise
                # the error of the body goes on; the cancellation comes back at the next chance

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """Return the next message; the caller answers it.

        Raises:
            StopAsyncIteration: the consumer was stopped.
            InvalidState: the consumer is not open.
            NsqError: nothing further will come.
        """
        self._opened()
        inbox = self._inbox
        if inbox.messages and _clock() - self._given > _SLICE:
            self._keeper.flush()
            await checkpoint()
            self._given = _clock()
        while True:
            if self._error is not None:
                raise self._error
            if inbox.stopped:
                raise StopAsyncIteration
            if not inbox.messages:
                self._keeper.flush()
                await inbox.wait()
                self._given = _clock()
                continue
            message = inbox.messages.popleft()
            if message.received >= message.owner.horizon:
                return message

    # Inside

    def _opened(self) -> TaskGroup:
        if self._tasks is None:
            raise InvalidState("the consumer is not open", hint="use it inside 'async with Consumer(...) as consumer'")
        return self._tasks

    def _start(self, function: Callable[[], Awaitable[object]]) -> None:
        """Start a task that only the end of `__aexit__` cancels, so that leaving is orderly."""
        tasks = self._opened()
        scope = anyio.CancelScope(shield=True)
        self._scopes.append(scope)

        async def run() -> None:
            with scope:
                await function()

        tasks.start_soon(run)

    async def _subscribe(self) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                await self._keeper.run(tasks)
        except* NsqError as errors:
            self._fail(_first(errors))

    def _stop_rows(self) -> None:
        self._inbox.stop()
        if self._lanes is not None:
            self._lanes.stop()

    def _arrived(self, messages: list[Message]) -> None:
        if self._lanes is None:
            self._inbox.put(messages)
            return
        try:
            self._lanes.put(messages)
        except InvalidInput as error:
            self._fail(error)

    def _ticked(self, now: float, late: float) -> None:
        running = self._workers.running if self._workers is not None else []
        self._delays.tick(now)
        lanes = self._lanes
        if lanes is not None:
            lanes.tick(now)
            if self._flow.widen(lanes.waiting):
                self._keeper.level()
        if self._toucher is not None:
            waiting = lanes.here() if lanes is not None else self._inbox.messages
            self._toucher.tick((*running, *self._delays.held, *waiting), now)
        self._stall.tick(late, running, self.topic)

    def _fail(self, error: NsqError) -> None:
        if self._error is None:
            self._error = error
        self._keeper.started.set()
        self._inbox.wake()
        self._end.set()

    async def _listen(self) -> None:
        try:
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
                async for number in received:
                    logger.info("stopping on %s", signal.Signals(number).name)
                    self.stop()
                    return
        except (NotImplementedError, RuntimeError, ValueError):
            logger.debug("no signals outside of the main thread")

    async def _drain(self) -> None:
        """RDY 0; handlers end; answers go out; CLS; then the sockets."""
        self._flow.paused = True
        self._keeper.level()
        self._keeper.flush()
        self._stop_rows()
        if self._workers is not None:
            with anyio.move_on_after(self.options.grace) as scope:
                await self._workers.wait()
            if scope.cancelled_caught:
                logger.warning("handlers did not end within %g s", self.options.grace, extra={"topic": self.topic})
        await self._keeper.close()
        await self._directory.aclose()


def _first(errors: BaseExceptionGroup[E]) -> E:
    """Return the first error of a group: users see one error, never a group."""
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
