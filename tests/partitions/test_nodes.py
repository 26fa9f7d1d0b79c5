"""What nodes tell about partitions. The texts are those of the real server; the rest is tested with `Admin`."""

from __future__ import annotations

import pytest
import respx

from nsqext.errors import LookupFailed, NsqError, PartitionUnavailable
from nsqext.errors.server import ChannelNotRegistered
from nsqext.lookup.client import LookupClient
from nsqext.partitions import ChannelPosition, Leader, PartitionNodes
from nsqext.partitions.nodes import read_position
from nsqext.types import Address
from tests.support.fake_nsqd import scripted_lookup

TEXT = (
    "topic t channel c \ninflight 0, req 0, 0, 0, deferred: 0 , 0, \n\n"
    "channel end : &{{{0 356} 356} 11},current read:&{{{0 132} 132} 4}, "
    "current confirm &{{{0 100} 100} 3}, confirmed 0 messages: \n\n"
)


def test_positions_of_a_channel() -> None:
    assert read_position(TEXT) == ChannelPosition(end=11, count=3, offset=100)
    later = TEXT.replace("{0 356} 356", "{2 56} 2000356").replace("{0 100} 100", "{1 100} 1000100")
    assert read_position(later) == ChannelPosition(end=11, count=3, offset=1000100)
    assert (
        read_position(TEXT.replace("confirmed 0 messages: ", "confirmed 1 messages: interval &{132 164 5}, "))
        is not None
    )
    assert read_position(TEXT.replace("current read:&{{{0 132} 132} 4}", "current read:<nil>")) is not None


def test_a_missing_channel() -> None:
    assert read_position("") is None
    assert read_position(" \n") is None


def test_texts_that_do_not_match() -> None:
    for text in ("hello", TEXT.replace("current confirm &{{{0 100} 100} 3}", "current confirm <nil>")):
        with pytest.raises(ValueError, match="no positions"):
            read_position(text)


@pytest.mark.anyio
async def test_answers_that_cannot_be_read() -> None:
    async with scripted_lookup() as node, LookupClient([str(node.address)]) as client:
        nodes, leader = PartitionNodes(client.http), Leader(node.address, node.address)
        node.set_response("/stats", {"topics": [{"topic_name": "t", "topic_partition": "3"}]})
        node.set_response("/message/stats", "hello")
        node.set_response("/message/get", {"offset": 3})
        for asked in (
            nodes.stats(leader, "t", 3),
            nodes.position(leader, "t", 3, "c"),
            nodes.message(leader, "t", 3, "count", 1),
        ):
            with pytest.raises(PartitionUnavailable, match="cannot be read") as caught:
                await asked
            assert (caught.value.topic, caught.value.partition, caught.value.node) == ("t", 3, str(node.address))


@pytest.mark.anyio
async def test_nodes_that_do_not_lead() -> None:
    async with scripted_lookup() as node, LookupClient([str(node.address)]) as client:
        nodes, leader = PartitionNodes(client.http), Leader(node.address, node.address)
        expected = {"topic_name": "t", "topic_partition": "3", "is_leader": False, "message_count": 1, "channels": None}
        expected |= {"backend_start": 0, "backend_depth": 30}
        for topics in (None, [], [expected], [{**expected, "topic_partition": "2", "is_leader": True}]):
            node.set_response("/stats", {"topics": topics})
            with pytest.raises(PartitionUnavailable, match="does not lead"):
                await nodes.stats(leader, "t", 3)
        node.set_response("/stats", {"topics": [{**expected, "is_leader": True}]})
        stats = await nodes.stats(leader, "t", 3)
        assert (stats.messages, stats.committed) == (1, 0), "the number of committed messages is unknown"
        tcp = Address("n", 4150)
        assert (await nodes.stats(Leader(tcp, node.address), "t", 3)).node == tcp
        assert "needClients=false" in node.questions[-1]


@pytest.mark.anyio
async def test_all_partitions_of_a_leader() -> None:
    async with scripted_lookup() as node, LookupClient([str(node.address)]) as client:
        nodes, leader = PartitionNodes(client.http), Leader(node.address, node.address)
        expected = {"message_count": 1, "channels": [], "backend_start": 0, "backend_depth": 30}
        leading = {"0": True, "1": False, "5": True}
        node.set_response(
            "/stats",
            {
                "topics": [
                    {**expected, "topic_name": "t", "topic_partition": key, "is_leader": leads}
                    for key, leads in leading.items()
                ]
            },
        )
        assert list(await nodes.led(leader, "t")) == [("t", 0), ("t", 5)]
        node.set_response("/stats", {"topics": None})
        assert await nodes.led(leader, "t") == {}
        node.set_response("/stats", {"topics": [{"topic_partition": "zero"}]})
        with pytest.raises(PartitionUnavailable, match="cannot be read"):
            await nodes.led(leader, "t")


@pytest.mark.anyio
async def test_an_unreachable_node() -> None:
    async with scripted_lookup() as node:
        leader = Leader(node.address, node.address)
    async with LookupClient([str(leader.http)]) as client:
        with pytest.raises(PartitionUnavailable, match="no response to /stats") as caught:
            await PartitionNodes(client.http).stats(leader, "t", 3)
        assert caught.value.topic == "t"
        assert not isinstance(caught.value, LookupFailed)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (403, "channel c not registered. channel should be initialized before use.", ChannelNotRegistered),
        (404, "E_TOPIC_NOT_EXIST", PartitionUnavailable),
        (404, "CHANNEL_NOT_FOUND", PartitionUnavailable),
        (400, "E_FAILED_ON_NOT_LEADER ", PartitionUnavailable),
    ],
)
async def test_refusals(status: int, text: str, kind: type[NsqError]) -> None:
    address = Address("127.0.0.1", 4151)
    async with LookupClient([str(address)]) as client:
        with respx.mock, pytest.raises(kind) as caught:
            respx.post("http://127.0.0.1:4151/channel/create").respond(status, json={"message": text})
            await PartitionNodes(client.http).change_channel(Leader(address, address), "t", 3, "create", "c")
        assert (caught.value.topic, caught.value.partition) == ("t", 3)
