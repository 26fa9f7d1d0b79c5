"""Messages that were not received yet are waited for, as long as the order can be kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsqext.client.consumer.handlers import key_lanes
from tests.support.key_lanes import Bench, Owner, at_place, cut


def test_the_wait_for_an_unseen_message_begins_with_the_first_early_one() -> None:
    bench = Bench(1)
    bench.put_at(1)
    bench.wait(0.3)
    cut(bench)
    bench.put_at(2)
    bench.clock.now += 4.0  # nothing is early, nothing is waited for
    bench.put_at(5)
    bench.wait(4.9)
    assert bench.rows() == {"a": ["a1", "a2"]}
    bench.put_at(7)
    bench.wait(0.2)
    assert bench.rows() == {"a": ["a1", "a2", "a5", "a7"]}


def test_the_wait_for_an_unseen_message_passes_only_while_the_server_can_deliver() -> None:
    bench = Bench(1)
    bench.put_at(1)
    bench.wait(0.3)
    again = cut(bench)
    bench.put_at(3)
    again.ready = 0
    bench.wait(5.1)
    again.ready = 20
    bench.wait(4.9)
    assert bench.rows() == {"a": ["a1"]}
    bench.wait(0.2)
    assert bench.rows() == {"a": ["a1", "a3"]}


def test_the_wait_for_an_unseen_message_begins_again_on_each_connection() -> None:
    bench = Bench(1)
    bench.put_at(1)
    bench.wait(0.3)
    for pause in (4.0, 2.0):
        cut(bench)
        bench.put_at(3)
        bench.wait(pause)
        assert bench.rows() == {"a": ["a1"]}
    bench.wait(3.1)
    assert bench.rows() == {"a": ["a1", "a3"]}


@pytest.mark.parametrize(("ready", "others", "ends"), [(2, 1, True), (3, 2, False), (4, 2, True)])
def test_the_wait_for_a_lost_message_passes_unless_other_keys_use_up_rdy(ready: int, others: int, ends: bool) -> None:
    bench = Bench(1)
    (first,) = bench.put("a1")
    again = cut(bench)
    again.ready = ready
    bench.put("a2", *(f"b{number}" for number in range(others)))
    bench.expire(first)
    bench.wait(61.0)
    assert ("a" in bench.rows()) is ends


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_messages_may_have_been_sent_on_connections_that_received_nothing(number: int) -> None:
    bench = Bench(1)
    bench.owner.ready = 1
    bench.put_at(1)
    bench.wait(0.3)
    again = cut(bench)
    again.number, again.ready = number, 1
    unseen = max(1, number - 1)
    bench.put_at(*range(2, unseen + 1), unseen + 2, unseen + 1)
    assert bench.rows() == {"a": [f"a{one}" for one in range(1, unseen + 3)]}
    bench.put_at(9)
    assert bench.rows()["a"][-1] == "a9", "nothing else can be unseen"


def test_messages_may_have_been_sent_for_a_rdy_count_that_grew_after_the_last_message() -> None:
    bench = Bench(1)
    bench.owner.ready = 1
    bench.put_at(1)
    bench.wait(0.3)
    bench.owner.ready = 2
    cut(bench).ready = 1
    bench.put_at(2, 4)
    assert bench.rows() == {"a": ["a1", "a2"]}
    bench.put_at(3)
    assert bench.rows() == {"a": ["a1", "a2", "a3", "a4"]}


def test_the_first_messages_are_waited_for_if_their_connection_is_lost_while_they_are_sorted() -> None:
    bench = Bench(1)
    bench.put_at(2, 1)
    cut(bench)
    bench.put_at(2)
    bench.wait(0.3)
    assert bench.rows() == {}
    bench.put_at(1)
    assert bench.rows() == {"a": ["a1", "a2"]}


def test_as_many_finished_messages_are_remembered_as_the_server_may_not_know_of() -> None:
    bench = Bench(1)
    bench.owner.ready = 2
    for message in bench.put("a1", "a2", "a3"):
        bench.take(message).finish_now()
    again = cut(bench)
    bench.put("a3", "a2", "a1")
    assert again.commands == [("FIN", b"a3"), ("FIN", b"a2")]
    assert bench.rows() == {"a": ["a1"]}


@pytest.mark.parametrize(("attempts", "handled"), [(1, True), (2, False), (3, False)])
def test_a_first_attempt_on_the_same_connection_is_no_redelivery(attempts: int, handled: bool) -> None:
    bench = Bench(1)
    (message,) = bench.put("a1")
    bench.take(message).finish_now()
    (again,) = bench.make("a1")
    again.attempts = attempts
    bench.lanes.put([again])
    assert bench.rows() == ({"a": ["a1"]} if handled else {})
    assert bench.owner.commands == [("FIN", b"a1")] * (1 if handled else 2)


def test_messages_whose_answer_came_too_late_are_remembered_for_as_long_as_they_may_be_redelivered() -> None:
    bench = Bench(1)
    messages = bench.put("a1", "b1")
    for message in messages:
        bench.take(message)
    again = cut(bench)
    bench.put("c1")
    for message in messages:
        message.finish_now()
    bench.wait(119.0)
    bench.put("a1")
    bench.wait(2.0)
    bench.put("b1")
    assert again.commands[-1] == ("FIN", b"a1")
    assert bench.rows() == {"c": ["c1"], "b": ["b1"]}


def test_finished_messages_are_remembered_for_as_long_as_the_server_may_redeliver_them() -> None:
    bench = Bench(1)
    for message in bench.put("a1", "a2"):
        bench.take(message).finish_now()
    again = cut(bench)
    bench.put("b1")
    bench.wait(59.0)
    bench.put("a1")
    assert again.commands[-1] == ("FIN", b"a1")
    bench.wait(2.0)
    bench.put("a2")
    assert bench.rows() == {"a": ["a2"], "b": ["b1"]}


@given(ready=st.integers(1, 4), data=st.data())
def test_unseen_messages_may_return_in_any_order(ready: int, data: st.DataObject) -> None:
    """As many as RDY allowed may be unseen when a connection ends; new ones are received between them."""
    bench = Bench(1)
    bench.owner.ready = ready
    bench.put_at(1)
    bench.wait(0.3)
    cut(bench)
    received = {1}
    new = iter((ready + 2, ready + 3))
    for unseen_before in data.draw(st.permutations([*range(2, ready + 2), None, None])):
        number = next(new) if unseen_before is None else unseen_before
        bench.put_at(number)
        received.add(number)
        unseen = [one for one in range(2, ready + 2) if one not in received]
        known = [one for one in sorted(received) if not unseen or one < unseen[0]]
        assert bench.rows() == {"a": [f"a{one}" for one in known]}
        assert bench.lanes.waiting == len(received) - len(known)
    bench.put_at(ready + 9)
    assert bench.rows()["a"][-1] == f"a{ready + 9}", "nothing else can be unseen"


def test_messages_that_wait_for_unseen_ones_are_requeued_at_the_end() -> None:
    bench = Bench(1)
    bench.put_at(1)
    bench.wait(0.3)
    again = cut(bench)
    again.original = True
    bench.put_at(4, 3)
    bench.lanes.stop()
    for _ in range(2):
        bench.lanes.requeue_remaining()
    assert sorted(again.commands) == [("REQ", b"a3"), ("REQ", b"a4")], "once; number 1 was lost with its connection"
    assert bench.lanes.waiting == 0


@pytest.mark.anyio
async def test_messages_that_use_up_rdy_while_they_wait_are_requeued() -> None:
    bench = Bench(1)
    (first,) = bench.put("a1")
    again = cut(bench)
    again.ready = 4
    bench.put("a2", "a3", "a4", "a5", owner=again)
    bench.expire(first)
    for seconds in (0.5, 0.9):
        bench.wait(seconds)
        assert again.commands == []
    bench.wait(0.2)
    assert again.commands == [("REQ", b"a4"), ("REQ", b"a5")]
    assert again.delays == {b"a4": 0.0, b"a5": 0.0}, "the redesigned NSQ redelivers the lost one first"
    bench.put("a5", "a1", owner=again)
    assert bench.rows() == {"a": ["a1", "a2", "a3", "a4", "a5"]}
    assert [message.lost for message in bench.lanes.queued()] == [False, False, False, True, False]


def test_a_message_that_comes_back_at_once_makes_room_once_a_second() -> None:
    bench = Bench(1)
    (first,) = bench.put("a1")
    again = cut(bench)
    again.ready = 2
    bench.put("a2", "a3")
    bench.expire(first)
    bench.wait(0.1)
    bench.wait(1.0)
    assert again.commands == [("REQ", b"a3")]
    bench.put("a3")
    for seconds, count in ((0.3, 1), (0.7, 1), (0.4, 2)):
        bench.wait(seconds)
        assert len(again.commands) == count


def test_early_messages_that_use_up_rdy_make_room_for_those_before_them() -> None:
    bench = Bench(1)
    bench.put_at(1)
    bench.wait(0.3)
    again = cut(bench)
    again.ready = 4
    bench.put_at(5, 4, 3)
    bench.put("b1")
    bench.wait(0.1)
    bench.wait(1.1)
    assert sorted(again.commands) == [("REQ", b"a4"), ("REQ", b"a5")]
    bench.put_at(2, 4)
    assert bench.rows() == {"a": ["a1", "a2", "a3", "a4"], "b": ["b1"]}


@pytest.mark.anyio
async def test_an_early_message_that_made_room_several_times_was_not_attempted() -> None:
    bench = Bench(1)
    bench.put_at(1)
    bench.wait(0.3)
    again = cut(bench)
    again.ready = 2
    bench.put_at(4, 3)
    for attempts in range(2, 5):
        bench.wait(0.1)
        bench.wait(1.1)
        (delivery,) = bench.make("a4", owner=again)
        delivery.attempts = attempts
        bench.lanes.put([at_place(delivery, 4)])
    assert again.commands == [("REQ", b"a4")] * 3
    bench.put_at(2)
    assert [message.attempts for message in bench.lanes.queued()] == [1] * 4


def test_an_early_message_that_made_room_was_not_attempted_although_the_connection_ends() -> None:
    bench = Bench(1)
    bench.put_at(1)
    bench.wait(0.3)
    cut(bench).ready = 2
    bench.put_at(4, 3)
    bench.wait(0.1)
    bench.wait(1.1)
    assert bench.owner.commands == [("REQ", b"a4")]
    cut(bench).ready = 2
    bench.put_at(3)
    bench.wait(0.3)
    (delivery,) = bench.make("a4")
    delivery.attempts = 2
    bench.lanes.put([at_place(delivery, 4)])
    bench.put_at(2)
    assert [message.attempts for message in bench.lanes.queued()] == [1] * 4


@pytest.mark.anyio
async def test_a_message_that_made_room_has_the_attempts_that_it_was_handled() -> None:
    bench = Bench(1)
    (first,) = bench.put("a1")
    again = cut(bench)
    again.ready = 1
    bench.put("a2", owner=again)
    bench.expire(first)
    for attempts in range(2, 10):
        bench.wait(0.1)
        bench.wait(1.1)
        (delivery,) = bench.make("a2", owner=again)
        delivery.attempts = attempts
        bench.lanes.put([delivery])
    assert again.commands == [("REQ", b"a2")] * 8
    bench.put("b1", owner=again)
    bench.put("a1", owner=again)
    assert {message.body: message.attempts for message in bench.lanes.queued()} == {b"a1": 1, b"a2": 1, b"b1": 1}


@pytest.mark.anyio
async def test_redelivered_messages_that_use_up_rdy_make_room_for_an_earlier_one() -> None:
    """On a new connection to the original NSQ, even if nothing else was received."""
    bench = Bench(1)
    bench.owner.partition, bench.owner.original = None, True
    first, _ = bench.put("a1", "a2")
    again = cut(bench)
    again.partition, again.original, again.ready = None, True, 1
    bench.put("a2", owner=again)
    bench.expire(first)
    bench.wait(0.1)
    bench.wait(1.1)
    assert again.commands == [("REQ", b"a2")]
    bench.put("a1", "a2", owner=again)
    assert bench.rows() == {"a": ["a1", "a2"]}


def test_the_first_connection_to_the_original_nsq_makes_room_as_well() -> None:
    bench = Bench(1)
    bench.owner.partition, bench.owner.original, bench.owner.ready = None, True, 2
    (first,) = bench.put("a1")
    bench.clock.now += 2.0
    bench.put("a2", "a3")
    bench.owner.horizon = bench.clock.now - 1.0
    bench.expire(first)
    bench.wait(0.1)
    bench.wait(1.1)
    assert bench.owner.commands == [("REQ", b"a3")]


@pytest.mark.anyio
async def test_the_order_is_given_up_when_too_many_messages_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_lanes, "MOST_RETURNED", 2)
    bench = Bench(1)
    bench.owner.partition, bench.owner.original = None, True
    (first,) = bench.put("a1")
    again = cut(bench)
    again.partition, again.original = None, True
    bench.put("b1", owner=again)
    bench.expire(first)
    bench.put("a2", "a3", owner=again)
    bench.wait(0.1)
    assert not caplog.text
    bench.put("a4", owner=again)
    bench.wait(0.1)
    assert "3 messages of t wait for the redelivery of earlier messages" in caplog.text
    bench.put("a3", "a1", owner=again)
    assert bench.rows() == {"b": ["b1"], "a": ["a3", "a1"]}


@pytest.mark.anyio
@pytest.mark.parametrize(("most", "most_bytes", "given_up"), [(2, 100, False), (100, 4, False), (100, 3, True)])
async def test_only_messages_that_wait_now_count_against_the_order(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, most: int, most_bytes: int, given_up: bool
) -> None:
    monkeypatch.setattr(key_lanes, "MOST_RETURNED", most)
    monkeypatch.setattr(key_lanes, "MOST_RETURNED_BYTES", most_bytes)
    bench = Bench(1)
    for number in range(4):
        bench.owner.partition, bench.owner.original = None, True
        (lost,) = bench.put(f"a{number}")
        again = cut(bench)
        again.partition, again.original = None, True
        bench.put("b1")
        bench.expire(lost)
        bench.put("a8", "a9")
        bench.wait(0.1)
        bench.put(f"a{number}", "a8", "a9")
        for message in list(bench.lanes.queued()):
            bench.take(message).finish_now()
    assert ("that order is given up" in caplog.text) is given_up


@pytest.mark.anyio
async def test_the_original_nsq_redelivers_after_the_timeout(caplog: pytest.LogCaptureFixture) -> None:
    """It keeps messages of a lost connection in flight: the time for a redelivery counts from their timeout."""
    bench = Bench(1)
    bench.owner.partition, bench.owner.original = None, True
    first, finished = bench.put("a1", "b1")
    bench.take(first)
    bench.take(finished).finish_now()
    again = cut(bench)
    again.partition, again.original, again.ready = None, True, 2
    bench.put("a2", owner=again)
    bench.lanes.expired(first)
    bench.put("a3", owner=again)
    assert again.delays == {b"a3": 60.0}, "until the first one has timed out"
    bench.wait(1.2)
    bench.wait(117.0)
    assert bench.rows() == {}
    bench.put("a3", "b1", owner=again)
    assert again.commands[-1] == ("FIN", b"b1"), "its first FIN was lost"
    bench.wait(2.0)
    assert bench.rows() == {"a": ["a2", "a3"]}
    assert "1 messages of a key were not redelivered within 60 s" in caplog.text


@pytest.mark.anyio
async def test_a_key_of_another_partition_does_not_wait() -> None:
    bench = Bench(1)
    (first,) = bench.put("a1")
    again = cut(bench)
    bench.put("a2", owner=again)
    bench.expire(first)
    other = Owner()
    other.partition = 1
    bench.put("a7", owner=other)
    assert bench.rows() == {"a": ["a7"]}


@pytest.mark.anyio
async def test_a_key_failover_channel_redelivers_to_any_consumer() -> None:
    """The connection is closed if messages wait for one that timed out, and its messages are dropped.

    It is not enough to requeue the waiting ones: the server may have sent later ones that are not received yet.
    """
    bench = Bench(1, ordered_by_server=True)
    (first,) = bench.put("a1")
    bench.clock.now += 2
    bench.put("a2")
    bench.owner.horizon = bench.clock.now - 1
    bench.expire(first)
    bench.put("a3")
    assert bench.rows() == {}
    bench.wait(1.9)
    assert bench.owner.commands == []
    bench.wait(0.2)
    assert bench.owner.commands == [("reset", b"")]
    bench.put("a4", "b1")
    assert bench.rows() == {"b": ["b1"]}
    bench.put("a2", "b2", owner=cut(bench))
    assert bench.rows() == {"a": ["a2"], "b": ["b2"]}


@pytest.mark.anyio
async def test_the_place_of_a_message_that_timed_out_is_kept_on_a_key_failover_channel() -> None:
    """It is kept while no message of its key waits, because a later message may still be received."""
    bench = Bench(1, ordered_by_server=True)
    (first,) = bench.put("a1")
    bench.clock.now += 2
    bench.owner.horizon = bench.clock.now - 1
    bench.expire(first)
    bench.wait(100.0)
    bench.put("a2", "b1")
    assert bench.rows() == {"b": ["b1"]}
    bench.wait(1.9)
    bench.put("a1")
    assert bench.rows() == {"a": ["a1", "a2"], "b": ["b1"]}
    bench.wait(100.0)
    assert ("reset", b"") not in bench.owner.commands


def test_a_lost_message_is_not_waited_for_without_end_on_a_key_failover_channel() -> None:
    bench = Bench(1, ordered_by_server=True)
    (first,) = bench.put("a1")
    bench.clock.now += 2
    bench.owner.horizon = bench.clock.now - 1
    bench.expire(first)
    bench.wait(100.0)
    bench.put("a2")
    bench.wait(1.9)
    assert bench.owner.commands == []
    bench.wait(0.2)
    assert bench.owner.commands == [("reset", b"")]


def test_messages_lost_to_other_consumers_are_bounded() -> None:
    bench = Bench(1, ordered_by_server=True)
    bench.owner.ready = 3
    for number in range(7):
        (message,) = bench.put(f"{number}")
        bench.take(message)
        bench.clock.now += 2
        bench.owner.horizon = bench.clock.now - 1
        bench.lanes.expired(message)
        bench.wait(0.0)
        assert (("reset", b"") in bench.owner.commands) == (number == 6)


def test_messages_behind_lost_ones_count_against_the_bound() -> None:
    bench = Bench(1, ordered_by_server=True)
    bench.owner.ready = 3
    for key in "abc":
        (message,) = bench.put(f"{key}1")
        bench.take(message)
        bench.clock.now += 0.1
        bench.owner.horizon = bench.clock.now
        bench.lanes.expired(message)
        bench.wait(0.0)
        assert (("reset", b"") in bench.owner.commands) == (key == "c")
        bench.put(f"{key}2", f"{key}3")
        bench.wait(0.0)
        assert (("reset", b"") in bench.owner.commands) == (key == "c")


def test_early_messages_of_a_lost_connection_are_received_again() -> None:
    bench = Bench(1)
    bench.put_at(1)
    bench.wait(0.3)
    for _ in range(2):
        cut(bench)
        bench.put_at(4)
    cut(bench)
    bench.put_at(2, 3)
    assert bench.rows() == {"a": ["a1", "a2", "a3"]}
    bench.put_at(4)
    assert bench.rows() == {"a": ["a1", "a2", "a3", "a4"]}


def test_the_first_messages_after_a_move_are_sorted_if_their_connection_is_lost_before_them() -> None:
    bench = Bench(1)
    (running,) = (at_place(message, 1) for message in bench.make("a1"))
    bench.lanes.put([running])
    bench.wait(0.3)
    bench.take(running)
    cut(bench).moved = True
    bench.put_at(1)
    cut(bench)
    bench.put_at(3)
    assert bench.rows() == {}
    bench.put_at(2)
    bench.wait(0.3)
    assert bench.rows() == {"a": ["a2", "a3"]}


def test_a_redelivered_message_waits_for_one_of_another_partition_in_front_of_what_waits_for_it_already() -> None:
    bench, other = Bench(1), Owner()
    other.partition = 1
    (lost,), (first, _) = bench.put("a1"), bench.put("a7", "a8", owner=other)
    cut(bench)
    bench.expire(lost)
    bench.put("a2")
    bench.take(first).requeue_now(5.0, backoff=False)
    bench.put("a1")
    assert (bench.rows(), bench.lanes.waiting) == ({}, 4)
    bench.wait(5.1)
    assert bench.rows() == {"a": ["a7", "a1", "a2", "a8"]}


def test_the_wait_for_a_lost_message_begins_again_with_a_new_connection() -> None:
    bench = Bench(1)
    (first,) = bench.put("a1")
    bench.put("a2", owner=cut(bench))
    bench.expire(first)
    bench.wait(50.0)
    again = cut(bench)
    bench.put("b1", owner=again)
    bench.wait(50.0)
    bench.put("a2", "a1", owner=again)
    assert bench.rows() == {"a": ["a1", "a2"], "b": ["b1"]}


def test_the_original_nsq_has_more_time_for_a_lost_message_each_time_that_others_make_room() -> None:
    """It redelivers the lost message behind its whole queue."""
    bench = Bench(1)
    bench.owner.partition, bench.owner.original = None, True
    (first,) = bench.put("a1")
    again = cut(bench)
    again.partition, again.original, again.ready = None, True, 2
    bench.put("a2", owner=again)
    bench.expire(first)
    bench.put("a3", owner=again)
    bench.wait(61.0)
    delays = []
    for _ in range(3):
        bench.put("a3", owner=again)
        bench.wait(0.1)
        bench.wait(1.2)
        delays.append(again.delays.pop(b"a3"))
    assert delays == [1.0, 1.5, 2.0]
