"""The dispatcher of received messages: queues, and closing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import anyio
import pytest

from nsqext import Consumer, Message, Producer, Requeue
from nsqext.broker import Cluster
from nsqext.client.consumer.handlers.dispatcher import MessageDispatcher
from nsqext.client.consumer.options import BackoffOptions, ConsumerOptions
from nsqext.client.consumer.subscriptions.backoff import Backoff
from nsqext.client.consumer.subscriptions.rdy_distributor import RdyDistributor
from nsqext.client.consumer.subscriptions.subscription import Subscription
from tests.support.consumers import quick, take
from tests.support.messages import RecordingOwner, make_message

if TYPE_CHECKING:
    from nsqext.client.consumer.handlers.workers import Workers
    from nsqext.errors import NsqError


def dispatcher(failed: list[NsqError]) -> MessageDispatcher:
    """A dispatcher without lanes and workers."""
    flow = RdyDistributor[Subscription](10, Backoff(BackoffOptions()))
    return MessageDispatcher(ConsumerOptions(), flow, failed.append)


def test_messages_wait_in_one_queue() -> None:
    failed: list[NsqError] = []
    here = dispatcher(failed)
    here.dispatch([make_message(RecordingOwner(), 1), make_message(RecordingOwner(), 2)])
    here.dispatch([make_message(RecordingOwner(), 3)])
    assert [message.internal_id for message in here.queue.messages] == [1, 2, 3]
    here.tick(1.0, 0.0)
    assert failed == []


@pytest.mark.parametrize("answered", [False, True])
def test_a_handler_continues_with_the_new_delivery_of_its_ordered_message(answered: bool) -> None:
    here, old, new = dispatcher([]), RecordingOwner(in_order=True), RecordingOwner(in_order=True)
    running = make_message(old, 1)
    running.answered = answered
    here._workers = cast("Workers", SimpleNamespace(running=[running]))
    again = make_message(new, 1, attempts=2)
    here.dispatch([again, make_message(new, 2)])
    assert [message.internal_id for message in here.queue.messages] == ([1, 2] if answered else [2])
    assert (running.owner, running.attempts) == ((old, 1) if answered else (new, 2))


@pytest.mark.parametrize("timeout", [1.0, 60.0])
def test_messages_are_touched_in_time_by_few_looks(timeout: float, monkeypatch: pytest.MonkeyPatch) -> None:
    here, owner, slow = dispatcher([]), RecordingOwner(), RecordingOwner()
    owner.msg_timeout, slow.msg_timeout, tick = timeout, 900.0, timeout / 60
    here.tick(0.0, 0.0)
    here.dispatch([make_message(slow, 1)])
    here.tick(tick, 0.0)
    message = make_message(owner, 2)
    message.received = message.delivered = 2 * tick
    here.dispatch([message])
    held = here.queue.take_all()
    here.held.add(held)
    looks = 0
    unanswered = here.held.unanswered

    def counted() -> list[Message]:
        nonlocal looks
        looks += 1
        return unanswered()

    monkeypatch.setattr(here.held, "unanswered", counted)
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
    here, owner = dispatcher([]), RecordingOwner()
    for number in range(1000):
        message = make_message(owner, number)
        message.answered = number > 0
        here.held.add([message])
    assert [message.internal_id for message in here.held.unanswered()] == [0]
    assert len(here.held._holdings) == 1
    for number in range(1000):
        message = make_message(owner, number)
        message.answered = True
        here.held.add([message])
    assert len(here.held._holdings) < 50


def test_nothing_is_accepted_after_the_stop() -> None:
    here = dispatcher([])
    here.dispatch([make_message(RecordingOwner(), 1)])
    here.stop()
    assert here.queue.stopped
    here.dispatch([make_message(RecordingOwner(), 2)])
    assert not here.queue.messages


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.anyio
async def test_closing_on_the_original_nsq_requeues_all_messages(lanes: bool) -> None:
    """The server would keep messages in flight until they time out (captured behaviour of the original server)."""
    with Cluster(nodes=1, generation="nsq") as cluster, anyio.fail_after(25):
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
