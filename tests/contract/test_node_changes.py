"""Changes of nodes and of the place of partitions by an administrator, embedded and real."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from secrets import token_hex
from typing import TYPE_CHECKING

import anyio
import httpx
import orjson
import pytest

from nsqext import Admin, Consumer, Producer, sync
from nsqext.broker import Cluster
from nsqext.errors import InvalidInput, OperationNotSupported, PublishFailed
from tests.support.cluster import REAL, RESTART_LOOKUPD
from tests.support.fake_lookupd import eventually, http, serving
from tests.support.messages import finish_all

if TYPE_CHECKING:
    from anyio.abc import SocketStream

    from tests.support.cluster import ClusterUnderTest, Original

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """What nodes do does not depend on the event loop of a client."""
    return "asyncio"


@pytest.fixture(scope="module")
def topic(cluster_under_test: ClusterUnderTest) -> Iterator[str]:
    """A topic of one partition for all tests: a real cluster takes up to two minutes until it accepts publishes."""
    name = f"contract_node_{token_hex(4)}"
    with sync.Admin(cluster_under_test.lookupd) as admin:
        admin.create_topic(name, retention_days=3, sync_every=100, channels=["other"])
        yield name
        admin.delete_topic(name)


async def test_a_moved_leader_is_published_to_and_consumed(
    cluster_under_test: ClusterUnderTest, topic: str, channel: str
) -> None:
    lookupd = cluster_under_test.lookupd
    async with (
        Admin(lookupd) as admin,
        Producer(lookupd) as producer,
        Consumer(topic, channel, lookupd=lookupd) as consumer,
    ):
        await producer.publish(topic, b"before")
        first = await anext(consumer)
        await first.finish()
        source = str((await admin.topic(topic)).leaders[0])
        target = next(str(node.tcp) for node in await admin.nodes() if str(node.tcp) != source)
        await admin.move_partition(topic, 0, source, target)
        assert str((await admin.topic(topic)).leaders[0]) == target
        with anyio.fail_after(60):
            await producer.publish(topic, b"after")
            second = await anext(consumer)
        await second.finish()
    assert (first.body, second.body) == (b"before", b"after")


@asynccontextmanager
async def lookup_without_partitions(lookupd: str, hidden: Callable[[], bool]) -> AsyncIterator[str]:
    """Serve the answers of a lookup node without partitions while hidden, as a real one answers after a kill."""
    async with httpx.AsyncClient(timeout=60) as client:

        async def handle(stream: SocketStream) -> None:
            path = (await stream.receive()).split()[1].decode()
            if path.startswith("/listlookup"):  # else the client asks the lookup node itself
                await stream.send(http(b"{}", status="404 Not Found"))
                return
            answer = (await client.get(f"http://{lookupd}{path}")).json()
            if hidden():
                answer["data"]["partitions"] = {}
            await stream.send(http(orjson.dumps(answer)))

        async with serving(handle) as address:
            yield str(address)


async def test_a_leader_that_lookup_lists_without_its_partition_is_not_subscribed_twice(
    cluster_under_test: ClusterUnderTest, topic: str, channel: str
) -> None:
    hidden = True
    async with (
        lookup_without_partitions(cluster_under_test.lookupd[0], lambda: hidden) as lookup,
        Producer(cluster_under_test.lookupd) as producer,
        Consumer(topic, channel, lookup, start_timeout=1.0, lookup_poll_interval=0.5) as consumer,
    ):
        assert [one.partition for one in consumer.connections] == []
        hidden = False
        await eventually(lambda: len(consumer.connections) > 0, within=60)
        await producer.publish(topic, b"x")
        with anyio.fail_after(60):
            message = await anext(consumer)
        await message.finish()
        assert message.partition == 0
        assert [one.partition for one in consumer.connections] == [0]


async def test_a_leader_that_lookup_lists_without_its_partition_is_not_published_to(
    cluster_under_test: ClusterUnderTest, topic: str
) -> None:
    hidden = True
    async with (
        lookup_without_partitions(cluster_under_test.lookupd[0], lambda: hidden) as lookup,
        Producer(lookup, timeout=1.0) as producer,
    ):
        with pytest.raises(PublishFailed, match="no partition has a leader"):
            await producer.publish(topic, b"x")
        hidden = False
        assert (await producer.publish(topic, b"x")).partition == 0


async def test_moves_are_checked(cluster_under_test: ClusterUnderTest, topic: str) -> None:
    async with Admin(cluster_under_test.lookupd) as admin:
        leader = str((await admin.topic(topic)).leaders[0])
        others = [str(node.tcp) for node in await admin.nodes() if str(node.tcp) != leader]
        with pytest.raises(InvalidInput, match="no partition 7"):
            await admin.move_partition(topic, 7, leader, others[0])
        with pytest.raises(InvalidInput, match="has no replica"):
            await admin.move_partition(topic, 0, others[0], others[1])
        with pytest.raises(InvalidInput, match="no node has the TCP address"):
            await admin.move_partition(topic, 0, leader, "127.0.0.1:1")


@pytest.fixture
def reducible() -> Iterator[list[str]]:
    """Lookup addresses of a cluster that a node may be removed from."""
    if not REAL:
        with Cluster(nodes=2) as cluster:
            yield cluster.lookupd
        return
    if not RESTART_LOOKUPD:
        pytest.skip("NSQEXT_TEST_RESTART_LOOKUPD does not say how nsqlookupd of the real cluster is restarted")
    yield REAL.split(",")
    subprocess.run(shlex.split(RESTART_LOOKUPD), check=True)


async def test_a_removed_node_leads_nothing(reducible: list[str], channel: str) -> None:
    topic = f"contract_node_{token_hex(4)}"
    async with Admin(reducible) as admin, Producer(reducible) as producer:
        await admin.create_topic(topic, channels=[channel])
        await producer.publish(topic, b"before")
        node = str((await admin.topic(topic)).leaders[0])
        await admin.remove_node(node)
        with anyio.fail_after(240):
            while str((await admin.topic(topic)).leaders.get(0, node)) == node:  # noqa: ASYNC110 - no event for it
                await anyio.sleep(0.02)
        await producer.publish(topic, b"after")
        async with Consumer(topic, channel, lookupd=reducible) as consumer:
            bodies = {message.body for message in await finish_all(consumer, 2)}
        with pytest.raises(InvalidInput, match="no node has the TCP address"):
            await admin.remove_node("127.0.0.1:1")
        await admin.remove_node("127.0.0.1:1:1:9")  # an id, of a node that is gone
        await admin.delete_topic(topic)
    assert bodies == {b"before", b"after"}


async def test_disabled_writes_are_refused_until_they_are_enabled(
    cluster_under_test: ClusterUnderTest, topic: str
) -> None:
    lookupd = cluster_under_test.lookupd
    async with Admin(lookupd) as admin, Producer(lookupd, timeout=3.0) as producer:
        await admin.disable_writes()
        try:
            with pytest.raises(PublishFailed):
                await producer.publish(topic, b"refused")
        finally:
            await admin.enable_writes()
    async with Producer(lookupd, timeout=100.0) as producer:  # real: lookup offers it again within a minute
        await producer.publish(topic, b"accepted")


async def test_options_of_a_node_are_read_and_changed(cluster_under_test: ClusterUnderTest) -> None:
    async with Admin(cluster_under_test.lookupd) as admin:
        node = str((await admin.nodes())[0].tcp)
        assert await admin.node_option(node, "msg_timeout") == 60_000_000_000
        before = await admin.node_option(node, "max_conn_for_client")
        assert await admin.set_node_option(node, "max_conn_for_client", 12345) == 12345
        assert await admin.node_option(node, "max_conn_for_client") == 12345
        await admin.set_node_option(node, "max_conn_for_client", before)
        with pytest.raises(InvalidInput, match="refuses msg_timeout"):
            await admin.set_node_option(node, "msg_timeout", 1)
        with pytest.raises(InvalidInput, match="has no option"):
            await admin.node_option(node, "no_such_option")
        with pytest.raises(InvalidInput, match="not the name of an option"):
            await admin.node_option(node, "../stats")


async def test_log_levels_and_traces_are_accepted(
    cluster_under_test: ClusterUnderTest, topic: str, channel: str
) -> None:
    async with Admin(cluster_under_test.lookupd) as admin:
        await admin.set_log_level("debug")
        await admin.set_log_level("info")
        with pytest.raises(InvalidInput, match="none of error, warning, info, debug"):
            await admin.set_log_level("loud")  # type: ignore[arg-type]
        await admin.create_channel(topic, channel)
        for enabled in (True, False):
            await admin.trace_topic(topic, enabled=enabled)
            await admin.trace_topic(topic, channel=channel, enabled=enabled)
        with pytest.raises(InvalidInput, match="no channel"):
            await admin.trace_topic(topic, channel="missing")


async def test_the_original_nsq_has_options_and_log_levels_only(original: Original, channel: str) -> None:
    topic = f"contract_{token_hex(4)}"
    async with Admin(original.lookupd) as admin:
        await admin.create_topic(topic, channels=[channel])
        node = str((await admin.nodes())[0].tcp)
        await admin.set_log_level("warning")
        assert await admin.node_option(node, "log_level") in (3, "warning")
        await admin.set_log_level("info")
        assert await admin.node_option(node, "msg_timeout") == 60_000_000_000
        changes: list[Callable[[], Awaitable[None]]] = [
            lambda: admin.move_partition(topic, 0, node, node),
            lambda: admin.trace_topic(topic),
            lambda: admin.remove_node(node),
            admin.disable_writes,
            admin.enable_writes,
        ]
        for change in changes:
            with pytest.raises(OperationNotSupported):
                await change()
