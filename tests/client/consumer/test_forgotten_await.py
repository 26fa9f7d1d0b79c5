"""A requeue that is not awaited: the message is not finished."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext import Consumer, Message, MessageBatch, Producer
from nsqext.client.consumer.handlers.forgotten_await import check_awaited
from nsqext.client.consumer.handlers.message_keys import lane_number
from nsqext.errors import InvalidState
from nsqext.middleware import Decompress, Deduplicate
from tests.support.consumers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from nsqext.broker import Cluster
    from nsqext.middleware import Middleware

pytestmark = [
    pytest.mark.anyio,
    # Python says it as well
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]


@pytest.mark.parametrize("way", ["coroutine", "thread", "batch", "message of a batch"])
@pytest.mark.parametrize("middleware", [(), (Decompress(),)], ids=["alone", "middleware"])
async def test_a_message_whose_requeue_was_not_awaited_is_delivered_again(
    cluster: Cluster, topic: str, way: str, middleware: tuple[Middleware, ...], caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[int] = []
    consumer = Consumer(topic, "ch", cluster.lookupd, middleware=middleware, requeue_delay=0.01, backoff="off")

    def forget(message: Message) -> None:
        attempts.append(message.attempts)
        if message.attempts == 1:
            message.requeue(0.01)  # type: ignore[unused-coroutine]

    async def handle(message: Message) -> None:
        forget(message)

    async def handle_batch(batch: MessageBatch) -> None:
        if way == "message of a batch":
            forget(batch[0])
            return
        attempts.append(batch[0].attempts)
        if batch[0].attempts == 1:
            batch.requeue()  # type: ignore[unused-coroutine]

    if "batch" in way:
        consumer.batch_handler(max_count=1)(handle_batch)
    else:
        consumer.handler(forget if way == "thread" else handle)
    async with Producer(cluster.lookupd) as producer, consumer:
        await producer.publish(topic, b"1")
        await eventually(lambda: consumer.statistics().finished == 1)
    assert attempts == [1, 2]
    [failure] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "called requeue() and did not await it" in failure.getMessage()


@pytest.mark.parametrize("way", ["alone", "batch", "deduplicated"])
async def test_a_handler_that_returns_a_coroutine_has_failed(
    cluster: Cluster, topic: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its message was finished, and nothing was done."""
    attempts, saved = list[int](), list[int]()
    middleware = [Deduplicate()] if way == "deduplicated" else []
    consumer = Consumer(topic, "ch", cluster.lookupd, middleware=middleware, requeue_delay=0.01, backoff="off")

    async def save(number: int) -> object:
        saved.append(number)
        return None

    async def handle(message: Message) -> object:
        attempts.append(message.attempts)
        return save(message.attempts) if message.attempts == 1 else await save(message.attempts)

    async def handle_batch(batch: MessageBatch) -> object:
        return await handle(batch[0])

    if way == "batch":
        consumer.batch_handler(max_count=1)(handle_batch)
    else:
        consumer.handler(handle)
    async with Producer(cluster.lookupd) as producer, consumer:
        await producer.publish(topic, b"1")
        await eventually(lambda: consumer.statistics().finished == 1)
    assert (attempts, saved) == ([1, 2], [2])
    assert "save, and did not await it" in caplog.text


@pytest.mark.parametrize("fails", [False, True])
async def test_a_message_that_its_handler_requeues_waits_for_the_end_of_its_handler(
    cluster: Cluster, topic: str, fails: bool
) -> None:
    first, second = (next(key for key in "abcdef" if lane_number(key.encode(), 2) == lane) for lane in range(2))
    consumer = Consumer(
        topic, "ch", cluster.lookupd, key=lambda one: one.body, concurrency=2, requeue_delay=0.01, msg_timeout=1.0
    )
    seen: list[tuple[str, int]] = []
    later = anyio.Event()

    @consumer.handler
    async def handle(message: Message) -> None:
        key = message.body.decode()
        seen.append((key, message.attempts))
        if key == second:
            if message.attempts == 1:
                await message.requeue(0.6)  # both are touched meanwhile
            else:
                later.set()
        elif message.attempts == 1:
            await message.requeue()
            await later.wait()  # the delay of the first has passed, too
            assert not fails, "it was requeued already"
        elif message.attempts == 2:
            raise ValueError("it is not finished yet")
        else:
            consumer.stop()

    async with Producer(cluster.lookupd) as producer:
        await producer.publish_many(topic, [first.encode(), second.encode()])
    with anyio.fail_after(20):
        await consumer.serve()
    assert [attempts for key, attempts in seen if key == first] == [1, 2, 3]


def test_a_generator_that_has_not_run_is_a_failure() -> None:
    """As of a decorator, behind which nothing shows that the handler is a generator."""
    ran = list[int]()

    def one() -> Iterator[int]:
        ran.append(1)
        yield 1

    async def later() -> AsyncIterator[int]:
        ran.append(1)
        yield 1

    for result in (one(), later()):
        with pytest.raises(InvalidState, match=r"returned the generator .*(one|later), which has not run"):
            check_awaited(result)
    begun = one()
    next(begun)
    for used in (begun, None, [1], "text", map(str, ())):
        check_awaited(used)
    assert ran == [1]
