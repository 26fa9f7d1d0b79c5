"""Batches: finish and requeue, loops over batches, batch handlers, and fetching."""

from __future__ import annotations

import logging
from gc import collect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest
from anyio import create_task_group

from nsqext import Consumer, Finish, MessageBatch, Reject, Requeue
from nsqext.client.consumer.handlers.batches import MessageBatches
from nsqext.client.consumer.handlers.workers import BatchLimits
from nsqext.errors import InvalidInput, InvalidSetting, InvalidState, MessageNotInFlight
from tests.support.consumers import depth, eventually, in_batches, publish, quick_sharing, running, tape
from tests.support.fake_nsqd import PLAIN, message, scripted_node
from tests.support.messages import RecordingOwner, make_message

if TYPE_CHECKING:
    from collections.abc import Callable

    from nsqext import Message
    from nsqext.broker import Cluster
    from nsqext.client.consumer.handlers.iteration import MessageIteration

pytestmark = pytest.mark.anyio

TEN = [b"%d" % number for number in range(10)]


def batch_of(count: int, owner: RecordingOwner | None = None) -> tuple[MessageBatch, RecordingOwner]:
    owner = owner or RecordingOwner()
    return MessageBatch([make_message(owner, number) for number in range(1, count + 1)]), owner


async def test_a_batch_is_a_sequence_in_the_order_received() -> None:
    batch, _ = batch_of(3)
    assert len(batch) == 3
    assert [message.internal_id for message in batch] == [1, 2, 3]
    assert (batch[0].internal_id, batch[-1].internal_id) == (1, 3)
    assert [message.internal_id for message in batch[1:]] == [2, 3]
    assert batch[1] in batch
    assert repr(batch) == "<MessageBatch 3 messages, 3 unanswered>"


async def test_finish_leaves_answered_messages_alone() -> None:
    batch, owner = batch_of(4)
    await batch[1].requeue(2.0)
    await batch[2].finish()
    await batch.finish()
    await batch.finish()
    assert owner.commands == ["REQ 2 2", "FIN 3", "FIN 1", "FIN 4"]
    assert batch.unanswered == []


@pytest.mark.parametrize(("last", "left"), [(1, [3, 4]), (-3, [3, 4]), ("message", [3, 4]), (-1, [])])
async def test_finish_up_to_includes_the_last_one(last: int | str, left: list[int]) -> None:
    batch, owner = batch_of(4)
    await batch.finish_up_to(batch[1] if isinstance(last, str) else last)
    assert owner.commands == [f"FIN {number}" for number in range(1, 5) if number not in left]
    assert [message.internal_id for message in batch.unanswered] == left


async def test_messages_and_indexes_outside_of_the_batch_are_refused() -> None:
    batch, owner = batch_of(2)
    for last in (2, -3, make_message(owner, 1)):
        with pytest.raises(InvalidInput):
            await batch.finish_up_to(last)
    with pytest.raises(InvalidInput, match="not in the batch"):
        await batch.requeue([make_message(owner, 9)])
    with pytest.raises(InvalidInput, match="requeue delay"):
        await batch.requeue(delay=-1)
    with pytest.raises(InvalidInput, match="7 is not in the batch"):
        await batch.requeue([7], delay=5)  # type: ignore[list-item]
    assert owner.commands == []


async def test_requeue_some_or_the_rest() -> None:
    batch, owner = batch_of(4)
    await batch.requeue([batch[2]], delay=5, backoff=True)
    assert not batch.requeue_called, "it was awaited"
    await batch.requeue()
    assert owner.commands == ["REQ 3 5!", "REQ 1 0", "REQ 2 0", "REQ 4 0"]


async def test_the_delay_of_a_batch_from_several_topics_is_checked_for_each_message_that_is_requeued() -> None:
    plain, ordered = RecordingOwner(), RecordingOwner(in_order=True)
    batch = MessageBatch([make_message(plain, 1), make_message(plain, 2), make_message(ordered, 3)])
    with pytest.raises(InvalidInput, match="ordered channel"):
        await batch.requeue(delay=5)
    await batch.requeue([batch[0]], delay=5)
    await batch[2].finish()
    await batch.requeue(delay=6)
    assert (plain.commands, ordered.commands) == (["REQ 1 5", "REQ 2 6"], ["FIN 3"])


async def test_requeue_of_an_empty_batch_checks_the_delay() -> None:
    batch = MessageBatch([])
    await batch.requeue(delay=5)
    with pytest.raises(InvalidInput):
        await batch.requeue(delay=-5)


async def test_requeue_of_an_answered_message_changes_nothing() -> None:
    batch, owner = batch_of(3)
    await batch[2].finish()
    with pytest.raises(InvalidState):
        await batch.requeue([batch[0], batch[2]])
    assert owner.commands == ["FIN 3"]


async def test_expired_messages_are_reported_once_after_the_others_were_finished() -> None:
    lost, owner = RecordingOwner(), RecordingOwner()
    lost.refusal = MessageNotInFlight("its timeout has passed", topic="t", partition=3)
    batch = MessageBatch([make_message(owner, 1), make_message(lost, 2), make_message(lost, 3), make_message(owner, 4)])
    with pytest.raises(MessageNotInFlight, match="2 of 4 messages of a batch"):
        await batch.finish()
    assert owner.commands == ["FIN 1", "FIN 4"]
    assert [message.internal_id for message in batch.unanswered] == [2, 3]
    lost.ignore_lost = True
    await batch.finish()
    assert batch.unanswered == []


async def test_after_its_handler_a_batch_is_finished_and_what_is_lost_of_it_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    batch, owner = batch_of(2)
    batch.finish_now()
    assert (owner.commands, batch.unanswered, caplog.text) == (["FIN 1", "FIN 2"], [], "")
    batch, owner = batch_of(2)
    owner.refusal = MessageNotInFlight("its timeout has passed")
    batch.finish_now()
    assert batch.unanswered == [], "a redelivery is finished without the handler"
    assert "2 of 2 messages of a batch were not answered" in caplog.text


@pytest.mark.parametrize("limits", [{"max_count": 0}, {"max_count": True}, {"max_wait": -1}, {"max_wait": "x"}])
async def test_invalid_limits_are_refused(limits: dict[str, Any]) -> None:
    consumer = Consumer("t", "ch", nsqd="127.0.0.1:4150")
    with pytest.raises(InvalidSetting):
        consumer.batches(**limits)
    with pytest.raises(InvalidSetting):
        consumer.batch_handler(**limits)


@pytest.mark.parametrize("keys", [{"key": "user"}, {"dispatch": "key_failover"}])
async def test_loops_over_batches_do_not_promise_the_order_of_keys(keys: dict[str, Any]) -> None:
    consumer = Consumer("t", "ch", nsqd="127.0.0.1:4150", **keys)
    with pytest.raises(InvalidSetting, match="order of keys"):
        consumer.batches()
    with pytest.raises(InvalidSetting, match="order of keys"):
        await consumer.fetch(1)


async def test_what_a_loop_over_batches_leaves_is_requeued_once_and_in_its_event_loop_only() -> None:
    owner, running = RecordingOwner(), [True]

    async def take(*_: object) -> list[Message]:
        return [make_message(owner, 1), make_message(owner, 2)]

    source = cast("MessageIteration", SimpleNamespace(next_batch=take, in_event_loop=lambda: running[0]))
    for leave in ("aclose", "reference", "other loop", "before the first batch"):
        owner.commands.clear()
        batches = MessageBatches(source, BatchLimits())
        if leave != "before the first batch":
            batch = await anext(batches)
            await batch[0].finish()
        if leave == "aclose":
            await batches.aclose()
            assert owner.commands == ["FIN 1", "REQ 2 0"]
            await batches.aclose()
        running[0] = leave != "other loop"
        del batches
        collect()
        expected = {"aclose": ["FIN 1", "REQ 2 0"], "reference": ["FIN 1", "REQ 2 0"], "other loop": ["FIN 1"]}
        assert owner.commands == expected.get(leave, []), leave


async def test_the_end_of_a_loop_over_batches_leaves_the_batches_of_other_tasks_in_flight() -> None:
    owner, ends = RecordingOwner(), [False, True]

    async def take(*_: object) -> list[Message]:
        if ends.pop(0):
            raise StopAsyncIteration
        return [make_message(owner)]

    source = cast("MessageIteration", SimpleNamespace(next_batch=take, in_event_loop=lambda: True))
    batches = MessageBatches(source, BatchLimits())
    kept = [batch async for batch in batches]
    await batches.aclose()
    assert (owner.commands, len(kept)) == ([], 1)


async def test_a_consumer_that_closes_waits_for_the_batch_of_another_task(cluster: Cluster, topic: str) -> None:
    publish(cluster, topic, *TEN)
    consumer = await in_batches(cluster, topic).start()
    working, resume = anyio.Event(), anyio.Event()

    async def work() -> None:
        async for batch in consumer.batches(max_count=10):
            working.set()
            await resume.wait()
            await batch.finish()

    async with create_task_group() as tasks:
        tasks.start_soon(work)
        await working.wait()
        tasks.start_soon(consumer.aclose)
        await anyio.wait_all_tasks_blocked()
        assert consumer.connections
        resume.set()
    await eventually(lambda: depth(cluster, topic) == 0)


async def test_a_batch_that_is_not_answered_within_close_timeout_is_requeued(cluster: Cluster, topic: str) -> None:
    publish(cluster, topic, *TEN)
    consumer = await in_batches(cluster, topic, close_timeout=0.05).start()
    async with create_task_group() as tasks:
        batch = await consumer.fetch(10, 10.0)
        tasks.start_soon(consumer.aclose)
    with pytest.raises(InvalidState):
        await batch[0].finish()
    async with in_batches(cluster, topic) as other:
        with anyio.fail_after(25):
            again = await other.fetch(10)
        assert len(again) == 10
        await again.finish()


async def test_fetch_returns_what_is_received_until_the_timeout(cluster: Cluster, topic: str) -> None:
    async with in_batches(cluster, topic) as consumer:
        assert len(await consumer.fetch(5, 0.01)) == 0
        publish(cluster, topic, b"a", b"b")
        batch = await consumer.fetch(2, 10.0)
        assert [message.body for message in batch] == [b"a", b"b"]
        await batch[0].finish()
        await batch.requeue([batch[1]])
        again = await consumer.fetch(1)
        assert again[0].attempts == 2
        await again.finish()
        consumer.stop()
        with pytest.raises(InvalidState, match="stopped"):
            await consumer.fetch(1)
    await eventually(lambda: depth(cluster, topic) == 0)


@pytest.mark.parametrize("paused", [True, False])
async def test_fetch_returns_when_a_lower_bound_leaves_nothing_to_wait_for(
    cluster: Cluster, topic: str, paused: bool
) -> None:
    batches: list[MessageBatch] = []
    async with in_batches(cluster, topic, max_in_flight=10) as consumer:

        async def fetch() -> None:
            batches.append(await consumer.fetch(5))

        with anyio.fail_after(25):
            async with create_task_group() as tasks:
                tasks.start_soon(fetch)
                publish(cluster, topic, b"1", partition=0)
                await eventually(lambda: consumer.statistics().in_flight == 1)
                assert not batches
                if paused:
                    consumer.pause()
                else:
                    consumer.max_in_flight = 1
        await batches[0].finish()
    assert len(batches[0]) == 1


async def test_a_fetch_with_a_timeout_does_not_wait_for_another_fetch(cluster: Cluster, topic: str) -> None:
    async with in_batches(cluster, topic) as consumer, create_task_group() as tasks:
        tasks.start_soon(consumer.fetch, 5)
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(25):
            assert len(await consumer.fetch(5, 0.01)) == 0
            assert len(await consumer.fetch(5, 0.0)) == 0
        tasks.cancel_scope.cancel()


async def test_a_batch_handler_that_raises_requeues_the_rest_and_logs_once(
    cluster: Cluster, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = in_batches(cluster, topic, backoff="off", requeue_delay=0)
    seen: list[tuple[bytes, int]] = []

    @consumer.batch_handler(max_count=10, max_wait=0.2)
    async def handle(batch: MessageBatch) -> None:
        seen.extend((message.body, message.attempts) for message in batch)
        if len(seen) == len(TEN):
            await batch.finish_up_to(6)
            raise ZeroDivisionError("no")

    publish(cluster, topic, *TEN)
    with caplog.at_level(logging.ERROR):
        await running(consumer, lambda: eventually(lambda: len(seen) == 13))
    assert sorted(seen[10:]) == [(b"7", 2), (b"8", 2), (b"9", 2)]
    (record,) = (record for record in caplog.records if "handler failed" in record.message)
    assert "3 messages of it are not answered: no" in record.message
    await eventually(lambda: depth(cluster, topic) == 0)


@pytest.mark.parametrize("key", [None, lambda message: message.body[-1:]], ids=["queue", "lanes"])
async def test_messages_that_a_clean_close_returns_are_not_lost(
    cluster: Cluster, topic: str, key: Callable[[Message], bytes] | None
) -> None:
    consumer = in_batches(cluster, topic, key=key, max_in_flight=100)
    handled: list[bytes] = []

    @consumer.batch_handler(max_count=10, max_wait=0.2)
    async def handle(batch: MessageBatch) -> None:
        handled.extend(message.body for message in batch)
        if consumer.statistics().received > len(handled):
            consumer.stop()

    publish(cluster, topic, *(b"%d" % number for number in range(100)))
    with anyio.fail_after(25):
        await consumer.serve(signals=False)
    found = consumer.statistics()
    assert (found.finished, found.lost, found.in_flight) == (len(handled), 0, 0)
    assert found.requeued == found.received - len(handled) > 0


@pytest.mark.parametrize(
    ("signal", "expected"),
    [
        (Requeue(7.0, backoff=False), ["FIN 2", "REQ 1", "REQ 3"]),
        (Reject("bad"), ["FIN 2", "FIN 1", "FIN 3"]),
        (Finish(), ["FIN 2", "FIN 1", "FIN 3"]),
    ],
)
async def test_a_signal_decides_about_the_rest_of_a_batch(signal: Exception, expected: list[str]) -> None:
    async with scripted_node(granted=PLAIN) as node:
        consumer = Consumer("t", "ch", nsqd=str(node), **quick_sharing())

        @consumer.batch_handler(max_count=3, max_wait=30.0)
        async def handle(batch: MessageBatch) -> None:
            await batch[1].finish()
            raise signal

        async def body() -> None:
            peer = await node.accept_subscribed()
            await peer.raw(message(1) + message(2) + message(3))
            assert await tape(peer, 3) == expected

        await running(consumer, body, node)
