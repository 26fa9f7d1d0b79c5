"""How many messages a consumed channel still has."""

from __future__ import annotations

import anyio
import pytest

from nsqext import Consumer, Producer
from nsqext.broker import Cluster
from nsqext.errors import LookupFailed
from nsqext.spark.options import ClientConfig
from nsqext.spark.read.channel_lag import ChannelLag

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """What executors and planners run on."""
    return "asyncio"


@pytest.mark.parametrize("generation", ["ha", "nsq"])
async def test_waiting_and_in_flight_messages_are_counted_over_all_nodes(generation: str) -> None:
    with Cluster(2, generation=generation) as cluster:
        for topic in ("one", "two"):
            cluster.create_topic(topic, 2 if generation == "ha" else 1, channels=["spark", "other"])
        backlog = ChannelLag(ClientConfig(tuple(cluster.lookupd)), ["one", "two"], "spark")
        assert await backlog.count() == 0
        async with Producer(cluster.lookupd) as producer:
            for topic in ("one", "two"):
                for number in range(10):
                    await producer.publish(topic, b"%d" % number)
        assert await backlog.count() == 20
        async with Consumer("one", "spark", lookupd=cluster.lookupd, max_in_flight=4) as consumer:
            message = await anext(consumer)
            assert await backlog.count() == 20
            await message.finish()
            with anyio.fail_after(10):
                while await backlog.count() != 19:  # noqa: ASYNC110
                    await anyio.sleep(0.02)
        await backlog.aclose()


async def test_no_node_answers() -> None:
    backlog = ChannelLag(ClientConfig(("127.0.0.1:1",)), ["one"], "spark")
    with pytest.raises(LookupFailed):
        await backlog.count()
    await backlog.aclose()
