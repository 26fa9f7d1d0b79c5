"""`App`: handlers for several topics, run together."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import anyio

from nsqext.client.consumer.consumer import Consumer
from nsqext.client.producer.producer import Producer
from nsqext.client.tasks import first_error, stop_on_signals, takes_signals
from nsqext.errors import InvalidSetting, InvalidState, NsqError
from nsqext.lookup.metadata import Lookup
from nsqext.lookup.options import LookupOptions

if TYPE_CHECKING:
    from nsqext.client.consumer.handlers.workers import Handler
    from nsqext.client.consumer.options import ConsumerOptions
    from nsqext.client.producer.options import ProducerOptions
    from nsqext.observability.observer import Observer

__all__ = ("App",)

logger: logging.Logger = logging.getLogger("nsqext.app")

H = TypeVar("H", bound="Handler")
Lifespan = Callable[["App"], AsyncIterator[object]]
L = TypeVar("L", bound=Lifespan)


class App:
    """Handlers for several topics, and a producer for what they publish.

    They ask the lookup service together: one poll for each topic, over one pool of connections. Only consumers whose
    options for it differ ask by themselves.

    Args:
        lookupd: lookup addresses, ``host:port`` of nsqlookupd's HTTP side; a list, or text with commas. Or a
            `nsqext.Lookup` that others use as well.
        nsqd: nsqd addresses (TCP) to use without lookup; fine for the original NSQ.
        producer_options: options of the producer.
        observers: told of every publish and every handled message, see `nsqext.observability`.

    Raises:
        InvalidSetting: neither or both kinds of addresses, or an address that is none.
    """

    def __init__(
        self,
        lookupd: str | Sequence[str] | Lookup = (),
        *,
        nsqd: str | Sequence[str] = (),
        producer_options: ProducerOptions | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._lookupd = lookupd
        self._nsqd = nsqd
        self._lookups: dict[LookupOptions, Lookup] = {}
        self._observers = tuple(observers)
        lookupd = self._lookup(producer_options)
        if self._observers:
            from nsqext.observability.clients import ObservedProducer

            self._producer: Producer = ObservedProducer(
                lookupd, nsqd=nsqd, options=producer_options, observers=self._observers
            )
        else:
            self._producer = Producer(lookupd, nsqd=nsqd, options=producer_options)
        self._lifespans: list[Callable[[App], AbstractAsyncContextManager[object]]] = []
        self._consumers: list[Consumer] = []
        self._stopping = anyio.Event()
        self._serving = False
        self._errors: list[NsqError] = []

    def _lookup(self, options: ProducerOptions | ConsumerOptions | None) -> str | Sequence[str] | Lookup:
        """Return what all with the same lookup options share."""
        if isinstance(self._lookupd, Lookup) or not self._lookupd or self._nsqd:
            return self._lookupd
        given = LookupOptions() if options is None else options.lookup
        if given not in self._lookups:
            self._lookups[given] = Lookup(self._lookupd, options=given)
        return self._lookups[given]

    @classmethod
    def from_url(cls, url: str | None = None, *, observers: Sequence[Observer] = (), **settings: Any) -> Self:
        """Return an app whose addresses and producer are set by keywords, a URL and the environment.

        Args:
            url: see `nsqext.Producer.from_url`.
            observers: see the class.
            settings: settings of the producer.

        Raises:
            InvalidSetting: an unknown setting, or settings that contradict each other.
        """
        from nsqext.client.from_url import load_producer

        found = load_producer(url, settings)
        return cls(found.lookupd, nsqd=found.nsqd, producer_options=found.options, observers=observers)

    @property
    def producer(self) -> Producer:
        """The app's producer; open while the app runs, the lifespans included."""
        return self._producer

    @property
    def consumers(self) -> tuple[Consumer, ...]:
        """The consumers, in the order of their handlers."""
        return tuple(self._consumers)

    def handler(
        self,
        topic: str,
        channel: str,
        *,
        tag: str | None = None,
        max_in_flight: int = 200,
        concurrency: int = 1,
        options: ConsumerOptions | None = None,
    ) -> Callable[[H], H]:
        """Decorator: let a coroutine function handle the messages of a topic.

        Parameters are those of `nsqext.Consumer`; what its end means is told at `nsqext.Consumer.handler`. One function
        may handle several topics.

        Raises:
            InvalidName: a topic, channel or tag that no server takes.
            InvalidSetting: it is no coroutine function, or a bad option.
            InvalidState: the app runs already.
        """
        if self._serving:
            raise InvalidState("the app runs already", topic=topic)
        if self._observers:
            from nsqext.observability.clients import ObservedConsumer

            kind: Callable[..., Consumer] = ObservedConsumer
            more: dict[str, Any] = {"observers": self._observers}
        else:
            kind, more = Consumer, {}
        more |= {"lookupd": self._lookup(options), "nsqd": self._nsqd}
        consumer = kind(
            topic, channel, tag=tag, max_in_flight=max_in_flight, concurrency=concurrency, options=options, **more
        )

        def take(function: H) -> H:
            consumer.handler(function)
            self._consumers.append(consumer)
            return function

        return take

    def lifespan(self, function: L) -> L:
        """Decorator: let an asynchronous generator function surround the run.

        It is called with the app, before the first message comes, and resumed behind its ``yield`` after the last
        handler has ended. Several are entered in their order and left in the opposite one.
        """
        if self._serving:
            raise InvalidState("the app runs already")
        self._lifespans.append(asynccontextmanager(function))
        return function

    def stop(self) -> None:
        """Let `run` and `serve` drain and return. May be called from handlers."""
        self._stopping.set()

    def run(self, *, backend: str = "asyncio", backend_options: dict[str, Any] | None = None) -> None:
        """Run until SIGTERM or SIGINT, until `stop`, or until a consumer cannot go on; then drain and close.

        Args:
            backend: ``asyncio`` or ``trio``.
            backend_options: see `anyio.run`, for example ``{"use_uvloop": True}``.

        Errors are those of `serve`.
        """
        anyio.run(partial(self.serve, signals=True), backend=backend, backend_options=backend_options)

    async def serve(self, *, signals: bool | None = None) -> None:
        """Run inside a running event loop; see `run`.

        Args:
            signals: whether to react to SIGTERM and SIGINT. By default, if this is the main thread and the program has
                no handler for SIGTERM: a web server or any other program that handles SIGTERM keeps its handler.
                After the first signal both have their usual effect again.

        Raises:
            InvalidSetting: there is no handler.
            InvalidState: the app was run before.
            NsqError: why a consumer could not go on; the others were drained.

        When it is cancelled, handlers that run may go on for their ``close_timeout`` seconds.
        """
        if not self._consumers:
            raise InvalidSetting("the app has no handler", hint="decorate a function with @app.handler(topic, channel)")
        if self._serving:
            raise InvalidState("an app runs once", hint="make a new one")
        self._serving = True
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._producer)
            for lifespan in self._lifespans:
                await stack.enter_async_context(lifespan(self))
            try:
                await self._consume(signals=takes_signals(signals))
            except BaseExceptionGroup as group:
                raise first_error(group) from None
        if self._errors:
            raise self._errors[0]

    async def _consume(self, *, signals: bool) -> None:
        async with anyio.create_task_group() as tasks:
            if signals:
                tasks.start_soon(self._listen)
            async with anyio.create_task_group() as consuming:
                for consumer in self._consumers:
                    consuming.start_soon(self._run, consumer)
                await self._stopping.wait()
                for consumer in self._consumers:
                    consumer.stop()
            tasks.cancel_scope.cancel()

    async def _run(self, consumer: Consumer) -> None:
        """Run one consumer; what ends it ends the others as well."""
        try:
            await consumer.run(signals=False)
        except NsqError as error:
            logger.exception("a consumer cannot go on", extra={"topic": consumer.topic, "channel": consumer.channel})
            self._errors.append(error)
        finally:
            self._stopping.set()

    async def _listen(self) -> None:
        await stop_on_signals(self.stop, logger)
