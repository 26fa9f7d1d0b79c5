"""The state of a consumer, its settings and its errors, without servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest
from anyio.lowlevel import checkpoint

from nsqext import Consumer
from nsqext.client.consumer.subscriptions import subscription_group
from nsqext.errors import InvalidName, InvalidSetting, InvalidState, NsqError, ProtocolError
from tests.support.subscription_bench import Connection, ready

if TYPE_CHECKING:
    from nsqext import Message, MessageBatch
    from nsqext.client.consumer.subscriptions.subscription import Subscription

pytestmark = pytest.mark.anyio


def consumer_of(*connections: Connection, **settings: Any) -> Consumer:
    """Return a consumer with open subscriptions to the topic t."""
    consumer = Consumer("t", "ch", nsqd="127.0.0.1:1", **{"max_in_flight": 10, "initial_ready": 10, **settings})
    for connection in connections:
        consumer._group.add(cast("Subscription", connection))
    return consumer


async def ignore(message: Message) -> None:
    """Handle a message."""


async def ignore_batch(batch: MessageBatch) -> None:
    """Handle a batch."""


def test_a_consumer_is_starved_when_a_connection_has_used_up_most_of_its_rdy() -> None:
    one, two = Connection(partition=1), Connection(partition=2)
    consumer = consumer_of(one, two)
    for ready_count, in_flight, starved in (
        (0, 0, False),
        (1, 0, False),
        (1, 1, True),
        (100, 84, False),
        (100, 85, True),
    ):
        two.ready, two.in_flight = ready_count, in_flight
        assert consumer.is_starved is starved
    assert not consumer_of().is_starved


async def test_the_total_may_be_changed_and_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(subscription_group, "_clock", lambda: now[0])
    one, other = Connection(), Connection("u", 1)
    consumer = consumer_of(one, other)

    def settle() -> None:
        for _ in range(3):
            now[0] += 0.3
            consumer._group.rebalance()

    settle()
    assert ready(one, other) == [5, 5]
    consumer.max_in_flight = 4
    settle()
    assert (ready(one, other), consumer.max_in_flight) == ([2, 2], 4)
    consumer.max_in_flight = 1
    settle()
    assert sum(ready(one, other)) == 1
    consumer.max_in_flight = 4
    with pytest.raises(InvalidSetting):
        consumer.max_in_flight = 0
    consumer.pause("t")
    settle()
    assert (ready(one, other), consumer.paused, consumer.paused_topics) == ([0, 4], False, frozenset({"t"}))
    consumer.pause()
    assert (ready(one, other), consumer.paused) == ([0, 0], True)
    consumer.resume("t")
    assert (ready(one, other), consumer.paused, consumer.paused_topics) == ([0, 0], True, frozenset())
    consumer.resume()
    settle()
    assert (ready(one, other), consumer.paused) == ([2, 2], False)
    for call in (consumer.pause, consumer.resume):
        with pytest.raises(InvalidName):
            call("no topic!")
    consumer.pause()
    consumer._receiver.queue.stopped = True
    consumer.resume()
    assert (ready(one, other), consumer.paused) == ([0, 0], True)


@pytest.mark.parametrize(("started", "raises", "logged"), [(False, True, 0), (True, True, 1), (False, False, 1)])
async def test_an_error_that_is_raised_in_the_caller_is_not_logged(
    caplog: pytest.LogCaptureFixture, started: bool, raises: bool, logged: int
) -> None:
    consumer = consumer_of()
    state = consumer._state
    state.raises = raises
    if started:
        consumer._topics.started.set()
    error = ProtocolError("no nsqd")
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            for waiter in (consumer._receiver.queue.wait, consumer._group.unpacking().wait):
                tasks.start_soon(waiter)
            for _ in range(5):
                await checkpoint()
            consumer._fail(error)
    consumer._fail(NsqError("later"))
    assert (state.error, state.ended.is_set(), consumer._topics.started.is_set()) == (error, True, True)
    assert caplog.text.count("the consumer cannot continue") == logged


async def test_a_consumer_is_subscribed_between_its_start_and_its_end() -> None:
    consumer = consumer_of()
    assert not consumer.subscribed
    consumer._state.opened = True
    assert not consumer.subscribed
    consumer._topics.started.set()
    assert consumer.subscribed
    consumer._stop()
    assert not consumer.subscribed
    consumer._state.opened = False
    assert not consumer.subscribed
    other = consumer_of()
    other._stop()
    assert other._topics.started.is_set()
    assert (other._state.ended.is_set(), other._receiver.queue.stopped) == (True, True)


@pytest.mark.parametrize(
    ("batches", "settings", "concurrency", "hook"),
    [
        (None, {"concurrency": 3}, 3, False),
        (20, {"concurrency": 3}, 60, False),
        (None, {"dead_letter": ignore, "max_attempts": 2}, 1, True),
        (None, {"dead_letter": "dead", "max_attempts": 2}, 1, True),
    ],
)
async def test_what_workers_get(
    monkeypatch: pytest.MonkeyPatch, batches: int | None, settings: dict[str, Any], concurrency: int, hook: bool
) -> None:
    consumer, given = consumer_of(**settings), list[Any]()
    if batches is None:
        consumer.handler(ignore)
    else:
        consumer.batch_handler(max_count=batches)(ignore_batch)
    monkeypatch.setattr(consumer._receiver, "start_workers", lambda *members: given.extend(members))
    assert consumer._handler is not None
    consumer._start_workers(consumer._handler)
    assert consumer._group.flow.concurrency == concurrency
    assert given[0] is consumer._handler
    assert (given[1] is not None) is hook
    if settings.get("dead_letter") is ignore:
        assert given[1] is ignore


async def test_a_consumer_has_one_handler() -> None:
    consumer = consumer_of()
    with pytest.raises(InvalidState, match="the consumer has no handler"):
        await consumer.serve()
    assert consumer.handler(auto_finish=False)(ignore) is ignore
    for register in (consumer.handler, consumer.batch_handler()):
        with pytest.raises(InvalidSetting, match="the consumer has a handler already"):
            register(ignore)  # type: ignore[type-var]


async def test_limits_of_batches_are_checked_before_the_state() -> None:
    consumer = consumer_of()
    for n, timeout in ((0, None), (1, -1.0), (1, "long")):
        with pytest.raises(InvalidSetting):
            await consumer.fetch(n, timeout)  # type: ignore[arg-type]
    with pytest.raises(InvalidState, match="not open"):
        await consumer.fetch(1, 0.0)
    with pytest.raises(InvalidState, match="not open"):
        consumer.statistics()
    with pytest.raises(InvalidState, match="not open"):
        await anext(consumer)
    with pytest.raises(InvalidState, match="not open"):
        await consumer.wait()
    await consumer.aclose()


async def test_other_topics_may_be_selected() -> None:
    consumer = consumer_of()
    assert consumer.topics == ("t",)
    consumer.topics = ("u", "v")
    assert consumer.topics == ("u", "v")
    with pytest.raises(InvalidSetting, match="needs a list of topics"):
        consumer.topics = "a*"
    assert consumer.topics == ("u", "v")
    assert consumer_of(tag="red").tag == "red"
