"""Lanes by key: the order of a key is kept, and a requeue delays only messages of its key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest
from anyio import create_task_group

from nsqext.client.consumer.handlers.key_lanes import KeyLanes
from nsqext.client.consumer.handlers.message_keys import key_reader, lane_number
from nsqext.client.consumer.message import KeySharing
from nsqext.client.consumer.options import DeliveryOptions
from nsqext.client.consumer.unpacking import UnpackBudget
from nsqext.errors import InvalidInput
from tests.support.key_lanes import Bench, Owner, at_place, cut

if TYPE_CHECKING:
    from nsqext.client.consumer.message import Message


@pytest.mark.anyio
async def test_a_requeue_blocks_its_key_only() -> None:
    bench = Bench(1)
    first, second, other = bench.put("a1", "a2", "b1")
    bench.take(first)
    await first.requeue(5.0, backoff=True)
    bench.put("a3", "b2")
    assert bench.rows() == {"b": ["b1", "b2"]}
    assert (bench.lanes.waiting, bench.lanes.count_in_flight()) == (3, 5)
    bench.wait(4.9)
    assert bench.rows() == {"b": ["b1", "b2"]}
    bench.wait(0.2)
    assert bench.rows() == {"a": ["a1", "a2", "a3"], "b": ["b1", "b2"]}
    assert (first.attempts, first.answered, bench.lanes.waiting) == (2, False, 0)
    assert not (first.requeued or first.requeue_called), "its handler may return without an answer"
    assert bench.owner.commands == []
    bench.take(first)
    await first.finish()
    assert bench.owner.commands == [("FIN", b"a1")]
    assert [row.messages[0] for row in bench.lanes.lanes] == [second]
    assert not other.answered


@pytest.mark.anyio
async def test_held_messages_are_touched() -> None:
    bench = Bench(1)
    first, _ = bench.put("a1", "a2")
    bench.take(first)
    await first.requeue(100.0)
    bench.wait(20.0)
    assert bench.owner.commands == []
    bench.wait(11.0)
    assert bench.owner.commands == [("TOUCH", b"a1"), ("TOUCH", b"a2")]


@pytest.mark.anyio
async def test_messages_of_a_lost_connection_keep_their_places() -> None:
    bench = Bench(1)
    first, second, _ = bench.put("a1", "a2", "b1")
    bench.take(first)
    await first.requeue(5.0)
    again = cut(bench)
    bench.put("a3", "a2", "b1", "a1", owner=again)
    bench.wait(6.0)
    assert bench.rows() == {"a": ["a1", "a2", "a3"], "b": ["b1"]}
    assert not [message for message in bench.lanes.queued() if message.lost]
    bench.take(first)
    await first.finish()
    assert again.commands == [("FIN", b"a1")]
    assert bench.lanes.lanes[0].messages[0] is second


@pytest.mark.anyio
async def test_waiting_for_a_redelivery_ends(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(1)
    (first,) = bench.put("a1")
    again = cut(bench)
    bench.put("a2", "b1", owner=again)
    bench.expire(first)
    again.ready = 0  # while the server cannot deliver messages, the time does not count
    bench.wait(61.0)
    assert bench.rows() == {"b": ["b1"]}, "no other key waits"
    again.ready = 20
    bench.wait(61.0)
    assert bench.rows() == {"a": ["a2"], "b": ["b1"]}
    assert "1 messages of a key were not redelivered within 60 s" in caplog.text
    bench.put("a1", owner=again)
    assert bench.rows()["a"] == ["a2", "a1"], "it is handled late, but it is handled"


def test_a_partition_keeps_its_order_when_its_leader_moves_to_another_node() -> None:
    bench = Bench(1)
    (first,) = bench.put("a1")
    again = cut(bench)
    again.node = "127.0.0.1:5150"
    bench.put("a2")
    bench.expire(first)
    assert bench.rows() == {}


def test_a_message_that_made_room_stays_in_its_place_when_those_before_it_are_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(1)
    first, _ = bench.put("a1", "a2")
    cut(bench).ready = 1
    bench.put("a3")
    bench.expire(first)
    bench.wait(0.1)
    bench.wait(1.1)
    assert bench.owner.commands == [("REQ", b"a3")]
    bench.wait(61.0)
    assert bench.rows() == {"a": ["a3"]}
    assert "2 messages of a key were not redelivered" in caplog.text
    bench.put("a4", "a3", "a2")
    assert bench.rows() == {"a": ["a3", "a4", "a2"]}


@pytest.mark.anyio
async def test_a_handled_message_whose_fin_was_lost_is_not_handled_again() -> None:
    bench = Bench(1)
    finished, running = bench.put("a1", "a2")
    bench.take(finished).finish_now()
    bench.take(running)
    again = cut(bench)
    running.finish_now()
    bench.put("a2", "a1", owner=again)
    assert bench.rows() == {}
    assert again.commands == [("FIN", b"a2"), ("FIN", b"a1")]
    bench.put("a1", owner=again)
    assert bench.rows() == {}, "a redelivery of an earlier connection"


def _put_replaced(bench: Bench, owner: Owner, body: str, place: str, number: int) -> Message:
    """Receive another message with the id and the position of an earlier one."""
    (message,) = bench.make(body, owner=owner)
    message.id, message.timestamp = place.encode().ljust(16, b"-"), 2
    bench.lanes.put([at_place(message, number)])
    return message


@pytest.mark.anyio
async def test_a_message_with_the_id_of_a_finished_one_is_handled() -> None:
    bench = Bench(1)
    first, second = (at_place(message, number) for number, message in enumerate(bench.make("a1", "a2")))
    bench.lanes.put([first, second])
    bench.wait(0.3)
    bench.take(first).finish_now()
    bench.take(second).finish_now()
    again = cut(bench)
    _put_replaced(bench, again, "a3", "a1", 0)
    _put_replaced(bench, again, "b1", "a2", 1)
    assert bench.rows() == {"a": ["a3"], "b": ["b1"]}
    assert again.commands == []


@pytest.mark.anyio
async def test_a_message_with_the_id_of_a_lost_one_is_handled_in_its_place() -> None:
    bench = Bench(1)
    messages = [at_place(message, number) for number, message in enumerate(bench.make("a1", "a2", "b1", "b2"))]
    bench.lanes.put(messages)
    bench.wait(0.3)
    running = bench.take(messages[0])
    again = cut(bench)
    bench.expire(messages[1])
    third = _put_replaced(bench, again, "a3", "a2", 1)
    assert bench.rows() == {"a": ["a3"]}
    fourth = _put_replaced(bench, again, "a4", "b1", 2)
    assert bench.rows()["a"] == ["a3", "a4"]
    assert (third.body, fourth.body) == (b"a3", b"a4")
    bench.lanes.put([at_place(bench.make("a1", owner=again)[0], 0)])
    await running.finish()
    assert again.commands == [("FIN", b"a1")]


def test_nothing_is_waited_for_behind_a_message_that_was_replaced() -> None:
    bench = Bench(1)
    bench.put_at(1, 2)
    bench.wait(0.3)
    _put_replaced(bench, cut(bench), "b2", "a2", 2)
    bench.put_at(9)
    assert bench.rows() == {"a": ["a1", "a9"], "b": ["b2"]}


@pytest.mark.anyio
async def test_a_handler_whose_message_the_server_has_lost_ends_without_effect_on_the_next() -> None:
    bench = Bench(1)
    (running,) = (at_place(message, 0) for message in bench.make("a1"))
    bench.lanes.put([running])
    bench.wait(0.3)
    bench.take(running)
    again = cut(bench)
    following = _put_replaced(bench, again, "a2", "a1", 0)
    running.owner.order.finish(running)  # type: ignore[attr-defined]
    assert following.owner.order.unfinished == {following.id: following}  # type: ignore[attr-defined]
    assert bench.rows() == {"a": ["a2"]}


def test_messages_behind_a_lost_one_keep_their_order_while_its_handler_runs_and_connections_end_again() -> None:
    bench = Bench(1)
    bench.put_at(0)
    bench.wait(0.3)
    bench.take(bench.lanes.lanes[0].messages[0])  # its handler runs until the end
    again = cut(bench)
    bench.put_at(9)
    _put_replaced(bench, again, "a3", "a0", 3)  # the server has lost a0, and gives its id to a3
    assert bench.rows() == {}, "messages before them may be received"
    again = cut(bench)
    _put_replaced(bench, again, "a3", "a0", 3)
    bench.put_at(2, 1)
    _put_replaced(bench, again, "a4", "a9", 0)
    assert bench.rows() == {"a": ["a4", "a1", "a2", "a3"]}


@pytest.mark.anyio
async def test_after_a_seek_nothing_is_expected_again() -> None:
    bench = Bench(1)
    first, _ = bench.put("a1", "a2")
    bench.take(first).finish_now()
    again = cut(bench)
    again.moved = True
    bench.put("a1", "a3", owner=again)
    assert bench.rows() == {"a": ["a1", "a3"]}


@pytest.mark.anyio
async def test_no_message_is_handed_out_after_the_stop() -> None:
    bench = Bench(1)
    (first,) = bench.put("a1")
    bench.take(first)
    await first.requeue(5.0)
    bench.lanes.stop()
    bench.wait(6.0)
    bench.put("b1")
    assert bench.rows() == {}


@pytest.mark.anyio
async def test_remaining_messages_are_requeued_with_the_rest_of_their_delay() -> None:
    bench = Bench(2)
    bench.owner.original = True
    a1, _, b1, _, c1 = bench.put("a1", "a2", "b1", "b2", "c1")
    bench.take(a1)
    await a1.requeue(5.0)
    bench.take(b1)
    bench.lanes.stop()
    bench.wait(2.0)
    await b1.requeue(1.0)  # its handler was still running
    bench.owner.horizon, c1.received = 0.5, 0.0  # no longer in flight
    for _ in range(2):
        bench.lanes.requeue_remaining()
        assert sorted(bench.owner.delays.items()) == [(b"a1", 3.0), (b"a2", 3.0), (b"b1", 1.0), (b"b2", 0.0)]
    assert len(bench.owner.commands) == 4
    assert a1.answered


def test_a_key_function_that_fails_is_an_error() -> None:
    bench = Bench()
    bench.owner.original = True
    bench.lanes = KeyLanes(2, key_reader(lambda message: {b"good": "k"}[message.body]), bench.clock, DeliveryOptions())
    with pytest.raises(InvalidInput, match="must return str, bytes or None"):
        bench.put("good", "bad", "good", "good")
    assert [message.body for message in bench.lanes.queued()] == [b"good"]
    bench.lanes.stop()
    bench.lanes.requeue_remaining()
    assert bench.owner.commands == [("REQ", body) for body in (b"bad", b"good", b"good", b"good")]


def test_a_key_function_that_fails_for_a_message_that_was_sorted_is_an_error() -> None:
    bench = Bench()
    bench.owner.original = True
    bench.lanes = KeyLanes(
        2, key_reader(lambda message: {b"a1": "k", b"a3": "k"}[message.body]), bench.clock, DeliveryOptions()
    )
    bench.put_at(3, 2, 1)
    with pytest.raises(InvalidInput, match="must return str, bytes or None"):
        bench.wait(0.3)
    bench.lanes.stop()
    bench.lanes.requeue_remaining()
    assert sorted(bench.owner.commands) == [("REQ", b"a1"), ("REQ", b"a2"), ("REQ", b"a3")]


def test_a_bucket_is_sorted_until_it_is_taken_over() -> None:
    """The server delivers the first message of the key long after the others: another bucket had no owner."""
    bench = Bench()
    bench.owner.key_sharing = KeySharing.TAGS
    bench.owner.taking_over = True
    bench.put_at(3, 5)
    bench.wait(2.0)
    bench.put_at(1)
    bench.wait(2.0)
    assert bench.rows() == {}
    bench.owner.taking_over = False
    bench.wait(0.1)
    assert bench.rows() == {"a": ["a1", "a3", "a5"]}


@pytest.mark.anyio
async def test_a_waiting_worker_wakes_when_a_message_is_received_or_sorted_or_its_key_is_free() -> None:
    bench = Bench(1)
    (lane,) = bench.lanes.lanes
    (first,) = bench.put("a1")
    bench.put_at(2)
    bench.take(first)
    await first.requeue(1.0)

    async def work(taken: list[bytes]) -> None:
        while not lane.messages:
            await lane.wait()
        taken.append(lane.messages.popleft().body)

    for cause, body in ((lambda: bench.put("b1"), b"b1"), (lambda: bench.wait(1.1), b"a1"), (lambda: None, b"a2")):
        taken: list[bytes] = []
        with anyio.fail_after(25):
            async with create_task_group() as tasks:
                tasks.start_soon(work, taken)
                await anyio.wait_all_tasks_blocked()
                cause()
        assert taken == [body]
    other = Bench(1)
    lane = other.lanes.lanes[0]
    other.put_at(1)
    with anyio.fail_after(25):
        async with create_task_group() as tasks:
            tasks.start_soon(work, taken)
            await anyio.wait_all_tasks_blocked()
            other.wait(0.3)
    assert taken[1:] == [b"a1"]


class _Batches:
    """The batches of the lane of the key ``a``."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.lane = bench.lanes.lanes[lane_number(b"a", 4)]

    def take(self, count: int) -> list[Message]:
        return self.bench.lanes.take(self.lane, count)

    def held_back(self) -> set[Message]:
        return self.bench.lanes.held_back(self.lane)

    def end(self) -> None:
        self.bench.lanes.end_batch(self.lane)


def _take(bench: Bench, batches: _Batches, *bodies: str) -> list[Message]:
    """Receive messages of the key ``a`` and take them as a batch."""
    bench.put(*bodies)
    return batches.take(10)


@pytest.mark.parametrize("delays", [(30.0, 5.0), (5.0, 30.0)])
def test_the_messages_of_a_batch_behind_a_requeued_one_wait_for_it(delays: tuple[float, float]) -> None:
    bench = Bench()
    batches = _Batches(bench)
    first, second, third, fourth = _take(bench, batches, "a1", "a2", "a3", "a4")
    first.finish_now()
    for message, delay in zip((second, fourth), delays, strict=True):
        message.requeue_now(delay, backoff=False)
    assert batches.held_back() == {third}
    batches.end()
    bench.put("a5")
    bench.wait(29.0)
    assert (bench.rows(), bench.lanes.waiting) == ({}, 4)
    bench.wait(2.0)
    assert bench.rows() == {"a": ["a2", "a3", "a4", "a5"]}
    assert [message.attempts for message in (second, third, fourth)] == [2, 1, 2]
    assert [message.answered for message in (second, third, fourth)] == [False] * 3
    assert bench.owner.commands == [("FIN", b"a1")]


@pytest.mark.parametrize("first", ["redelivery", "delay", "cut"])
def test_lost_messages_behind_those_of_a_batch_keep_their_places_when_it_is_requeued(first: str) -> None:
    bench = Bench()
    bench.put("a1", "a2", "a3", "a4")
    again = cut(bench)
    bench.put("a1", "a2", owner=again)
    batches = _Batches(bench)
    one, two = _take(bench, batches)  # the others were not redelivered yet
    one.requeue_now(1.0, backoff=False)
    assert batches.held_back() == {two}
    batches.end()
    if first == "redelivery":
        bench.put("a3", "a4", owner=again)
    bench.wait(2.0)
    if first != "redelivery":
        assert bench.rows() == {"a": ["a1", "a2"]}, "they do not wait for later messages"
    if first == "cut":
        again = cut(bench)
        bench.expire(next(bench.lanes.queued()))
        bench.put("a4", "a2", owner=again)
        assert (bench.rows(), bench.lanes.waiting) == ({}, 2)
        bench.put("a1", owner=again)
    if first != "redelivery":
        bench.put("a3", "a4", owner=again)
    assert bench.rows() == {"a": ["a1", "a2", "a3", "a4"]}


def test_a_requeued_message_of_a_batch_is_touched_and_survives_its_redelivery() -> None:
    """It counts as answered, but no REQ was sent; while its handler runs, neither a tick nor a redelivery finish it."""
    bench = Bench()
    batches = _Batches(bench)
    first, second = _take(bench, batches, "a1", "a2")
    first.requeue_now(1.0, backoff=False)
    bench.wait(31.0)
    assert ("TOUCH", b"a1") in bench.owner.commands
    assert first.answered
    bench.put("a1", "a2", owner=cut(bench))
    assert bench.owner.commands == []
    batches.end()
    bench.wait(2.0)
    assert bench.rows() == {"a": ["a1", "a2"]}
    assert not (first.answered or second.answered)


def test_a_requeued_message_of_a_bucket_that_has_another_owner_is_forgotten() -> None:
    bench = Bench()
    bench.owner.key_sharing = KeySharing.TAGS
    batches = _Batches(bench)
    for in_batch in (True, False):
        (message,) = _take(bench, batches, "a1")
        if not in_batch:
            batches.end()
        bench.lanes.forget(bench.owner)
        cut(bench).key_sharing = KeySharing.TAGS
        message.requeue_now(1.0, backoff=False)
        batches.end()
        bench.wait(100.0)
        assert (bench.rows(), bench.lanes.waiting) == ({}, 0)


def test_the_messages_of_a_bucket_are_handled_again_by_its_owner_and_forgotten_with_its_connection() -> None:
    bench = Bench()
    bench.owner.key_sharing = KeySharing.TAGS
    first, _ = bench.put("a1", "a2")
    bench.take(first).requeue_now(1.0, backoff=False)
    bench.wait(1.1)
    assert bench.rows() == {"a": ["a1", "a2"]}
    owner = bench.owner
    cut(bench)
    bench.lanes.forget(owner)
    assert (bench.rows(), bench.lanes.waiting) == ({}, 0)
    bench.lanes.forget(owner)


def test_a_batch_of_a_lane_has_what_is_in_flight_and_fits() -> None:
    bench, budget = Bench(), UnpackBudget(3)
    batches = _Batches(bench)
    lost, first, second, third, fourth = bench.put("a1", "b2", "b3", "b4", "b5")
    lane = batches.lane
    lane.messages.clear()
    lane.messages.extend((lost, first, second, third, fourth))
    lost.received = -1.0
    second.budget = third.budget = fourth.budget = budget
    assert batches.take(1) == [first], "a1 is redelivered"
    assert bench.lanes.waiting == 0
    batches.end()
    assert batches.take(10) == [second]
    assert list(lane.messages) == [third, fourth]
    second.finish_now()
    batches.end()
    assert batches.take(10) == [third]
    assert budget.used == 2
    third.requeue_now(1.0, backoff=False)
    assert budget.used == 0


def test_what_a_batch_holds_back_releases_its_unpacked_bytes_and_has_no_attempt_more() -> None:
    bench, budget = Bench(), UnpackBudget(100)
    batches = _Batches(bench)
    for message in bench.put("a1", "a2", "a3"):
        message.budget = budget
    first, second, third = batches.take(10)
    assert budget.used == 6
    for message in (first, third):
        message.requeue_now(1.0, backoff=False)
    cut(bench)
    bench.put("a2")
    batches.end()
    bench.wait(2.0)
    assert (budget.used, [message.attempts for message in (first, second, third)]) == (0, [2, 1, 2])
    assert (first.answered, third.answered) == (False, False)


def test_messages_of_one_key_in_two_partitions_that_are_requeued_one_after_the_other_are_kept() -> None:
    """On ordered topics a delayed requeue reaches the lanes when the next partition's message was requeued as well."""
    bench = Bench()
    other = Owner()
    other.partition = 1
    (first,), (second,) = bench.put("a1"), bench.put("a2", owner=other)
    for message, delay in ((bench.take(first), 5.0), (bench.take(second), 1.0)):
        message.requeue_now(delay, backoff=False)
    bench.wait(2.0)
    assert bench.rows() == {}, "the longest delay counts"
    bench.wait(4.0)
    assert sorted(bench.rows()["a"]) == ["a1", "a2"]


@pytest.mark.anyio
@pytest.mark.parametrize("requeued", ["12", "21"])
async def test_messages_that_handlers_left_unanswered_keep_their_order_however_they_are_requeued(requeued: str) -> None:
    bench = Bench()
    messages = bench.put("a1", "a2", "a3", "a4")
    left = [bench.take(message) for message in messages[:3]]
    for number in requeued:
        await left[int(number) - 1].requeue(1.0)
    again = cut(bench)
    bench.put("a4", "a2", "a1", owner=again)
    assert again.commands == [], "what was requeued is not finished when it is redelivered"
    bench.wait(2.0)
    assert bench.rows() == {"a": ["a1", "a2", "a4"]}
    assert [(message.attempts, message.answered) for message in messages[:2]] == [(2, False)] * 2


@pytest.mark.parametrize(
    ("returns", "served", "attempts"),
    [("before", 1, 3), ("after", 1, 3), ("before", 2, 3), ("after", 2, 3), ("after", 5, 5), ("before", 5, 5)],
)
def test_each_call_of_a_handler_counts_as_an_attempt_if_the_connection_ends_between_them(
    returns: str, served: int, attempts: int
) -> None:
    """The redesigned NSQ counts no attempt when a connection ends, the original one does; both know no requeue."""
    bench = Bench(1)
    (message,) = bench.put("a1")
    for _ in range(2):
        bench.take(message).requeue_now(1.0, backoff=True)
        if message.attempts == 1:
            bench.wait(2.0)
    again = cut(bench)
    (delivery,) = bench.make("a1", owner=again)
    delivery.attempts = served
    if returns == "before":
        bench.lanes.put([delivery])
        bench.wait(2.0)
    else:
        bench.wait(2.0)
        bench.expire(message)
        bench.lanes.put([delivery])
    assert bench.take(message).attempts == attempts


def test_a_move_of_the_channel_repeats_a_message_whose_fin_was_lost() -> None:
    bench = Bench()
    (handled,) = bench.put("a1")
    bench.take(handled)
    again = cut(bench)
    handled.finish_now()
    again.moved = True
    bench.put("a1")
    assert bench.rows() == {"a": ["a1"]}
