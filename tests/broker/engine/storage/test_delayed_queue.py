"""The delayed queue, and requeues with long delays."""

from __future__ import annotations

import pytest

from nsqext.broker.engine.options import ChannelRules
from nsqext.broker.engine.storage.delayed_queue import Delayed, DelayedQueue
from nsqext.broker.engine.storage.log import LogEntry, Refusal
from nsqext.protocol.record import Record
from tests.support.channel_scripts import ChannelScript
from tests.support.engine_partition import Bench
from tests.support.tables import table

SCENES = {
    "a long delay moves the message to the delayed queue": """
        a sub 2; pub m0 m1 m2; a req 3 1200; a gets m0 m1 m2;
        has delayed_queue_count=1 deferred_count=0 requeue_count=0 delayed_queue_recent=1700001200000000000;
        a fin 3 ! Message ID not in flight; a fin 2 4; has depth=0; wait 1199; a gets; wait 1; a gets m1/2;
        has deferred_from_delay_count=1; a fin 3; has delayed_queue_count=0 deferred_from_delay_count=0""",
    "an emptied channel has no delayed messages": """
        a sub 5; pub m0 m1; a req 2 1200; do empty; has delayed_queue_count=0; wait 1300; a gets m0 m1""",
    "requeuedelayed takes what is due soon": """
        a sub 5; pub m0 m1; a req 2 1200; do requeue_delayed; a gets m0 m1; do requeue_delayed 3600; a gets m0/2""",
    "a message of the delayed queue is deferred in memory": """
        a sub 5; pub m0; a req 2 1200; do requeue_delayed 3600; a req 2 1200;
        has deferred_count=1 delayed_queue_count=1; wait 1201; a gets m0/1 m0/2 m0/3""",
    "delayed messages of a lost client are requeued": """
        a sub; pub m0; a req 2 1200; do requeue_delayed 3600; a end; b sub; b gets m0/2""",
    "a full window stops the reading": """
        given confirm_window=2; a sub 9; pub m0 m1 m2 m3 m4 m5; a gets m0 m1 m2 m3 m4 m5; a fin 3 5 7; pub held;
        a gets; a fin 2 4 6; a gets held""",
}


@table(("scene", "script"), SCENES.items())
def test_scenes(scene: str, script: str) -> None:
    assert ChannelScript.checks(script), scene


def test_an_emptied_delayed_queue_delivers_nothing() -> None:
    bench = Bench()
    consumer = bench.consume()
    bench.publish("m0")
    bench.channel().requeue(consumer, 2, 1200)
    bench.channel().cursor.delayed.clear()
    bench.channel().requeue_delayed(3600)
    assert consumer.attempts() == [("m0", 1)]


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
