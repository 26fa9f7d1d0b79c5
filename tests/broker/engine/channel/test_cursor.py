"""The read position of a channel: requeued, deferred and delayed messages, moves, and what statistics say of them."""

from __future__ import annotations

import logging
from random import Random

import pytest

from nsqext.broker.engine.options import ChannelRules, make_kind
from nsqext.broker.engine.schedule import Turn
from nsqext.broker.engine.storage.log import Refusal, StartPosition
from nsqext.protocol.server.negotiate import ServerLimits
from tests.support.channel_scripts import ChannelScript
from tests.support.engine_partition import Bench, Consumer
from tests.support.tables import table

_DELAYED = "given delayed_threshold=10.0; a sub 9; pub m0; a gets m0; a req 2 20;"
_DELAYED_OF_TWO = """given delayed_threshold=10.0; a sub; pub m0 m1; a gets m0; a req 2 20; a gets m1; a fin 3;
    a rdy 0;"""

SCENES = {
    "a subscription at a position reads a message ahead": "pub m0 m1; a sub 0 start=msgcount:1; cursor count=1",
    "a message at its client stays there while the queue is skipped": """
        a sub 0; pub m0 m1; do set_skipped True; a rdy 2; has in_flight_count=1; a rdy 3; has in_flight_count=1""",
    "the delayed queue is read on when its messages are finished": """
        given delayed_batch=1 delayed_threshold=10.0; a sub 9; pub m0 m1 m2; a gets m0 m1 m2; a req 2 20;
        a req 3 20; a req 4 20; has depth=0; wait 19; a gets; wait 2; a gets m0/2; wait 21; a gets;
        has deferred_from_delay_count=1; a fin 2; wait 1; a gets m1/2; has delayed_queue_count=2""",
    "a message of the delayed queue is delivered once at a time": f"""
        {_DELAYED} a rdy 0; do requeue_delayed 30; do requeue_delayed 30; do requeue_delayed 30; a rdy 1;
        a gets m0/2; do requeue_delayed 30; a fin 2; a gets""",
    "a message of the delayed queue that is delayed again stays in memory": f"""
        {_DELAYED} wait 20; a gets m0/2; a req 2 20; has deferred_count=1 delayed_queue_count=1; wait 20; a gets m0/3;
        a fin 2; has delayed_queue_count=0""",
    "delayed messages are delivered early on request": f"""
        {_DELAYED} do requeue_delayed 19; a gets; do requeue_delayed 20; a gets m0/2""",
    "a message in the delayed queue is not delivered from the queue, too": """
        given delayed_threshold=10.0; a sub 9; pub m0 m1; a gets m0 m1; a req 2 20; do set_offset virtual_queue:0;
        a gets m1/1; wait 21; a gets m0/2""",
    "a new leader reads the delayed queue again": f"""
        {_DELAYED} wait 21; a gets m0/2; topic do suspend; has in_flight_count=0; topic do resume; b sub 5; wait 1;
        b gets m0/2""",
    "a message of the delayed queue that was read ahead is delivered once": f"""
        {_DELAYED_OF_TWO} wait 20; do set_offset special:-1; has deferred_from_delay_count=1; wait 1; a rdy 1;
        a gets m0/2; a fin 2; a gets""",
    "a message of the delayed queue is delivered behind the message read ahead": f"""
        {_DELAYED_OF_TWO} pub m2; wait 20; do set_offset special:-1; has deferred_from_delay_count=0; wait 1;
        a rdy 1; a gets m2/1; a fin 4; a gets m0/2""",
    "a message at its client that is read again is finished once": """
        a sub; pub m0 m1 m2; a gets m0; do set_offset virtual_queue:0; a rdy 9; a gets m1 m0 m2; a fin 2;
        has depth=2; a fin 3 4; has depth=0""",
    "a message that left the delayed queue is finished in the queue, too": """
        given delayed_threshold=10.0; a sub 9; pub m0 m1; a gets m0 m1; a req 2 20; a rdy 0; wait 20; do empty;
        do set_offset virtual_queue:0; a rdy 9; a gets m0/2 m1/1; a fin 2 3; has depth=0""",
    "unfinished messages are delivered again on request": """
        a sub 9; pub m0 m1 m2; a gets m0 m1 m2; a fin 3; do redeliver_unfinished; a gets m0 m2""",
    "a paused channel does not deliver unfinished messages again": """
        a sub 9; pub m0; a gets m0; do set_paused True; do redeliver_unfinished; do set_paused False; a gets""",
    "messages are finished by force": """
        a sub 2; pub m0 m1 m2 m3; a gets m0 m1; do finish_forced 2; a gets m2; has in_flight_count=2; a req 3 50;
        a req 4 50; do finish_deferred; has deferred_count=0 in_flight_count=1 depth=1""",
    "the message read ahead is cut off with the queue": """
        a sub; pub m0 m1; a gets m0; topic do truncate 32; pub new; do finish_forced 2; a gets m0 new""",
    "what was finished out of order stays finished when the queue is cut": """
        a sub 9; pub m0 m1 m2 m3; a gets m0 m1 m2 m3; a fin 3; topic do truncate 96; pub new; a gets m0 m2 new""",
    "a delay is ignored if the topic is ordered": """
        given ordered=True; a sub; pub m0; a req 2 5; has in_flight_count=1 deferred_count=0""",
    "a delay is ignored if the channel is ordered": """
        a sub ordered; pub m0; a req 2 5; has in_flight_count=1 deferred_count=0""",
}


@table(("scene", "script"), SCENES.items())
def test_scenes(scene: str, script: str) -> None:
    assert ChannelScript.checks(script), scene


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


def test_delayed_messages_behind_the_end_of_a_cut_queue_are_lost() -> None:
    bench, consumer = _filled(3, rules=ChannelRules(delayed_threshold=10.0))
    for counter in (2, 3, 4):
        bench.channel().requeue(consumer, counter, 20)
    bench.partition.truncate(32)
    assert sorted(bench.channel().cursor.delayed.messages) == [2]
    assert (bench.channel().acked.offset, bench.channel().stats().depth) == (32, 0)


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
