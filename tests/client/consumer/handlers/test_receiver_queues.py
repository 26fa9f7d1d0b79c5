"""The queues of received messages, and closing."""

from __future__ import annotations

import gc
from contextlib import asynccontextmanager
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest

from nsqext import Consumer, Message, Producer, Requeue
from nsqext.broker import Cluster
from nsqext.client.consumer.handlers.receiver_queues import ReceiverQueues
from nsqext.client.consumer.handlers.workers import ConsumerState, MessageHandler, MessageQueue
from nsqext.client.consumer.options import ConsumerOptions, DeliveryOptions
from nsqext.client.consumer.subscriptions.subscription_group import SubscriptionGroup
from nsqext.client.events import ClientEvents
from nsqext.errors import MessageNotInFlight
from tests.support.consumers import quick, take
from tests.support.messages import RecordingOwner, make_message
from tests.support.sleeps import settled
from tests.support.subscription_bench import Connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from nsqext.client.consumer.subscriptions.subscription import Subscription
    from nsqext.client.tasks import BackgroundTasks
    from nsqext.errors import NsqError
    from nsqext.lookup.metadata import MetadataCache


class Receiver(ReceiverQueues):
    """A receiver without lanes and workers."""

    def __init__(self, failed: list[NsqError] | None = None, **options: Any) -> None:
        metadata, events = cast("MetadataCache", None), ClientEvents()
        idle = cast("BackgroundTasks", SimpleNamespace(start_soon=lambda *_: None, check_event_loop=lambda: None))
        self.group = SubscriptionGroup(
            ConsumerOptions(max_in_flight=10, initial_ready=100, **options), metadata, events, idle
        )
        super().__init__(self.group, ConsumerState(opened=True), ([] if failed is None else failed).append)

    def ready(self, connection: Connection) -> int:
        """Return the RDY count of a connection that receives all that may be in flight."""
        self.group.rebalance()
        return connection.ready


@asynccontextmanager
async def handling(*messages: Message, **options: Any) -> AsyncIterator[tuple[Receiver, list[int]]]:
    """Run the handlers of messages, which wait, within a block; yields their numbers too."""
    here, handled = Receiver(concurrency=max(1, len(messages)), **options), list[int]()

    async def handle(message: Message) -> None:
        handled.append(message.internal_id)
        await anyio.sleep_forever()

    here.receive(list(messages))
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            here.group.tasks = cast("BackgroundTasks", tasks)
            here.start_workers(MessageHandler(handle), None)
            await anyio.wait_all_tasks_blocked()
            yield here, handled
            here.stop()
            here.cancel()


def kept(owner: RecordingOwner) -> int:
    """Return how many messages of a subscription are still in memory."""
    return sum(isinstance(one, Message) for one in gc.get_referrers(owner))


def test_messages_wait_in_one_queue() -> None:
    here = Receiver()
    here.receive([make_message(RecordingOwner(), 1), make_message(RecordingOwner(), 2)])
    here.receive([make_message(RecordingOwner(), 3)])
    here.tick(1.0, 0.0)
    assert [message.internal_id for message in here.queue.messages] == [1, 2, 3]


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.anyio
async def test_a_handler_continues_with_the_new_delivery_of_its_ordered_message(answered: bool) -> None:
    old, new = RecordingOwner(in_order=True), RecordingOwner(in_order=True)
    running = make_message(old, 1)
    async with handling(running) as (here, handled):
        running.answered = answered
        again = make_message(new, 1, attempts=2)
        here.receive([again, make_message(new, 2)])
        assert [message.internal_id for message in here.queue.messages] == ([1, 2] if answered else [2])
        assert (running.owner, running.attempts) == ((old, 1) if answered else (new, 2))
    assert handled == [1]


def test_an_ordered_message_that_is_redelivered_while_it_waits_for_its_requeue_waits_on() -> None:
    old, new, here = RecordingOwner(in_order=True), RecordingOwner(in_order=True), Receiver()
    here.policy.requeue(failed := make_message(old, 1), 5.0, backoff=True)
    old.horizon = inf
    here.receive([make_message(new, 1, attempts=2)])
    assert not here.queue.messages, "its delay would end with its connection"
    here.tick(inf, 0.0)
    assert (failed.attempts, new.commands) == (2, ["REQ 1 0"])


@pytest.mark.parametrize("timeout", [1.0, 60.0])
def test_messages_are_touched_in_time_by_few_looks(timeout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    here, owner, slow = Receiver(), RecordingOwner(), RecordingOwner()
    owner.msg_timeout, slow.msg_timeout, tick = timeout, 900.0, timeout / 60
    here.tick(0.0, 0.0)
    here.receive([make_message(slow, 1)])
    here.tick(tick, 0.0)
    message = make_message(owner, 2)
    message.received = message.delivered = 2 * tick
    here.receive([message])
    held = here.queue.take_all()
    here.hold(held)
    looks = 0
    unanswered = here.iteration.held

    def counted() -> list[Message]:
        nonlocal looks
        looks += 1
        return unanswered()

    monkeypatch.setattr(here.iteration, "held", counted)
    for number in range(2, 602):
        now = number * tick
        before = len(owner.commands)
        here.tick(now, 0.0)
        assert now - message.received < 0.6 * timeout
        if len(owner.commands) > before:
            assert now - message.received >= 0.5 * timeout
            message.received = now
    assert 16 <= len(owner.commands) <= 20
    assert looks <= 200


def test_answered_messages_are_not_kept() -> None:
    here, owner = Receiver(), RecordingOwner()
    for number in range(1000):
        message = make_message(owner, number)
        message.answered = number > 0
        here.hold([message])
    assert kept(owner) < 50
    assert [message.internal_id for message in here.iteration.held()] == [0]
    del message
    assert kept(owner) == 1


async def _ignore(message: Message) -> None:
    """Handle a message."""


def _of_the_original(owner: RecordingOwner, number: int) -> Message:
    message = make_message(owner, number)
    message.id = b"%016x" % number
    owner.original = True
    return message


def _numbers(owner: RecordingOwner) -> list[str]:
    return [command.split()[0] for command in owner.commands]


@pytest.mark.parametrize("difference", ["topic", "partition", "id", "timestamp"])
@pytest.mark.anyio
async def test_another_message_is_no_new_delivery(difference: str) -> None:
    old, new = RecordingOwner(in_order=True), RecordingOwner(in_order=True)
    running = make_message(old, 1)
    async with handling(running) as (here, _):
        if difference in ("topic", "partition"):
            setattr(new, difference, {"topic": "other", "partition": 4}[difference])
        again = make_message(new, 2 if difference == "id" else 1, timestamp=difference == "timestamp")
        here.receive([again])
        assert (list(here.queue.messages), running.owner) == ([again], old)
        unordered = make_message(RecordingOwner(), 1)
        here.receive([unordered])
        assert (list(here.queue.messages), running.owner) == ([again, unordered], old)


@pytest.mark.anyio
async def test_messages_in_flight_are_those_that_wait_are_held_or_handled() -> None:
    assert Receiver().count_in_flight() == 0
    owner = RecordingOwner()
    one, two, three, four = (make_message(owner, number) for number in range(1, 5))
    async with handling(four) as (here, _):
        assert here.count_in_flight() == 1
        here.receive([one, two])
        assert here.count_in_flight() == 3
        here.hold([three])
        assert here.count_in_flight() == 4


def test_what_is_received_after_the_stop_is_requeued_on_the_original_nsq_only() -> None:
    here, owner, redesigned = Receiver(), RecordingOwner(), RecordingOwner()
    first = [_of_the_original(owner, 1), make_message(redesigned, 2)]
    here.receive(first)
    here.stop()
    here.receive([_of_the_original(owner, 3)])
    assert owner.commands == [], "RDY has to be 0 first"
    answered = _of_the_original(owner, 4)
    answered.answered = True
    lost = _of_the_original(RecordingOwner(), 5)
    lost.owner.horizon = 1e18
    here.receive([answered, lost])
    here.requeue_unstarted()
    assert owner.commands == [f"REQ {first[0].internal_id} 0", f"REQ {_of_the_original(owner, 3).internal_id} 0"]
    here.receive([_of_the_original(owner, 6)])
    assert _numbers(owner) == ["REQ"] * 3
    here.requeue_unstarted()
    assert _numbers(owner) == ["REQ"] * 3
    assert (redesigned.commands, cast("RecordingOwner", lost.owner).commands) == ([], [])


def test_what_the_iteration_handed_out_is_requeued_on_the_original_nsq() -> None:
    here, owner = Receiver(), RecordingOwner()
    owner.horizon = -1.0
    waiting: list[Message] = []
    for number in range(100):
        here.receive([_of_the_original(owner, number)])
        message = here.queue.messages.popleft()
        message.answered = number % 50 > 0
        waiting += [] if message.answered else [message]
    assert kept(owner) < 20
    redesigned = make_message(RecordingOwner(), 200)
    here.receive([redesigned])
    assert here.queue.messages.popleft() is redesigned
    here.stop()
    here.requeue_remaining()
    assert owner.commands == [f"REQ {message.internal_id} 0" for message in waiting]
    assert len(waiting) == 2
    assert not any(message.in_flight for message in waiting)
    assert redesigned.in_flight


@pytest.mark.anyio
async def test_messages_of_handlers_that_were_cancelled_are_requeued() -> None:
    owner, ordered, ended = RecordingOwner(), RecordingOwner(in_order=True), RecordingOwner()
    one, two = make_message(owner, 1), make_message(owner, 2)
    async with handling(one, two, make_message(ordered, 3), make_message(ended, 4)) as (here, handled):
        assert sorted(handled) == [1, 2, 3, 4]
        ended.horizon, two.answered = 1e18, True
        here.hold([make_message(owner, 5)])
    here.requeue_remaining()
    assert owner.commands == ["REQ 1 0", "REQ 5 0"]
    assert (ordered.commands, ended.commands) == ([], [])


@pytest.mark.parametrize("touches", [True, False])
@pytest.mark.anyio
async def test_only_with_auto_touch_messages_are_touched(touches: bool) -> None:
    owner = RecordingOwner()
    async with handling(make_message(owner, 3), delivery=DeliveryOptions(auto_touch=touches)) as (here, _):
        here.receive([make_message(owner, 1)])
        here.hold([make_message(owner, 2)])
        here.tick(55.0, 0.0)
        assert sorted(owner.commands) == (["TOUCH 1", "TOUCH 2", "TOUCH 3"] if touches else [])


def test_a_message_that_waits_until_it_is_due_is_touched() -> None:
    here, owner = Receiver(), RecordingOwner(in_order=True)
    here.group.early_messages().keep(make_message(owner), 110.0)
    here.tick(55.0, 0.0)
    assert owner.commands == ["TOUCH 1"]


@pytest.mark.anyio
async def test_messages_in_lanes_are_in_flight() -> None:
    owner = RecordingOwner()
    async with handling(make_message(owner, 1), key=lambda message: "key") as (here, handled):
        assert (here.count_in_flight(), handled) == (1, [1])
        here.receive([make_message(owner, 2), make_message(owner, 3)])
        assert here.count_in_flight() == 3


def test_messages_that_wait_until_they_are_due_raise_the_total_and_are_requeued_then() -> None:
    here, owner, connection = Receiver(), RecordingOwner(), Connection()
    here.group.add(cast("Subscription", connection))
    message = make_message(owner, 1)
    message.received = 95.0
    here.group.early_messages().keep(message, 110.0)
    here.tick(100.0, 0.0)
    assert (here.ready(connection), owner.commands) == (11, [])
    here.tick(110.0, 0.0)
    assert (here.ready(connection), _numbers(owner)) == (10, ["REQ"])


def test_unpacked_bytes_of_messages_that_are_not_in_flight_any_more_are_released_by_a_tick() -> None:
    here, owner = Receiver(), RecordingOwner()
    message = make_message(owner, 1)
    budget = here.group.unpacking()
    assert budget.reserve(message, 10)
    owner.horizon = 1.0
    here.tick(1.0, 0.0)
    assert budget.used == 0


@pytest.mark.anyio
async def test_a_key_that_cannot_be_read_ends_the_consumer() -> None:
    failed: list[NsqError] = []

    def key_of(message: Message) -> str:
        return cast("str", 5)

    here = Receiver(failed, key=key_of)
    here.receive([make_message(RecordingOwner(), 1)])
    here.start_workers(MessageHandler(_ignore), None)
    assert len(failed) == 1
    here.receive([make_message(RecordingOwner(), 2)])
    assert len(failed) == 2


@pytest.mark.parametrize("options", [{}, {"key": lambda message: message.body}], ids=["one queue", "lanes"])
@pytest.mark.anyio
async def test_messages_that_were_received_before_the_handlers_start_are_handled(options: dict[str, Any]) -> None:
    messages = [make_message(RecordingOwner(), number, b"%d" % number) for number in (1, 2)]
    async with handling(*messages, **options) as (here, handled):
        assert not here.queue.messages
        assert sorted(handled) == [1, 2]
        assert here.count_in_flight() == 2


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.anyio
async def test_with_lanes_what_a_handler_left_unanswered_is_handled_again_when_it_is_redelivered(left: bool) -> None:
    old, new, handled, resume = RecordingOwner(), RecordingOwner(), list[Message](), anyio.Event()

    async def handle(message: Message) -> None:
        handled.append(message)
        if not left:
            await resume.wait()

    here = Receiver(key=lambda message: b"one")
    async with anyio.create_task_group() as tasks:
        here.group.tasks = cast("BackgroundTasks", tasks)
        here.start_workers(MessageHandler(handle, auto_finish=False), None)
        here.receive([make_message(old, 1)])
        await anyio.wait_all_tasks_blocked()
        old.horizon = inf
        old.refusal = MessageNotInFlight("it will be delivered again")
        if left:
            with pytest.raises(MessageNotInFlight):
                await handled[0].finish()
        here.receive([make_message(new, 1)])
        resume.set()
        await anyio.wait_all_tasks_blocked()
        await handled[-1].finish()
        here.stop()
    assert (len(handled), new.commands) == (2 if left else 1, ["FIN 1"])


class _Stopped(MessageQueue):
    """A queue whose messages are taken after the stop only, because threads may take some meanwhile."""

    def take_all(self) -> list[Message]:
        assert self.stopped
        return super().take_all()


@pytest.mark.anyio
async def test_a_stop_wakes_those_that_wait_for_messages_and_keeps_the_others_from_them() -> None:
    here = Receiver()
    here.queue = _Stopped()
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            for waiter in (here.queue.wait, here.group.unpacking().wait):
                tasks.start_soon(waiter)
            await settled()
            here.stop()


@pytest.mark.anyio
async def test_what_workers_have_is_not_requeued_as_messages_of_the_iteration() -> None:
    here, owner = Receiver(), RecordingOwner()
    here.receive([_of_the_original(owner, 1)])
    here.start_workers(MessageHandler(_ignore), None)
    here.receive([_of_the_original(owner, 2)])
    assert len(here.queue.take_all()) == 2
    here.stop()
    here.requeue_remaining()
    assert owner.commands == []


@pytest.mark.anyio
async def test_what_waits_for_a_key_and_until_it_is_due_raises_the_total() -> None:
    owner, connection = RecordingOwner(), Connection()
    owner.ready = 10
    lost, waiting, early = (make_message(owner, number) for number in (1, 2, 3))
    owner.horizon, lost.received, waiting.received, early.received = 50.0, 40.0, 60.0, 60.0
    async with handling(key=lambda message: b"k") as (here, handled):
        here.group.add(cast("Subscription", connection))
        here.receive([lost, waiting])
        await anyio.wait_all_tasks_blocked()
        assert handled == [], "the server sends the first message of the key again"
        here.group.early_messages().keep(early, 1e12)
        here.tick(70.0, 0.0)
        assert here.ready(connection) == 12
    Receiver().expired(lost)


def test_nothing_is_accepted_after_the_stop() -> None:
    here = Receiver()
    here.receive([make_message(RecordingOwner(), 1)])
    here.stop()
    assert here.queue.stopped
    here.receive([make_message(RecordingOwner(), 2)])
    assert not here.queue.messages


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.anyio
async def test_closing_on_the_original_nsq_requeues_all_messages(lanes: bool) -> None:
    """The server would keep messages in flight until they time out (captured behaviour of the original server)."""
    with Cluster(nodes=1, generation="original") as cluster, anyio.fail_after(25):
        options = quick(key=lambda message: message.body[:1]) if lanes else quick()
        consumer = Consumer("fresh", "ch", lookupd=cluster.lookupd, concurrency=2, **options)
        handled: list[bytes] = []

        @consumer.handler
        async def handle(message: Message) -> None:
            consumer.stop()
            await anyio.sleep(0.05)
            if message.body == b"a0" and lanes:
                raise Requeue(0.0)
            handled.append(message.body)

        bodies = [b"a%d" % number for number in range(8)]
        async with Producer(cluster.lookupd) as producer:
            await producer.publish_many("fresh", bodies)
        await consumer.serve(signals=False)
        async with Consumer("fresh", "ch", lookupd=cluster.lookupd, **quick()) as successor:
            rest = await take(successor, 8 - len(handled))
        assert sorted(handled + rest) == bodies
        assert len(rest) > 4
