"""Requests about channels to the nodes that lead their partitions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from nsqext.errors import PartitionUnavailable
from nsqext.lookup.node_channels import LogBounds, NodeChannels, ask_node
from nsqext.lookup.options import LookupOptions
from nsqext.lookup.responses import LookupHttp
from nsqext.types import Address
from tests.support.fake_nsqd import scripted_lookup
from tests.support.stats import client_entry, topic_entry

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
        assert (caught.value.topic, caught.value.partition, caught.value.node) == ("t", 3, str(node.address))
        assert "topic=t&partition=3" in node.questions[0]
        for wrong in ([1, 2], {"status_code": 500, "status_txt": "busy"}):
            node.set_response("/stats", wrong)
            with pytest.raises(PartitionUnavailable, match="cannot be read"):
                await channels.exists(node.address, "t", 3, "ch")
        topics = [topic_entry("t", {"channel_name": "ch"})]
        for wrapped in ({"topics": topics}, {"status_code": 200, "data": {"topics": topics}}):
            node.set_response("/stats", wrapped)
            assert await channels.exists(node.address, "t", 3, "ch")
            assert not await channels.exists(node.address, "t", 3, "other")
            with pytest.raises(PartitionUnavailable, match="does not lead the partition"):
                await channels.exists(node.address, "t", 2, "ch")
        node.set_response("/stats", {"topics": None})
        with pytest.raises(PartitionUnavailable, match="does not lead the partition"):
            await channels.exists(node.address, "t", 3, "ch")


async def test_what_the_statistics_of_a_channel_say() -> None:
    one = client_entry("one", "red", ready_count=9, message_count=40, in_flight_count=6)
    clients = [one, {"client_id": "two"}]
    full = {"channel_name": "full", "clients": clients, "client_num": 7, "depth": 5, "in_flight_count": 3}
    full |= {"deferred_count": 1, "paused": True, "backlogs": 3, "message_count": 20, "delayed_queue_count": 2}
    listed = {"channel_name": "listed", "clients": clients, "depth_size": 40}
    counted = {"channel_name": "counted", "client_count": 4}
    bare = {"channel_name": "bare"}
    led = topic_entry("t", full, listed, counted, bare)
    followed = topic_entry("t", is_leader=False, backend_start=0, backend_depth=1)
    async with scripted_lookup() as node, _channels() as channels:
        node.set_response("/stats", {"topics": [followed, led]})
        where = node.address, "t", 3
        names = ("full", "listed", "counted", "bare", "none")
        assert [await channels.clients(*where, name) for name in names] == [7, 2, 4, 0, 0]
        found = [await channels.channel(*where, name) for name in names]
        assert [stats and (stats.depth, stats.in_flight, stats.deferred, stats.on_disk) for stats in found] == [
            (5, 3, 3, 2),
            *[(0, 0, 0, 0)] * 3,
            None,
        ]
        assert [stats and (stats.paused, stats.unread, stats.read, stats.unconfirmed) for stats in found] == [
            (True, 2, 18, 3),
            *[(False, 0, 0, 0)] * 3,
            None,
        ]
        clients_of = [client for stats in found if stats for client in stats.clients]
        shown = [(one.client_id, one.tag, one.ready, one.messages, one.in_flight) for one in clients_of]
        assert shown == [("one", "red", 9, 40, 6), ("two", None, 0, 0, 0)] * 2
        assert [await channels.log_bounds(*where, name) for name in ("listed", "bare", "none", "")] == [
            LogBounds(10, 100, 60),
            LogBounds(10, 100, None),
            LogBounds(10, 100, None),
            LogBounds(10, 100, None),
        ]
        node.set_response("/stats", {"topics": [followed]})
        with pytest.raises(PartitionUnavailable, match="does not lead the partition"):
            await channels.log_bounds(*where)
        for wrong in ({"backend_start": None}, {"backend_depth": "many"}):
            node.set_response("/stats", {"topics": [{**led, **wrong}]})
            with pytest.raises(PartitionUnavailable, match="the statistics cannot be read"):
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
