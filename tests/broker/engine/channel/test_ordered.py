"""Ordered channels: one message at a time, redelivered until it is finished."""

from __future__ import annotations

import pytest

from nsqext.broker.coordinator.replication import hand_over_channels
from nsqext.broker.engine.storage.log import Refusal, StartPosition
from tests.support.engine_partition import Bench


def primed() -> Bench:
    """A channel after its first SUB_ORDERED."""
    bench = Bench(ordered=True)
    first = bench.consume(99, ready=0, ordered=True)
    bench.channel().unsubscribe(first)
    return bench


def test_one_message_is_in_flight_for_any_rdy() -> None:
    bench = primed()
    bench.publish("m0", "m1")
    first = bench.consume(1, ready=100, ordered=True)
    second = bench.consume(2, ready=100, ordered=True)
    assert (first.bodies(), second.bodies()) == (["m0"], [])
    bench.finish(first, [2])
    assert first.bodies() + second.bodies() == ["m1"]


def test_rdy_zero_delivers_nothing() -> None:
    bench = primed()
    consumer = bench.consume(ready=0, ordered=True)
    bench.publish("m0")
    assert consumer.bodies() == []
    bench.channel().set_ready(consumer, 1)
    assert consumer.bodies() == ["m0"]


def backlogged() -> Bench:
    """A channel before its first SUB_ORDERED, with three unread messages."""
    bench = Bench(ordered=True)
    bench.channel()
    bench.publish("m0", "m1", "m2")
    return bench


@pytest.mark.parametrize("ready", [1, 2, 100])
def test_the_first_sub_ordered_delivers_the_first_message_twice(ready: int) -> None:
    bench = backlogged()
    consumer = bench.consume(ready=ready, ordered=True)
    assert consumer.attempts() == [("m0", 1), ("m0", 1)]
    bench.finish(consumer, [2])
    assert consumer.attempts() == [("m1", 1)]
    bench.finish(consumer, [3])
    assert consumer.attempts() == [("m2", 1)]


def test_a_restarted_server_has_no_ordered_channel_and_no_counters() -> None:
    bench = backlogged()
    first = bench.consume(ready=1, ordered=True)
    bench.finish(first, [2])
    bench.channel().requeue(first, 3, 0)
    assert first.attempts() == [("m0", 1), ("m0", 1), ("m1", 1), ("m1", 2)]
    bench.partition.restart()
    stats = bench.channel().stats()
    assert (first.has_closed, bench.channel().ordered, stats.requeue_count, stats.in_flight_count) == (
        True,
        False,
        0,
        0,
    )
    assert bench.consume(2, ordered=True).attempts() == [("m1", 1), ("m1", 1)]


def test_a_new_leader_delivers_the_first_message_twice() -> None:
    old, new = backlogged(), backlogged()
    consumer = old.consume(ready=1, ordered=True)
    old.finish(consumer, [2])
    hand_over_channels(old.partition, new.partition)
    new.partition.resume()
    assert new.consume(2, ordered=True).attempts() == [("m1", 1), ("m1", 1)]


def test_the_first_message_can_be_requeued() -> None:
    bench = backlogged()
    consumer = bench.consume(ready=1, ordered=True)
    bench.channel().requeue(consumer, 2, 0)
    assert consumer.attempts() == [("m0", 1), ("m0", 1), ("m0", 2)]
    bench.finish(consumer, [2])
    assert consumer.attempts() == [("m1", 1)]


def test_the_first_message_survives_its_client() -> None:
    bench = backlogged()
    first = bench.consume(1, ready=1, ordered=True)
    second = bench.consume(2, ready=1, ordered=True)
    assert (first.attempts(), second.attempts()) == ([("m0", 1), ("m0", 1)], [])
    bench.channel().unsubscribe(first)
    assert second.attempts() == [("m0", 1)]


def test_messages_at_other_clients_are_redelivered_when_a_channel_becomes_ordered() -> None:
    bench = Bench()
    first = bench.consume(1, ready=1)
    bench.publish("m0", "m1", "m2")
    second = bench.consume(2, ready=1, ordered=True)
    bodies = first.bodies() + second.bodies()
    assert bodies.count("m0") == 2
    assert bodies.count("m2") == 0


def test_a_delay_is_ignored_until_the_timeout() -> None:
    bench = primed()
    bench.publish("m0", "m1")
    consumer = bench.consume(ready=10, ordered=True, msg_timeout=5.0)
    bench.channel().requeue(consumer, 2, 1)
    bench.channel().requeue(consumer, 999, 1)
    bench.wait(4)
    assert consumer.attempts() == [("m0", 1)]
    bench.wait(1)
    assert consumer.attempts() == [("m0", 2)]


def test_another_client_receives_the_same_message() -> None:
    bench = primed()
    bench.publish("m0", "m1")
    first = bench.consume(1, ready=1, ordered=True)
    second = bench.consume(2, ready=1, ordered=True)
    bench.channel().requeue(first, 2, 0)
    assert second.attempts() == [("m0", 2)]
    bench.channel().unsubscribe(second)
    assert first.attempts() == [("m0", 1), ("m0", 2)]


def test_a_plain_subscription_to_an_ordered_channel_is_ordered_too() -> None:
    bench = primed()
    bench.publish("m0", "m1")
    consumer = bench.consume(ready=10)
    assert consumer.bodies() == ["m0"]


def test_setoffset_under_a_consumer() -> None:
    bench = primed()
    bench.publish("m0", "m1")
    consumer = bench.consume(ready=5, ordered=True)
    bench.finish(consumer, [2])
    assert consumer.bodies() == ["m0", "m1"]
    bench.channel().set_offset(StartPosition("virtual_queue", 0))
    assert consumer.bodies() == ["m0"]
    with pytest.raises(Refusal, match="not in flight"):
        bench.finish(consumer, [3])
    bench.finish(consumer, [2])
    assert consumer.bodies() == ["m1"]


def test_setorder_false_closes_the_clients() -> None:
    bench = primed()
    bench.publish("m0", "m1")
    consumer = bench.consume(ready=5, ordered=True)
    channel = bench.channel()
    channel.set_ordered(False)
    assert consumer.has_closed
    assert consumer.bodies() == ["m0"]
    channel.unsubscribe(consumer)
    assert bench.consume(2, ready=5).bodies() == ["m0", "m1"]


def test_a_channel_of_a_plain_topic_becomes_ordered() -> None:
    bench = Bench()
    consumer = bench.consume(ready=10)
    bench.publish("m0", "m1")
    assert consumer.bodies() == ["m0", "m1"]
    bench.channel().set_ordered(True)
    assert bench.channel().ordered
    assert consumer.bodies() == ["m0"]


def test_an_acknowledged_position_inside_a_message_moves_to_a_message(caplog: pytest.LogCaptureFixture) -> None:
    bench = backlogged()
    cursor = bench.channel().cursor
    cursor.acked.reset(7, 1)  # the log was another one when m0 was finished
    cursor.rewind(forget=True)
    before = bench.partition.changes
    consumer = bench.consume(ready=1, ordered=True)
    assert consumer.attempts()[-1] == ("m1", 1)
    assert bench.partition.changes == before + 2, "m0 is finished, and the position moves"
    assert [record.message for record in caplog.records] == [
        "ch: the acknowledged position 7 is not the start of a message; it moves to 32"
    ]
    assert bench.channel().acked.count == 1
    bench.finish(consumer, [3])
    assert consumer.attempts() == [("m2", 1)]
