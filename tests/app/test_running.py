"""How an app begins and ends: start, stop, signals, cancellation and errors."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext import Admin, App, Consumer, Message
from nsqext.errors import InvalidPartition, InvalidState, LookupFailed, TopicNotFound
from nsqext.middleware import Middleware
from tests.support.apps import nothing
from tests.support.consumers import eventually

if TYPE_CHECKING:
    from nsqext.broker import Cluster

NODES = 2

pytestmark = pytest.mark.anyio


async def test_the_first_of_several_errors_is_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = App("127.0.0.1:1")
    app.handler("orders", "early")(nothing)
    app.handler("orders", "late")(nothing)

    @app.lifespan
    async def fails_at_the_end(_: App) -> AsyncIterator[None]:
        yield
        raise ZeroDivisionError

    async def start(consumer: Consumer) -> None:
        if consumer.channel == "late":
            while app.health().live:  # noqa: ASYNC110 - it has no event for this
                await anyio.sleep(0.01)
        raise TopicNotFound(f"no topic for {consumer.channel}")

    monkeypatch.setattr(Consumer, "start", start)
    with anyio.fail_after(25), pytest.raises(TopicNotFound, match="no topic for early"):
        await app.serve()
    assert app.health().reasons == ("a consumer cannot continue: no topic for early",)
    assert [one.getMessage() for one in caplog.records if one.name == "nsqext.app"] == [
        "a consumer cannot continue: no topic for late",
        "the app failed again while it ended: ZeroDivisionError()",
    ]


async def test_a_missing_lookup_service_is_one_error() -> None:
    app = App("127.0.0.1:1", lookup_request_timeout=0.2)
    app.handler("orders", "ch", lookup_timeout=0.0)(nothing)
    app.handler("bills", "ch", lookup_timeout=0.0)(nothing)
    with anyio.fail_after(25), pytest.raises(LookupFailed):
        await app.serve()


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


async def test_a_start_returns_when_the_app_was_stopped_before(cluster: Cluster, topics: tuple[str, str]) -> None:
    app = App(cluster.lookupd)
    app.handler(topics[0], "ch")(nothing)
    app.stop()
    with anyio.fail_after(10):
        await app.start()
    assert not app.health().ready


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


async def test_a_start_or_wait_that_is_cancelled_leaves_the_lifespans() -> None:
    app, entered, left = App("127.0.0.1:1"), anyio.Event(), list[str]()

    @app.lifespan
    async def enter(_: App) -> AsyncIterator[None]:
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
        await app.start()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await app.wait()
    assert left == ["x", "x"]
    assert app.health().reasons == ("the app is not running",)


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


async def test_a_lifespan_that_ends_the_app_with_its_own_cancel_scope_is_no_error(
    cluster: Cluster, topics: tuple[str, str]
) -> None:
    app = App(cluster.lookupd)
    app.handler(topics[0], "ch")(nothing)

    @app.lifespan
    async def limited(_: App) -> AsyncIterator[None]:
        with anyio.CancelScope() as scope:
            scope.cancel()
            yield

    with anyio.fail_after(25):
        await app.serve()
    assert app.health().live
