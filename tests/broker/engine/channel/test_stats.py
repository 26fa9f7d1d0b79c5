"""Histograms of the times of messages."""

from __future__ import annotations

import pytest

from nsqext.broker.engine.channel.cursor import Latencies


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
