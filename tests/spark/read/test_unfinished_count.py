"""How many messages a consumed channel still has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import anyio
import pytest

from nsqext import Admin, Consumer, Producer
from nsqext.broker import Cluster
from nsqext.errors import LookupFailed, PartitionUnavailable
from nsqext.spark.read.channel_batches import unfinished_count

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """What executors and planners run on."""
    return "asyncio"


@pytest.mark.parametrize("generation", ["redesigned", "original"])
async def test_waiting_and_in_flight_messages_are_counted_over_all_nodes(generation: str) -> None:
    with Cluster(2, generation=generation) as cluster:
        for topic in ("one", "two"):
            cluster.create_topic(topic, 2 if generation == "redesigned" else 1, channels=["spark", "other"])
        async with Admin(cluster.lookupd) as admin:
            assert await unfinished_count(admin, ["one", "two"], "spark") == 0
            async with Producer(cluster.lookupd) as producer:
                for topic in ("one", "two"):
                    for number in range(10):
                        await producer.publish(topic, b"%d" % number)
            assert await unfinished_count(admin, ["one", "two"], "spark") == 20
            async with Consumer("one", "spark", lookupd=cluster.lookupd, max_in_flight=4) as consumer:
                message = await anext(consumer)
                assert await unfinished_count(admin, ["one", "two"], "spark") == 20
                await message.finish()
                with anyio.fail_after(10):
                    while await unfinished_count(admin, ["one", "two"], "spark") != 19:  # noqa: ASYNC110
                        await anyio.sleep(0.02)


async def test_the_lags_of_all_topics_and_partitions_are_added() -> None:
    lags = {"one": [3, 4], "two": [5], "none": []}

    async def stats(topic: str, channel: str) -> SimpleNamespace:
        found = {partition: SimpleNamespace(lag=lag) for partition, lag in enumerate(lags[topic])}
        return SimpleNamespace(unreachable=(), missing=(), channels=found if channel == "spark" else {})

    admin = cast("Admin", SimpleNamespace(stats=stats))
    counts = [await unfinished_count(admin, topics, "spark") for topics in ([], ["none"], ["one"], ["one", "two"])]
    assert counts == [0, 0, 7, 12]


async def test_no_node_answers() -> None:
    async with Admin("127.0.0.1:1") as admin:
        with pytest.raises(LookupFailed):
            await unfinished_count(admin, ["one"], "spark")


async def test_a_node_that_does_not_answer_may_have_messages() -> None:
    with Cluster(2, generation="original") as cluster:
        cluster.create_topic("one", channels=["spark"])
        cluster.faults.freeze("n2")
        async with Admin(cluster.lookupd, lookup_request_timeout=0.5) as admin:
            with pytest.raises(PartitionUnavailable, match="does not report its messages"):
                await unfinished_count(admin, ["one"], "spark")


async def test_a_partition_without_a_leader_may_have_messages() -> None:
    with Cluster(2) as cluster:
        cluster.create_topic("one", partitions=2, channels=["spark"])
        cluster.kill(cluster.leader("one", 1))
        async with Admin(cluster.lookupd) as admin:
            with pytest.raises(PartitionUnavailable, match="no node reports its messages"):
                await unfinished_count(admin, ["one"], "spark")
