"""The queues of received messages, and closing."""

from __future__ import annotations

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
from tests.support.consumers import quick, take
from tests.support.messages import RecordingOwner, make_message
from tests.support.sleeps import settled

if TYPE_CHECKING:
    from nsqext.client.consumer.handlers.workers import Workers
    from nsqext.client.tasks import BackgroundTasks
    from nsqext.errors import NsqError
    from nsqext.lookup.metadata import MetadataCache


def receiver(failed: list[NsqError] | None = None, **options: Any) -> ReceiverQueues:
    """A receiver without lanes and workers."""
    metadata, events, tasks = cast("MetadataCache", None), ClientEvents(), cast("BackgroundTasks", None)
    group = SubscriptionGroup(ConsumerOptions(max_in_flight=10, **options), metadata, events, tasks)
    return ReceiverQueues(group, ConsumerState(opened=True), ([] if failed is None else failed).append)


def test_messages_wait_in_one_queue() -> None:
    here = receiver()
    here.receive([make_message(RecordingOwner(), 1), make_message(RecordingOwner(), 2)])
    here.receive([make_message(RecordingOwner(), 3)])
    here.tick(1.0, 0.0)
    assert [message.internal_id for message in here.queue.messages] == [1, 2, 3]


@pytest.mark.parametrize("answered", [False, True])
def test_a_handler_continues_with_the_new_delivery_of_its_ordered_message(answered: bool) -> None:
    here, old, new = receiver(), RecordingOwner(in_order=True), RecordingOwner(in_order=True)
    running = make_message(old, 1)
    running.answered = answered
    here._workers = cast("Workers", SimpleNamespace(running=[running]))
    again = make_message(new, 1, attempts=2)
    here.receive([again, make_message(new, 2)])
    assert [message.internal_id for message in here.queue.messages] == ([1, 2] if answered else [2])
    assert (running.owner, running.attempts) == ((old, 1) if answered else (new, 2))


@pytest.mark.parametrize("timeout", [1.0, 60.0])
def test_messages_are_touched_in_time_by_few_looks(timeout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    here, owner, slow = receiver(), RecordingOwner(), RecordingOwner()
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
    here, owner = receiver(), RecordingOwner()
    for number in range(1000):
        message = make_message(owner, number)
        message.answered = number > 0
        here.hold([message])
    assert [message.internal_id for message in here.iteration.held()] == [0]
    assert len(here.iteration._holdings) == 1
    for number in range(1000):
        message = make_message(owner, number)
        message.answered = True
        here.hold([message])
    assert len(here.iteration._holdings) < 50


def _of_the_original(owner: RecordingOwner, number: int) -> Message:
    message = make_message(owner, number)
    message.id = b"%016x" % number
    owner.original = True
    return message


def _numbers(owner: RecordingOwner) -> list[str]:
    return [command.split()[0] for command in owner.commands]


@pytest.mark.parametrize("difference", ["topic", "partition", "id", "timestamp"])
def test_another_message_is_no_new_delivery(difference: str) -> None:
    here, old, new = receiver(), RecordingOwner(in_order=True), RecordingOwner(in_order=True)
    running = make_message(old, 1)
    here._workers = cast("Workers", SimpleNamespace(running=[running]))
    if difference in ("topic", "partition"):
        setattr(new, difference, {"topic": "other", "partition": 4}[difference])
    again = make_message(new, 2 if difference == "id" else 1, timestamp=difference == "timestamp")
    here.receive([again])
    assert (list(here.queue.messages), running.owner) == ([again], old)
    unordered = make_message(RecordingOwner(), 1)
    here.receive([unordered])
    assert (list(here.queue.messages), running.owner) == ([again, unordered], old)


def test_messages_in_flight_are_those_that_wait_are_held_or_handled() -> None:
    here, owner = receiver(), RecordingOwner()
    one, two, three, four = (make_message(owner, number) for number in range(1, 5))
    assert here.count_in_flight() == 0
    here.receive([one, two])
    assert here.count_in_flight() == 2
    here.hold([three])
    here._workers = cast("Workers", SimpleNamespace(running=[four]))
    assert here.count_in_flight() == 4


def test_what_is_received_after_the_stop_is_requeued_on_the_original_nsq_only() -> None:
    here, owner, redesigned = receiver(), RecordingOwner(), RecordingOwner()
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
    here, owner = receiver(), RecordingOwner()
    owner.horizon = -1.0
    for number in range(100):
        here.receive([_of_the_original(owner, number)])
        here.queue.messages[-1].answered = number % 50 > 0
    assert len(here.iteration._reads) < 20
    here.receive([make_message(RecordingOwner(), 200)])
    handed_out = [here.queue.messages.popleft() for _ in range(len(here.queue.messages))]
    here.stop()
    here.requeue_remaining()
    waiting = [message for message in handed_out[:-1] if not message.answered]
    assert owner.commands == [f"REQ {message.internal_id} 0" for message in waiting]
    assert len(waiting) == 2
    assert not any(message.in_flight for message in waiting)
    assert handed_out[-1].in_flight


def test_messages_of_handlers_that_were_cancelled_are_requeued() -> None:
    here, owner, ordered = receiver(), RecordingOwner(), RecordingOwner(in_order=True)
    ended = RecordingOwner()
    ended.horizon = 1e18
    one, two = make_message(owner, 1), make_message(owner, 2)
    two.answered = True
    taken = [one, two, make_message(ordered, 3), make_message(ended, 4)]
    here._workers = cast("Workers", SimpleNamespace(running=[], take_cancelled=lambda: taken))
    here.hold([make_message(owner, 5)])
    here.stop()
    here.requeue_remaining()
    assert owner.commands == ["REQ 1 0", "REQ 5 0"]
    assert (ordered.commands, ended.commands) == ([], [])


@pytest.mark.parametrize("touches", [True, False])
def test_only_with_auto_touch_messages_are_touched(touches: bool) -> None:
    here, owner = receiver(delivery=DeliveryOptions(auto_touch=touches)), RecordingOwner()
    here.receive([make_message(owner, 1)])
    here.hold([make_message(owner, 2)])
    here._workers = cast("Workers", SimpleNamespace(running=[make_message(owner, 3)]))
    here.tick(55.0, 0.0)
    assert sorted(owner.commands) == (["TOUCH 1", "TOUCH 2", "TOUCH 3"] if touches else [])


def test_messages_that_wait_until_they_are_due_raise_the_total_and_are_requeued_then() -> None:
    here, owner = receiver(), RecordingOwner()
    message = make_message(owner, 1)
    message.received = 95.0
    here._group.early_messages().keep(message, 110.0)
    here.tick(100.0, 0.0)
    assert (here._group.flow._extra, owner.commands) == (1, [])
    here.tick(110.0, 0.0)
    assert (here._group.flow._extra, _numbers(owner)) == (0, ["REQ"])


def test_unpacked_bytes_of_messages_that_are_not_in_flight_any_more_are_released_by_a_tick() -> None:
    here, owner = receiver(), RecordingOwner()
    message = make_message(owner, 1)
    budget = here._group.unpacking()
    assert budget.reserve(message, 10)
    owner.horizon = 1.0
    here.tick(1.0, 0.0)
    assert budget.used == 0


def test_a_key_that_cannot_be_read_ends_the_consumer() -> None:
    failed: list[NsqError] = []

    def key_of(message: Message) -> str:
        return cast("str", 5)

    here = receiver(failed, key=key_of)
    here.receive([make_message(RecordingOwner(), 1)])
    here._queues(2)
    assert len(failed) == 1
    here.receive([make_message(RecordingOwner(), 2)])
    assert len(failed) == 2


def test_messages_that_were_received_before_lanes_are_put_into_them() -> None:
    here = receiver(key=lambda message: message.body)
    here.receive([make_message(RecordingOwner(), 1, b"a"), make_message(RecordingOwner(), 2, b"b")])
    lanes = here._queues(2)
    assert not here.queue.messages
    assert sorted(message.internal_id for lane in lanes for message in lane.messages) == [1, 2]
    assert here.count_in_flight() == 2
    plain = receiver()
    assert plain._queues(3) == [plain.queue] * 3


class _Stopped(MessageQueue):
    """A queue whose messages are taken after the stop only, because threads may take some meanwhile."""

    def take_all(self, count: int | None = None) -> list[Message]:
        assert self.stopped
        return super().take_all(count)


@pytest.mark.anyio
async def test_a_stop_wakes_those_that_wait_for_messages_and_keeps_the_others_from_them() -> None:
    here = receiver()
    here.queue = _Stopped()
    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            for waiter in (here.queue.wait, here._group.unpacking().wait):
                tasks.start_soon(waiter)
            await settled()
            here.stop()


async def _ignore(message: Message) -> None:
    """Handle a message."""


@pytest.mark.anyio
async def test_what_workers_have_is_not_requeued_as_messages_of_the_iteration() -> None:
    here, owner = receiver(), RecordingOwner()
    here.receive([_of_the_original(owner, 1)])
    here._group.tasks = cast("BackgroundTasks", SimpleNamespace(start_soon=lambda *_: None))
    here.start_workers(MessageHandler(_ignore), None)
    here.receive([_of_the_original(owner, 2)])
    assert len(here.queue.take_all()) == 2
    here.stop()
    here.requeue_remaining()
    assert owner.commands == []


def test_what_waits_for_a_key_and_until_it_is_due_raises_the_total() -> None:
    here = receiver(key=lambda message: b"k")
    (lane,) = here._queues(1)
    owner = RecordingOwner()
    owner.ready = 10
    lost, waiting, early = (make_message(owner, number) for number in (1, 2, 3))
    here.receive([lost, waiting])
    lane.messages.popleft()
    owner.horizon, lost.received, waiting.received, early.received = 50.0, 40.0, 60.0, 60.0
    here.expired(lost)
    here._group.early_messages().keep(early, 1e12)
    here.tick(70.0, 0.0)
    assert here._group.flow._extra == 2
    receiver().expired(lost)


def test_nothing_is_accepted_after_the_stop() -> None:
    here = receiver()
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
