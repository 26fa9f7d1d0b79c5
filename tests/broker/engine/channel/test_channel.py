"""Responses to messages and switches of a channel, as captured from the real server."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nsqext.broker.engine.storage.log import Refusal, StartPosition
from tests.support.engine_partition import Bench, original


def test_rdy_is_a_window() -> None:
    bench = Bench()
    consumer = bench.consume(ready=2)
    bench.publish("m0", "m1", "m2", "m3")
    assert consumer.bodies() == ["m0", "m1"]
    bench.finish(consumer, [2])
    assert consumer.bodies() == ["m2"]
    bench.channel().set_ready(consumer, 0)
    bench.finish(consumer, [3, 4])
    assert consumer.bodies() == []
    bench.channel().set_ready(consumer, 1)
    assert consumer.bodies() == ["m3"]


def test_a_message_has_all_fields() -> None:
    bench = Bench()
    consumer = bench.consume(ready=5)
    stored = bench.publish("one", "second")
    first, second = consumer.take()
    assert (first.internal_id, first.attempts, first.offset, first.size) == (2, 1, 0, 33)
    assert (second.internal_id, second.offset, second.size) == (3, 33, 36)
    assert (stored.message_id, stored.offset, stored.size) == (2, 0, 69)


def test_a_new_channel_starts_at_the_end() -> None:
    bench = Bench()
    bench.publish("before")
    consumer = bench.consume()
    assert consumer.bodies() == []
    bench.publish("after")
    assert consumer.bodies() == ["after"]


def test_requeue_follows_the_message_read_ahead() -> None:
    bench = Bench()
    consumer = bench.consume()
    bench.publish("m0", "m1", "m2")
    bench.channel().requeue(consumer, 2, 0)
    assert consumer.attempts() == [("m0", 1), ("m1", 1)]
    bench.finish(consumer, [3])
    assert consumer.attempts() == [("m0", 2)]


def test_requeue_with_delay() -> None:
    bench = Bench()
    consumer = bench.consume()
    bench.publish("m0")
    bench.channel().requeue(consumer, 2, 1.5)
    bench.wait(1.4)
    assert consumer.attempts() == [("m0", 1)]
    bench.wait(0.2)
    assert consumer.attempts() == [("m0", 2)]


def test_refusals_of_messages_that_are_not_in_flight() -> None:
    bench = Bench()
    consumer = bench.consume()
    channel = bench.channel()
    for answer in (channel.finish, channel.touch):
        with pytest.raises(Refusal, match=r"^Message ID not in flight$"):
            answer(consumer, 99)
    with pytest.raises(Refusal, match=r"^Message ID not in flight$"):
        channel.requeue(consumer, 99, 0)


def test_refusals_of_messages_of_other_clients() -> None:
    bench = Bench()
    owner, other = bench.consume(7), bench.consume(8)
    bench.publish("m0")
    channel = bench.channel()
    assert owner.bodies() == ["m0"]
    with pytest.raises(Refusal, match=r"^client does not own message : 7 vs 8$"):
        channel.finish(other, 2)
    with pytest.raises(Refusal, match=r"^client does not own message : 7 vs 8$"):
        channel.requeue(other, 2, 0)
    with pytest.raises(Refusal, match=r"^client does not own message 2: 7 vs 8$"):
        channel.requeue(other, 2, 1)
    with pytest.raises(Refusal, match=r"^client does not own message : 7 vs 8$"):
        channel.touch(other, 2)
    channel.finish(owner, 2)


def test_a_deferred_message_has_no_owner() -> None:
    bench = Bench()
    consumer = bench.consume(10)
    bench.publish("m0")
    channel = bench.channel()
    channel.requeue(consumer, 2, 60)
    with pytest.raises(Refusal, match=r"^client does not own message : 0 vs 10$"):
        channel.requeue(consumer, 2, 0)
    with pytest.raises(Refusal, match=r"^Message is deferred$"):
        channel.requeue(consumer, 2, 0.1)
    with pytest.raises(Refusal, match=r"^client does not own message : 0 vs 10$"):
        channel.finish(consumer, 2)
    channel.finish_forced(2)
    assert channel.stats().depth == 0


def test_setoffset_discards_messages_in_flight_except_the_one_read_ahead() -> None:
    bench = Bench()
    consumer = bench.consume(ready=2)
    bench.publish("m0", "m1", "m2", "m3")
    bench.finish(consumer, [2])
    assert consumer.bodies() == ["m0", "m1", "m2"]
    bench.channel().set_offset(StartPosition("virtual_queue", 0))
    assert consumer.bodies() == ["m3", "m0"]
    for gone in (3, 4):
        with pytest.raises(Refusal, match="not in flight"):
            bench.finish(consumer, [gone])
    bench.finish(consumer, [2])
    assert consumer.bodies() == ["m1"]
    bench.channel().set_ready(consumer, 10)
    assert consumer.bodies() == ["m2"]


def test_empty_keeps_the_message_read_ahead() -> None:
    bench = Bench()
    bench.channel()
    bench.publish("m0", "m1", "m2")
    bench.channel().empty()
    consumer = bench.consume(ready=10)
    bench.publish("new")
    assert consumer.bodies() == ["m0", "new"]


@pytest.mark.parametrize("make", [Bench, original], ids=["redesigned", "original"])
def test_message_timeout(make: Callable[[], Bench]) -> None:
    bench = make()
    consumer = bench.consume(msg_timeout=1.0)
    bench.publish("m0")
    bench.wait(0.9)
    bench.channel().touch(consumer, 2)
    bench.wait(0.9)
    assert consumer.attempts() == [("m0", 1)]
    bench.wait(0.2)
    assert consumer.attempts() == [("m0", 2)]
    assert bench.channel().stats().timeout_count == 1


def test_touch_may_shorten_the_timeout() -> None:
    bench = Bench()
    consumer = bench.consume(msg_timeout=60.0, touch_timeout=1.0)
    bench.publish("m0")
    bench.wait(3)
    bench.channel().touch(consumer, 2)
    bench.wait(1.1)
    assert consumer.attempts() == [("m0", 1), ("m0", 2)]


def test_messages_of_a_lost_client_are_redelivered_with_their_attempts() -> None:
    bench = Bench()
    first = bench.consume(ready=2)
    bench.publish("m0", "m1", "m2")
    assert first.bodies() == ["m0", "m1"]
    bench.channel().unsubscribe(first)
    second = bench.consume(2, ready=10)
    (ahead, *requeued) = second.attempts()
    assert ahead == ("m2", 1), "the message that was read ahead is delivered first"
    assert sorted(requeued) == [("m0", 1), ("m1", 1)]


def test_a_finished_message_read_ahead_is_not_delivered() -> None:
    bench = Bench()
    consumer = bench.consume(ready=2)
    bench.publish("m0", "m1")
    bench.finish(consumer, [3])
    bench.partition.suspend()
    bench.partition.resume()
    consumer = bench.consume(2, ready=1)
    assert consumer.bodies() == ["m0"]
    bench.finish(consumer, [2])
    assert consumer.bodies() == []


def test_messages_of_a_client_are_counted_by_what_became_of_them() -> None:
    bench = Bench()
    consumer = bench.consume(ready=10)
    bench.publish(*"abcd")
    bench.finish(consumer, [2])
    bench.channel().requeue(consumer, 3, 60)
    assert (consumer.messages, consumer.finished, consumer.requeued, consumer.in_flight) == (4, 1, 1, 2)
