"""The consumer."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from attrs import evolve, frozen

from nsqext.client.consumer.handlers.workers import Handler
from nsqext.client.consumer.options import ConsumerOptions, KeyOptions
from nsqext.client.consumer.session import ConsumerSession
from nsqext.client.consumer.subscriptions.assignment import SubscriptionSpec
from nsqext.client.tasks import stop_on_signals
from nsqext.errors import InvalidSetting, InvalidState
from nsqext.lookup.shared import Lookup, find_directory
from nsqext.protocol.names import check_channel, check_tag, check_topic

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from types import TracebackType

    from nsqext.client.consumer.handlers.dead_letter import DeadLetterTopic
    from nsqext.client.consumer.message import Message
    from nsqext.client.consumer.position import Position
    from nsqext.client.consumer.subscriptions.backoff import Backoff

__all__ = ("Consumer", "ConsumerConnection")

logger: logging.Logger = logging.getLogger("nsqext.consumer")

H = TypeVar("H", bound=Handler)


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
        lookupd: lookup addresses, ``host:port`` of nsqlookupd's HTTP side; a list, or text with commas. Or a
            `nsqext.Lookup` that others use as well.
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
        lookupd: str | Sequence[str] | Lookup = (),
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
        self._handler: Handler | None = None
        if isinstance(self.options.failure.dead_letter, str) and lookupd and not (nsqd or isinstance(lookupd, Lookup)):
            lookupd = Lookup(lookupd, options=self.options.lookup)  # shared with the producer of dead letters
        self._directory = find_directory(lookupd, nsqd, self.options.lookup)
        source = SubscriptionSpec(self.topic, self.channel, self.tag, self.options)
        self._session = ConsumerSession(source, self._directory, max_in_flight, self._dead_letter_topic(lookupd, nsqd))
        self.backoff: Backoff = self._session.upkeep.backoff
        """How much the consumer has slowed down because handlers fail; to be looked at, not to be changed."""

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
        from nsqext.client.from_url import load_consumer

        found = load_consumer(url, settings)
        return cls(topic, channel, lookupd=found.lookupd, nsqd=found.nsqd, options=found.options, **found.others)

    def _dead_letter_topic(
        self, lookupd: str | Sequence[str] | Lookup, nsqd: str | Sequence[str]
    ) -> DeadLetterTopic | None:
        topic = self.options.failure.dead_letter
        if not isinstance(topic, str):
            return None
        # a consumer without dead letters does without the producer's modules
        from nsqext.client.consumer.handlers.dead_letter import DeadLetterTopic
        from nsqext.client.producer.options import ProducerOptions

        options = ProducerOptions(connection=self.options.connection, lookup=self.options.lookup)
        return DeadLetterTopic(topic, lookupd, nsqd, options)

    def handler(self, function: H) -> H:
        """Decorator: let a coroutine function handle the messages.

        When it returns, the message is finished, unless it was answered by hand; when it raises, the message is
        requeued with a delay that grows with its attempts, and the consumer slows down (see `FailureOptions`,
        `BackoffOptions`). `Finish`, `Requeue` and `Reject` say otherwise.

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

        On cancellation, running handlers have ``options.close_timeout`` seconds to end; then they are cancelled and
        their messages are requeued.
        """
        handler = self._handler
        if handler is None:
            raise InvalidState("the consumer has no handler", hint="decorate a function with @consumer.handler")
        session = self._session
        async with self:
            session.work(handler, self._concurrency)
            if signals:
                session.start(self._listen)
            await session.ended.wait()
        if session.error is not None:
            raise session.error

    async def _listen(self) -> None:
        await stop_on_signals(self.stop, logger)

    def stop(self) -> None:
        """Let `run` drain and return, or end the iteration. May be called from handlers."""
        self._session.stop()

    # While it runs

    def pause(self) -> None:
        """Ask for no further messages, until `resume`; those that are here go on."""
        self._session.flow.paused = True
        self._session.upkeep.rebalance()

    def resume(self) -> None:
        """Ask for messages again."""
        if not self._session.dispatcher.stopped:
            self._session.flow.paused = False
            self._session.upkeep.rebalance()

    @property
    def max_in_flight(self) -> int:
        """Messages that may be here unanswered, over all connections; may be changed at any time.

        Raises:
            InvalidSetting: it is no positive number.
        """
        return self._session.flow.max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        self._session.flow.max_in_flight = count
        self._session.upkeep.rebalance()

    @property
    def paused(self) -> bool:
        """Whether no further messages are asked for."""
        return self._session.flow.paused

    @property
    def connections(self) -> tuple[ConsumerConnection, ...]:
        """The connections that work at the moment."""
        return tuple(
            ConsumerConnection(one.partition, one.node, one.ready, one.in_flight, one.backoff.level)
            for one in self._session.upkeep.subscriptions
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

        While a partition has no leader it waits; when it is cancelled, the channel is moved all the same, as soon as
        that can be.
        """
        await self._session.seek(position, partitions)

    # Iteration

    async def __aenter__(self) -> Self:
        await self._session.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close(error)

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, Message]:
        """Return the next message; the caller answers it.

        Raises:
            StopAsyncIteration: the consumer was stopped.
            InvalidState: the consumer is not open.
            NsqError: nothing further will come.
        """
        return self._session.next()  # without a coroutine of its own: this is called for every message
