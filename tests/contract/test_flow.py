"""What is in flight over many connections by the servers' own counts, and how long one failure pauses a consumer."""

from __future__ import annotations

import time
from functools import partial
from itertools import pairwise
from secrets import token_hex
from typing import TYPE_CHECKING, NamedTuple

import anyio
import pytest

from nsqext import Admin, Consumer, ConsumerSettings, Message, Producer
from tests.support.cluster import REAL_ORIGINAL
from tests.support.consumers import eventually
from tests.support.machine_pauses import unless_paused
from tests.support.messages import DEADLINE

if TYPE_CHECKING:
    from tests.support.cluster import ClusterUnderTest, Original

pytestmark = pytest.mark.anyio

_PATTERN: ConsumerSettings = {"max_in_flight": 500, "requeue_delay": 0.1, "start_timeout": DEADLINE}
_PAUSE = 2.0
"""Seconds for which a consumer pauses after one failure, as documented."""


class Topics(NamedTuple):
    """Topics of one partition on a server of one generation."""

    lookupd: list[str]
    prefix: str

    async def create(self, count: int, channel: str) -> list[str]:
        """Create topics with a channel, and return their names."""
        names = [f"{self.prefix}.{number}" for number in range(count)]
        async with Admin(self.lookupd) as admin, anyio.create_task_group() as group:
            for name in names:  # a real cluster enables new topics in rounds: 6 s lie between two
                group.start_soon(partial(admin.create_topic, name, channels=[channel]))
        return names


@pytest.fixture(
    params=["cluster_under_test", "embedded_original", *(["real_original"] if REAL_ORIGINAL else [])],
    ids=lambda name: name.replace("_", " "),
)
def topics(request: pytest.FixtureRequest) -> Topics:
    """Topics of each generation."""
    server: ClusterUnderTest | Original = request.getfixturevalue(request.param)
    return Topics(server.lookupd, f"contract_{token_hex(4)}")


async def test_a_slow_handler_has_no_more_in_flight_than_allowed_by_the_count_of_the_servers(
    topics: Topics, channel: str
) -> None:
    names = await topics.create(3, channel)
    handled: set[tuple[str, bytes]] = set()
    counts: list[int] = []
    consumer = Consumer(names, channel, lookupd=topics.lookupd, max_in_flight=1)

    @consumer.handler
    async def handle(message: Message) -> None:
        await anyio.sleep(0.0 if handled else 2.0)
        handled.add((message.topic, message.body))

    async with Producer(topics.lookupd) as producer:
        for name in names:
            await producer.publish_many(name, [b"1", b"2", b"3"])
    with anyio.fail_after(3 * DEADLINE):
        async with consumer, Admin(topics.lookupd) as admin:
            while len(handled) < 9:
                stats = [await admin.stats(name, channel) for name in names]
                counts.append(sum(one.channels[channel].in_flight for one in stats))
                await anyio.sleep(0.1)
    assert counts
    assert max(counts) == 1


async def test_one_failure_pauses_a_consumer_of_many_idle_topics_as_long_as_documented(
    topics: Topics, channel: str
) -> None:
    async def attempt(number: int) -> None:
        own = Topics(topics.lookupd, f"{topics.prefix}_{number}")
        assert await _longest_gap_after_a_failure(own, channel) < _PAUSE + 1.0

    await unless_paused(attempt, 0.1)


async def _longest_gap_after_a_failure(topics: Topics, channel: str) -> float:
    names = await topics.create(10, channel)
    began: list[float] = []
    requeued: list[bytes] = []
    consumer = Consumer(f"{topics.prefix}.*", channel, lookupd=topics.lookupd, **_PATTERN)

    @consumer.handler
    async def handle(message: Message) -> None:
        if (
            message.attempts > 1
        ):  # a real node looks for requeued messages in a few channels at a time: it may send it late
            requeued.append(message.body)
            return
        began.append(time.monotonic())
        if len(began) == 3:
            raise ValueError

    async with consumer, Producer(topics.lookupd) as producer:
        await eventually(lambda: {one.topic for one in consumer.statistics().connections} == set(names))
        await producer.publish_many(names[-1], [b"x"] * 10)
        await eventually(lambda: len(began) == 10 and len(requeued) == 1)
    return max(later - earlier for earlier, later in pairwise(began))
