"""Where a channel begins, and where a consumer seeks to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext import Consumer, Position
from nsqext.errors import InvalidPartition, InvalidSetting, InvalidState
from tests.client.consuming import QUICK, eventually, opened, publish, quick, take
from tests.client.scripted import PLAIN, obey, scripted_node

if TYPE_CHECKING:
    from nsqext.broker import Cluster

pytestmark = pytest.mark.anyio

_EARLIEST = Position.earliest()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name of the test's own."""
    return f"t{abs(hash(request.node.nodeid)) % 10**12}"


async def test_a_new_channel_may_begin_at_the_start(cluster: Cluster, topic: str) -> None:
    cluster.create_topic(topic, channels=["other"])
    publish(cluster, topic, b"1", b"2", b"3")
    options = quick(start=_EARLIEST)
    async with opened(topic, cluster, options) as consumer:
        assert await take(consumer, 3) == [b"1", b"2", b"3"]
    publish(cluster, topic, b"4")
    async with opened(topic, cluster, options) as consumer:
        assert await take(consumer, 1) == [b"4"], "the channel exists now"
    async with opened(topic, cluster, quick(start=_EARLIEST, start_existing=True)) as consumer:
        assert (await take(consumer, 4))[-3:] == [b"2", b"3", b"4"]


async def test_seek_by_offset_number_and_end(cluster: Cluster, topic: str) -> None:
    cluster.create_topic(topic, channels=["ch"])
    publish(cluster, topic, b"1", b"2", b"3")
    async with opened(topic, cluster, quick(queue_position=True)) as consumer:
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
        assert (await take(consumer, 1))[-1] in (b"1", b"4")
        with pytest.raises(InvalidPartition):
            await consumer.seek(Position.latest(), [5])


async def test_seek_where_a_partition_is_empty(cluster: Cluster, topic: str) -> None:
    cluster.create_topic(topic, partitions=2, channels=["ch"])
    publish(cluster, topic, b"1")
    async with opened(topic, cluster) as consumer:
        assert await take(consumer, 1) == [b"1"]
        with anyio.fail_after(5):
            await consumer.seek(Position.earliest())
        assert await take(consumer, 1) == [b"1"]


async def test_the_original_has_no_positions() -> None:
    async with scripted_node(obey(), granted=PLAIN) as node:
        with pytest.raises(InvalidSetting, match="original"):
            async with Consumer("t", "ch", nsqd=str(node), options=quick(start=_EARLIEST)):
                raise AssertionError("it opened")
        with pytest.raises(InvalidSetting, match="original"):
            async with Consumer("t", "ch", nsqd=str(node), options=quick(partitions=(0,))):
                raise AssertionError("it opened")
        async with Consumer("t", "ch", nsqd=str(node), options=QUICK) as consumer:
            with pytest.raises(InvalidSetting, match="original"):
                await consumer.seek(_EARLIEST)


async def test_a_seek_ends_with_its_consumer(cluster: Cluster, topic: str) -> None:
    cluster.create_topic(topic, channels=["ch"])
    seen: list[str] = []

    async def seek(consumer: Consumer) -> None:
        with pytest.raises(InvalidState, match="ended"):
            await consumer.seek(Position.latest())
        seen.append("ended")

    async with anyio.create_task_group() as tasks:
        async with opened(topic, cluster) as consumer:
            cluster.kill(cluster.leader(topic))
            await eventually(lambda: not consumer.connections)
            tasks.start_soon(seek, consumer)
            await anyio.wait_all_tasks_blocked()
        with pytest.raises(InvalidState, match="not open"):
            await consumer.seek(Position.latest())
    assert seen == ["ended"]
    cluster.restart(cluster.leader(topic))
