"""Changes of a topic under running producers and consumers with default settings, embedded and real."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from secrets import token_hex
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest

from nsqext import Admin, Consumer, Producer, sync
from nsqext.admin.requests import http_of
from nsqext.admin.topics import EXPAND
from nsqext.errors import InvalidInput, OperationNotSupported, PublishFailed
from tests.support.cluster import REAL
from tests.support.cluster_requests import cluster_requests, offered_partitions
from tests.support.messages import finish_all

if TYPE_CHECKING:
    from tests.support.cluster import ClusterUnderTest, Original

# a real cluster takes up to two minutes until it expands topics, and as long until new partitions are placed
pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

KEYS = [f"key {number}" for number in range(12)]


@asynccontextmanager
async def new_topic(cluster: ClusterUnderTest, *channels: str) -> AsyncIterator[str]:
    """Create a topic with one partition, which may have several on a node; delete it at the end."""
    topic = f"contract_change_{token_hex(4)}"
    async with Admin(cluster.lookupd) as admin:
        await admin.create_topic(topic, multipart=True, channels=channels)
        try:
            yield topic
        finally:
            await admin.delete_topic(topic)


@asynccontextmanager
async def soon_stable(cluster: ClusterUnderTest, topic: str) -> AsyncIterator[None]:
    """Have a real cluster check its topics, after which it expands a new one; else it does so once a minute."""

    async def change_nothing() -> None:
        async with cluster_requests(cluster.lookupd) as requests:
            while True:
                await requests.change_lookup(
                    "/topic/meta/update", {"topic": topic, "disable_channel_auto_create": "false"}
                )
                await anyio.sleep(7)

    async with anyio.create_task_group() as tasks:
        if REAL:
            tasks.start_soon(change_nothing)
        yield
        tasks.cancel_scope.cancel()


async def test_new_partitions_are_published_to_and_consumed_at_once(
    cluster_under_test: ClusterUnderTest, channel: str
) -> None:
    cluster = cluster_under_test
    async with (
        new_topic(cluster, channel, "other") as topic,
        Admin(cluster.lookupd) as admin,
        Producer(cluster.lookupd) as producer,
        Consumer(topic, channel, lookupd=cluster.lookupd) as consumer,
    ):
        await producer.publish(topic, b"before", key="key")
        assert [message.body for message in await finish_all(consumer, 1)] == [b"before"]
        async with soon_stable(cluster, topic):
            await admin.expand_topic(topic, 3)
        used, published = set[int | None](), 0
        with anyio.fail_after(25):  # clients of the process look it up at once, and not before the call returns
            while used != {0, 1, 2}:
                used |= {(await producer.publish(topic, key.encode(), key=key)).partition for key in KEYS}
                published += len(KEYS)
        bodies = {message.body for message in await finish_all(consumer, published)}
        stats = await admin.stats(topic)
    assert bodies == {key.encode() for key in KEYS}
    assert [sorted(part.channels) for part in stats.partitions] == [sorted([channel, "other"])] * 3


async def test_publishes_with_a_key_continue_while_another_process_expands_the_topic(
    cluster_under_test: ClusterUnderTest, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = cluster_under_test
    monkeypatch.setattr("nsqext.admin.topics.topic_changed", lambda topic: None)
    used = set[int | None]()
    async with (
        new_topic(cluster, channel) as topic,
        Admin(cluster.lookupd) as admin,
        Producer(cluster.lookupd, timeout=10.0, lookup_poll_interval=0.5) as producer,
        anyio.create_task_group() as tasks,
    ):

        async def publish() -> None:
            while True:
                for key in KEYS:
                    used.add((await producer.publish(topic, b"x", key=key)).partition)
                    await anyio.sleep(0.02)

        tasks.start_soon(publish)
        async with soon_stable(cluster, topic):
            await admin.expand_topic(topic, 3)
        with anyio.fail_after(25):
            while used != {0, 1, 2}:  # noqa: ASYNC110 - the producer has no event for it
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()


async def test_a_partition_that_was_added_by_another_process_is_asked_for(
    cluster_under_test: ClusterUnderTest, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = cluster_under_test
    async with (
        new_topic(cluster, channel) as topic,
        Admin(cluster.lookupd) as admin,
        Producer(cluster.lookupd) as producer,
    ):
        await producer.publish(topic, b"before", partition=0)
        monkeypatch.setattr("nsqext.admin.topics.topic_changed", lambda topic: None)
        async with soon_stable(cluster, topic):
            await admin.expand_topic(topic, 2)
        assert (await producer.publish(topic, b"after", partition=1)).partition == 1


async def test_a_partition_without_channel_is_named(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    cluster = cluster_under_test
    async with (
        new_topic(cluster, channel) as topic,
        cluster_requests(cluster.lookupd) as requests,
        Producer(cluster.lookupd, timeout=5.0) as producer,
    ):
        await producer.publish(topic, b"before")
        async with soon_stable(cluster, topic):
            # without channels, as another client does
            await requests.change_settled(EXPAND, {"topic": topic, "partition_num": 2}, topic, bounded=False)
        with anyio.fail_after(240):
            while not await requests.client.lacks_channel(topic, 1):  # noqa: ASYNC110 - registered later
                await anyio.sleep(0.1)
        with pytest.raises(PublishFailed, match="the partition has no channel") as caught:
            await producer.publish(topic, b"after", partition=1)
    assert (caught.value.partition, "channel create" in str(caught.value.hint)) == (1, True)


@pytest.fixture
def other_loop(cluster_under_test: ClusterUnderTest) -> Iterator[sync.Admin]:
    """A client in another event loop of this process."""
    with sync.Admin(cluster_under_test.lookupd) as admin:
        yield admin


async def test_a_consumer_receives_after_an_upgrade_to_extend(
    cluster_under_test: ClusterUnderTest, channel: str, other_loop: sync.Admin
) -> None:
    cluster = cluster_under_test
    async with (
        new_topic(cluster, channel) as topic,
        Producer(cluster.lookupd) as producer,
        Consumer(topic, channel, lookupd=cluster.lookupd) as consumer,
    ):
        await producer.publish(topic, b"before")
        assert [message.body for message in await finish_all(consumer, 1)] == [b"before"]
        await anyio.to_thread.run_sync(other_loop.upgrade_topic, topic)
        await producer.publish(topic, b"after", headers={"a": "b"})
        (message,) = await finish_all(consumer, 1)
    assert (message.body, dict(message.headers)) == (b"after", {"a": "b"})


@pytest.mark.parametrize("before", [True, False], ids=["after a message", "without a message before"])
@pytest.mark.parametrize("by_admin", [True, False], ids=["nsqext", "another client"])
async def test_a_consumer_of_another_process_receives_after_an_upgrade(
    cluster_under_test: ClusterUnderTest, channel: str, monkeypatch: pytest.MonkeyPatch, by_admin: bool, before: bool
) -> None:
    cluster = cluster_under_test
    async with (
        new_topic(cluster, channel) as topic,
        Admin(cluster.lookupd) as admin,
        cluster_requests(cluster.lookupd) as requests,
        Consumer(topic, channel, lookupd=cluster.lookupd) as consumer,
    ):
        where = await requests.led(topic)
        node = http_of(where, where.leaders[0])
        pub: dict[str, str | int] = {
            "topic": topic,
            "partition": 0,
        }  # a producer would tell the consumer of its process
        if before:
            await requests.post(node, "/pub", pub, b"before")
            assert [message.body for message in await finish_all(consumer, 1)] == [b"before"]
        monkeypatch.setattr("nsqext.admin.topics.topic_changed", lambda topic: None)
        if by_admin:
            await admin.upgrade_topic(topic)
        else:
            await requests.change_lookup("/topic/meta/update", {"topic": topic, "upgradeext": "true"})
        await requests.post(node, "/pub", pub, b"after")
        with anyio.fail_after(25):  # a missing heartbeat shows it after 31 s
            assert (await anext(consumer)).body == b"after"


@pytest.mark.parametrize("order", [False, True], ids=["unordered", "ordered"])
async def test_channels_of_an_upgraded_topic_keep_their_order(
    cluster_under_test: ClusterUnderTest, channel: str, order: bool
) -> None:
    lookupd = cluster_under_test.lookupd
    topic = f"contract_change_{token_hex(4)}"
    async with Admin(lookupd) as admin, Producer(lookupd) as producer:
        await admin.create_topic(topic, ordered=order, channels=[channel])
        await admin.upgrade_topic(topic)
        await producer.publish_many(topic, [b"1", b"2"], partition=0)
        async with Consumer(topic, channel, lookupd=lookupd, ordered=order, max_in_flight=2) as consumer:
            with anyio.fail_after(25):
                assert (await anext(consumer)).body == b"1"
            with anyio.move_on_after(1) as waiting:
                assert (await anext(consumer)).body == b"2"
        await admin.delete_topic(topic)
    assert waiting.cancelled_caught == order


async def test_settings_of_a_topic_are_changed(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    cluster = cluster_under_test
    async with new_topic(cluster, channel) as topic, Admin(cluster.lookupd) as admin:
        await admin.set_topic(topic, retention_days=3, sync_every=100, registered_channels_only=True)
        meta = (await admin.topic(topic)).meta
        assert meta is not None
        assert (meta.disable_channel_auto_create, meta.replica) == (True, 1)
        await admin.create_channel(topic, "registered")
        with anyio.fail_after(60):  # the leader of a real cluster hears of it later
            while "registered" not in await admin.channels(topic):  # noqa: ASYNC110 - no event for it
                await anyio.sleep(0.1)
        await admin.set_topic(topic, replicas=2, registered_channels_only=False)
        meta = (await admin.topic(topic)).meta
        assert meta is not None
        assert (meta.disable_channel_auto_create, meta.replica) == (False, 2)
        with pytest.raises(InvalidInput, match="retention_days=61 is not within"):
            await admin.set_topic(topic, retention_days=61)
        with pytest.raises(InvalidInput, match="no setting"):
            await admin.set_topic(topic)


async def test_a_hidden_node_is_shown_again(cluster_under_test: ClusterUnderTest, channel: str) -> None:
    cluster = cluster_under_test
    async with (
        new_topic(cluster, channel) as topic,
        Admin(cluster.lookupd) as admin,
        cluster_requests(cluster.lookupd) as requests,
    ):
        leader = (await admin.topic(topic)).leaders[0]
        http = next(str(node.http) for node in await admin.nodes() if node.tcp == leader)
        await admin.tombstone(topic, http)
        assert await offered_partitions(requests, topic) == []
        await admin.tombstone(topic, http, restore=True)
        assert await offered_partitions(requests, topic) == [0]


async def test_the_original_nsq_has_no_settings_of_topics(original: Original, channel: str) -> None:
    topic = f"contract_{token_hex(4)}"
    async with Admin(original.lookupd) as admin:
        await admin.create_topic(topic, channels=[channel])
        node = next(str(node.http) for node in await admin.nodes())
        with pytest.raises(OperationNotSupported, match="no settings"):
            await admin.set_topic(topic, retention_days=1)
        with pytest.raises(OperationNotSupported, match="by itself"):
            await admin.tombstone(topic, node, restore=True)
