"""Requests about channels to the nodes that lead their partitions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from nsqext.errors import PartitionUnavailable
from nsqext.lookup.node_channels import ChannelClient, ChannelConnections, LogBounds, NodeChannels, ask_node
from nsqext.lookup.options import LookupOptions
from nsqext.lookup.responses import LookupHttp
from nsqext.types import Address
from tests.support.fake_nsqd import scripted_lookup

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def _channels() -> AsyncIterator[NodeChannels]:
    http = LookupHttp(LookupOptions())
    try:
        yield NodeChannels(http)
    finally:
        await http.aclose()


async def test_refusals_and_invalid_responses_of_nodes() -> None:
    async with scripted_lookup() as node, _channels() as channels:
        with pytest.raises(PartitionUnavailable, match="refused with 404") as caught:
            await channels.move(node.address, "t", 3, "ch", "special:-1")
        assert (caught.value.topic, caught.value.partition) == ("t", 3)
        assert "topic=t&partition=3" in node.questions[0]
        node.set_response("/stats", [1, 2])
        with pytest.raises(PartitionUnavailable, match="cannot be read"):
            await channels.exists(node.address, "t", 3, "ch")
        topics = [{"topic_name": "t", "topic_partition": "3", "channels": [{"channel_name": "ch"}]}]
        for wrapped in ({"topics": topics}, {"status_code": 200, "data": {"topics": topics}}):
            node.set_response("/stats", wrapped)
            assert await channels.exists(node.address, "t", 3, "ch")
            assert not await channels.exists(node.address, "t", 2, "ch")
            assert not await channels.exists(node.address, "t", 3, "other")
        node.set_response("/stats", {"topics": None})
        assert not await channels.exists(node.address, "t", 3, "ch")


async def test_what_the_statistics_of_a_channel_say() -> None:
    one = {"client_id": "one", "desired_tag": "red", "ready_count": 9, "message_count": 40, "in_flight_count": 6}
    clients = [one, {"client_id": "two"}]
    full = {"channel_name": "full", "clients": clients, "client_num": 7, "depth": 5, "in_flight_count": 3}
    full |= {"deferred_count": 1, "paused": True, "backlogs": 3, "message_count": 20}
    listed = {"channel_name": "listed", "clients": clients, "depth_size": 40}
    counted = {"channel_name": "counted", "client_count": 4}
    bare = {"channel_name": "bare"}
    led = {"backend_start": 10, "backend_depth": 100, "is_leader": True, "channels": [full, listed, counted, bare]}
    followed = {"backend_start": 0, "backend_depth": 1, "is_leader": False}
    async with scripted_lookup() as node, _channels() as channels:
        topics = [{"topic_name": "t", "topic_partition": "3", **found} for found in (followed, led)]
        node.set_response("/stats", {"topics": topics})
        where = node.address, "t", 3
        names = ("full", "listed", "counted", "bare", "none")
        assert [await channels.clients(*where, name) for name in names] == [7, 2, 4, 0, 0]
        found = (ChannelClient("one", "red", 9, 40, 6), ChannelClient("two", ""))
        assert [await channels.connections(*where, name) for name in names] == [
            ChannelConnections(found, 5, 4, True, unread=2, read=18),
            ChannelConnections(found, 0, 0),
            ChannelConnections((), 0, 0),
            ChannelConnections((), 0, 0),
            ChannelConnections(),
        ]
        unconfirmed = [(await channels.connections(*where, name)).unconfirmed for name in names]
        assert unconfirmed == [3, 0, 0, 0, 0]
        assert [await channels.log_bounds(*where, name) for name in ("listed", "bare", "none", "")] == [
            LogBounds(10, 100, 60),
            LogBounds(10, 100, None),
            LogBounds(10, 100, None),
            LogBounds(10, 100, None),
        ]
        for wrong in ({"is_leader": False}, {"backend_start": None}, {"backend_depth": "1"}):
            node.set_response("/stats", {"topics": [{**topics[1], **wrong}]})
            with pytest.raises(PartitionUnavailable, match="does not lead the partition"):
                await channels.log_bounds(*where)


@pytest.mark.parametrize(
    ("topic", "partition", "query"),
    [
        ("t", 3, "topic=t&partition=3&a=1"),
        ("t", 0, "topic=t&partition=0&a=1"),
        ("t", None, "topic=t&a=1"),
        (None, None, "a=1"),
    ],
)
async def test_what_a_request_is_about(topic: str | None, partition: int | None, query: str) -> None:
    http = LookupHttp(LookupOptions())
    try:
        async with scripted_lookup() as node:
            node.set_response("/stats", {})
            await ask_node(http, "GET", node.address, "/stats", topic, partition, {"a": 1})
            assert node.questions == [f"/stats?{query}"]
    finally:
        await http.aclose()


async def test_an_unreachable_node() -> None:
    async with scripted_lookup() as node:
        gone = node.address
    async with _channels() as channels:
        with pytest.raises(PartitionUnavailable, match="no response to"):
            await channels.exists(Address(gone.host, gone.port), "t", 0, "ch")
