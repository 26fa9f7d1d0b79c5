"""Numbers of channels that flags of the redesigned nsqd set; compared with the real program side by side."""

from __future__ import annotations

from typing import Any

import pytest

from nsqext.broker.engine.options import ChannelRules
from nsqext.broker.engine.storage.log import Refusal
from nsqext.protocol.server.negotiate import ServerLimits
from tests.support.engine_partition import Bench, Consumer


def _filled(count: int, **rules: Any) -> tuple[Bench, Consumer]:
    bench = Bench(rules=ChannelRules(**rules))
    consumer = bench.consume(ready=100)
    bench.publish(*[f"m{number}" for number in range(count)])
    assert len(consumer.take()) == count
    return bench, consumer


def _requeued(bench: Bench, consumer: Consumer, *delays: float) -> tuple[int, int]:
    """Requeue the first messages; return how many wait in memory and in the delayed queue."""
    for counter, delay in enumerate(delays, 2):
        bench.channel().requeue(consumer, counter, delay)
    stats = bench.channel().stats()
    return stats.deferred_count, stats.delayed_queue_count


@pytest.mark.parametrize(
    ("rules", "delays", "waiting"),
    [
        ({"delayed_threshold": 10.0}, (5, 9.999, 10, 10.001, 60), (3, 2)),
        ({"delayed_threshold": 1e-6}, (5, 59, 61), (2, 1)),
        ({"delayed_threshold": 0.001}, (0.0005, 0.01, 59), (1, 2)),
        ({"delayed_threshold": 10.0, "delayed_most": 2}, (20, 20, 20, 20), (2, 2)),
        ({"delayed_threshold": 10.0, "delayed_most": 0}, (20, 20, 20), (2, 1)),
    ],
)
def test_a_long_delay_leaves_the_memory(rules: dict[str, Any], delays: tuple[float, ...], waiting: object) -> None:
    assert _requeued(*_filled(len(delays), **rules), *delays) == waiting


def test_a_full_confirm_window_holds_back_the_queue_and_sends_long_delays_to_the_delayed_queue() -> None:
    bench, consumer = _filled(10, confirm_window=2)
    bench.finish(consumer, (3, 5, 7))
    bench.publish("more")
    assert consumer.take() == []
    with pytest.raises(Refusal, match="Too much deferred messages in flight"):
        bench.channel().requeue(consumer, 2, 110)
    bench.channel().requeue(consumer, 4, 130)
    assert bench.channel().stats().delayed_queue_count == 1


@pytest.mark.parametrize(("finished", "again", "changes"), [((3, 5, 7), 9, 1), ((3, 5), 7, 2)])
def test_a_new_leader_with_a_full_confirm_window_delivers_finished_messages_again(
    finished: tuple[int, ...], again: int, changes: int
) -> None:
    """It delivered nothing more: the messages before the finished ones were not read either."""
    bench, consumer = _filled(9, confirm_window=2)
    bench.finish(consumer, finished)
    before = bench.partition.changes
    bench.channel().cursor.rewind(forget=False)
    bench.channel().pump()
    assert (len(consumer.take()), bench.partition.changes) == (again, before + changes)


@pytest.mark.parametrize(
    ("attempts", "age", "refused"),
    [(100, 0.0, False), (101, 0.0, True), (101, 0.2, False), (1999, 0.2, False), (2000, 0.2, True)],
)
def test_a_message_is_requeued_at_once_unless_it_was_delivered_too_often(
    attempts: int, age: float, refused: bool
) -> None:
    bench, consumer = _filled(1)
    bench.channel().cursor.in_flight.table[2].attempts = attempts
    bench.now += age
    if refused:
        with pytest.raises(Refusal, match="Message too much requeue"):
            bench.channel().requeue(consumer, 2, 0)
    else:
        bench.channel().requeue(consumer, 2, 0)
        assert consumer.attempts() == [("m0", attempts + 1)]


@pytest.mark.parametrize(
    ("attempts", "age", "delay", "waits"),
    [(100, 0.0, 0.5, 0.5), (101, 0.0, 0.5, 1.5), (101, 0.7, 0.5, 0.5), (101, 0.0, 1.5, 1.5)],
)
def test_after_many_attempts_a_message_waits_at_least_a_second(
    attempts: int, age: float, delay: float, waits: float
) -> None:
    bench, consumer = _filled(1)
    bench.channel().cursor.in_flight.table[2].attempts = attempts
    bench.now += age
    bench.channel().requeue(consumer, 2, delay)
    bench.wait(waits - 0.01)
    assert consumer.take() == []
    bench.wait(0.02)
    assert consumer.attempts() == [("m0", attempts + 1)]


@pytest.mark.parametrize(
    ("attempts", "after", "ignored"),
    [(0, 5.0, False), (1, 5.0, True), (2, 5.0, False), (1, 0.5, True), (1, 0.0, False), (1, 10.0, False)],
)
def test_an_old_message_is_ignored_after_more_attempts_than_allowed(attempts: int, after: float, ignored: bool) -> None:
    assert ChannelRules(ignored_attempts=attempts, ignored_after=after).ignores(2, 10.0) is ignored


def test_a_new_message_is_delivered_after_any_attempts() -> None:
    bench, consumer = _filled(1, ignored_attempts=1, ignored_after=5.0)
    for attempts in (2, 3):
        bench.channel().requeue(consumer, 2, 0)
        assert consumer.attempts() == [("m0", attempts)]


def test_no_message_is_ignored_unless_a_number_of_attempts_is_set() -> None:
    assert not ChannelRules(ignored_after=5.0).ignores(9, 10.0)


@pytest.mark.parametrize(("delay", "waiting"), [(59.0, (1, 0)), (60.0, (0, 1))])
def test_a_message_that_would_be_in_flight_for_too_long_leaves_the_memory(
    delay: float, waiting: tuple[int, int]
) -> None:
    bench = Bench(limits=ServerLimits(max_req_timeout=100.0), rules=ChannelRules(delayed_threshold=1000.0))
    consumer = bench.consume()
    bench.publish("m0")
    bench.now += 40
    assert _requeued(bench, consumer, delay) == waiting


def test_an_old_message_is_finished_after_so_many_attempts() -> None:
    bench, consumer = _filled(1, ignored_attempts=2, ignored_after=5.0)
    bench.channel().requeue(consumer, 2, 0)
    bench.wait(6)
    bench.channel().requeue(consumer, 2, 0)
    assert consumer.attempts() == [("m0", 2), ("m0", 3)], "the attempts were not more than two"
    bench.channel().requeue(consumer, 2, 0)
    assert consumer.take() == []
    assert bench.channel().stats().depth == 0


def test_the_default_rate_of_channels() -> None:
    bench = Bench(rules=ChannelRules(rate_limit=1))
    consumer = bench.consume(ready=100)
    bench.publish("a" * 4096, "b" * 2048)
    assert [len(body) for body in consumer.bodies()] == [4096]
    bench.wait(2)
    assert [len(body) for body in consumer.bodies()] == [2048]


@pytest.mark.parametrize(("threshold", "longest"), [(600.0, 120), (200.0, 100)])
def test_a_blocked_channel_keeps_delays_in_memory_up_to_half_of_the_threshold(threshold: float, longest: float) -> None:
    bench, consumer = _filled(10, confirm_window=2, delayed_threshold=threshold)
    bench.finish(consumer, (3, 5, 7))
    with pytest.raises(Refusal, match="Too much deferred messages in flight"):
        bench.channel().requeue(consumer, 4, longest)
    bench.channel().requeue(consumer, 4, longest + 0.1)
    assert bench.channel().stats().delayed_queue_count == 1
