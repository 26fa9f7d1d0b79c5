"""`App`: handlers for several topics, run together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, Unpack

import anyio
from anyio.lowlevel import current_token
from attrs import evolve

from nsqext.app.health import Health, HealthEndpoint, ReadinessCheck, name_of, obstacles, unready
from nsqext.app.results import publish_results
from nsqext.app.router import HandlerSpec, Router
from nsqext.app.start_checks import (
    check_dead_letters_once,
    overlap,
    refuse_loops,
    refuse_shared,
    warn_of_drops_once,
    warn_of_unwritable,
)
from nsqext.arguments import check_plain_function
from nsqext.client.consumer.consumer import Consumer
from nsqext.client.consumer.handler_functions import stand_in
from nsqext.client.consumer.handlers.batches import MessageBatch
from nsqext.client.consumer.options import LANE_WAITS, ConsumerOptions
from nsqext.client.consumer.typed.body import encode_body
from nsqext.client.middleware import (
    Middleware,
    check_handler_kind,
    check_middleware,
    surround_batch_handler,
    surround_handler,
)
from nsqext.client.producer.options import ProducerOptions
from nsqext.client.producer.producer import Producer
from nsqext.client.settings import app_schema, consumer_schema, consumer_settings, producer_settings, settings_for
from nsqext.client.signals import stop_on_signals, takes_signals
from nsqext.client.tasks import BackgroundTasks, Runnable, first_error
from nsqext.errors import InvalidSetting, InvalidState, NsqError
from nsqext.lookup.lookup import Lookup, share_lookup
from nsqext.protocol.identify import KEY_FAILOVER
from nsqext.protocol.messages import KEY_HEADER
from nsqext.settings import build
from nsqext.transport.event_loop import call_in_loop

if TYPE_CHECKING:
    from nsqext.app.settings import AppSettings
    from nsqext.app.testing import AppTest
    from nsqext.client.consumer.handlers.batches import BatchFunction
    from nsqext.client.consumer.handlers.workers import Handler
    from nsqext.client.consumer.message import Message
    from nsqext.client.producer.publishing import PublishOptions
    from nsqext.types import Receipt

logger: logging.Logger = logging.getLogger("nsqext.app")


class App(Router, Runnable):
    """A service: handlers for several topics, and their producer.

    Its clients share addresses, settings, and the lookup client: one poll per topic, one pool of connections. An app
    can run again after its end; without handlers it only publishes.

    Args:
        lookupd, nsqd, env: as for `nsqext.Producer`.
        middleware: around every publish and handled message, the first is the outermost; see `nsqext.middleware`.
        settings: see `AppSettings`; a handler's settings take precedence.

    Raises:
        InvalidSetting: no address, both kinds of addresses, an invalid value, or settings that contradict each other.
        UnknownSetting: the error suggests a known name.
    """

    def __init__(
        self,
        lookupd: str | Sequence[str] | Lookup = (),
        *,
        nsqd: str | Sequence[str] = (),
        env: str | None = None,
        middleware: Sequence[Middleware] = (),
        **settings: Unpack[AppSettings],
    ) -> None:
        super().__init__()
        self._given = app_schema().collect(lookupd, nsqd, env, settings)
        self._middleware = check_middleware(middleware)
        self._test: AppTest | None = None
        self._used = False
        self._unstarted = 0
        self._readiness_checks: list[ReadinessCheck] = []
        self._error: BaseException | None = None
        self._loop: object = None  # event loop of the run
        self._tasks: BackgroundTasks | None = None
        self._stopping = anyio.Event()
        self._started = anyio.Event()
        self._ended = anyio.Event()
        self._consumer_options({"key": self._given.values.get("key", KEY_HEADER)})  # raises for invalid settings
        self._make_clients()

    def __repr__(self) -> str:
        shared = self._shared
        place = repr(shared.lookupd) if isinstance(shared.lookupd, Lookup) else f"nsqd={shared.nsqd!r}"
        handlers = " ".join(map(name_of, self._consumers)) or "no handlers"
        state = ("stopping" if self._stopping.is_set() else "running") if self._running else "not running"
        return f"{type(self).__name__}({place}, {handlers}, {state})"

    @property
    def settings(self) -> Mapping[str, object]:
        """All settings by name, with defaults; secrets are ``***``.

        Where defaults differ (``close_timeout``, ``lookup_timeout``), they are the consumers'; see
        ``app.producer.settings``.
        """
        own = consumer_schema().effective(self._consumer_options({}))
        given = {name: value for name, value in self._given.values.items() if name in LANE_WAITS}  # for keyed handlers
        return MappingProxyType({**self._producer.settings, **own, **given})

    @property
    def producer(self) -> Producer:
        """The app's producer, open while the app runs, lifespans included."""
        return self._producer

    @property
    def consumers(self) -> tuple[Consumer, ...]:
        """In the order of their handlers."""
        return tuple(self._consumers)

    async def publish(self, topic: str, value: object, **options: Unpack[PublishOptions]) -> Receipt:
        """Encode a value and publish it; see `nsqext.app.encode_body` and `nsqext.Producer.publish`.

        Args:
            value: bytes, str, JSON values, a dataclass, or an attrs, msgspec or pydantic object.
            options: the other arguments of `nsqext.Producer.publish`.

        Raises InvalidBody for a value that cannot be encoded; other errors as `nsqext.Producer.publish`.
        """
        return await self._producer.publish(topic, encode_body(value), **options)

    # Clients

    def _make_clients(self) -> None:
        """Create the clients of a run."""
        given = self._given
        if self._test is not None:
            given = evolve(given, lookupd=self._test.lookupd, nsqd=())
        self._shared = shared = share_lookup(given)
        own = settings_for(producer_settings(), shared.values)
        self._producer = Producer(shared.lookupd, nsqd=shared.nsqd, middleware=self._around(), **own)
        self._consumers = [self._consumer_of(spec) for spec in self.specs]
        self._used = False

    def _around(self, *specs: HandlerSpec) -> tuple[Middleware, ...]:
        """Return the middleware of the app, and of handlers inside it, the first outermost."""
        recorder = () if self._test is None else (self._test.recorder,)
        return (*self._middleware, *recorder, *(one for spec in specs for one in spec.middleware))

    def _consumer_of(self, spec: HandlerSpec) -> Consumer:
        shared = self._shared
        own = self._consumer_values(shared.values, spec.settings)
        consumer = Consumer(spec.topics.given, spec.channel, shared.lookupd, nsqd=shared.nsqd, **own)
        for one in self._around(spec):
            one.attach(consumer)
        return consumer

    def _consumer_values(self, app: Mapping[str, Any], handler: Mapping[str, Any]) -> Any:
        """Return the settings of a handler's consumer."""
        values: dict[str, Any] = settings_for(consumer_settings(), app)
        if handler.get("max_attempts") == 0:
            # a handler that never rejects ignores the app's treatment of rejected messages
            values = {name: value for name, value in values.items() if name not in ("dead_letter", "reject_ordered")}
        values = {**values, **handler}
        # of the app's producer, and for the handlers that need them
        unneeded = set[str]() if values.get("dispatch") == KEY_FAILOVER else {"key_tags"}
        if unneeded and values.get("key") is None:
            unneeded |= LANE_WAITS.keys()
        return {name: value for name, value in values.items() if name in handler or name not in unneeded}

    def _consumer_options(self, handler: Mapping[str, Any]) -> ConsumerOptions:
        return build(ConsumerOptions, consumer_settings(), self._consumer_values(self._given.values, handler))

    @property
    def addresses(self) -> tuple[tuple[str, str], ...]:
        """The given addresses, each with its program, nsqlookupd (HTTP) or nsqd (TCP)."""
        shared = self._shared
        if isinstance(shared.lookupd, Lookup):
            return tuple(("nsqlookupd", str(address)) for address in shared.lookupd.addresses)
        given = [shared.nsqd] if isinstance(shared.nsqd, str) else shared.nsqd
        return tuple(("nsqd", address.strip()) for text in given for address in str(text).split(","))

    @property
    def knows_partitions(self) -> bool:
        """Whether the app's producer looks up the partitions of topics."""
        return not self._given.nsqd

    @property
    def publish_options(self) -> ProducerOptions:
        """The settings of the app's producer."""
        return build(ProducerOptions, producer_settings(), settings_for(producer_settings(), self._given.values))

    def options_of(self, spec: HandlerSpec) -> ConsumerOptions:
        """Return the settings of a handler's consumer."""
        return self._consumer_options(spec.settings)

    def tested_handler_of(self, spec: HandlerSpec, called: Callable[[], object]) -> Handler:
        """Return a handler of single messages, which calls ``called`` inside its middleware."""
        around = self._around(spec)
        if spec.batch is not None:

            async def handle_batch(batch: MessageBatch) -> object:
                called()
                return await spec.call(batch)

            surrounded = surround_batch_handler(around, handle_batch, spec.channel)
            return lambda message: surrounded(MessageBatch([message]))
        call = self._call_of(spec)

        async def handle(message: Message) -> object:
            called()
            return await call(message)

        return surround_handler(around, handle, spec.channel)

    def handler_of(self, spec: HandlerSpec) -> Handler:
        """Return a handler of messages: middleware, decoding, the function, publishing of the result."""
        call = self._call_of(spec)
        handler = surround_handler(self._around(spec), call, spec.channel, auto_finish=spec.auto_finish)
        if self.publishers.get(spec.function):
            stand_in(handler, spec.call, published=True)
        return handler

    def _call_of(self, spec: HandlerSpec) -> Handler:
        """Return a handler without its middleware."""
        plan = spec.plan
        call: Handler = spec.call if plan is None else plan.handler(self.options_of(spec).failure)
        topics = self.publishers.get(spec.function)
        return publish_results(call, self._producer, tuple(topics)) if topics else call

    def _batch_handler_of(self, spec: HandlerSpec) -> BatchFunction:
        return surround_batch_handler(self._around(spec), spec.call, spec.channel)

    def _add(self, spec: HandlerSpec) -> None:
        around = (*self._middleware, *spec.middleware)
        check_handler_kind(around, batch=spec.batch is not None, auto_finish=spec.auto_finish)
        consumer = self._consumer_of(spec)  # raises for invalid options
        for other in self.specs:
            own, others = (self._consumer_values(self._given.values, one.settings) for one in (spec, other))
            if own.get("tag") == others.get("tag") and overlap(own.get("partitions"), others.get("partitions")):
                refuse_shared(spec, other)
        self._consumers.append(consumer)
        super()._add(spec)

    def _remove_from(self, index: int) -> None:
        super()._remove_from(index)
        del self._consumers[index:]

    @property
    def _running(self) -> bool:
        return self._loop is not None

    def _check_changeable(self) -> None:
        if self._running:
            raise InvalidState("the app is running already", hint="add handlers before it is started")

    # Running

    async def serve(self, *, signals: bool | None = None) -> None:
        """Run until SIGTERM or SIGINT, `stop`, or an error of a consumer; then drain and close.

        Args:
            signals: whether SIGTERM and SIGINT stop it; see `nsqext.Consumer.serve`. The first signal does not
                interrupt a lifespan that begins or ends.

        Raises:
            InvalidSetting: a publisher for a function that is no handler, or a handler's pattern that matches what it
                publishes.
            InvalidState: the app is running already.
            NsqError: a consumer failed; the others drained.
            Exception: of a lifespan, or of the start of a middleware.

        On cancellation, handlers have ``close_timeout`` seconds to end.
        """
        self._begin()
        if not takes_signals(signals):
            await self._main()
            return
        receiving = BackgroundTasks("app")  # until lifespans and the producer are closed
        await receiving.start()
        receiving.start_soon(stop_on_signals, self.stop, logger)
        try:
            await self._main()
        finally:
            await receiving.aclose()

    async def start(self) -> Self:
        """Run in the background until `aclose`, which any task may call.

        Returns when lifespans are entered and all partitions subscribed, or after ``start_timeout``.

        Raises:
            Exception: as for `serve`.
        """
        self._begin()
        self._tasks = tasks = BackgroundTasks("app", self._drain)
        try:
            await tasks.start()
            tasks.start_soon(self._main)
            await self._started.wait()
        except BaseException:
            await tasks.aclose()
            raise
        if self._ended.is_set():
            await tasks.aclose()
        return self

    async def wait(self) -> None:
        """After `start`: wait until `stop` is called, a consumer fails, or it is cancelled; then drain and close.

        Raises:
            InvalidState: not started, or called from another event loop.
            NsqError: a consumer failed.
        """
        if self._tasks is None and not self._running:
            raise InvalidState("the app is not running", hint="use 'async with' or await app.start() first")
        try:
            await self._stopping.wait()
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Drain and close; without effect before `start` and when called again.

        In a handler, and while `serve` runs the app, it begins the close and returns. Cancellation does not shorten it.

        Raises:
            InvalidState: called from another event loop.
            BaseException: the error that ended the app, unless it was raised before.
        """
        if self._tasks is not None and not self._ended.is_set():
            self._tasks.check_event_loop()
        if self._running:
            call_in_loop(self._loop, self._stop)
        if self._tasks is not None:
            await self._tasks.aclose()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def stop(self) -> None:
        """Make the app drain and stop; does not wait, for handlers and any thread.

        An app that has never run ends once it has started, without consuming. After a run, and in a test without a
        cluster, it has no effect.
        """
        call_in_loop(self._loop, self._stop)

    def _stop(self) -> None:
        if self._test is None or not self._test.direct:  # otherwise the next run would end at once
            self._stopping.set()

    def check_publishers(self) -> None:
        """Raise InvalidSetting for publishers with which the app does not start; see `serve`."""
        for function in self.publishers.keys() - {spec.function for spec in self.specs if spec.batch is None}:
            raise InvalidSetting(f"the publisher {function!r} is not a handler", hint="decorate it with @app.handler")
        refuse_loops(self.specs, self.publishers)

    def _begin(self) -> None:
        """Check the app, and prepare a run."""
        self.check_publishers()
        if self._test is not None and self._test.direct:
            raise InvalidState("the app is tested without a server", hint="give one: app.test(cluster.lookupd)")
        if self._running:
            raise InvalidState("the app is running already")
        if self._used:
            self._make_clients()
        for consumer, spec in zip(self._consumers, self.specs, strict=True):
            if spec.batch is not None:
                decorate = consumer.batch_handler(max_count=spec.batch.max_count, max_wait=spec.batch.max_wait)
                decorate(self._batch_handler_of(spec))
            else:
                consumer.handler(auto_finish=spec.auto_finish)(self.handler_of(spec))
        self._used = True
        self._loop = current_token().native_token
        self._error = None
        self._unstarted = len(self._consumers)
        self._tasks = None
        stops_early = self._stopping.is_set() and not self._ended.is_set()  # stopped before the first run
        self._stopping, self._started, self._ended = anyio.Event(), anyio.Event(), anyio.Event()
        if stops_early:
            self._stopping.set()

    async def _main(self) -> None:
        failure: BaseException | None = None

        def note(_: object, error: BaseException | None, __: object) -> None:
            nonlocal failure
            if error is not None and not isinstance(error, anyio.get_cancelled_exc_class()):
                failure = first_error(error) if isinstance(error, BaseExceptionGroup) else error

        try:
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self._producer)
                for lifespan in self.lifespans:
                    stack.push(note)  # lifespans around it may hide its error
                    await stack.enter_async_context(lifespan(self))
                stack.push(note)
                await self.start_middleware()
                failures = [self.options_of(spec).failure for spec in self.specs]
                warn_of_drops_once(self._consumers, failures)
                check_dead_letters_once(self._consumers, failures)
                if not self._stopping.is_set():
                    published = {topic for spec in self.specs for topic in self.publishers.get(spec.function, ())}
                    await warn_of_unwritable(self._producer, published | {one.topic for one in self.published})
                    await self._consume()
        except Exception as error:
            note(None, error, None)  # raised below, unless a consumer had failed before
        finally:
            if self._error is None and isinstance(failure, Exception):
                self._error = failure
            self._loop = None
            self._stopping.set()  # also after a failed lifespan or a cancellation: `wait` waits for it
            self._started.set()
            self._ended.set()
            if self._test is not None:
                self._test.app_ended()
        ended = failure if self._error is None else self._error
        if failure is not None and failure is not ended:
            logger.error("the app failed again while it ended: %r", failure, exc_info=failure)
        if ended is not None:
            raise ended

    async def start_middleware(self) -> None:
        """Start each middleware of the app and its handlers once."""
        around = self._around(*self.specs)
        for one in dict.fromkeys(around):
            await one.start()

    async def _consume(self) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                for consumer in self._consumers:
                    tasks.start_soon(self._run_consumer, consumer)
                if not self._consumers:
                    self._started.set()
                await self._stopping.wait()
                for consumer in self._consumers:
                    consumer.stop()
        except BaseExceptionGroup as group:
            raise first_error(group) from None

    async def _run_consumer(self, consumer: Consumer) -> None:
        """Run a consumer; at its end, stop the others."""
        try:
            await consumer.start()
            self._unstarted -= 1
            if not self._unstarted:
                self._started.set()
            await consumer.wait()
        except NsqError as error:
            # the first error is raised after the others have drained
            if self._error is not None or self._started.is_set():
                place = {"topic": ",".join(consumer.topics), "channel": consumer.channel}
                logger.error("a consumer cannot continue: %s", error, extra=place)  # noqa: TRY400 - its text says where
            self._error = self._error or error
        finally:
            self._stopping.set()

    async def _drain(self) -> None:
        self._stopping.set()
        await self._ended.wait()

    # Health and tests

    def health(self) -> Health:
        """Return whether the app is live and ready, with reasons; thread-safe."""
        if self._error is not None:
            failed = isinstance(self._error, NsqError)
            ended = f"a consumer cannot continue: {self._error}" if failed else f"the app has ended: {self._error!r}"
            return Health(live=False, ready=False, reasons=(ended,))
        if not self._running:
            return Health(live=True, ready=False, reasons=("the app is not running",))
        if self._stopping.is_set():
            return Health(live=True, ready=False, reasons=("the app is stopping",))
        reasons = [reason for consumer in self._consumers if (reason := unready(consumer))]
        if not reasons and not self._started.is_set():
            reasons = ["the app is starting"]
        reasons += obstacles(self._readiness_checks)
        return Health(live=True, ready=not reasons, reasons=tuple(reasons))

    def readiness_check(self, check: ReadinessCheck) -> ReadinessCheck:
        """Decorator: register a function that returns why the app is not ready; None if it is.

        `health` calls it while the app runs, in any thread. An exception that it raises is a reason, too.

        Raises:
            InvalidSetting: no function, or a coroutine function.
            InvalidState: the app is running already.
        """
        self._check_changeable()
        check_plain_function("readiness_check", check)
        self._readiness_checks.append(check)
        return check

    def asgi(self) -> HealthEndpoint:
        """Return an ASGI application that answers ``/healthz`` and ``/readyz``."""
        return HealthEndpoint(self.health)

    def test(self, lookupd: str | Sequence[str] = ()) -> AppTest:
        """Return a context manager for tests of this app; see `AppTest`.

        Args:
            lookupd: lookup addresses of a test cluster; without the argument handlers are called directly.

        Raises InvalidSetting for an empty address: the test would run without its cluster.
        """
        from nsqext.app.testing import AppTest

        return AppTest(self, lookupd)

    def use_test(self, test: AppTest | None) -> None:
        """Create clients for a test; None for the app's own. Raises InvalidState while it runs, or InvalidSetting."""
        self._check_changeable()
        if test is not None and self._test is not None:
            raise InvalidState("the app is being tested already", hint="end the other test first")
        before, self._test = self._test, test
        try:
            self._make_clients()
        except BaseException:
            self._test = before
            raise
