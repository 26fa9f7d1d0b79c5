"""Start positions of channels, and seeks of consumers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext import Consumer, Position
from nsqext.errors import InvalidPartition
from nsqext.lookup.node_channels import NodeChannels
from tests.support.consumers import opened, publish, quick, take
from tests.support.fake_nsqd import (
    message,
    scripted_lookup,
    scripted_node,
)

if TYPE_CHECKING:
    from nsqext.broker import Cluster

pytestmark = pytest.mark.anyio

_EARLIEST = Position.earliest()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic name for this test only."""
    return f"t{abs(hash(request.node.nodeid)) % 10**12}"


async def test_a_new_channel_may_begin_at_the_start(cluster: Cluster, topic: str) -> None:
    cluster.create_topic(topic, channels=["other"])
    publish(cluster, topic, b"1", b"2", b"3")
    options = quick(start=_EARLIEST)
    async with opened(topic, cluster, **options) as consumer:
        assert await take(consumer, 3) == [b"1", b"2", b"3"]
    publish(cluster, topic, b"4")
    async with opened(topic, cluster, **options) as consumer:
        assert await take(consumer, 1) == [b"4"], "the channel exists now"
    async with opened(topic, cluster, start=_EARLIEST, start_existing=True) as consumer:
        assert (await take(consumer, 4))[-3:] == [b"2", b"3", b"4"]


async def test_seek_by_offset_number_and_end(cluster: Cluster, topic: str) -> None:
    cluster.create_topic(topic, channels=["ch"])
    publish(cluster, topic, b"1", b"2", b"3")
    async with opened(topic, cluster, queue_position=True) as consumer:
        offsets = []
        async for message in consumer:
            offsets.append(message.offset)
            await message.finish()
            if len(offsets) == 3:
                break
        await consumer.seek(Position.offset(offsets[1]))
        assert await take(consumer, 2) == [b"2", b"3"]
        await consumer.seek(Position.message(3), [0])
        assert await take(consumer, 1) == [b"3"]
        await consumer.seek(Position.at(1.0))
        assert await take(consumer, 3) == [b"1", b"2", b"3"]
        await consumer.seek(Position.earliest())
        await consumer.seek(Position.latest())
        publish(cluster, topic, b"4")
        bodies: list[bytes] = []
        with anyio.fail_after(25):
            while b"4" not in bodies:
                bodies += await take(consumer, 1)
        # the server may deliver one message that it requeued when the connection was closed, in any order
        assert len(bodies) <= 2
        with pytest.raises(InvalidPartition):
            await consumer.seek(Position.latest(), [5])


async def test_a_channel_is_moved_when_the_server_has_all_answers_and_sends_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved: list[object] = []

    async def move(*given: object) -> None:
        moved.append(given[-1])

    monkeypatch.setattr(NodeChannels, "move", move)
    async with scripted_lookup() as lookup, scripted_node() as node:
        lookup.set_leaders({0: node}, num=1)
        options = quick(start_timeout=0.0, queue_position=False)
        async with (
            anyio.create_task_group() as tasks,
            Consumer("t", "ch", lookupd=str(lookup), **options) as consumer,
        ):
            peer = await node.accept_subscribed()
            await peer.raw(message(1))
            await (await anext(consumer)).finish()
            tasks.start_soon(consumer.seek, Position.message(7))
            await peer.expect("FIN")
            await peer.expect("CLS")
            await anyio.wait_all_tasks_blocked()
            assert moved == []
            await peer.answer(b"CLOSE_WAIT")
            await peer.expect_end()
            again = await node.accept_subscribed()
            assert moved == ["msgcount:7"]
            await again.close()
