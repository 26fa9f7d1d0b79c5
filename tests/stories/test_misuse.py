"""Misuse of the public names: a clear error at once, never a hang, a late AttributeError, or an ignored setting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext, suppress
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Any, cast

import anyio
import attrs
import pytest

import nsqext
import nsqext.sync
from nsqext import Admin, App, Consumer, OutgoingMessage, Producer, Router
from nsqext.arrow import consume
from nsqext.client.consumer.options import BackoffOptions, ConsumerOptions, DeliveryOptions, FailureOptions
from nsqext.client.producer.options import ProducerOptions
from nsqext.delays import DelayStore
from nsqext.errors import InvalidInput, InvalidName, InvalidSetting, InvalidState, UnknownSetting
from nsqext.integrations import QueueTopics
from nsqext.lookup.options import LookupOptions
from nsqext.observability import LogObserver
from nsqext.observability.otel import OpenTelemetry
from nsqext.transactions import Inbox, Outbox, OutboxStore, Positions
from nsqext.transport.options import ConnectionOptions
from tests.support.blocking_client import eventually

if TYPE_CHECKING:
    from nsqext.broker import Cluster

pytestmark = pytest.mark.anyio

NOWHERE = "127.0.0.1:1"
OPTIONS = (
    BackoffOptions,
    ConnectionOptions,
    ConsumerOptions,
    DeliveryOptions,
    FailureOptions,
    LookupOptions,
    ProducerOptions,
)
MEMBERS = [(kind, member.name, str(member.type)) for kind in OPTIONS for member in attrs.fields(kind)]
anything = cast("Any", object())


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A topic with the channel ``ch``."""
    name = f"orders_{token_hex(4)}"
    cluster.create_topic(name, partitions=2, channels=["ch"])
    return name


async def in_another_loop(function: Callable[[], Any]) -> None:
    """Call a function in the event loop of another thread."""

    async def call() -> None:
        result = function()
        if hasattr(result, "__await__"):
            async with asyncio.timeout(5):
                await result

    await anyio.to_thread.run_sync(asyncio.run, call())


# Arguments


def _refuses(kind: type, name: str, value: object) -> bool:
    try:
        kind(**{name: value})
    except (InvalidSetting, InvalidName):
        return True
    return False


def test_an_option_of_another_kind_is_refused() -> None:
    switches = [(kind, name) for kind, name, annotation in MEMBERS if "bool" in annotation.split(" | ")]
    numbers = [(kind, name) for kind, name, annotation in MEMBERS if annotation in ("int", "float")]
    given = [(*of, anything) for *of, _ in MEMBERS] + [(*of, 1) for of in switches] + [(*of, True) for of in numbers]
    assert [one for one in given if not _refuses(*one)] == []
    assert min(len(switches), len(numbers)) > 5


def test_a_secret_of_another_kind_is_not_shown() -> None:
    with pytest.raises(InvalidSetting, match=r"^auth_secret is a bytes: give text$"):
        ConnectionOptions(auth_secret=cast("Any", b"hidden"))


async def handle(message: nsqext.Message) -> None:
    """Do nothing."""


async def no_generator(app: App) -> None:
    """Do nothing."""


def refused_arguments() -> dict[str, Callable[[], object]]:
    """Return calls with bad arguments, by name."""
    app = App(NOWHERE)
    consumer = Consumer("orders", "billing", lookupd=NOWHERE)
    return {
        "topics of a mapping": lambda: Consumer(cast("Any", {"orders": 1}), "billing", lookupd=NOWHERE),
        "topics of bytes": lambda: Consumer(cast("Any", b"orders"), "billing", lookupd=NOWHERE),
        "topics of nothing": lambda: setattr(consumer, "topics", None),
        "addresses of a mapping": lambda: Producer(cast("Any", {"127.0.0.1": 4161})),
        "url of a number": lambda: Producer(cast("Any", 5)),
        "ext_filter of text": lambda: Consumer("orders", "billing", NOWHERE, ext_filter=cast("Any", "country")),
        "batches": lambda: consumer.batches(max_wait=cast("Any", "1")),
        "event callback": lambda: consumer.on_event(anything),
        "event callback that would be awaited": lambda: consumer.on_event(cast("Any", no_generator)),
        "event callback of a producer": lambda: Producer(NOWHERE).on_event(anything),
        "admin timeout": lambda: Admin(NOWHERE, timeout=-1),
        "admin timeout of text": lambda: Admin(NOWHERE, timeout=cast("Any", "30")),
        "default that handlers do not have": lambda: App(NOWHERE, max_inflight=5),  # type: ignore[call-arg]
        "middleware of a number": lambda: App(NOWHERE, middleware=cast("Any", 5)),
        "router of nothing": lambda: app.include_router(cast("Any", None)),
        "router of a class": lambda: app.include_router(cast("Any", Router)),
        "lifespan that is no generator": lambda: app.lifespan(cast("Any", no_generator)),
        "level of text": lambda: LogObserver(level=cast("Any", "INFO")),
        "slow of text": lambda: LogObserver(slow=cast("Any", "1")),
        "flag of telemetry": lambda: OpenTelemetry(parent=cast("Any", "no")),
        "flag of task queues": lambda: QueueTopics(topic_create=cast("Any", "no")),
        "flag of an outbox": lambda: OutboxStore("sqlite:///x.db", create=cast("Any", "no")),
        "flag of delays": lambda: DelayStore("x.db", create=cast("Any", "no")),
        "flag of a channel": lambda: consume("orders", "billing", NOWHERE, until_empty=cast("Any", "no")),
        "transaction that was begun": lambda: Inbox(cast("Any", nullcontext())),
        "positions in a coroutine function": lambda: Positions(cast("Any", no_generator)),
        "lifespan of nothing": lambda: app.lifespan(cast("Any", None)),
    }


@pytest.mark.parametrize("name", refused_arguments())
def test_a_bad_argument_is_refused(name: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        refused_arguments()[name]()
    assert caught.value.hint or "seconds" in str(caught.value)


def _outbox_add(**given: Any) -> object:
    return Outbox().add(anything, "orders", b"x", **given)


MISSPELT: dict[str, tuple[Callable[..., Any], str, str]] = {
    "Producer.publish": (lambda **given: Producer(NOWHERE).publish("t", b"x", **given), "heders", "headers"),
    "Producer.publish, trace": (lambda **given: Producer(NOWHERE).publish("t", b"x", **given), "traceid", "trace_id"),
    "Producer.publish_many": (lambda **given: Producer(NOWHERE).publish_many("t", [b"x"], **given), "kye", "key"),
    "App.publish": (lambda **given: App(NOWHERE).publish("t", b"x", **given), "partitions", "partition"),
    "sync.Producer.publish": (
        lambda **given: nsqext.sync.Producer(NOWHERE).publish("t", b"x", **given),
        "dely",
        "delay",
    ),
    "sync.Producer.publish_many": (
        lambda **given: nsqext.sync.Producer(NOWHERE).publish_many("t", [b"x"], **given),
        "trace_id",
        "trace_ids",
    ),
    "Outbox.add": (_outbox_add, "idenity", "identity"),
    "Outbox.add_async": (
        lambda **given: Outbox().add_async(anything, "orders", b"x", **given),
        "tags",
        "tag",
    ),
    "Producer": (lambda **given: Producer(NOWHERE, **given), "time_out", "timeout"),
    "Consumer": (lambda **given: Consumer("t", "ch", NOWHERE, **given), "max_inflight", "max_in_flight"),
}


@pytest.mark.parametrize("what", MISSPELT)
async def test_a_misspelt_argument_is_refused_with_the_right_one(what: str) -> None:
    call, wrong, right = MISSPELT[what]

    async def run() -> None:
        result = call(**{wrong: 1})
        if hasattr(result, "__await__"):
            await result

    with pytest.raises(UnknownSetting, match=rf"unknown (setting|argument) '{wrong}'.*did you mean {right}\?"):
        await anyio.to_thread.run_sync(run_blocking, run) if what.startswith("sync.") else await run()
    assert issubclass(UnknownSetting, TypeError)


def run_blocking(function: Callable[[], Awaitable[None]]) -> None:
    """Run a coroutine function that awaits nothing in a thread without an event loop."""
    with suppress(StopIteration):
        function().__await__().__next__()


async def test_an_argument_that_is_like_no_other_is_refused_with_all_of_them() -> None:
    with pytest.raises(UnknownSetting, match="unknown argument 'zzz': its arguments are topic, body, headers, tag"):
        await Producer(NOWHERE).publish("t", b"x", **anything_named("zzz"))


def anything_named(name: str) -> Any:
    """Return keyword arguments that type checkers do not know."""
    return {name: 1}


def test_auto_finish_of_text_is_refused() -> None:
    wrong = cast("Any", "no")
    for decorate in (
        Consumer("orders", "billing", lookupd=NOWHERE).handler(auto_finish=wrong),
        Router().handler("orders", "billing", auto_finish=wrong),
    ):
        with pytest.raises(InvalidSetting, match=r"^auto_finish='no' is not True or False"):
            decorate(handle)


class Service:
    """Handlers in a class."""

    async def handle(self, message: nsqext.Message) -> None:
        """Do nothing."""

    async def handle_batch(self, batch: nsqext.MessageBatch) -> None:
        """Do nothing."""

    def handle_in_thread(self, message: nsqext.sync.Message) -> None:
        """Do nothing."""


@pytest.mark.parametrize("service", [Service, Service()])
def test_a_method_is_registered_with_its_object(service: Any) -> None:
    for decorate, name in (
        (Consumer("orders", "billing", lookupd=NOWHERE).handler, "handle"),
        (Consumer("orders", "billing", lookupd=NOWHERE).batch_handler(), "handle_batch"),
        (App(NOWHERE).handler("orders", "billing"), "handle"),
        (nsqext.sync.Consumer("orders", "billing", lookupd=NOWHERE).handler, "handle_in_thread"),
    ):
        register = cast("Callable[[object], object]", decorate)
        if service is Service:
            with pytest.raises(InvalidSetting, match=f"Service.{name} is a method without its object"):
                register(getattr(service, name))
        else:
            register(getattr(service, name))


# Order of calls


async def test_waiting_for_what_was_not_started_is_refused() -> None:
    with anyio.fail_after(25), pytest.raises(InvalidState, match="consumer is not open"):
        await Consumer("orders", "billing", lookupd=NOWHERE).wait()
    with anyio.fail_after(25), pytest.raises(InvalidState, match="app is not running"):
        await App(NOWHERE).wait()


async def test_run_inside_of_an_event_loop_names_serve() -> None:
    app = App(NOWHERE)
    app.handler("orders", "billing")(handle)
    with pytest.raises(InvalidState, match=r"await app\.serve\(\)"):
        app.run()


async def test_one_test_of_an_app_at_a_time() -> None:
    app = App(NOWHERE)
    app.handler("orders", "billing")(handle)
    before = app.test()
    with pytest.raises(InvalidState, match="has not begun"):
        await before.deliver("orders", b"1")
    async with app.test() as test:
        with pytest.raises(InvalidState, match="tested already"):
            await app.test().__aenter__()
        with pytest.raises(InvalidState, match="tested without a server"):
            await app.start()
        assert await test.deliver("orders", b"1") == [None]
        bad: list[dict[str, Any]] = [
            {"trace_id": -1},
            {"trace_id": "7"},
            {"attempts": "x"},
            {"attempts": 0},
            {"key": 5},
        ]
        for arguments in bad:
            with pytest.raises((InvalidInput, InvalidSetting)):
                await test.deliver("orders", b"1", **arguments)
    with pytest.raises(InvalidState, match="has ended"):
        await test.deliver("orders", b"1")
    with pytest.raises(InvalidSetting, match="is not an address"):
        await app.test("nowhere:port").__aenter__()
    async with app.test() as test:  # the failed one left nothing behind
        await test.deliver("orders", b"1")


async def test_a_direct_test_refuses_publishes_that_a_server_would_refuse() -> None:
    app = App(NOWHERE)
    app.handler("orders", "billing")(handle)
    async with app.test() as test:
        with pytest.raises(InvalidInput):
            await app.publish("no topic", b"1")
        with pytest.raises(InvalidInput):
            await app.producer.publish("orders", cast("Any", "text"))
        with pytest.raises(InvalidInput):
            await app.producer.publish_many("orders", [OutgoingMessage(b"1", headers={"user": cast("Any", 5)})])
        assert not test.published


# On a server


async def test_a_refused_seek_leaves_the_consumer_as_it_was(cluster: Cluster, topic: str) -> None:
    async with Producer(cluster.lookupd) as producer, Consumer(topic, "ch", lookupd=cluster.lookupd) as consumer:
        with anyio.fail_after(25), pytest.raises(InvalidInput, match=r"Position\.earliest"):
            await consumer.seek(cast("Any", None))
        receipt = await producer.publish(topic, b"one")
        with anyio.fail_after(25):
            message = await anext(consumer)
        assert (message.body, message.partition) == (b"one", receipt.partition)
        for timeout in (-1, float("nan"), "1", True):
            with pytest.raises(InvalidSetting, match="timeout="):
                await consumer.fetch(1, cast("Any", timeout))
        await message.finish()


async def test_a_consumer_refuses_other_event_loops_and_continues(cluster: Cluster, topic: str) -> None:
    async with Producer(cluster.lookupd) as producer, Consumer(topic, "ch", lookupd=cluster.lookupd) as consumer:
        await producer.publish(topic, b"one")
        message = await anext(consumer)
        calls: list[Callable[[], Any]] = [
            lambda: consumer.fetch(1, 1.0),
            lambda: anext(consumer.batches()),
            lambda: anext(consumer),
            consumer.wait,
            message.finish,
            message.requeue,
            message.touch,
        ]
        for call in calls:
            with pytest.raises(InvalidState, match="another event loop"):
                await in_another_loop(call)
        with pytest.raises(InvalidState, match="another event loop"):
            await anyio.to_thread.run_sync(consumer.pause)
        await message.finish()  # it was not answered by the refused calls
        await producer.publish(topic, b"two")
        with anyio.fail_after(25):
            message = await anext(consumer)
        assert message.body == b"two"
        await message.finish()
        statistics = consumer.statistics()
        assert (statistics.finished, statistics.requeued, statistics.in_flight) == (2, 0, 0)


async def test_an_app_is_closed_in_its_event_loop(cluster: Cluster, topic: str) -> None:
    app = App(cluster.lookupd)
    app.handler(topic, "ch")(handle)
    async with app:
        with pytest.raises(InvalidState, match="another event loop"):
            await in_another_loop(app.aclose)
        with pytest.raises(InvalidState, match="another event loop"):
            await in_another_loop(app.wait)
        assert app.health().live
    await in_another_loop(app.aclose)  # there is nothing left to close


def refuse_calls_of_other_threads() -> None:
    """Make an event loop of asyncio raise when another thread changes it; trio always does."""
    with suppress(RuntimeError):
        asyncio.get_running_loop().set_debug(True)


@pytest.mark.parametrize("call", [anyio.to_thread.run_sync, in_another_loop])
async def test_a_consumer_is_stopped_by_another_thread(
    cluster: Cluster, topic: str, call: Callable[[Callable[[], object]], Awaitable[object]]
) -> None:
    refuse_calls_of_other_threads()
    consumer = Consumer(topic, "ch", lookupd=cluster.lookupd)

    async def stop() -> None:
        await anyio.wait_all_tasks_blocked()
        await call(consumer.stop)

    with anyio.fail_after(25):
        async with consumer, anyio.create_task_group() as tasks:
            tasks.start_soon(stop)
            assert [message async for message in consumer] == []
        await call(consumer.stop)  # does nothing any more


@pytest.mark.parametrize("call", [anyio.to_thread.run_sync, in_another_loop])
async def test_an_app_is_stopped_by_another_thread(
    cluster: Cluster, topic: str, call: Callable[[Callable[[], object]], Awaitable[object]]
) -> None:
    refuse_calls_of_other_threads()
    app = App(cluster.lookupd)
    app.handler(topic, "ch")(handle)
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(app.serve)
            await anyio.wait_all_tasks_blocked()
            await call(app.stop)
        await call(app.stop)  # does nothing any more
        async with app:
            await call(app.stop)
            await app.wait()


def test_an_app_in_a_thread_is_stopped_after_which_it_can_run_again(cluster: Cluster, topic: str) -> None:
    app = App(cluster.lookupd)
    app.handler(topic, "ch")(handle)
    for _ in range(2):
        thread = threading.Thread(target=partial(app.run, backend_options={"debug": True}), daemon=True)
        thread.start()
        eventually(lambda: app.health().ready)
        app.stop()
        thread.join(30)
        assert not thread.is_alive()
        assert app.health().live


async def test_admin_refuses_what_would_change_something_else_or_nothing(cluster: Cluster, topic: str) -> None:
    async with Admin(cluster.lookupd) as admin:
        with anyio.fail_after(25), pytest.raises(InvalidInput, match="is not a position"):
            await admin.seek_channel(topic, "ch", cast("Any", "latest"))
        with pytest.raises(InvalidInput, match=r"give channels=\['billing'\]"):
            await admin.create_topic("invoices", channels="billing")
        with pytest.raises(InvalidInput, match="known:"):
            await admin.tombstone(topic, "127.0.0.1:1")
        with pytest.raises(InvalidState, match="another event loop"):
            await in_another_loop(admin.topics)
        assert "invoices" not in await admin.topics()


async def test_a_lifespan_with_its_own_context_manager_is_refused() -> None:
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def lifespan(app: App) -> AsyncIterator[None]:
        yield

    with pytest.raises(InvalidSetting, match="without @asynccontextmanager"):
        App(NOWHERE).lifespan(cast("Any", lifespan))
