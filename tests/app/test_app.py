"""Handlers for several topics and their settings, run together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from nsqext import App, Consumer, Message, MessageBatch, Router
from nsqext.app import Health
from nsqext.app.start_checks import refuse_loops
from nsqext.errors import InvalidSetting, InvalidState
from nsqext.middleware import CallNext, Deduplicate, Handling, Middleware
from tests.support.apps import nothing

if TYPE_CHECKING:
    from nsqext.broker import Cluster

NODES = 2

pytestmark = pytest.mark.anyio


async def test_handlers_lifespans_and_producer(cluster: Cluster, topics: tuple[str, str]) -> None:
    first, second = topics
    app, router = App(cluster.lookupd), Router()
    events: list[object] = []

    @app.lifespan
    async def outer(given: App) -> AsyncIterator[None]:
        assert given is app
        events.append("begin")
        await app.producer.publish(first, b"one")
        yield
        await app.producer.publish(first, b"late")
        events.append("end")

    @router.lifespan
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

    app.include_router(router)
    assert [consumer.topics for consumer in app.consumers] == [(first,), (second,)]
    with anyio.fail_after(25):
        await app.serve()
    assert events == ["begin", "begin inner", b"one", b"two", "end inner", "end"]


async def test_mistakes(cluster: Cluster) -> None:
    app = App(cluster.lookupd)

    async def generator(message: Message) -> AsyncIterator[bytes]:
        yield message.body

    with pytest.raises(InvalidSetting, match="generator is an asynchronous generator: remove 'yield'"):
        app.handler("orders", "ch")(generator)
    assert app.consumers == ()
    app = App(cluster.lookupd, middleware=[Deduplicate()])
    with pytest.raises(InvalidSetting, match="Deduplicate cannot be used with auto_finish=False"):
        app.handler("orders", "ch", auto_finish=False)(nothing)


async def test_publishers_of_several_routers_add_up() -> None:
    app = App("127.0.0.1:1")
    for topic in ("first", "second"):
        router = Router()
        router.publisher(topic)(nothing)
        app.include_router(router)
    assert app.publishers[nothing] == ["first", "second"]


async def test_a_router_that_is_refused_leaves_nothing_behind() -> None:
    """Its first handlers stayed, so that the corrected router was refused, too."""

    async def first(message: Message) -> None: ...

    def make(*topics: str) -> Router:
        router = Router()
        for topic in topics:
            router.handler(topic, "ch")(first)
        router.publisher("results")(first)
        return router

    app = App("127.0.0.1:1")
    app.handler("orders", "ch")(nothing)
    with pytest.raises(InvalidSetting, match="two handlers consume orders/ch"):
        app.include_router(make("refunds", "orders"))
    assert len(app.specs) == 1
    assert first not in app.publishers
    assert [consumer.topics for consumer in app.consumers] == [("orders",)]
    app.include_router(make("refunds", "bills"))
    assert [consumer.topics for consumer in app.consumers] == [("orders",), ("refunds",), ("bills",)]


async def test_an_app_cannot_be_included() -> None:
    """Its middleware and readiness checks were left out without a word."""
    inner = App("127.0.0.1:1", middleware=[Deduplicate()])
    inner.handler("orders", "ch")(nothing)
    for outer in (App("127.0.0.1:1"), Router()):
        with pytest.raises(InvalidSetting, match="an app cannot be included"):
            outer.include_router(inner)
        assert outer.specs == []


async def idle(app: App) -> AsyncIterator[None]:
    """Do nothing while an app runs."""
    yield


async def test_nothing_is_added_to_a_router_that_was_included() -> None:
    """It would not run, while the app is ready."""
    inner, outer, app = Router(), Router(), App("127.0.0.1:1")
    begun = {
        router: (router.handler("orders", "ch"), router.batch_handler("orders", "ch")) for router in (inner, outer)
    }
    outer.include_router(inner)
    app.include_router(outer)
    for router in (inner, outer):
        adds: list[Callable[[], object]] = [
            partial(router.handler, "orders", "ch"),
            partial(router.batch_handler, "orders", "ch"),
            partial(router.publisher("orders"), nothing),
            partial(router.publishes, "orders"),
            partial(router.lifespan, idle),
            partial(router.include_router, Router()),
            *(partial(decorate, nothing) for decorate in begun[router]),
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
        await anyio.to_thread.run_sync(lambda: anyio.run(app.aclose, backend=anyio_backend_name))


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


async def test_the_settings_of_an_app_reach_producer_and_consumers() -> None:
    url = "nsq://127.0.0.1:1?auth_secret=hush&tls=true&requeue_delay=3&max_in_flight=7"
    app = App(url, lookup_request_timeout=2.0)
    app.handler("orders", "ch", close_timeout=1.0, requeue_delay=2.0, requeue_jitter=0.0, concurrency=2)(nothing)
    consumer = app.consumers[0]
    assert app.settings["close_timeout"] == Consumer("orders", "ch", "127.0.0.1:1").settings["close_timeout"]
    assert app.settings["close_timeout"] != app.producer.settings["close_timeout"]
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
    app = App("127.0.0.1:1", key_tags=4)
    app.handler("orders", "ch", dispatch="key_failover")(nothing)
    app.handler("orders", "other")(nothing)
    assert [one.settings["key_tags"] for one in app.consumers] == [4, None]
    app = App("127.0.0.1:1", settle_wait=1.0)
    app.handler("orders", "ch", key="customer")(nothing)
    app.handler("orders", "other")(nothing)
    app.handler("orders", "third", dispatch="key_failover", settle_wait=2.0)(nothing)
    assert app.settings["settle_wait"] == 1.0
    assert [one.settings["settle_wait"] for one in app.consumers] == [1.0, 0.2, 2.0]
    with pytest.raises(InvalidSetting, match="settle_wait=-1 is not a time"):
        App("127.0.0.1:1", settle_wait=-1)
    with pytest.raises(InvalidSetting, match="settle_wait has no effect without key or dispatch='key_failover'"):
        app.handler("orders", "fourth", settle_wait=2.0)(nothing)


async def test_options_that_would_be_ignored_are_refused() -> None:
    app = App("127.0.0.1:1", tls=True)
    assert app.producer.settings["tls"] is True
    with pytest.raises(InvalidSetting, match="deflate_level"):
        app.handler("orders", "other", deflate_level=3)(nothing)  # type: ignore[call-arg]
    with pytest.raises(InvalidSetting, match="did you mean max_in_flight"):
        App("nsq://h", max_inflight=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidSetting, match="did you mean max_wait"):
        app.batch_handler("orders", "other", max_wiat=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidSetting, match="concurrency"):
        app.handler("orders", "other", concurrency=0)(nothing)
    assert (app.specs, app.consumers) == ([], ())


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


class Attached(Middleware):
    """Notes the clients that it is attached to."""

    def __init__(self) -> None:
        self.clients: list[object] = []

    def attach(self, client: object) -> None:
        self.clients.append(client)


async def test_middleware_is_attached_to_the_clients_whose_messages_it_sees() -> None:
    of_app, of_handler = Attached(), Attached()
    app = App("127.0.0.1:1", middleware=[of_app])
    app.handler("orders", "ch", middleware=[of_handler])(nothing)
    app.handler("bills", "ch")(nothing)
    assert of_app.clients == [app.producer, *app.consumers]
    assert of_handler.clients == [app.consumers[0]]


async def test_an_object_is_a_lifespan() -> None:
    class Cache:
        begun = 0

        async def __call__(self, app: App) -> AsyncIterator[None]:
            self.begun += 1
            yield

    app, cache = App("127.0.0.1:1"), Cache()
    app.lifespan(cache)
    async with app:
        assert cache.begun == 1
