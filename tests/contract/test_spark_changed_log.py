"""A stream of Spark notices that a topic is another one than before, although it has as many messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from secrets import token_hex
from typing import TYPE_CHECKING

import pytest
from anyio.to_thread import run_sync

from nsqext import Admin, Producer
from nsqext.errors import DataLoss
from nsqext.spark.cluster.admin import SourceAdmin as PlannerAdmin
from nsqext.spark.options import SourceOptions
from nsqext.spark.read.offsets import Range
from nsqext.spark.read.stream_planner import StreamPlanner
from tests.support.cluster import REAL
from tests.support.node_restarts import published_again
from tests.support.topic_plan import TopicPlan

if TYPE_CHECKING:
    from tests.support.cluster import ClusterUnderTest, Truncatable

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

COUNT = 50


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """What planners run on."""
    return "asyncio"


@asynccontextmanager
async def planning(lookupd: list[str], topic: str, **given: str) -> AsyncIterator[StreamPlanner]:
    known = {
        "lookupd": ",".join(lookupd),
        "subscribe": topic,
        "channel": "spark",
        "startingOffsets": "earliest",
    }
    options = SourceOptions.parse({**known, **given}, streaming=True)
    planner = StreamPlanner(options, PlannerAdmin(options.client))
    try:
        yield planner
    finally:
        await planner.aclose()


async def publish(lookupd: list[str], topic: str, count: int) -> None:
    async with Producer(lookupd) as producer:
        await producer.publish_many(topic, [b"message %03d" % number for number in range(count)])


async def test_a_topic_that_was_recreated_with_more_messages(cluster_under_test: ClusterUnderTest) -> None:
    cluster = cluster_under_test
    topic = f"contract_recreated_{token_hex(4)}"
    plan = TopicPlan(topic, channels=("ready",))
    async with Admin(cluster.lookupd) as admin:
        await plan.create(admin)
        await publish(cluster.lookupd, topic, COUNT)
        async with planning(cluster.lookupd, topic) as planner:
            read = await planner.latest(await planner.initial(), None)
            last = planner.last
            await planner.commit(read)
        (first,) = last.values()
        assert (read, first.count) == ({(topic, 0): first.count + 1}, first.count)
        async with planning(cluster.lookupd, topic) as planner:
            assert await planner.latest(read, None, last=last) == read, "the same message is found again"
        await admin.delete_topic(topic)
        await plan.create(admin)
        try:
            await publish(cluster.lookupd, topic, COUNT + 5)
            async with planning(cluster.lookupd, topic) as planner:
                with pytest.raises(DataLoss, match=rf"message {first.count}, the last message read, .* recreated"):
                    await planner.latest(read, None, last=last)
            async with planning(cluster.lookupd, topic, failOnDataLoss="false") as planner:
                back = await planner.latest(read, None, last=last)
                begin = back[topic, 0]
                assert begin < COUNT
                end = await planner.latest(back, None, last=planner.last)
                (found,) = await planner.ranges(back, end)
                assert found == Range(topic, 0, begin, begin + COUNT + 5), "every message of the new topic"
        finally:
            await admin.delete_topic(topic)


async def test_a_log_that_was_truncated_and_has_grown_again(truncatable: Truncatable) -> None:
    """A real leader that was killed comes back without the messages that it had acknowledged last."""
    cluster = truncatable
    for _ in range(5):
        topic, truncate = await run_sync(cluster.create, 7400)
        for _ in range(80):
            await publish(cluster.lookupd, topic, 100)
        async with planning(cluster.lookupd, topic) as planner:
            read = await planner.latest(await planner.initial(), None)
            last = planner.last
            await planner.commit(read)
        count = read[topic, 0]
        await run_sync(truncate)
        if await published_again(cluster.lookupd, topic, b"message 000"):
            break
        assert REAL, "only a real node may lose the leadership: it has lost messages that its commit log names"
    async with planning(cluster.lookupd, topic, failOnDataLoss="false") as planner:
        back = await planner.latest(read, None, last=last)
        begin = back[topic, 0]
        assert begin < count, "the server has lost messages"
        lacking = count - begin
    await publish(cluster.lookupd, topic, lacking + 50)
    async with planning(cluster.lookupd, topic) as planner:
        with pytest.raises(DataLoss, match=rf"message {count - 1}, the last message read, .* has grown again"):
            await planner.latest(read, None, last=last)
    async with planning(cluster.lookupd, topic, failOnDataLoss="false") as planner:
        assert await planner.latest(read, None, last=last) == back
        end = await planner.latest(back, None, last=planner.last)
        assert await planner.ranges(back, end) == [Range(topic, 0, begin, begin + 1 + lacking + 50)]
