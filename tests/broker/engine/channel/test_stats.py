"""Histograms of the times of messages."""

from __future__ import annotations

import pytest

from nsqext.broker.engine.channel.cursor import Latencies
from tests.support.engine_partition import Bench


@pytest.mark.parametrize(
    ("microseconds", "bucket"),
    [
        (-20_000, 0),  # the clock was set back
        (0, 0),
        (15_990, 0),
        (16_000, 1),
        (31_990, 1),
        (32_000, 2),
        (8_191_990, 9),
        (8_192_000, 10),
        (16_384_000, 11),
        (10**12, 11),
    ],
)
def test_times_are_counted_in_buckets_each_twice_as_wide_as_the_one_before(microseconds: int, bucket: int) -> None:
    found = Latencies()
    found.add(microseconds / 1e6, microseconds * 1000)
    wanted = [int(number == bucket) for number in range(12)]
    assert (found.delivery, found.consume) == (wanted, wanted)


def test_a_finished_message_is_counted_by_both_times() -> None:
    bench = Bench()
    consumer = bench.consume(ready=0)
    bench.publish("m0", "m1")
    bench.now += 0.100
    bench.channel().set_ready(consumer, 2)
    bench.now += 0.020
    bench.finish(consumer, [2])
    latencies = bench.channel().latencies
    assert ([number for number, count in enumerate(latencies.delivery) if count], sum(latencies.delivery)) == ([1], 1)
    assert ([number for number, count in enumerate(latencies.consume) if count], sum(latencies.consume)) == ([3], 1)


def test_the_depth_in_bytes_counts_what_is_not_finished() -> None:
    bench = Bench()
    consumer = bench.consume(ready=2)
    bench.publish("one", "second", "m2")
    bench.finish(consumer, [2])
    stats = bench.channel().stats()
    assert (stats.depth, stats.depth_size, stats.message_count, stats.backlogs) == (2, 36 + 32, 3, 0)
    assert (stats.timeout_count, stats.replay_count, stats.held_keys, stats.key_ranges) == (0, 0, 0, [])


def test_a_restarted_channel_measures_again() -> None:
    bench = Bench()
    consumer = bench.consume(ready=2)
    bench.publish("m0")
    bench.finish(consumer, [2])
    assert sum(bench.channel().latencies.consume) == 1
    bench.partition.restart()
    assert sum(bench.channel().latencies.consume) == sum(bench.channel().latencies.delivery) == 0
