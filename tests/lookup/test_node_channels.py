"""Requests about channels to the nodes that lead their partitions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from nsqext.errors import PartitionUnavailable
from nsqext.lookup.http import LookupHttp
from nsqext.lookup.node_channels import NodeChannels
from nsqext.lookup.options import LookupOptions
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


async def test_an_unreachable_node() -> None:
    async with scripted_lookup() as node:
        gone = node.address
    async with _channels() as channels:
        with pytest.raises(PartitionUnavailable, match="no response to"):
            await channels.exists(Address(gone.host, gone.port), "t", 0, "ch")
