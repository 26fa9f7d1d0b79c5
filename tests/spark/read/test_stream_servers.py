"""The planner of streaming queries with servers: anchors that last, and messages that are gone."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from nsqext import Producer
from nsqext.broker import Cluster, ClusterOptions
from nsqext.errors import DataLoss, InvalidState, PartitionUnavailable, TopicNotFound
from nsqext.lookup.client import LookupClient
from nsqext.lookup.responses import LookupHttp
from nsqext.partitions import LeaderLocator, leaders
from nsqext.spark.cluster.admin import SourceAdmin
from nsqext.spark.cluster.client_config import ClientConfig
from nsqext.spark.options import SourceOptions
from nsqext.spark.read.offsets import Offsets, Range
from nsqext.spark.read.range_reader import TaskReader
from nsqext.spark.read.stream_planner import StreamPlanner
from tests.support.spark_queries import post, starting
from tests.support.spark_readers import SingleReader

if TYPE_CHECKING:
    from nsqext.types import Address
    from tests.support.spark_cluster import Servers

pytestmark = pytest.mark.anyio

COUNT = 20


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """What executors and planners run on."""
    return "asyncio"


def _options(lookupd: list[str], topic: str, **given: str) -> SourceOptions:
    known = {"lookupd": ",".join(lookupd), "subscribe": topic, "channel": "spark", "startingOffsets": "earliest"}
    if {"assign", "subscribePattern"} & given.keys():
        del known["subscribe"]
    return SourceOptions.parse({**known, **given}, streaming=True)


@asynccontextmanager
async def planning(lookupd: list[str], topic: str, **given: str) -> AsyncIterator[StreamPlanner]:
    """Open a planner, as a process of Spark does."""
    options = _options(lookupd, topic, **given)
    planner = StreamPlanner(options, SourceAdmin(options.client))
    try:
        yield planner
    finally:
        await planner.aclose()


async def publish(lookupd: list[str], topic: str, count: int = COUNT, partition: int = 0) -> None:
    async with Producer(lookupd) as producer:
        await producer.publish_many(topic, [b"%d" % number for number in range(count)], partition=partition)


@pytest.fixture
def topic(servers: Servers) -> str:
    """A topic of two partitions."""
    return servers.make_topic("planned", 2)


async def test_the_servers_keep_the_start_and_the_position_of_a_query(servers: Servers, topic: str) -> None:
    lookupd, first = list(servers.lookupd), servers.first
    await publish(lookupd, topic)
    async with planning(lookupd, topic, startingOffsets="latest") as planner:
        start = await planner.initial()
    assert start == {(topic, 0): first + COUNT, (topic, 1): first}
    await publish(lookupd, topic)
    async with planning(lookupd, topic, startingOffsets="latest") as planner:
        assert await planner.initial() == start
        end = await planner.latest(start, 7)
        assert end == {(topic, 0): first + COUNT + 7, (topic, 1): first}
        assert await planner.ranges(start, end) == [Range(topic, 0, first + COUNT, first + COUNT + 7)]
        await planner.commit(end)
    async with planning(lookupd, topic) as planner:
        assert await planner.ranges(start, end) == [Range(topic, 0, first + COUNT, first + COUNT + 7)]
    async with planning(lookupd, topic, existingChannel="continue") as planner:
        assert await planner.initial() == end
    given = starting(first + 3, {topic: 2})[:-2].replace(f'"1": {first + 3}', f'"1": {first}') + "}}"
    async with planning(lookupd, topic, startingOffsets=given, resetChannel="true") as planner:
        assert await planner.initial() == {(topic, 0): first + 3, (topic, 1): first}


async def test_a_second_query_on_the_same_channel_is_noticed(
    servers: Servers, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsqext.spark.read.anchor._FRESH", -1.0)
    lookupd = list(servers.lookupd)
    await publish(lookupd, topic)
    given = {"startingOffsets": starting(servers.first, {topic: 2})}
    async with planning(lookupd, topic, **given) as mine, planning(lookupd, topic, **given) as other:
        start = await mine.initial()
        assert await other.initial() == start
        await other.commit(await other.latest(start, 5))
        with pytest.raises(InvalidState, match="another client moved the anchor channel spark"):
            await mine.latest(start, 5)


async def test_a_micro_batch_of_two_partitions_needs_few_requests(
    servers: Servers, topic: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lookupd = list(servers.lookupd)
    async with planning(lookupd, topic) as planner:
        end = await planner.latest(await planner.initial(), None)
        await planner.ranges({}, end)
        monkeypatch.setattr("nsqext.spark.read.anchor._FRESH", 600.0)  # positions of anchors are known, however slow
        for number in range(2):
            for partition in range(2):
                await publish(lookupd, topic, 3, partition)
            asked.clear()
            start, last = end, planner.last
            end = await planner.latest(start, None, None, last)
            ranges = await planner.ranges(start, end, last, planner.last)
            await planner.commit(start)
            async with TaskReader(_options(lookupd, topic), ranges, planner.planned_of(ranges)) as reader:
                while await reader.next_block() is not None:
                    pass
            assert sum(map(len, ranges)) == 6
            assert number == 0 or len(asked) <= 10, asked


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the HTTP requests of a test."""
    paths: list[str] = []
    fetch = LookupHttp.fetch

    async def count(http: LookupHttp, address: Address, path: str, *given: Any, **named: Any) -> tuple[int, bytes]:
        paths.append(path)
        return await fetch(http, address, path, *given, **named)

    monkeypatch.setattr(LookupHttp, "fetch", count)
    return paths


@pytest.mark.parametrize("available_now", [False, True])
async def test_the_first_micro_batch_of_many_partitions_needs_few_requests(
    asked: list[str], available_now: bool
) -> None:
    """For each: two create the anchor, one asks for the last message, one moves the task's channel."""
    partitions = 40
    with Cluster(2) as cluster:
        cluster.create_topic("orders", partitions, channels=["other"])
        for partition in range(partitions):
            await publish(cluster.lookupd, "orders", 3, partition)
        asked.clear()
        async with planning(cluster.lookupd, "orders") as planner:
            if available_now:
                await planner.freeze()
            start = await planner.initial()
            end = await planner.latest(start, None, None, planner.last)
            ranges = await planner.ranges(start, end, {}, planner.last)
            options = _options(cluster.lookupd, "orders")
            async with TaskReader(options, ranges, planner.planned_of(ranges)) as reader:
                while await reader.next_block() is not None:
                    pass
            assert sum(map(len, ranges)) == 3 * partitions
            assert len(asked) <= 4 * partitions + 30, Counter(asked)
            asked.clear()
            await planner.commit(end)
            assert await planner.latest(end, None, None, planner.last) == end
        async with planning(cluster.lookupd, "orders") as planner:
            asked.clear()
            assert await planner.latest(end, None) == end
            assert len(asked) <= partitions + 10, "a process that continues asks for positions once"


async def test_a_query_whose_anchors_were_not_all_created_begins_at_its_start(servers: Servers, topic: str) -> None:
    """The positions of the channels that exist are not its own, even if `existingChannel` says to continue there."""
    lookupd = list(servers.lookupd)
    await publish(lookupd, topic)
    async with SourceAdmin(_options(lookupd, topic).client) as admin:
        for name in ("spark.begin", "spark"):
            await admin.leaders.ask(topic, 0, admin.leaders.nodes.change_channel, "create", name)
        given = {"startingOffsets": starting(servers.first, {topic: 2}), "existingChannel": "continue"}
        async with planning(lookupd, topic, **given) as planner:
            start = await planner.initial()
            assert start == {(topic, 0): servers.first, (topic, 1): servers.first}
        assert not admin.is_incomplete(await admin.survey(start), "spark")
    async with planning(lookupd, topic, **given) as planner:
        assert await planner.initial() == start


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A cluster that may be broken."""
    with Cluster(3) as cluster:
        yield cluster


async def test_a_topic_that_is_deleted_while_queries_run(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaders, "DELETED_AFTER", 0.1)
    monkeypatch.setattr("nsqext.spark.read.anchor._FRESH", -1.0)
    lookupd = cluster.lookupd
    for name in ("bills", "orders"):
        cluster.create_topic(name, channels=["other"])
        await publish(lookupd, name)
    given = {"subscribe": "bills,orders", "readTimeoutMs": "9000"}
    async with (
        planning(lookupd, "orders", **given, channel="lenient", failOnDataLoss="false") as lenient,
        planning(lookupd, "orders", **given, channel="strict") as strict,
    ):
        end = await lenient.latest(await lenient.initial(), None)
        assert end == await strict.latest(await strict.initial(), None) == {("bills", 0): COUNT, ("orders", 0): COUNT}
        await anyio.to_thread.run_sync(cluster.delete_topic, "bills")
        await publish(lookupd, "orders", 3)
        assert await lenient.latest(end, None) == {("bills", 0): COUNT, ("orders", 0): COUNT + 3}
        await lenient.commit(end)
        with pytest.raises(TopicNotFound, match="bills"):
            await strict.latest(end, None)
        await anyio.to_thread.run_sync(partial(cluster.create_topic, "bills", channels=["other"]))
        await publish(lookupd, "bills")
        back = await lenient.latest(end, None)
        assert back == {("bills", 0): 0, ("orders", 0): COUNT + 3}, "the new topic has as many messages as the old one"
        assert await lenient.latest(back, None) == {("bills", 0): COUNT, ("orders", 0): COUNT + 3}


async def test_anchors_outlive_their_leader(cluster: Cluster) -> None:
    cluster.create_topic("orders", replicas=3, channels=["other"])
    await publish(cluster.lookupd, "orders")
    async with planning(cluster.lookupd, "orders") as planner:
        start = await planner.initial()
        end = await planner.latest(start, 8)
        await planner.commit(end)
        await anyio.to_thread.run_sync(cluster.kill, cluster.leader("orders"))
        assert await planner.latest(end, None) == {("orders", 0): COUNT}
    async with planning(cluster.lookupd, "orders", existingChannel="continue") as planner:
        assert await planner.initial() == end == {("orders", 0): 8}


async def test_a_task_that_starts_without_a_leader(cluster: Cluster) -> None:
    cluster.create_topic("orders", channels=["other"])
    await publish(cluster.lookupd, "orders")
    leader = cluster.leader("orders")
    await anyio.to_thread.run_sync(cluster.kill, leader)
    async with LookupClient(cluster.lookupd) as client:
        with anyio.fail_after(20):
            while any(answer.partitions for answer in await client.lookup("orders", "r")):  # noqa: ASYNC110
                await anyio.sleep(0.02)
    read: list[int] = []

    async def run_task() -> None:
        async with SingleReader(
            ClientConfig(tuple(cluster.lookupd), timeout=10), Range("orders", 0, 0, COUNT)
        ) as reader:
            async for block in reader:
                read.extend(range(block.first, block.first + len(block)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_task)
        await anyio.sleep(0.3)  # time to learn that there is no leader
        await anyio.to_thread.run_sync(cluster.restart, leader)
    assert read == list(range(COUNT))


async def test_a_stored_batch_is_not_skipped_while_its_leader_is_down(cluster: Cluster) -> None:
    """Without ``failOnDataLoss`` only messages that do not exist any more are skipped."""
    cluster.create_topic("orders", channels=["other"])
    await publish(cluster.lookupd, "orders")
    given = {"failOnDataLoss": "false", "readTimeoutMs": "600"}
    async with planning(cluster.lookupd, "orders", **given) as planner:
        start = await planner.initial()
        end = await planner.latest(start, None)
    leader = cluster.leader("orders")
    await anyio.to_thread.run_sync(cluster.kill, leader)
    async with planning(cluster.lookupd, "orders", **given) as planner:
        with pytest.raises(PartitionUnavailable, match="orders"):
            await planner.ranges(start, end)
    await anyio.to_thread.run_sync(cluster.restart, leader)
    async with planning(cluster.lookupd, "orders", failOnDataLoss="false") as planner:
        assert await planner.ranges(start, end) == [Range("orders", 0, 0, COUNT)]


async def test_a_stored_batch_is_not_skipped_while_lookup_learns_its_topic(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time after which a topic counts as deleted is longer than the timeout of a read."""
    cluster.create_topic("orders", channels=["other"])
    await publish(cluster.lookupd, "orders")
    given = {"failOnDataLoss": "false", "readTimeoutMs": "300"}
    is_deleted = LeaderLocator.is_deleted

    async def learn(locator: LeaderLocator, topic: str) -> bool:
        """The timeout of the read is over."""
        found = await is_deleted(locator, topic)
        cluster.faults.heal_lookup()
        return found

    monkeypatch.setattr(LeaderLocator, "is_deleted", learn)
    monkeypatch.setattr("nsqext.spark.read.anchor._TOPICS_INTERVAL", 0.0)
    async with planning(cluster.lookupd, "orders", **given) as planner:
        start = await planner.initial()
        end = await planner.latest(start, None)
    cluster.faults.empty_lookup()
    async with planning(cluster.lookupd, "orders", **given) as planner:
        assert await planner.ranges(start, end) == [Range("orders", 0, 0, COUNT)]
    cluster.faults.empty_lookup()
    async with planning(cluster.lookupd, "orders", **given) as planner:
        await planner.freeze()
        assert await planner.latest(start, None) == end, "a run that reads everything reads the topic"
    cluster.faults.empty_lookup()
    async with planning(cluster.lookupd, "ord.*", **given, subscribePattern="ord.*") as planner:
        assert await planner.ranges(start, end) == [Range("orders", 0, 0, COUNT)]


async def test_a_logged_batch_of_a_partition_that_is_no_longer_assigned_is_read(servers: Servers, topic: str) -> None:
    for partition in (0, 1):
        await publish(list(servers.lookupd), topic, partition=partition)
    async with planning(list(servers.lookupd), topic) as planner:
        start = await planner.initial()
        end = await planner.latest(start, None)
    async with planning(list(servers.lookupd), topic, assign=f'{{"{topic}": [0]}}') as planner:
        ranges = await planner.ranges(start, end)
        assert [(found.partition, len(found)) for found in ranges] == [(0, COUNT), (1, COUNT)]
        assert planner.planned_of(ranges).keys() == {(topic, 0)}


async def test_tasks_of_a_logged_batch_know_the_message_before_it(servers: Servers, topic: str) -> None:
    lookupd = list(servers.lookupd)
    await publish(lookupd, topic)
    async with planning(lookupd, topic) as planner:
        start = await planner.latest(await planner.initial(), 5, None, planner.last)
        known = planner.last
        end = await planner.latest(start, None, None, known)
        last = planner.last
    async with planning(lookupd, topic) as planner:
        ranges = await planner.ranges(start, end, known, last)
        assert planner.planned_of(ranges)[topic, 0].before == known[topic, 0]


async def test_a_partition_that_is_added(cluster: Cluster) -> None:
    cluster.create_topic("orders", channels=["other"])
    async with planning(cluster.lookupd, "orders", startingOffsets="latest") as planner:
        start = await planner.initial()
        post(cluster.lookupd[0], "/topic/partition/expand", topic="orders", partition_num=2)
        await anyio.to_thread.run_sync(cluster.wait_writable, "orders", 1)
        start = await planner.latest(start, None)
        assert start == {("orders", 0): 0, ("orders", 1): 0}
        # there is a channel now, without which the partition would not be shown to publishers
        await publish(cluster.lookupd, "orders", partition=1)
        end = await planner.latest(start, None)
        assert await planner.ranges(start, end) == [Range("orders", 1, 0, COUNT)]
        # a process that ends here finds the anchor at the first message
    async with planning(cluster.lookupd, "orders") as planner:
        assert await planner.initial() == {("orders", 0): 0, ("orders", 1): 0}


async def test_a_topic_that_was_recreated(cluster: Cluster) -> None:
    cluster.create_topic("orders", channels=["other"])
    await publish(cluster.lookupd, "orders")
    async with planning(cluster.lookupd, "orders") as planner:
        start = await planner.latest(await planner.initial(), None)
    cluster.delete_topic("orders")
    cluster.create_topic("orders", channels=["other"])
    await publish(cluster.lookupd, "orders", 5)
    async with planning(cluster.lookupd, "orders") as planner:
        with pytest.raises(DataLoss, match=f"{COUNT} messages were read, but the partition has only 5"):
            await planner.latest(start, None)
    async with planning(cluster.lookupd, "orders", failOnDataLoss="false") as planner:
        back = await planner.latest(start, None)
        assert await planner.ranges(start, back) == []
        end = await planner.latest(back, None)
        assert await planner.ranges(back, end) == [Range("orders", 0, 0, 5)]


async def test_a_topic_that_was_recreated_with_fewer_partitions(cluster: Cluster) -> None:
    cluster.create_topic("orders", 2, channels=["other"])
    await publish(cluster.lookupd, "orders", partition=1)
    async with (
        planning(cluster.lookupd, "orders", failOnDataLoss="false") as running,
        planning(cluster.lookupd, "orders", failOnDataLoss="false") as restarted,
    ):
        start = await running.latest(await running.initial(), None)
        await running.commit(start)
        await anyio.to_thread.run_sync(cluster.delete_topic, "orders")
        await anyio.to_thread.run_sync(partial(cluster.create_topic, "orders", channels=["other"]))
        await publish(cluster.lookupd, "orders", 5)
        for planner in (running, restarted):
            end = await planner.latest(start, None)
            assert end == {("orders", 0): 5, ("orders", 1): COUNT}
            assert await planner.ranges(start, end) == [Range("orders", 0, 0, 5)]
            await planner.commit(end)


async def test_a_topic_that_was_recreated_with_more_messages(cluster: Cluster) -> None:
    cluster.create_topic("orders", channels=["other"])
    await publish(cluster.lookupd, "orders")
    async with planning(cluster.lookupd, "orders") as planner:
        start = await planner.latest(await planner.initial(), None)
        last = planner.last
    cluster.delete_topic("orders")
    cluster.create_topic("orders", channels=["other"])
    await publish(cluster.lookupd, "orders", COUNT + 5)
    async with planning(cluster.lookupd, "orders") as planner:
        with pytest.raises(DataLoss, match="message 19, the last message read, was the message with id"):
            await planner.latest(start, None, last=last)
    async with planning(cluster.lookupd, "orders", failOnDataLoss="false") as planner:
        back = await planner.latest(start, None, last=last)
        assert back == {("orders", 0): 0}
        end = await planner.latest(back, None, last=planner.last)
        assert await planner.ranges(back, end) == [Range("orders", 0, 0, COUNT + 5)]


async def test_a_log_that_was_truncated_and_has_grown_again(cluster: Cluster) -> None:
    cluster.create_topic("orders", replicas=2, channels=["other"])
    await publish(cluster.lookupd, "orders")
    async with planning(cluster.lookupd, "orders") as planner:
        start = await planner.latest(await planner.initial(), None)
        last = planner.last
        await planner.commit(start)
    await anyio.to_thread.run_sync(cluster.faults.truncate, "orders", 0, COUNT - 4)
    await publish(cluster.lookupd, "orders", 6)
    async with planning(cluster.lookupd, "orders") as planner:
        with pytest.raises(DataLoss, match="the log was truncated and has grown again"):
            await planner.latest(start, None, last=last)
    async with planning(cluster.lookupd, "orders", failOnDataLoss="false") as planner:
        back = await planner.latest(start, None, last=last)
        await planner.commit(start)
        assert back == {("orders", 0): COUNT - 4}
        end = await planner.latest(back, None, last=planner.last)
        assert await planner.ranges(back, end) == [Range("orders", 0, COUNT - 4, COUNT + 2)]
        await planner.commit(back)
    async with planning(cluster.lookupd, "orders", existingChannel="continue") as planner:
        assert await planner.initial() == back, "the anchor retains what was not read"


async def test_a_last_message_is_the_same_at_a_new_leader(cluster: Cluster) -> None:
    cluster.create_topic("orders", replicas=3, channels=["other"])
    await publish(cluster.lookupd, "orders")
    async with planning(cluster.lookupd, "orders") as planner:
        start = await planner.latest(await planner.initial(), None)
        last = planner.last
    await anyio.to_thread.run_sync(cluster.kill, cluster.leader("orders"))
    await publish(cluster.lookupd, "orders", 3)
    async with planning(cluster.lookupd, "orders") as planner:
        assert await planner.latest(start, None, last=last) == {("orders", 0): COUNT + 3}


async def test_the_anchor_retains_messages() -> None:
    with Cluster(1, options=ClusterOptions(memory_bound=400_000)) as cluster:
        cluster.create_topic("orders")
        body = b"x" * 1000
        async with (
            Producer(cluster.lookupd) as producer,
            planning(cluster.lookupd, "orders") as planner,
            SourceAdmin(SourceOptions.parse({"lookupd": cluster.lookupd[0], "subscribe": "orders"}).client) as admin,
        ):
            await admin.create_anchor("orders", 0, "other", 0)
            start = await planner.initial()
            end: Offsets = start
            for number in range(1, 11):
                await producer.publish_many("orders", [body] * 100)
                await admin.move_anchor("orders", 0, "other", number * 100)
                if number == 2:
                    end = await planner.latest(start, None)
                    assert await planner.ranges(start, end) == [Range("orders", 0, 0, 200)]
                    await admin.delete_anchor("orders", 0, "spark")
            kept = (await admin.bounds("orders", 0)).start
            assert kept > 200
        async with planning(cluster.lookupd, "orders") as planner:
            with pytest.raises(DataLoss, match="the messages from 0 to 200 are not retained any more"):
                await planner.ranges(start, end)
            with pytest.raises(DataLoss, match="the anchor channel does not exist"):
                await planner.latest(end, None)
        async with planning(cluster.lookupd, "orders", failOnDataLoss="false") as planner:
            assert await planner.ranges(start, end) == []
            more = await planner.latest(end, 50)
            assert await planner.ranges(end, more) == [Range("orders", 0, kept, kept + 50)]
