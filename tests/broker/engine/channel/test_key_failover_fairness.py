"""Fairness of a key_failover channel on a simulated clock: consumers with lanes start together, or on a backlog."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import orjson
import pytest

from nsqext.broker.engine.options import ChannelKind
from nsqext.broker.engine.storage.partition_store import NewMessage
from nsqext.key_ranges import position_of
from nsqext.protocol.messages import EXT_JSON, KEY_HEADER
from tests.support.engine_partition import Bench, Consumer

if TYPE_CHECKING:
    from nsqext.protocol.messages import RawMessage

STEP = 0.05
WINDOW = 200
RATE_OF_LANES = 4
"""Messages that a consumer handles in a step."""


class Lanes(Consumer):
    """A consumer that handles a fixed number of messages in every step."""

    def __init__(self, number: int) -> None:
        super().__init__(number, extend=True, msg_timeout=900.0)
        self.waiting: deque[int] = deque()

    def deliver(self, message: RawMessage) -> None:
        """Queue a message."""
        self.waiting.append(message.internal_id)


class Flow:
    """A channel with consumers and a publisher."""

    def __init__(self, backlog: int) -> None:
        self.bench = Bench(extend=True)
        self.channel = self.bench.partition.channel("ch", ChannelKind("key_failover", fixed=True))
        self.consumers: list[Lanes] = []
        self.published = 0
        self.handled: list[int] = []
        self.publish(backlog)

    def publish(self, count: int) -> None:
        """Publish messages of different keys."""
        for first in range(self.published, self.published + count, 1000):
            self.bench.publish(
                *(
                    NewMessage(b"x", header=orjson.dumps({KEY_HEADER: f"key-{number}"}), version=EXT_JSON)
                    for number in range(first, min(first + 1000, self.published + count))
                )
            )
        self.published += count

    def join(self) -> None:
        """Add a consumer."""
        consumer = Lanes(len(self.consumers) + 1)
        self.consumers.append(consumer)
        self.channel.subscribe(consumer)
        self.channel.set_ready(consumer, WINDOW)

    def run(self, seconds: float, *, rate: float) -> None:
        """Publish a part of what the consumers can handle, and handle messages."""
        for _ in range(round(seconds / STEP)):
            self.publish(round(rate * RATE_OF_LANES * len(self.consumers)))
            handled = 0
            for consumer in self.consumers:
                for _ in range(min(RATE_OF_LANES, len(consumer.waiting))):
                    self.channel.finish(consumer, consumer.waiting.popleft())
                    handled += 1
            self.handled.append(handled)
            self.bench.wait(STEP)

    def largest(self) -> float:
        """Return the largest range, in times of the fair share."""
        return max(found.high - found.low for found in self.channel.stats().key_ranges) * len(self.consumers)

    def use(self, seconds: float) -> float:
        """Return how much of the lanes was used in the last seconds."""
        steps = round(seconds / STEP)
        return sum(self.handled[-steps:]) / (steps * RATE_OF_LANES * len(self.consumers))


@pytest.mark.parametrize(("count", "pause", "backlog"), [(2, 3.0, 0), (4, 0.0, 500), (8, 0.3, 10_000)])
def test_after_ten_seconds_no_consumer_has_far_more_than_its_share(count: int, pause: float, backlog: int) -> None:
    flow = Flow(backlog)
    for _ in range(count):
        flow.join()
        flow.run(pause, rate=0.7)
    flow.run(10.0, rate=0.7)
    assert flow.largest() <= 1.3


def test_a_large_backlog_is_shared_evenly() -> None:
    flow = Flow(25_000)
    for _ in range(8):
        flow.join()
        flow.run(0.3, rate=0.0)
    flow.run(10.0, rate=0.0)
    assert flow.largest() <= 1.3
    assert flow.use(5.0) >= 0.95


def test_four_consumers_started_one_by_one_use_their_lanes() -> None:
    """The flow is too large for three of them; it was too large for four when the first fill counted."""
    flow = Flow(10_000)
    for _ in range(4):
        flow.join()
        flow.run(0.3, rate=0.95)
    flow.run(20.0, rate=0.95)
    assert flow.use(5.0) >= 0.9


def test_a_change_of_the_flow_moves_ranges_and_keeps_one_owner_of_a_key() -> None:
    """Keys of one quarter of the space become frequent: its consumer gives most of them away."""
    flow = Flow(0)
    for _ in range(4):
        flow.join()
    flow.run(5.0, rate=0.5)
    before = [found.high - found.low for found in flow.channel.stats().key_ranges]
    assert max(before) <= 0.3
    keys = [key for key in (f"{number}" for number in range(20_000)) if _place(key) < 0.25]
    for turn in range(400):
        flow.bench.publish(
            *(
                NewMessage(b"x", header=orjson.dumps({KEY_HEADER: key}), version=EXT_JSON)
                for key in keys[turn * 10 % 4000 : turn * 10 % 4000 + 10]
            )
        )
        flow.run(STEP, rate=0.0)
    low, high = min((found.low, found.high) for found in flow.channel.stats().key_ranges)
    assert high - low < 0.09
    assert flow.use(5.0) >= 0.6


def _place(key: str) -> float:
    return position_of(key.encode()) / (1 << 32)
