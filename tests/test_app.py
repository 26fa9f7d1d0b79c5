"""Handlers for several topics, run together."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from secrets import token_hex

import anyio
import pytest

from nsqext import App, ConsumerOptions, LookupOptions, Message
from nsqext.broker import Cluster
from nsqext.errors import InvalidPartition, InvalidSetting, InvalidState, LookupFailed

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes."""
    with Cluster(nodes=2) as cluster:
        yield cluster


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
    told: list[object] = []

    @app.lifespan
    async def outer(given: App) -> AsyncIterator[None]:
        assert given is app
        told.append("begin")
        await app.producer.publish(first, b"one")
        yield
        await app.producer.publish(first, b"late")
        told.append("end")

    @app.lifespan
    async def inner(given: App) -> AsyncIterator[None]:
        told.append("begin inner")
        yield
        told.append("end inner")

    @app.handler(first, "ch")
    async def pass_on(message: Message) -> None:
        told.append(message.body)
        await app.producer.publish(second, b"two")

    @app.handler(second, "ch", concurrency=2)
    async def take(message: Message) -> None:
        told.append(message.body)
        app.stop()

    assert [consumer.topic for consumer in app.consumers] == [first, second]
    with anyio.fail_after(15):
        await app.serve()
    assert told == ["begin", "begin inner", b"one", b"two", "end inner", "end"]
    with pytest.raises(InvalidState, match="runs once"):
        await app.serve()


async def test_a_consumer_that_cannot_go_on_ends_the_app(cluster: Cluster, topics: tuple[str, str]) -> None:
    app = App(cluster.lookupd)

    @app.handler(topics[0], "ch", options=ConsumerOptions(partitions=(7,)))
    @app.handler(topics[1], "ch")
    async def handle(message: Message) -> None:
        """Never called."""

    with anyio.fail_after(15), pytest.raises(InvalidPartition, match="partition"):
        await app.serve()


async def test_no_lookup_is_one_error() -> None:
    app = App("127.0.0.1:1")
    options = ConsumerOptions(lookup_timeout=0.0, lookup=LookupOptions(request_timeout=0.2))
    app.handler("orders", "ch", options=options)(nothing)
    app.handler("bills", "ch", options=options)(nothing)
    with anyio.fail_after(15), pytest.raises(LookupFailed):
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

    with anyio.fail_after(15):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(app.serve)
            await begun.wait()
            tasks.cancel_scope.cancel()
    assert ended == [b"x"]


async def test_what_cannot_be(cluster: Cluster) -> None:
    app = App(cluster.lookupd)
    with pytest.raises(InvalidSetting, match="no handler"):
        await app.serve()
    with pytest.raises(InvalidSetting, match="not a coroutine function"):
        app.handler("orders", "ch")(print)  # type: ignore[type-var]
    assert app.consumers == ()


async def test_nothing_is_added_while_it_runs(cluster: Cluster, topics: tuple[str, str]) -> None:
    app = App.from_url(f"nsq://{cluster.lookupd[0]}", timeout=5.0)
    assert app.producer.options.timeout == 5
    app.handler(topics[0], "ch")(nothing)

    @app.lifespan
    async def late(given: App) -> AsyncIterator[None]:
        with pytest.raises(InvalidState, match="runs already"):
            app.handler("orders", "ch")
        with pytest.raises(InvalidState, match="runs already"):
            app.lifespan(late)
        app.stop()
        yield

    with anyio.fail_after(15):
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


class Wreck(BaseException):
    """What no handler may raise, such as SystemExit, without what asyncio makes of that."""


async def test_what_a_handler_may_not_raise_comes_out_as_it_is(cluster: Cluster, topics: tuple[str, str]) -> None:
    app = App(cluster.lookupd)

    @app.handler(topics[0], "ch")
    async def handle(message: Message) -> None:
        raise Wreck

    @app.lifespan
    async def publish(given: App) -> AsyncIterator[None]:
        await app.producer.publish(topics[0], b"x")
        yield

    with anyio.fail_after(15), pytest.raises(Wreck):
        await app.serve(signals=False)
