"""Handlers declared with ``def``: they run in threads."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import anyio
import msgspec
import pytest

from nsqext import App, Consumer, MessageBatch, Producer, sync
from nsqext.client.consumer.blocking import LeftThreads
from nsqext.errors import InvalidSetting
from tests.support.consumers import depth, eventually

if TYPE_CHECKING:
    from nsqext.broker import Cluster

pytestmark = pytest.mark.anyio

NOWHERE = "127.0.0.1:1"


class Order(msgspec.Struct):
    """A body."""

    number: int


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """A fresh topic with the channel ``ch``."""
    name = f"t_{token_hex(4)}"
    cluster.create_topic(name, extend=True, channels=["ch"])
    return name


async def publish(cluster: Cluster, topic: str, *numbers: int, key: str | None = None) -> None:
    """Publish orders."""
    async with Producer(cluster.lookupd) as producer:
        for number in numbers:
            await producer.publish(topic, b'{"number":%d}' % number, key=key)


async def handled(subject: App | Consumer, consumer: Consumer, count: int) -> None:
    """Run until a number of messages is finished."""
    async with subject:
        await eventually(lambda: consumer.statistics().finished >= count)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("kind", ["app", "consumer"])
def test_a_blocking_handler_of_a_body_runs_in_a_thread(cluster: Cluster, topic: str, backend: str, kind: str) -> None:
    loop, found = threading.get_ident(), list[tuple[int, bool]]()

    async def main() -> None:
        await publish(cluster, topic, 1, 2)
        app, consumer = App(cluster.lookupd), Consumer(topic, "ch", cluster.lookupd)
        register = app.handler(topic, "ch") if kind == "app" else consumer.handler

        @register
        def handle(order: Order) -> None:
            found.append((order.number, threading.get_ident() == loop))

        if kind == "app":
            await handled(app, app.consumers[0], 2)
        else:
            await handled(consumer, consumer, 2)

    anyio.run(main, backend=backend)
    assert sorted(found) == [(1, False), (2, False)]
    assert depth(cluster, topic) == 0


async def test_as_many_blocking_handlers_run_at_once_as_concurrency_allows(cluster: Cluster, topic: str) -> None:
    await publish(cluster, topic, *range(100))
    barrier, lock, running, most = threading.Barrier(50), threading.Lock(), 0, 0
    consumer = Consumer(topic, "ch", cluster.lookupd, concurrency=50, max_in_flight=100)

    @consumer.handler
    def handle(order: Order) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        barrier.wait(25)
        with lock:
            running -= 1

    await handled(consumer, consumer, 100)
    assert most == 50


async def test_a_consumer_that_closes_waits_for_the_thread_and_answers_with_its_result(
    cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqext.client.consumer.consumer._CANCELLED_TIMEOUT", 0.01)
    await publish(cluster, topic, 1)
    begun, end = threading.Event(), threading.Event()
    consumer = Consumer(topic, "ch", cluster.lookupd, close_timeout=0.01)
    closed = anyio.Event()

    @consumer.handler
    def handle(order: Order) -> None:
        begun.set()
        end.wait(25)

    async def close() -> None:
        await consumer.aclose()
        closed.set()

    await consumer.start()
    await eventually(begun.is_set)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(close)
        with anyio.move_on_after(0.3):  # many times both timeouts
            await closed.wait()
        assert not closed.is_set()
        end.set()
        with anyio.fail_after(25):
            await closed.wait()
    assert consumer.statistics().finished == 1
    await eventually(lambda: depth(cluster, topic) == 0)


async def test_a_blocking_batch_handler_and_a_test_without_a_server(cluster: Cluster, topic: str) -> None:
    await publish(cluster, topic, 1, 2, 3)
    loop, found = threading.get_ident(), list[tuple[int, bool]]()
    consumer = Consumer(topic, "ch", cluster.lookupd)

    @consumer.batch_handler(max_count=3, max_wait=5.0)
    def handle_batch(batch: MessageBatch) -> None:
        found.append((len(batch), threading.get_ident() == loop))

    await handled(consumer, consumer, 3)
    assert found == [(3, False)]
    app = App(NOWHERE)

    @app.handler("orders", "ch")
    def double(order: Order) -> int:
        return order.number * 2

    async with app.test() as test:
        assert await test.deliver("orders", {"number": 4}) == [8]


class Service:
    """Has handlers that are methods, or the object itself."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def handle(self, order: Order) -> None:
        """Handle an order."""
        self.found.append(order.number)

    def __call__(self, order: Order) -> None:
        """Handle an order."""
        self.found.append(order.number)


def with_more(found: list[int], order: Order) -> None:
    """Handle an order, as a partial function."""
    found.append(order.number)


@pytest.mark.parametrize(
    "handler_of",
    [lambda one: one.handle, lambda one: one, lambda one: functools.partial(with_more, one.found)],
    ids=["method", "object", "partial"],
)
async def test_a_method_an_object_and_a_partial_function_are_handlers(handler_of: Callable[[Service], Any]) -> None:
    service, app = Service(), App(NOWHERE)
    app.handler("orders", "ch")(handler_of(service))
    async with app.test() as test:
        await test.deliver("orders", Order(5))
    assert service.found == [5]


def generator(order: Order) -> Iterator[int]:
    """Yield what is not used."""
    yield order.number


def of_blocking_clients(message: sync.Message) -> None:
    """Ask for a message that only blocking clients have."""


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (generator, "generator is a generator: remove 'yield'"),
        (Service, "is not a function"),
        (7, "7 is not a function: declare it with 'async def' or 'def'"),
        (of_blocking_clients, "message is a message of blocking clients: .*nsqext.Message.*nsqext.sync.Consumer"),
        (Service.handle, "a method without its object"),
    ],
)
def test_what_cannot_be_a_handler_is_refused(handler: Any, reason: str) -> None:
    for register in (Consumer("orders", "ch", NOWHERE).handler, App(NOWHERE).handler("orders", "ch")):
        with pytest.raises(InvalidSetting, match=reason):
            register(handler)


async def test_a_function_that_returns_a_coroutine_is_an_error_that_says_so(
    cluster: Cluster, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        """Never run."""

    await publish(cluster, topic, 1)
    consumer = Consumer(topic, "ch", cluster.lookupd)

    @consumer.handler
    def handle(order: Order) -> object:
        return work()

    with caplog.at_level(logging.WARNING):
        async with consumer:
            await eventually(lambda: "returned a coroutine: declare it with 'async def'" in caplog.text)
    assert consumer.statistics().finished == 0


async def test_a_handler_whose_call_was_cancelled_before_does_not_begin() -> None:
    called: list[bool] = []
    with anyio.CancelScope() as scope:
        scope.cancel()
        await LeftThreads().run(lambda: called.append(True))
    assert (called, scope.cancelled_caught) == ([], True)
