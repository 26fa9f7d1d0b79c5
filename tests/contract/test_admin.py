"""Administration, batches and statistics: the same on the redesigned and the original NSQ, embedded and real."""

from __future__ import annotations

from secrets import token_hex
from typing import TYPE_CHECKING, NamedTuple

import anyio
import pytest

import nsqext
from nsqext import Admin, Consumer, ConsumerSettings, MessageBatch, Position, Producer, sync
from nsqext.errors import InvalidInput, OperationNotSupported, TopicNotFound
from tests.support import plain_http
from tests.support.cluster import REAL_ORIGINAL
from tests.support.messages import DEADLINE, finish_all, nothing_for

if TYPE_CHECKING:
    from tests.support.cluster import ClusterUnderTest, Original

pytestmark = pytest.mark.anyio

_POLLED: ConsumerSettings = {"lookup_poll_interval": 0.5}


class Server(NamedTuple):
    """A server of one generation, with a topic that has the channel."""

    generation: str
    lookupd: list[str]
    topic: str


@pytest.fixture(
    params=["cluster_under_test", "embedded_original", *(["real_original"] if REAL_ORIGINAL else [])],
    ids=lambda name: name.replace("_", " "),
)
def server(request: pytest.FixtureRequest, channel: str) -> Server:
    """A server of each generation."""
    if request.param == "cluster_under_test":
        cluster: ClusterUnderTest = request.getfixturevalue(request.param)
        with sync.Admin(cluster.lookupd) as admin:
            admin.create_channel(cluster.plain, channel)
        return Server("redesigned", cluster.lookupd, cluster.plain)
    original: Original = request.getfixturevalue(request.param)
    topic = f"contract_{token_hex(4)}"
    with sync.Admin(original.lookupd) as admin:
        admin.create_topic(topic, channels=[channel])
    return Server("original", original.lookupd, topic)


async def publish(server: Server, *bodies: bytes) -> None:
    """Publish messages."""
    async with Producer(server.lookupd) as producer:
        await producer.publish_many(server.topic, bodies)


async def nothing_left(server: Server, channel: str) -> None:
    """Wait until the server reports that no message of the channel is left."""
    async with Admin(server.lookupd) as admin:
        with anyio.fail_after(DEADLINE):
            while (await admin.stats(server.topic, channel)).channels[channel].lag:  # noqa: ASYNC110 - it is polled
                await anyio.sleep(0.1)


async def test_topics_channels_nodes_and_statistics(server: Server, channel: str) -> None:
    await publish(server, b"one", b"two", b"three")
    async with Admin(server.lookupd) as admin:
        info = (await admin.topics())[server.topic]
        stats = await admin.stats(server.topic)
        (only,) = (await admin.stats(server.topic, channel)).channels
        nodes = await admin.nodes()
        everything = await admin.all_stats()
    assert info.generation == server.generation
    assert channel in info.channels
    assert set(info.nodes) <= {node.tcp for node in nodes}
    assert all(node.reachable and node.generation == server.generation for node in nodes)
    assert only == channel
    assert (stats.channels[channel].depth, stats.channels[channel].lag, stats.unreachable) == (3, 3, ())
    assert sum(part.channels[channel].lag for part in stats.partitions if channel in part.channels) == 3
    assert everything[server.topic].channels[channel].lag == 3


async def test_a_paused_channel_delivers_again_when_it_is_unpaused(server: Server, channel: str) -> None:
    async with (
        nsqext.Admin(server.lookupd) as admin,
        Consumer(server.topic, channel, lookupd=server.lookupd, **_POLLED) as consumer,
    ):
        await admin.pause_channel(server.topic, channel)
        assert (await admin.stats(server.topic)).channels[channel].paused
        await publish(server, b"one")
        assert await nothing_for(consumer, 0.5)
        await admin.unpause_channel(server.topic, channel)
        (message,) = await finish_all(consumer, 1)
    assert message.body == b"one"


async def test_an_emptied_channel_has_no_messages(server: Server, channel: str) -> None:
    await publish(server, b"one", b"two")
    async with Admin(server.lookupd) as admin:
        await admin.empty_channel(server.topic, channel)
    await nothing_left(server, channel)


async def test_an_emptied_topic_has_no_messages(server: Server, channel: str) -> None:
    await publish(server, b"one", b"two")
    async with Admin(server.lookupd) as admin:
        await admin.empty_topic(server.topic)
    await nothing_left(server, channel)


async def test_a_paused_topic_passes_messages_again_when_it_is_unpaused(original: Original, channel: str) -> None:
    topic = f"contract_{token_hex(4)}"
    async with Admin(original.lookupd) as admin, Producer(original.lookupd) as producer:
        await admin.create_topic(topic, channels=[channel])
        await admin.pause_topic(topic)
        assert (await admin.stats(topic)).paused
        await producer.publish(topic, b"one")
        async with Consumer(topic, channel, lookupd=original.lookupd, **_POLLED) as consumer:
            assert await nothing_for(consumer, 0.5)
            await admin.unpause_topic(topic)
            (message,) = await finish_all(consumer, 1)
    assert message.body == b"one"


async def test_a_skipped_channel_finishes_messages_until_it_is_unskipped(
    cluster_under_test: ClusterUnderTest, channel: str
) -> None:
    server = Server("redesigned", cluster_under_test.lookupd, cluster_under_test.plain)
    async with Admin(server.lookupd) as admin:
        await admin.create_channel(server.topic, channel)
        await admin.skip_channel(server.topic, channel)
        assert (await admin.stats(server.topic)).channels[channel].skipped
        await publish(server, b"skipped")
        await nothing_left(server, channel)
        await admin.unskip_channel(server.topic, channel)
        assert not (await admin.stats(server.topic)).channels[channel].skipped
        await publish(server, b"kept")
        async with Consumer(server.topic, channel, lookupd=server.lookupd, **_POLLED) as consumer:
            (message,) = await finish_all(consumer, 1)
    assert message.body == b"kept"


async def test_the_newest_messages_are_read_without_consuming_them(
    cluster_under_test: ClusterUnderTest, channel: str
) -> None:
    server = Server("redesigned", cluster_under_test.lookupd, cluster_under_test.plain)
    async with Admin(server.lookupd) as admin, Producer(server.lookupd) as producer:
        await admin.create_channel(server.topic, channel)
        for body in (b"one", b"two"):
            last = await producer.publish(server.topic, body, partition=1, trace_id=7)
        newest, other = await admin.peek(server.topic, count=2, partition=1)
        lag = (await admin.stats(server.topic, channel)).channels[channel].lag
    assert (newest.body, other.body, lag) == ("two", "one", 2)
    assert (newest.partition, newest.id, newest.trace_id) == (1, last.message_id, 7)


async def test_channels_are_created_and_deleted(server: Server) -> None:
    name = f"made_{token_hex(4)}"
    async with Admin(server.lookupd) as admin:
        await admin.create_channel(server.topic, name)
        assert name in (await admin.stats(server.topic)).channels
        await admin.delete_channel(server.topic, name)
        assert name not in (await admin.stats(server.topic)).channels
        with pytest.raises((InvalidInput, TopicNotFound)):
            await admin.pause_channel(server.topic, name)


async def test_operations_of_one_generation_are_refused_on_the_other(server: Server, channel: str) -> None:
    async with Admin(server.lookupd) as admin:
        if server.generation == "redesigned":
            with pytest.raises(OperationNotSupported):
                await admin.pause_topic(server.topic)
            replicas = await admin.replicas(server.topic)
            leaders = (await admin.topic(server.topic)).leaders
            assert {number: found[0] for number, found in replicas.items()} == {
                number: str(node) for number, node in leaders.items()
            }
            return
        for change in (
            admin.upgrade_topic(server.topic),
            admin.skip_channel(server.topic, channel),
            admin.seek_channel(server.topic, channel, Position.earliest()),
            admin.replicas(server.topic),
        ):
            with pytest.raises(OperationNotSupported):
                await change


async def test_batches_are_finished_requeued_and_counted(server: Server, channel: str) -> None:
    bodies = [b"%d" % number for number in range(30)]
    await publish(server, *bodies)
    consumer = Consumer(server.topic, channel, lookupd=server.lookupd, **_POLLED)
    seen: list[bytes] = []
    attempts: dict[bytes, int] = {}
    with anyio.fail_after(DEADLINE):
        async with consumer:
            async for batch in consumer.batches(max_count=10, max_wait=0.2):
                assert 1 <= len(batch) <= 10
                again = [message for message in batch if message.body == b"7" and message.attempts == 1]
                await batch.requeue(again)
                seen += [message.body for message in batch if message not in again]
                attempts |= {message.body: message.attempts for message in batch}
                await batch.finish()
                if len(seen) == len(bodies):
                    break
            statistics = consumer.statistics()
    assert sorted(seen) == sorted(bodies)
    assert attempts == {body: 2 if body == b"7" else 1 for body in bodies}
    assert (statistics.received, statistics.finished, statistics.requeued) == (31, 30, 1)
    assert (statistics.in_flight, statistics.lost) == (0, 0)
    assert {connection.topic for connection in statistics.connections} == {server.topic}
    await nothing_left(server, channel)


async def test_a_batch_handler_and_the_statistics_of_its_producer(server: Server, channel: str) -> None:
    consumer = Consumer(server.topic, channel, lookupd=server.lookupd, **_POLLED)
    seen = 0

    @consumer.batch_handler(max_count=50, max_wait=0.2)
    async def handle(batch: MessageBatch) -> None:
        nonlocal seen
        seen += len(batch)
        if seen == 40:
            consumer.stop()

    async with Producer(server.lookupd) as producer:
        await producer.ping()
        await producer.publish_many(server.topic, [b"x"] * 40)
        statistics = producer.statistics()
        with anyio.fail_after(DEADLINE):
            await consumer.serve(signals=False)
    assert (statistics.stored, statistics.failed, statistics.unknown, statistics.pending) == (40, 0, 0, 0)
    assert statistics.connections >= 1
    assert statistics.bytes_sent > 40
    assert consumer.statistics().finished == 40


def test_the_trigger_of_keda_reads_the_depth_of_the_original_nsq_only(server: Server, channel: str) -> None:
    """Its requests are those of pkg/scalers/nsq_scaler.go: neither of them asks for a version of the format."""
    anyio.run(publish, server, b"one", b"two")
    found = plain_http.get(f"http://{server.lookupd[0]}/lookup", params={"topic": server.topic}).json()
    depth = 0
    for node in found.get("producers", ()):
        address = f"http://{node['broadcast_address']}:{node['http_port']}/stats"
        params = {"format": "json", "include_clients": "false", "include_mem": "false", "topic": server.topic}
        (topic,) = plain_http.get(address, params=params).json()["topics"]
        depth += sum(one["depth"] for one in topic["channels"] if one["channel_name"] == channel)
    assert depth == (0 if server.generation == "redesigned" else 2)


async def test_a_pattern_finds_the_topic(server: Server, channel: str) -> None:
    await publish(server, b"one")
    pattern = f"{server.topic[:-1]}?"
    async with Consumer(pattern, channel, lookupd=server.lookupd, **_POLLED) as consumer:
        (message,) = await finish_all(consumer, 1)
    assert (message.topic, message.body) == (server.topic, b"one")
