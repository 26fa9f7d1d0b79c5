"""Redelivery after a lost connection: in random order and mixed with new messages, like the real server."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.engine_partition import Bench

SENT = [f"m{number}" for number in range(30)]


def redelivered(seed: int, *, channel: str = "ch", ready: int = 20) -> list[str]:
    """Publish 30 messages, lose a consumer with `ready` of them in flight, and return what the next one receives."""
    bench = Bench(random=Random(seed))
    first = bench.consume(1, ready=ready, channel=channel)
    keeps_channel = bench.consume(9, ready=0, channel=channel)
    bench.publish(*SENT)
    assert first.bodies() == SENT[:ready]
    bench.channel(channel).unsubscribe(first)
    second = bench.consume(2, ready=100, channel=channel)
    assert keeps_channel.bodies() == []
    return second.bodies()


@pytest.mark.parametrize("seed", range(5))
def test_messages_of_a_lost_connection_are_redelivered_in_random_order(seed: int) -> None:
    bodies = redelivered(seed)
    assert sorted(bodies) == sorted(SENT)
    assert bodies[0] == "m20", "the message that was read ahead is delivered first"
    returned = bodies[1:21]
    assert sorted(returned) == sorted(SENT[:20])
    assert returned != SENT[:20]
    assert bodies[21:] == SENT[21:], "requeued messages precede messages that were never sent"


def test_the_same_seed_repeats_the_order() -> None:
    assert redelivered(7) == redelivered(7)
    assert redelivered(7) != redelivered(8)


@pytest.mark.parametrize("seed", range(5))
def test_more_requeued_messages_than_the_queue_holds_mix_with_new_ones(seed: int) -> None:
    # requeuedMsgChan of an ephemeral channel holds two messages; the others wait in a Go map
    bodies = redelivered(seed, channel="tmp#ephemeral")
    assert sorted(bodies) == sorted(SENT)
    first_new, last_returned = bodies.index("m21"), max(bodies.index(body) for body in SENT[:20])
    assert first_new < last_returned


@pytest.mark.parametrize(("drawn", "order"), [(0.4, "2031"), (0.6, "2013")])
def test_another_consumer_may_receive_messages_before_all_are_requeued(drawn: float, order: str) -> None:
    class Fixed(Random):
        def random(self) -> float:
            return drawn

        def shuffle(self, x: list[object]) -> None:  # type: ignore[override]
            """Keep the order."""

    bench = Bench(random=Fixed())
    first, second = bench.consume(1, ready=2), bench.consume(2, ready=0)
    bench.publish(*"0123")
    assert first.bodies() == ["0", "1"]
    bench.channel().paused = True
    bench.channel().set_ready(second, 4)
    bench.channel().paused = False  # nothing is delivered before the connection is lost
    bench.channel().unsubscribe(first)
    assert "".join(second.bodies()) == order, "2 was read ahead"
