"""The rate limit of a channel: large messages wait, small ones do not."""

from __future__ import annotations

from nsqext.broker.engine.channel.channel import Channel
from tests.support.engine_partition import Bench

LARGE = "x" * 10 * 1024


def limited(rate: int) -> tuple[Bench, Channel]:
    """Return a bench whose channel delivers a number of KiB a second, and the channel."""
    bench = Bench()
    bench.consume(ready=100)
    channel = bench.channel()
    assert isinstance(channel, Channel)
    channel.set_rate_limit(rate)
    return bench, channel


def delivered(bench: Bench) -> int:
    """Return how many messages the channel has delivered."""
    return sum(client.messages for client in bench.channel().clients.values())


def test_large_messages_above_the_burst_wait() -> None:
    bench, _ = limited(10)
    bench.publish(*[LARGE] * 6)
    assert delivered(bench) == 4  # the burst of four seconds
    bench.wait(0.9)
    assert delivered(bench) == 4
    bench.wait(0.2)
    assert delivered(bench) == 5
    bench.wait(1.0)
    assert delivered(bench) == 6


def test_an_idle_channel_has_its_burst_again() -> None:
    bench, _ = limited(10)
    for _ in range(2):
        bench.publish(*[LARGE] * 4)
        bench.wait(4)
    assert delivered(bench) == 8


def test_a_higher_rate_takes_effect() -> None:
    bench, channel = limited(10)
    bench.publish(*[LARGE] * 8)
    before = delivered(bench)
    channel.set_rate_limit(10_000)
    bench.wait(1.1)
    assert (before, delivered(bench)) == (4, 8)


def test_small_messages_are_not_limited() -> None:
    bench, _ = limited(1)
    bench.publish(*["x" * 1024] * 50)
    assert delivered(bench) == 50


def test_a_message_above_the_burst_is_delivered() -> None:
    bench, _ = limited(1)
    bench.publish(LARGE)
    assert delivered(bench) == 1


def test_a_rate_of_zero_changes_nothing() -> None:
    bench, channel = limited(10)
    channel.set_rate_limit(0)
    bench.publish(*[LARGE] * 5)
    assert delivered(bench) == 4
