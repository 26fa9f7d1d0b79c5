"""The delayed queue, and requeues with long delays."""

from __future__ import annotations

import pytest

from nsqext.broker.engine.options import ChannelRules
from nsqext.broker.engine.storage.delayed_queue import Delayed, DelayedQueue
from nsqext.broker.engine.storage.log import AT_END, LogEntry, Refusal
from nsqext.protocol.record import Record
from tests.support.engine_partition import START, Bench


def test_a_long_delay_moves_the_message_to_the_delayed_queue() -> None:
    bench = Bench()
    consumer = bench.consume(ready=2)
    bench.publish("m0", "m1", "m2")
    channel = bench.channel()
    channel.requeue(consumer, 3, 1200)
    assert consumer.bodies() == ["m0", "m1", "m2"]
    stats = channel.stats()
    assert (stats.delayed_queue_count, stats.deferred_count, stats.requeue_count) == (1, 0, 0)
    assert stats.delayed_queue_recent == START + 1200 * 1_000_000_000
    with pytest.raises(Refusal, match=r"^Message ID not in flight$"):
        channel.finish(consumer, 3)
    bench.finish(consumer, [2, 4])
    assert channel.stats().depth == 0
    bench.wait(1199)
    assert consumer.bodies() == []
    bench.wait(1)
    (message,) = consumer.take()
    assert (message.internal_id, message.attempts, message.offset) == (3, 2, 32)
    assert channel.stats().deferred_from_delay_count == 1
    bench.finish(consumer, [3])
    assert (channel.stats().delayed_queue_count, channel.stats().deferred_from_delay_count) == (0, 0)


@pytest.mark.parametrize(
    ("handled", "delay", "on_disk"),
    [(0, 1, False), (0, 900, False), (0, 901, True), (258_300, 899, False), (258_300, 900, True), (259_199, 1, True)],
)
def test_a_message_that_was_handled_for_long_needs_a_shorter_delay(handled: int, delay: int, on_disk: bool) -> None:
    bench = Bench()
    consumer = bench.consume(msg_timeout=1e6)
    bench.publish("m0")
    bench.wait(handled)
    assert bench.options.limits.max_req_timeout == 259_200
    bench.channel().requeue(consumer, 2, delay)
    stats = bench.channel().stats()
    assert (stats.delayed_queue_count, stats.deferred_count) == ((1, 0) if on_disk else (0, 1))


def test_an_emptied_channel_has_no_delayed_messages() -> None:
    bench = Bench()
    consumer = bench.consume(ready=5)
    bench.publish("m0", "m1")
    bench.channel().requeue(consumer, 2, 1200)
    bench.channel().empty()
    assert bench.channel().stats().delayed_queue_count == 0
    bench.wait(1300)
    assert consumer.bodies() == ["m0", "m1"]


def test_requeuedelayed_and_emptydelayed() -> None:
    bench = Bench()
    consumer = bench.consume(ready=5)
    bench.publish("m0", "m1")
    channel = bench.channel()
    channel.requeue(consumer, 2, 1200)
    channel.requeue_delayed()
    assert consumer.bodies() == ["m0", "m1"]
    channel.requeue_delayed(3600)
    assert consumer.attempts() == [("m0", 2)]
    channel.requeue(consumer, 3, 1200)
    channel.cursor.delayed.clear()
    channel.requeue_delayed(3600)
    assert consumer.attempts() == []
    bench.finish(consumer, [2])


def test_a_delayed_message_read_ahead_is_delivered_once_when_the_position_moves() -> None:
    bench = Bench()
    consumer = bench.consume(ready=1)
    bench.publish("m0")
    channel = bench.channel()
    channel.requeue(consumer, 2, 1200)
    assert consumer.bodies() == ["m0"]
    channel.set_ready(consumer, 0)
    bench.wait(1200)
    channel.set_offset(AT_END)
    bench.wait(1)
    channel.set_ready(consumer, 1)
    assert consumer.attempts() == [("m0", 2)]
    bench.finish(consumer, [2])
    bench.wait(1)
    assert consumer.attempts() == []


def test_a_message_of_the_delayed_queue_is_deferred_in_memory() -> None:
    bench = Bench()
    consumer = bench.consume(ready=5)
    bench.publish("m0")
    channel = bench.channel()
    channel.requeue(consumer, 2, 1200)
    channel.requeue_delayed(3600)
    channel.requeue(consumer, 2, 1200)
    assert (channel.stats().deferred_count, channel.stats().delayed_queue_count) == (1, 1)
    bench.wait(1201)
    assert consumer.attempts() == [("m0", 1), ("m0", 2), ("m0", 3)]


def test_delayed_messages_of_a_lost_client_are_requeued() -> None:
    bench = Bench()
    consumer = bench.consume()
    bench.publish("m0")
    bench.channel().requeue(consumer, 2, 1200)
    bench.channel().requeue_delayed(3600)
    bench.channel().unsubscribe(consumer)
    assert bench.consume(2).attempts() == [("m0", 2)]


@pytest.mark.parametrize(("name", "counts"), [("tmp#ephemeral", (2, 0)), ("ch", (1, 1))])
def test_ephemeral_and_full_channels_keep_it_in_memory(name: str, counts: tuple[int, int]) -> None:
    bench = Bench(rules=ChannelRules(delayed_most=1))
    consumer = bench.consume(ready=2, channel=name)
    bench.publish("m0", "m1")
    for message_id in (2, 3):
        bench.channel(name).requeue(consumer, message_id, 1200)
    stats = bench.channel(name).stats()
    assert (stats.deferred_count, stats.delayed_queue_count) == counts


def test_too_much_deferred() -> None:
    bench = Bench(rules=ChannelRules(confirm_window=10))
    consumer = bench.consume(ready=2500)
    bench.publish(*[f"m{number}" for number in range(40)])
    channel = bench.channel()
    with pytest.raises(Refusal, match=r"^Too much deferred messages in flight$"):
        for counter in range(2, 42):
            channel.requeue(consumer, counter, 100)
    assert channel.stats().deferred_count == 21
    channel.requeue(consumer, 40, 10)


def test_a_full_window_stops_the_reading() -> None:
    bench = Bench(rules=ChannelRules(confirm_window=3))
    consumer = bench.consume(ready=20)
    bench.publish(*[f"m{number}" for number in range(20)])
    bench.finish(consumer, range(3, 22, 2))
    consumer.take()
    bench.publish("held back")
    assert consumer.bodies() == []
    bench.finish(consumer, range(2, 22, 2))
    assert consumer.bodies() == ["held back"]


def test_too_many_requeues() -> None:
    bench = Bench()
    consumer = bench.consume()
    bench.publish("heavy")
    channel = bench.channel()
    for _ in range(100):
        channel.requeue(consumer, 2, 0)
    with pytest.raises(Refusal, match=r"^Message too much requeue$"):
        channel.requeue(consumer, 2, 0)
    bench.now += 0.2
    channel.requeue(consumer, 2, 0)
    assert consumer.attempts()[-1] == ("heavy", 102)
    channel.requeue(consumer, 2, 0.1)
    bench.wait(1.0)
    assert consumer.attempts() == []
    bench.wait(0.2)
    assert consumer.attempts() == [("heavy", 103)]


def test_attempts_stop_at_4000() -> None:
    bench = Bench()
    consumer = bench.consume(msg_timeout=1.0)
    bench.publish("m0")
    bench.channel().cursor.in_flight.table[2].attempts = 3999
    for _ in range(3):
        bench.wait(1.1)
    assert [attempts for _, attempts in consumer.attempts()] == [1, 4000, 4000, 4000]


def delayed(number: int, due: int) -> Delayed:
    return Delayed(LogEntry(Record(0, number, 0, b""), number * 30, 30, number), 1, due)


def test_the_queue_returns_due_messages_in_order() -> None:
    queue = DelayedQueue("ch")
    for number, due in ((1, 30), (2, 10), (3, 20), (4, 40)):
        queue.put(delayed(number, due))
    queue.put(delayed(2, 35))
    assert queue.first_due == 20
    assert [item.entry.count for item in queue.due(35, 2)] == [3, 1]
    assert [item.entry.count for item in queue.due(35, 10)] == [3, 1, 2]
    queue.remove(3)
    queue.remove(99)
    assert [item.entry.count for item in queue.due(100, 10)] == [1, 2, 4]
    queue.clear()
    assert (queue.first_due, queue.due(100, 10)) == (0, [])


def test_a_message_that_returns_to_an_emptied_queue_is_in_it_once() -> None:
    delayed = DelayedQueue("ch", None)
    one = Delayed(LogEntry(Record(0, 1, 0, b"x"), 0, 30, 1), due=50, attempts=1)
    for _ in range(2):
        delayed.put(one)
        assert (delayed.first_due, delayed.due(49, 10), delayed.due(50, 10)) == (50, [], [one])
        delayed.clear()
        assert (delayed.first_due, delayed.due(50, 10)) == (0, [])
    delayed.put(one)
    delayed.clear()
    delayed.put(one)
    assert delayed.due(50, 10) == [one]


def test_a_message_that_is_postponed_or_removed_is_not_due_at_its_old_time() -> None:
    queue = DelayedQueue("ch")
    for number, due in ((1, 10), (2, 20), (3, 30), (2, 40)):
        queue.put(delayed(number, due))
    queue.remove(3)
    assert [item.entry.count for item in queue.due(35, 10)] == [1]
    assert [item.entry.count for item in queue.due(40, 10)] == [1, 2]
