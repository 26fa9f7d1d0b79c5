"""Handlers for several topics, run together."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from nsqext import Admin, App, Consumer, Message, MessageBatch, Router
from nsqext.app import Health
from nsqext.app.start_checks import refuse_loops
from nsqext.errors import InvalidPartition, InvalidSetting, InvalidState, LookupFailed, TopicNotFound
from nsqext.middleware import CallNext, Handling, Middleware
from tests.support.consumers import eventually

if TYPE_CHECKING:
    from nsqext.broker import Cluster

NODES = 2

pytestmark = pytest.mark.anyio


@pytest.fixture
def topics(cluster: Cluster) -> tuple[str, str]:
    """Two fresh topics with the channel ``ch``."""
    names = (f"a_{token_hex(4)}", f"b_{token_hex(4)}")
    for name in names:
        cluster.create_topic(name, channels=["ch"])
    return names


async def test_handlers_lifespans_and_producer(cluster: Cluster, topics: tuple[str, str]) -> None:
    first, second = topics
    app = App(cluster.lookupd)
    events: list[object] = []

    @app.lifespan
    async def outer(given: App) -> AsyncIterator[None]:
        assert given is app
        events.append("begin")
        await app.producer.publish(first, b"one")
        yield
        await app.producer.publish(first, b"late")
        events.append("end")

    @app.lifespan
    async def inner(given: App) -> AsyncIterator[None]:
        events.append("begin inner")
        yield
        events.append("end inner")

    @app.handler(first, "ch")
    async def pass_on(message: Message) -> None:
        events.append(message.body)
        await app.producer.publish(second, b"two")

    @app.handler(second, "ch", concurrency=2)
    async def take(message: Message) -> None:
        events.append(message.body)
        app.stop()

    assert [consumer.topics for consumer in app.consumers] == [(first,), (second,)]
    with anyio.fail_after(25):
        await app.serve()
    assert events == ["begin", "begin inner", b"one", b"two", "end inner", "end"]


async def test_a_consumer_that_cannot_continue_ends_the_app(cluster: Cluster, topics: tuple[str, str]) -> None:
    app = App(cluster.lookupd)

    @app.handler(topics[0], "ch", partitions=(7,))
    @app.handler(topics[1], "ch")
    async def handle(message: Message) -> None:
        """Never called."""

    with anyio.fail_after(25), pytest.raises(InvalidPartition, match="partition"):
        await app.serve()


async def test_the_first_of_two_errors_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    app = App("127.0.0.1:1")
    app.handler("orders", "early")(nothing)
    app.handler("orders", "late")(nothing)

    async def start(consumer: Consumer) -> None:
        if consumer.channel == "late":
            while app.health().live:  # noqa: ASYNC110 - it has no event for this
                await anyio.sleep(0.01)
        raise TopicNotFound(f"no topic for {consumer.channel}")

    monkeypatch.setattr(Consumer, "start", start)
    with anyio.fail_after(25), pytest.raises(TopicNotFound, match="no topic for early"):
        await app.serve()
    assert app.health().reasons == ("a consumer cannot continue: no topic for early",)


async def test_a_missing_lookup_service_is_one_error() -> None:
    app = App("127.0.0.1:1", lookup_request_timeout=0.2)
    app.handler("orders", "ch", lookup_timeout=0.0)(nothing)
    app.handler("bills", "ch", lookup_timeout=0.0)(nothing)
    with anyio.fail_after(25), pytest.raises(LookupFailed):
        await app.serve()


async def nothing(message: Message) -> None:
    """Handle a message."""


async def test_cancelling_drains(cluster: Cluster, topics: tuple[str, str]) -> None:
    app = App(cluster.lookupd)
    begun = anyio.Event()
    ended: list[bytes] = []

    @app.lifespan
    async def publish(given: App) -> AsyncIterator[None]:
        await given.producer.publish(topics[0], b"x")
        yield

    @app.handler(topics[0], "ch")
    async def handle(message: Message) -> None:
        begun.set()
        await anyio.sleep(0.1)
        ended.append(message.body)

    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(app.serve)
            await begun.wait()
            tasks.cancel_scope.cancel()
    assert ended == [b"x"]


async def test_mistakes(cluster: Cluster) -> None:
    app = App(cluster.lookupd)

    async def generator(message: Message) -> AsyncIterator[bytes]:
        yield message.body

    with pytest.raises(InvalidSetting, match="generator is an asynchronous generator: remove 'yield'"):
        app.handler("orders", "ch")(generator)
    assert app.consumers == ()


async def test_publishers_of_several_routers_add_up() -> None:
    app = App("127.0.0.1:1")
    for topic in ("first", "second"):
        router = Router()
        router.publisher(topic)(nothing)
        app.include_router(router)
    assert app.publishers[nothing] == ["first", "second"]


async def test_nothing_is_added_to_a_router_that_was_included() -> None:
    """It would not run, while the app is ready."""
    inner, outer, app = Router(), Router(), App("127.0.0.1:1")
    outer.include_router(inner)
    app.include_router(outer)
    for router in (inner, outer):
        adds: list[Callable[[], object]] = [
            partial(router.handler, "orders", "ch"),
            partial(router.batch_handler, "orders", "ch"),
            partial(router.publisher("orders"), nothing),
            partial(router.include_router, Router()),
        ]
        for add in adds:
            with pytest.raises(InvalidState, match="what is added now would not run"):
                add()
    App("127.0.0.1:1").include_router(inner)  # a second app has it too


async def test_an_app_without_handlers_publishes(
    cluster: Cluster, topics: tuple[str, str], anyio_backend_name: str
) -> None:
    with anyio.fail_after(25):
        async with App(cluster.lookupd) as app:
            assert (await app.publish(topics[0], b"x")).topic == topics[0]
            with pytest.raises(InvalidState, match="another event loop"):
                await anyio.to_thread.run_sync(lambda: anyio.run(app.aclose, backend=anyio_backend_name))
            assert app.health() == Health(live=True, ready=True)
        await app.start()
        ended = anyio.Event()

        async def wait() -> None:
            await app.wait()
            ended.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            assert (await app.publish(topics[0], b"x")).topic == topics[0]
            assert not ended.is_set()
            app.stop()
        assert app.health().reasons == ("the app is not running",)


async def test_a_stop_before_the_first_run_ends_it_and_no_later_one(cluster: Cluster, topics: tuple[str, str]) -> None:
    """It was lost: the app ran on."""
    app = App(cluster.lookupd)
    app.handler(topics[0], "ch")(nothing)
    await app.aclose()  # without effect before the start
    app.stop()
    with anyio.fail_after(10):
        await app.serve()
    app.stop()
    async with app:
        assert app.health().ready


async def test_a_start_waits_for_all_consumers(
    cluster: Cluster, topics: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app, early, go, started = App(cluster.lookupd), anyio.Event(), anyio.Event(), anyio.Event()
    app.handler(topics[0], "ch")(nothing)
    app.handler(topics[1], "ch")(nothing)
    start = Consumer.start

    async def late(consumer: Consumer) -> None:
        await start(consumer)
        early.set()
        if consumer.topics == (topics[1],):
            await go.wait()

    async def begin() -> None:
        await app.start()
        started.set()

    monkeypatch.setattr(Consumer, "start", late)
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(begin)
            await early.wait()
            await eventually(lambda: app.health().reasons == ("the app is starting",))
            assert not started.is_set()
            go.set()
            await started.wait()
        await app.aclose()


async def test_a_start_that_is_cancelled_leaves_its_lifespans() -> None:
    app, entered, left = App("127.0.0.1:1"), anyio.Event(), list[str]()

    @app.lifespan
    async def scope(_: App) -> AsyncIterator[None]:
        entered.set()
        try:
            await anyio.sleep(0.1)
            yield
        finally:
            left.append("x")

    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(app.start)
            await entered.wait()
            tasks.cancel_scope.cancel()
    assert left == ["x"]
    assert app.health().reasons == ("the app is not running",)


async def test_a_running_app_cannot_be_changed(
    cluster: Cluster, topics: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = App(f"nsq://{cluster.lookupd[0]}", timeout=5.0)
    assert app.producer.settings["timeout"] == 5
    app.handler(topics[0], "ch")(nothing)

    @app.lifespan
    async def late(given: App) -> AsyncIterator[None]:
        with pytest.raises(InvalidState, match="is running already"):
            app.handler("orders", "ch")
        with pytest.raises(InvalidState, match="is running already"):
            app.lifespan(late)
        monkeypatch.delattr(Consumer, "start")  # nothing is consumed any more
        app.stop()
        yield

    with anyio.fail_after(25):
        await app.serve()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_run_until_a_signal(cluster: Cluster, topics: tuple[str, str], backend: str) -> None:
    app = App(cluster.lookupd)
    left: list[str] = []

    @app.lifespan
    async def publish(given: App) -> AsyncIterator[None]:
        await given.producer.publish(topics[0], b"x")
        yield
        left.append("yes")

    @app.handler(topics[0], "ch")
    async def handle(message: Message) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    app.run(backend=backend)
    assert left == ["yes"]


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_signal_while_lifespans_begin_or_end_leaves_them(
    cluster: Cluster, topics: tuple[str, str], backend: str
) -> None:
    app = App(cluster.lookupd)
    steps: list[str] = []
    before = signal.getsignal(signal.SIGTERM)

    async def receive_signal() -> None:
        assert signal.getsignal(signal.SIGTERM) != before, "the default effect ends the process"
        os.kill(os.getpid(), signal.SIGTERM)
        await eventually(lambda: signal.getsignal(signal.SIGTERM) == before)

    @app.handler(topics[0], "ch")
    async def handle(message: Message) -> None:
        app.stop()

    @app.lifespan
    async def ends_late(given: App) -> AsyncIterator[None]:
        assert signal.getsignal(signal.SIGTERM) != before, "the default effect ends the process"
        await given.producer.publish(topics[0], b"x")
        yield
        if "again" not in steps:
            await receive_signal()
        steps.append("left")

    @app.lifespan
    async def begins_late(given: App) -> AsyncIterator[None]:
        if steps:
            await receive_signal()
            steps.append("again")
        yield

    app.run(backend=backend)
    app.run(backend=backend)
    assert steps == ["left", "again", "left"]


class Wreck(BaseException):
    """A BaseException such as SystemExit, which asyncio treats specially."""


async def test_base_exceptions_of_handlers_are_raised(cluster: Cluster, topics: tuple[str, str]) -> None:
    app = App(cluster.lookupd)

    @app.handler(topics[0], "ch")
    async def handle(message: Message) -> None:
        raise Wreck

    @app.lifespan
    async def publish(given: App) -> AsyncIterator[None]:
        await app.producer.publish(topics[0], b"x")
        yield

    with anyio.fail_after(25), pytest.raises(Wreck):
        await app.serve()


async def test_wait_ends_when_a_lifespan_fails(cluster: Cluster, topics: tuple[str, str]) -> None:
    app = App(cluster.lookupd)
    entered, waiting = anyio.Event(), anyio.Event()

    @app.lifespan
    async def broken(given: App) -> AsyncIterator[None]:
        entered.set()
        await waiting.wait()
        raise KeyError
        yield

    @app.handler(topics[0], "ch")
    async def handle(message: Message) -> None:
        raise AssertionError("it was handled")

    async def serve() -> None:
        with pytest.raises(KeyError):
            await app.serve()

    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            await entered.wait()
            tasks.start_soon(app.wait)
            await anyio.wait_all_tasks_blocked()
            waiting.set()


async def test_start_and_aclose_in_different_tasks_and_again(cluster: Cluster, topics: tuple[str, str]) -> None:
    app = App(cluster.lookupd)
    received: list[bytes] = []
    arrived = anyio.Event()

    @app.lifespan
    async def scope(given: App) -> AsyncIterator[None]:
        async with anyio.create_task_group():  # it is entered and left in one task
            yield

    @app.handler(topics[0], "ch")
    async def handle(message: Message) -> None:
        received.append(message.body)
        arrived.set()

    for body in (b"first", b"second"):
        arrived = anyio.Event()
        with anyio.fail_after(25):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(app.start)
            with pytest.raises(InvalidState, match="is running already"):
                await app.start()
            await app.producer.publish(topics[0], body)
            await arrived.wait()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(app.aclose)
            await app.aclose()
    assert received == [b"first", b"second"]


async def test_aclose_raises_the_error_that_ended_the_app(cluster: Cluster, topics: tuple[str, str]) -> None:
    app = App(cluster.lookupd)
    app.handler(topics[0], "ch", partitions=(1,))(nothing)
    with anyio.fail_after(25), pytest.raises(InvalidPartition):
        await app.start()
    assert not app.health().live
    await app.aclose()
    async with Admin(cluster.lookupd) as admin:
        await admin.expand_topic(topics[0], 2)
    async with app:  # without the error of the former run
        assert app.health().live


async def test_a_handler_closes_its_app(cluster: Cluster, topics: tuple[str, str]) -> None:
    app = App(cluster.lookupd)

    @app.handler(topics[0], "ch")
    async def handle(message: Message) -> None:
        await app.aclose()

    with anyio.fail_after(25):
        async with app:
            await app.producer.publish(topics[0], b"x")
            while app.health().reasons != ("the app is not running",):  # noqa: ASYNC110 - it has no event for this
                await anyio.sleep(0.01)


@pytest.mark.parametrize(
    ("signals", "handled", "left"), [(None, False, False), (None, True, True), (False, False, True)]
)
async def test_serve_leaves_signals_to_a_program_that_handles_them(
    cluster: Cluster, topics: tuple[str, str], signals: bool | None, handled: bool, left: bool
) -> None:
    app = App(cluster.lookupd)
    found: list[object] = []
    original = signal.getsignal(signal.SIGTERM)
    before = (lambda number, frame: None) if handled else signal.SIG_DFL
    signal.signal(signal.SIGTERM, before)

    @app.handler(topics[0], "ch")
    async def handle(message: Message) -> None:
        found.append(signal.getsignal(signal.SIGTERM))
        app.stop()

    @app.lifespan
    async def publish(given: App) -> AsyncIterator[None]:
        await app.producer.publish(topics[0], b"x")
        yield

    try:
        with anyio.fail_after(25):
            await app.serve(signals=signals)
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, original)
    assert (found == [before]) == left


async def test_the_settings_of_an_app_reach_producer_and_consumers() -> None:
    url = "nsq://127.0.0.1:1?auth_secret=hush&tls=true&requeue_delay=3&max_in_flight=7"
    app = App(url, lookup_request_timeout=2.0)
    app.handler("orders", "ch", close_timeout=1.0, requeue_delay=2.0, requeue_jitter=0.0, concurrency=2)(nothing)
    consumer = app.consumers[0]
    for settings in (app.producer.settings, consumer.settings):
        assert (settings["auth_secret"], settings["tls"], settings["lookup_request_timeout"]) == ("***", True, 2)
    assert (consumer.settings["close_timeout"], consumer.max_in_flight) == (1, 7)
    assert (consumer.settings["requeue_delay"], consumer.settings["requeue_jitter"]) == (2, 0)
    app = App("127.0.0.1:1", max_attempts=3, dead_letter="dead", reject_ordered=True)
    app.handler("orders", "ch")(nothing)
    app.handler("orders", "other", max_attempts=0)(nothing)
    names = ("max_attempts", "dead_letter", "reject_ordered")
    found = [tuple(one.settings[name] for name in names) for one in app.consumers]
    assert found == [(3, "dead", True), (0, None, False)]


async def test_options_that_would_be_ignored_are_refused() -> None:
    app = App("127.0.0.1:1", tls=True)
    assert app.producer.settings["tls"] is True
    with pytest.raises(InvalidSetting, match="deflate_level"):
        app.handler("orders", "other", deflate_level=3)(nothing)  # type: ignore[call-arg]
    with pytest.raises(InvalidSetting, match="did you mean max_in_flight"):
        App("nsq://h", max_inflight=3)  # type: ignore[call-arg]


async def test_an_app_that_drains_is_live_but_not_ready(cluster: Cluster, topics: tuple[str, str]) -> None:
    app = App(cluster.lookupd)
    begun, release = anyio.Event(), anyio.Event()

    @app.handler(topics[0], "ch")
    async def handle(message: Message) -> None:
        begun.set()
        await release.wait()

    with anyio.fail_after(25):
        async with app:
            await app.publish(topics[0], b"one")
            await begun.wait()
            app.stop()
            assert app.health() == Health(live=True, ready=False, reasons=("the app is stopping",))
            release.set()


@pytest.mark.parametrize("where", ["start", "task", "middleware"])
async def test_an_error_that_a_lifespan_hides_is_raised(cluster: Cluster, topics: tuple[str, str], where: str) -> None:
    """The app ended as after `stop`, and `nsqext run` did not start it again."""

    class Failing(Middleware):
        async def start(self) -> None:
            if where == "middleware":
                raise ZeroDivisionError

    app = App(cluster.lookupd, middleware=[Failing()])
    app.handler(topics[0], "ch")(nothing)
    hidden: list[BaseException] = []

    @app.lifespan
    async def hides(_: App) -> AsyncIterator[None]:
        try:
            yield
        except BaseException as error:
            hidden.append(error)

    async def fail() -> None:
        raise ZeroDivisionError

    @app.lifespan
    async def fails(_: App) -> AsyncIterator[None]:
        if where == "start":
            raise ZeroDivisionError
        async with anyio.create_task_group() as tasks:
            if where == "task":
                tasks.start_soon(fail)
            yield

    with anyio.fail_after(25), pytest.raises(ZeroDivisionError):
        await app.serve()
    assert len(hidden) == 1
    assert not app.health().live


async def test_handlers_of_several_topics(cluster: Cluster, topics: tuple[str, str]) -> None:
    first, second = topics
    app = App(cluster.lookupd)
    seen: list[tuple[str, bytes]] = []

    @app.handler([f"{first[:-1]}?", second], "ch")
    async def take(message: Message) -> None:
        seen.append((message.topic, message.body))
        if len(seen) == 2:
            app.stop()

    @app.batch_handler(f"{second}*", "batches")
    async def take_batch(batch: MessageBatch) -> None:
        """Never called: the channel is new."""

    @app.lifespan
    async def publish(app: App) -> AsyncIterator[None]:
        for topic in topics:
            await app.producer.publish(topic, topic.encode())
        yield

    with anyio.fail_after(25):
        await app.serve()
    assert sorted(seen) == [(topic, topic.encode()) for topic in sorted(topics)]
    async with app.test() as test:
        await test.deliver(second, b"direct", channel="ch")
    assert seen[-1] == (second, b"direct")


async def test_a_handler_that_would_receive_what_it_publishes_is_refused(cluster: Cluster) -> None:
    app = App(cluster.lookupd)

    @app.publisher("orders.paid")
    @app.handler("orders.*", "ch")
    async def take(message: Message) -> bytes:
        return message.body

    with pytest.raises(InvalidSetting, match=r"orders\.\* publishes to orders\.paid"):
        await app.serve()
    with pytest.raises(InvalidSetting, match="needs a list of topics"):
        App(nsqd="127.0.0.1:1").handler("a*", "ch")(take)
    named = App(cluster.lookupd)
    named.publisher("orders")(named.handler(["orders", "refunds.*"], "ch")(take))
    refuse_loops(named.specs, named.publishers)  # a name is intended


async def test_batch_handlers_and_handlers_that_answer_later(
    cluster: Cluster, topics: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    around: list[bool] = []
    given: list[object] = []

    class Counting(Middleware):
        async def handle(self, handling: Handling, call_next: CallNext) -> object:
            around.append(handling.batch)
            return await call_next(handling)

    register = Consumer.batch_handler

    def batch_handler(consumer: Consumer, **options: Any) -> Any:
        given.append(options)
        return register(consumer, **options)

    monkeypatch.setattr(Consumer, "batch_handler", batch_handler)
    app = App(cluster.lookupd, middleware=[Counting()])
    batches: list[list[bytes]] = []
    later: list[Message] = []
    done, written = anyio.Event(), anyio.Event()

    @app.batch_handler(topics[0], "ch", max_count=3, max_wait=5.0)
    async def write(batch: MessageBatch) -> str:
        batches.append([message.body for message in batch])
        if sum(map(len, batches)) == 7:
            written.set()
        return "written"

    @app.handler(topics[1], "ch", auto_finish=False)
    async def keep(message: Message) -> None:
        later.append(message)
        done.set()

    async with app.test() as test:
        assert await test.deliver(topics[0], b"alone") == ["written"]
    with anyio.fail_after(25):
        async with app:
            await app.producer.publish_many(topics[0], [b"%d" % number for number in range(6)], partition=0)
            await app.publish(topics[1], "x")
            await done.wait()
            assert not later[0].answered
            await later[0].finish()
            await written.wait()
    assert batches[:1] == [[b"alone"]]
    assert sorted(body for batch in batches[1:] for body in batch) == [b"%d" % number for number in range(6)]
    assert max(map(len, batches)) <= 3
    assert given == [{"max_count": 3, "max_wait": 5.0}]
    assert around.count(True) == len(batches)
    app.publisher("results")(write)
    with pytest.raises(InvalidSetting, match="is not a handler"):
        await app.serve()
