"""The read position of a channel: requeued, deferred and delayed messages, moves, and what statistics say of them."""

from __future__ import annotations

import logging
from random import Random

import pytest

from nsqext.broker.engine.options import ChannelRules, make_kind
from nsqext.broker.engine.schedule import Turn
from nsqext.broker.engine.storage.log import Refusal, StartPosition
from nsqext.protocol.server.negotiate import ServerLimits
from tests.support.engine_partition import Bench, Consumer


class Reversing(Random):
    """Turns lists around instead of shuffling them, and draws 0.9 or another number."""

    number = 0.9

    def shuffle(self, x: list[object]) -> None:  # type: ignore[override]
        """Turn a list around."""
        x.reverse()

    def random(self) -> float:
        """Return the number."""
        return self.number


def _filled(count: int, ready: int = 100, **options: object) -> tuple[Bench, Consumer]:
    """Return a partition with some messages, and a consumer that has received all it may have."""
    bench = Bench(**options)
    consumer = bench.consume(ready=ready, extend=True)
    bench.publish(*[f"m{number}" for number in range(count)])
    consumer.take()
    return bench, consumer


@pytest.mark.parametrize(("channel", "order"), [("ch", "01234576"), ("ch#ephemeral", "01276345")])
def test_requeued_messages_beyond_a_bound_have_no_order(channel: str, order: str) -> None:
    bench = Bench(random=Reversing(), limits=ServerLimits(max_rdy_count=40))
    consumer = bench.consume(ready=8, channel=channel)
    bench.publish(*"01234567")
    consumer.take()
    bench.channel(channel).set_ready(consumer, 0)
    for counter in range(2, 10):
        bench.channel(channel).requeue(consumer, counter, 0)
    assert bench.channel(channel).stats().requeue_count == 8
    bench.channel(channel).set_ready(consumer, 8)
    assert "".join(consumer.bodies()) == order


def test_the_read_position_is_behind_the_message_read_ahead() -> None:
    bench, consumer = _filled(3, ready=1)
    stats, cursor = bench.channel().stats(), bench.channel().cursor
    assert (cursor.offset, cursor.count, stats.depth_timestamp > 0) == (64, 2, True)
    assert stats.backlogs == 1
    changes = bench.partition.changes
    bench.channel().set_offset(StartPosition("virtual_queue", 96))
    assert bench.partition.changes == changes + 1, "the position is written"
    assert consumer.bodies() == ["m1"], "it was read ahead"
    stats = bench.channel().stats()
    assert (cursor.offset, cursor.count, stats.depth_timestamp, stats.in_flight_count) == (96, 3, 0, 1)


def test_a_subscription_at_a_position_reads_a_message_ahead() -> None:
    bench = Bench()
    bench.publish("m0", "m1")
    bench.consume(ready=0, start=StartPosition("msgcount", 1))
    assert bench.channel().cursor.count == 1


@pytest.mark.parametrize("channel", ["ch", "ch#ephemeral"])
def test_a_move_to_the_start_discards_requeued_messages(channel: str) -> None:
    random = Reversing()
    random.number = 0.1
    bench = Bench(random=random)
    consumer = bench.consume(ready=10, channel=channel)
    bench.publish(*"0123456789")
    bench.channel(channel).set_ready(consumer, 0)
    for message in consumer.take():
        bench.channel(channel).requeue(consumer, message.internal_id, 0)
    bench.channel(channel).set_offset(StartPosition("virtual_queue", 0))
    bench.channel(channel).set_ready(consumer, 10)
    assert consumer.attempts() == [("0", 2), *((body, 1) for body in "123456789")], "0 was read ahead"
    assert bench.channel(channel).stats().depth == 10


def test_a_message_at_its_client_stays_there_while_the_queue_is_skipped() -> None:
    bench = Bench()
    consumer = bench.consume(ready=0)
    bench.publish("read ahead", "behind")
    bench.channel().set_skipped(True)
    for ready in (2, 3):
        bench.channel().set_ready(consumer, ready)
        assert bench.channel().stats().in_flight_count == 1


@pytest.mark.parametrize(
    ("count", "deferred", "finished", "read"),
    [(10, 5, 0, 12), (10, 6, 0, 10), (10, 6, 1, 11), (12, 6, 0, 14), (12, 7, 0, 12)],
)
def test_a_window_of_which_most_is_deferred_holds_back_the_queue(
    count: int, deferred: int, finished: int, read: int
) -> None:
    bench, consumer = _filled(count, rules=ChannelRules(confirm_window=10))
    for counter in range(count + 1, count + 1 - deferred, -1):
        bench.channel().requeue(consumer, counter, 30)
    bench.finish(consumer, range(2, 2 + finished))
    bench.publish("a", "b")
    assert bench.channel().cursor.count == read


def test_the_delayed_queue_is_read_on_when_its_messages_are_finished() -> None:
    bench, consumer = _filled(3, rules=ChannelRules(delayed_batch=1, delayed_threshold=10.0))
    for counter in (2, 3, 4):
        bench.channel().requeue(consumer, counter, 20)
    assert (bench.channel().stats().depth, bench.partition.tick()) == (0, bench.now + 20)
    bench.wait(19)
    assert consumer.attempts() == []
    bench.wait(2)
    assert consumer.attempts() == [("m0", 2)]
    bench.wait(21)
    assert consumer.take() == [], "one at a time"
    assert bench.channel().stats().deferred_from_delay_count == 1
    bench.finish(consumer, [2])
    bench.wait(1)
    assert consumer.attempts() == [("m1", 2)]
    assert bench.channel().stats().delayed_queue_count == 2


def test_a_message_of_the_delayed_queue_is_delivered_once_at_a_time() -> None:
    bench, consumer = _filled(1, rules=ChannelRules(delayed_threshold=10.0))
    bench.channel().requeue(consumer, 2, 20)
    bench.channel().set_ready(consumer, 0)
    for _ in range(3):
        bench.channel().requeue_delayed(30)
    bench.channel().set_ready(consumer, 1)
    assert consumer.attempts() == [("m0", 2)]
    bench.channel().requeue_delayed(30)
    bench.finish(consumer, [2])
    assert consumer.attempts() == []


def test_delayed_messages_are_delivered_early_on_request() -> None:
    bench, consumer = _filled(1, rules=ChannelRules(delayed_threshold=10.0))
    bench.channel().requeue(consumer, 2, 20)
    for ahead, deliveries in ((19, []), (20, [("m0", 2)])):
        bench.channel().requeue_delayed(ahead)
        assert consumer.attempts() == deliveries


def test_a_message_in_the_delayed_queue_is_not_delivered_from_the_queue_too() -> None:
    bench, consumer = _filled(2, rules=ChannelRules(delayed_threshold=10.0))
    bench.channel().requeue(consumer, 2, 20)
    bench.channel().set_offset(StartPosition("virtual_queue", 0))
    assert consumer.attempts() == [("m1", 1)]
    bench.wait(21)
    assert consumer.attempts() == [("m0", 2)]


def test_a_new_leader_reads_the_delayed_queue_again() -> None:
    bench, consumer = _filled(1, rules=ChannelRules(delayed_threshold=10.0))
    bench.channel().requeue(consumer, 2, 20)
    bench.wait(21)
    assert consumer.attempts() == [("m0", 2)]
    bench.partition.suspend()
    assert bench.channel().stats().in_flight_count == 0
    assert bench.channel().clients == {}
    bench.partition.resume()
    again = bench.consume(2, ready=5)
    bench.wait(1)
    assert again.attempts() == [("m0", 2)]


def test_delayed_messages_behind_the_end_of_a_cut_queue_are_lost() -> None:
    bench, consumer = _filled(3, rules=ChannelRules(delayed_threshold=10.0))
    for counter in (2, 3, 4):
        bench.channel().requeue(consumer, counter, 20)
    bench.partition.truncate(32)
    assert sorted(bench.channel().cursor.delayed.messages) == [2]
    assert (bench.channel().acked.offset, bench.channel().stats().depth) == (32, 0)


@pytest.mark.parametrize("read_ahead", [True, False])
def test_a_message_of_the_delayed_queue_that_was_read_ahead_is_delivered_once(read_ahead: bool) -> None:
    bench, consumer = _filled(2, ready=1, rules=ChannelRules(delayed_threshold=10.0))
    channel = bench.channel()
    channel.requeue(consumer, 2, 20)
    bench.finish(consumer, [3])
    consumer.take()
    channel.set_ready(consumer, 0)
    if not read_ahead:
        bench.publish("m2")
    bench.wait(20)
    channel.set_offset(StartPosition("special", -1))
    assert channel.stats().deferred_from_delay_count == read_ahead
    bench.wait(1)
    channel.set_ready(consumer, 1)
    assert consumer.attempts() == ([("m0", 2)] if read_ahead else [("m2", 1)])
    bench.finish(consumer, [2 if read_ahead else 4])
    assert consumer.attempts() == ([] if read_ahead else [("m0", 2)])


def test_a_message_at_its_client_that_is_read_again_is_finished_once() -> None:
    bench, consumer = _filled(3, ready=1)
    channel = bench.channel()
    channel.set_offset(StartPosition("virtual_queue", 0))
    channel.set_ready(consumer, 9)
    assert consumer.bodies() == ["m1", "m0", "m2"]
    bench.finish(consumer, [2])
    assert channel.stats().depth == 2, "m1 is at the client"
    bench.finish(consumer, [3, 4])
    assert channel.stats().depth == 0


def test_a_message_that_left_the_delayed_queue_is_finished_in_the_queue_too() -> None:
    bench, consumer = _filled(2, rules=ChannelRules(delayed_threshold=10.0))
    channel = bench.channel()
    channel.requeue(consumer, 2, 20)
    channel.set_ready(consumer, 0)
    bench.wait(20)
    channel.empty()
    channel.set_offset(StartPosition("virtual_queue", 0))
    channel.set_ready(consumer, 9)
    assert consumer.attempts() == [("m0", 2), ("m1", 1)], "m0 was read ahead"
    bench.finish(consumer, [2, 3])
    assert channel.stats().depth == 0


def test_the_delayed_queue_is_kept_when_a_channel_changes_its_type() -> None:
    bench, consumer = _filled(1, extend=True, rules=ChannelRules(delayed_threshold=10.0))
    bench.channel().requeue(consumer, 2, 20)
    bench.channel().unsubscribe(consumer)
    bench.partition.admit("ch", make_kind("key_failover"))
    again = bench.consume(2, extend=True)
    bench.wait(20)
    assert again.attempts() == [("m0", 2)]


def test_a_message_stays_in_memory_if_the_delayed_queue_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, consumer = _filled(1, rules=ChannelRules(delayed_threshold=10.0))

    def refuse(delayed: object) -> None:
        raise Refusal("the disk is full")

    monkeypatch.setattr("nsqext.broker.engine.storage.delayed_queue.DelayedQueue.put", lambda queue, one: refuse(one))
    bench.channel().requeue(consumer, 2, 20)
    stats = bench.channel().stats()
    assert (stats.deferred_count, stats.delayed_queue_count, stats.depth) == (1, 0, 1)
    bench.wait(20)
    assert consumer.attempts() == [("m0", 2)]


def test_the_delayed_queue_is_not_read_without_a_client() -> None:
    bench, consumer = _filled(1, rules=ChannelRules(delayed_threshold=10.0))
    bench.channel().requeue(consumer, 2, 20)
    bench.channel().unsubscribe(consumer)
    bench.wait(30)
    assert bench.channel().stats().deferred_from_delay_count == 0
    assert bench.partition.tick() is None


@pytest.mark.parametrize("suspended", [True, False])
def test_an_ordered_channel_reads_again_what_was_finished_out_of_order(suspended: bool) -> None:
    bench, consumer = _filled(4)
    bench.finish(consumer, [3])
    bench.channel().cursor.ordered = True
    if suspended:
        bench.partition.suspend()
        bench.partition.resume()
        consumer = bench.consume(2)
    else:
        bench.channel().requeue(consumer, 4, 0)  # it is not the next one
    for counter, body in ((2, "m0"), (3, "m1"), (4, "m2"), (5, "m3")):
        assert consumer.attempts() == [(body, 1)]
        bench.finish(consumer, [counter])


@pytest.mark.parametrize("topic", [True, False])
def test_a_delay_is_ignored_if_the_topic_or_the_channel_is_ordered(topic: bool) -> None:
    bench = Bench(ordered=topic)
    consumer = bench.consume(ready=1, ordered=not topic)
    bench.publish("m0")
    bench.channel().requeue(consumer, 2, 5)
    stats = bench.channel().stats()
    assert (stats.in_flight_count, stats.deferred_count, bench.channel().ordered) == (1, 0, not topic)


def test_unfinished_messages_are_delivered_again_on_request() -> None:
    bench, consumer = _filled(3)
    bench.finish(consumer, [3])
    bench.channel().redeliver_unfinished()
    assert consumer.bodies() == ["m0", "m2"]


def test_messages_are_finished_by_force() -> None:
    bench, consumer = _filled(4, ready=2)
    bench.channel().finish_forced(2)
    assert consumer.bodies() == ["m2"]
    assert bench.channel().stats().in_flight_count == 2
    for counter in (3, 4):
        bench.channel().requeue(consumer, counter, 50)
    bench.channel().finish_deferred()
    stats = bench.channel().stats()
    assert (stats.deferred_count, stats.in_flight_count, stats.depth) == (0, 1, 1)


def test_the_message_read_ahead_is_cut_off_with_the_queue() -> None:
    bench, consumer = _filled(2, ready=1)
    bench.partition.truncate(32)
    bench.publish("new")
    bench.channel().finish_forced(2)
    assert consumer.bodies() == ["m0", "new"]


def test_what_was_finished_out_of_order_stays_finished_when_the_queue_is_cut() -> None:
    bench, consumer = _filled(4)
    bench.finish(consumer, [3])
    bench.partition.truncate(96)
    bench.publish("new")
    assert consumer.bodies() == ["m0", "m2", "new"]


def test_a_trace_names_deliveries_and_finished_messages(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    consumer = bench.consume(ready=1)
    with caplog.at_level(logging.INFO):
        bench.finish(consumer, [bench.publish("m").message_id])
        bench.channel().traced = True
        bench.finish(consumer, [bench.publish("m").message_id])
    assert [record.message for record in caplog.records] == [
        f"CHANNEL(ch): message 3, trace id 0, attempt 1 {event} 127.0.0.1:40001"
        for event in ("delivered to", "finished by")
    ]


def test_nothing_is_delivered_in_the_turn_of_a_client() -> None:
    turn = Turn()
    bench = Bench(turn=turn)
    consumer = bench.consume(ready=5)
    turn.begin()
    bench.publish("m0")
    assert consumer.bodies() == []
    turn.end()
    assert consumer.bodies() == ["m0"]
