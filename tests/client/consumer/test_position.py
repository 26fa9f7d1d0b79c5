"""Positions in a queue; `test_seek.py` tests how a consumer moves to them."""

from __future__ import annotations

import datetime
import time

import pytest

from nsqext import Position
from nsqext.client.consumer.position import channel_exists, move_channel
from nsqext.errors import InvalidInput, PartitionUnavailable
from nsqext.types import Address
from tests.support.fake_nsqd import scripted_lookup
from tests.support.messages import RecordingOwner, make_message


def test_positions_in_the_text_of_the_protocol() -> None:
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    positions = [
        Position.earliest(),
        Position.latest(),
        Position.at(moment),
        Position.at(7.9),
        Position.offset(35),
        Position.message(3),
    ]
    assert [str(position) for position in positions] == [
        "msgcount:0",
        "special:-1",
        f"timestamp:{int(moment.timestamp())}",
        "timestamp:7",
        "virtual_queue:35",
        "msgcount:3",
    ]


def test_invalid_positions() -> None:
    for number in (-1, True, 1.5, "1"):
        with pytest.raises(InvalidInput):
            Position.offset(number)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput):
            Position.message(number)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="zone"):
        Position.at(datetime.datetime(2026, 1, 1))
    for moment in (-1.0, time.time() * 1000):
        with pytest.raises(InvalidInput, match="is not the time"):
            Position.at(moment)


def test_comparison_with_a_position() -> None:
    owner = RecordingOwner()
    assert not Position.offset(50).reached_by(make_message(owner, offset=49))
    assert Position.offset(50).reached_by(make_message(owner, offset=50))
    assert Position.offset(50).reached_by(make_message(owner)), "offset unknown"
    assert not Position.at(10).reached_by(make_message(owner, timestamp=9_999_999_999))
    assert Position.at(10).reached_by(make_message(owner, timestamp=10_000_000_000))
    assert Position.earliest().reached_by(make_message(owner))


@pytest.mark.anyio
async def test_refusals_and_invalid_responses_of_nodes() -> None:
    async with scripted_lookup() as node:
        with pytest.raises(PartitionUnavailable, match="refused with 404") as caught:
            await move_channel(node.address, "t", 3, "ch", Position.latest())
        assert (caught.value.topic, caught.value.partition) == ("t", 3)
        node.set_response("/stats", [1, 2])
        with pytest.raises(PartitionUnavailable, match="cannot be read"):
            await channel_exists(node.address, "t", 3, "ch")
        topics = [{"topic_name": "t", "topic_partition": "3", "channels": [{"channel_name": "ch"}]}]
        for wrapped in ({"topics": topics}, {"status_code": 200, "data": {"topics": topics}}):
            node.set_response("/stats", wrapped)
            assert await channel_exists(node.address, "t", 3, "ch")
            assert not await channel_exists(node.address, "t", 2, "ch")
            assert not await channel_exists(node.address, "t", 3, "other")
        node.set_response("/stats", {"topics": None})
        assert not await channel_exists(node.address, "t", 3, "ch")


@pytest.mark.anyio
async def test_an_unreachable_node() -> None:
    async with scripted_lookup() as node:
        gone = node.address
    with pytest.raises(PartitionUnavailable, match="no response to"):
        await channel_exists(Address(gone.host, gone.port), "t", 0, "ch")
