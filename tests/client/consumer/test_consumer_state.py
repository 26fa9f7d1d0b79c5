"""The state of a consumer, its settings and its errors, without servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest

from nsqext import Consumer, Position
from nsqext.client.consumer import consumer as module
from nsqext.client.consumer.handlers.receiver_queues import ReceiverQueues
from nsqext.client.consumer.handlers.workers import ConsumerState
from nsqext.client.consumer.subscriptions.subscription_group import SubscriptionGroup
from nsqext.client.consumer.subscriptions.topics import TopicSubscriptions
from nsqext.client.events import ClientEvent
from nsqext.errors import InvalidName, InvalidSetting, InvalidState, NsqError, ProtocolError
from tests.support.clock import replace_clock
from tests.support.sleeps import settled
from tests.support.subscription_bench import Connection, ready

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqext import Message, MessageBatch
    from nsqext.client.consumer.subscriptions.subscription import Subscription

pytestmark = pytest.mark.anyio


class Scene:
    """A consumer, and the parts that it has made."""

    group: SubscriptionGroup
    state: ConsumerState
    receiver: ReceiverQueues
    started: anyio.Event
    fail: Callable[[NsqError], None]

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[Any] = []  # to the workers
        for name, make in (
            ("ConsumerState", self._state),
            ("SubscriptionGroup", self._group),
            ("ReceiverQueues", self._receiver),
            ("TopicSubscriptions", self._topics),
        ):
            monkeypatch.setattr(module, name, make)

    def _state(self) -> ConsumerState:
        self.state = ConsumerState()
        return self.state

    def _group(self, *parts: Any) -> SubscriptionGroup:
        self.group = SubscriptionGroup(*parts)
        return self.group

    def _receiver(self, group: SubscriptionGroup, state: ConsumerState, failed: Any) -> ReceiverQueues:
        self.fail = failed
        self.receiver = receiver = ReceiverQueues(group, state, failed)
        receiver.start_workers = lambda *members: self.given.extend(members)  # type: ignore[method-assign]
        return receiver

    def _topics(self, *parts: Any) -> TopicSubscriptions:
        topics = TopicSubscriptions(*parts)
        self.started = topics.started
        return topics

    def consumer(self, *connections: Connection, **settings: Any) -> Consumer:
        """Return a consumer with open subscriptions to the topic t."""
        given = {"max_in_flight": 10, "initial_ready": 10, "start_timeout": 0.0, **settings}
        consumer = Consumer("t", "ch", nsqd="127.0.0.1:1", **given)
        for connection in connections:
            self.group.add(cast("Subscription", connection))
        return consumer


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    """What the next consumer is made of."""
    return Scene(monkeypatch)


async def ignore(message: Message) -> None:
    """Handle a message."""


async def ignore_batch(batch: MessageBatch) -> None:
    """Handle a batch."""


def test_a_consumer_is_starved_when_a_connection_has_used_up_most_of_its_rdy(scene: Scene) -> None:
    one, two = Connection(partition=1), Connection(partition=2)
    consumer = scene.consumer(one, two)
    for ready_count, in_flight, starved in (
        (0, 0, False),
        (1, 0, False),
        (1, 1, True),
        (100, 84, False),
        (100, 85, True),
    ):
        two.ready, two.in_flight = ready_count, in_flight
        assert consumer.is_starved is starved
    assert not scene.consumer().is_starved


async def test_the_total_may_be_changed_and_paused(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    replace_clock(monkeypatch, lambda: now[0])
    one, other = Connection(), Connection("u", 1)
    consumer = scene.consumer(one, other)

    def settle() -> None:
        for _ in range(3):
            now[0] += 0.3
            scene.group.rebalance()

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
    assert ready(one) == [0], "at once"
    settle()
    assert (ready(one, other), consumer.paused, consumer.paused_topics) == ([0, 4], False, frozenset({"t"}))
    consumer.pause()
    assert (ready(one, other), consumer.paused) == ([0, 0], True)
    consumer.resume("t")
    assert (ready(one, other), consumer.paused, consumer.paused_topics) == ([0, 0], True, frozenset())
    consumer.resume()
    assert (sum(ready(one, other)) > 0, consumer.paused) == (True, False), "at once"
    settle()
    assert ready(one, other) == [2, 2]
    for call in (consumer.pause, consumer.resume):
        with pytest.raises(InvalidName):
            call("no topic!")
    consumer.pause()
    consumer.stop()
    consumer.resume()
    assert (ready(one, other), consumer.paused) == ([0, 0], True)


@pytest.mark.parametrize(("started", "raises", "logged"), [(False, True, 0), (True, True, 1), (False, False, 1)])
async def test_an_error_that_is_raised_in_the_caller_is_not_logged(
    scene: Scene, caplog: pytest.LogCaptureFixture, started: bool, raises: bool, logged: int
) -> None:
    events: list[ClientEvent] = []
    scene.consumer().on_event(events.append)
    scene.state.raises = raises
    if started:
        scene.started.set()
    error = ProtocolError("no nsqd")
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            for waiter in (scene.receiver.queue.wait, scene.group.unpacking().wait):
                tasks.start_soon(waiter)
            await anyio.wait_all_tasks_blocked()
            scene.fail(error)
    scene.fail(NsqError("later"))
    assert (scene.state.error, scene.state.ended.is_set(), scene.started.is_set()) == (error, True, True)
    assert caplog.text.count("the consumer cannot continue") == logged
    assert events == [ClientEvent("failed", None, None, "", "no nsqd")]


@pytest.mark.parametrize("waits", [False, True])
async def test_an_error_before_the_first_subscription_is_logged_unless_a_caller_waits(
    scene: Scene, caplog: pytest.LogCaptureFixture, waits: bool
) -> None:
    consumer, error = scene.consumer(), ProtocolError("no nsqd")
    raised: list[NsqError] = []

    async def wait() -> None:
        try:
            await consumer.wait()
        except NsqError as failure:
            raised.append(failure)

    with anyio.fail_after(25):
        async with consumer, anyio.create_task_group() as tasks:
            if waits:
                tasks.start_soon(wait)
                await settled()
            scene.fail(error)
    assert raised == [error] * waits
    assert caplog.text.count("the consumer cannot continue") == (not waits)


async def test_a_consumer_is_subscribed_between_its_start_and_its_end(scene: Scene) -> None:
    consumer = scene.consumer()
    assert not consumer.subscribed
    async with consumer:
        assert not consumer.subscribed
        scene.started.set()
        assert consumer.subscribed
        consumer.stop()
        assert not consumer.subscribed
    consumer = scene.consumer()
    scene.started.set()
    assert not consumer.subscribed, "it was not opened"
    async with scene.consumer() as consumer:
        consumer.stop()
        with pytest.raises(InvalidState, match="the consumer is closed"):
            await consumer.seek(Position.earliest())
    consumer = scene.consumer()
    consumer.stop()
    assert (scene.started.is_set(), scene.state.ended.is_set(), scene.receiver.queue.stopped) == (True, True, True)


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
    scene: Scene, batches: int | None, settings: dict[str, Any], concurrency: int, hook: bool
) -> None:
    consumer = scene.consumer(**settings)
    if batches is None:
        consumer.handler(ignore)
    else:
        consumer.batch_handler(max_count=batches)(ignore_batch)
    consumer.warns_of_dead_letters = False
    async with consumer:
        handler, dead_letters = scene.given
    assert scene.group.flow.concurrency == concurrency
    assert handler.origin is (ignore if batches is None else ignore_batch)
    assert (dead_letters is not None) is hook
    if settings.get("dead_letter") is ignore:
        assert dead_letters is ignore


async def test_a_consumer_has_one_handler(scene: Scene) -> None:
    consumer = scene.consumer()
    with pytest.raises(InvalidState, match="the consumer has no handler"):
        await consumer.serve()
    assert consumer.handler(auto_finish=False)(ignore) is ignore
    for register in (consumer.handler, consumer.batch_handler()):
        with pytest.raises(InvalidSetting, match="the consumer has a handler already"):
            register(ignore)  # type: ignore[type-var]


async def test_limits_of_batches_are_checked_before_the_state(scene: Scene) -> None:
    consumer = scene.consumer()
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


async def test_other_topics_may_be_selected(scene: Scene) -> None:
    consumer = scene.consumer()
    assert consumer.topics == ("t",)
    consumer.topics = ("u", "v")
    assert consumer.topics == ("u", "v")
    with pytest.raises(InvalidSetting, match="needs a list of topics"):
        consumer.topics = "a*"
    assert consumer.topics == ("u", "v")
    assert scene.consumer(tag="red").tag == "red"
