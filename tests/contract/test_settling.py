"""Publishes of unknown outcome are settled: each message is stored exactly once, although connections are lost."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import anyio
import pytest

from nsqext import Consumer, OutgoingMessage, Position, Producer, Receipt
from nsqext.errors import ConnectionLost
from tests.support.messages import finish_all, nothing_for, placed

if TYPE_CHECKING:
    from tests.support.cluster import ClusterUnderTest

pytestmark = pytest.mark.anyio

_PUBLISHERS = 8
_EACH = 40
_BATCH = 5


async def _lose_connections(producer: Producer) -> int:
    """Fail every connection with a pending publish a few times, without waiting for responses."""
    lost = 0
    while lost < 12:
        await anyio.sleep(0.02)
        for node in tuple(producer._pool._nodes.values()):
            connection = node.connection
            if connection is not None and connection.in_flight:
                connection.fail(ConnectionLost("cut by the test"))
                lost += 1
    return lost


async def _publish(producer: Producer, topic: str, name: str, receipts: dict[bytes, Receipt]) -> None:
    """Publish one after the other, also with a key and in batches."""
    for number in range(0, _EACH, _BATCH + 2):
        await anyio.sleep(0.01)
        first, second = (b"%b:%d" % (name.encode(), number + index) for index in range(2))
        receipts[first] = await producer.publish(topic, first)
        receipts[second] = await producer.publish(topic, second, key="shared")
        bodies = [b"%b:%d" % (name.encode(), number + 2 + index) for index in range(_BATCH)]
        many = await producer.publish_many(topic, [OutgoingMessage(body, key=name) for body in bodies])
        receipts.update(zip(bodies, many, strict=True))


@pytest.mark.parametrize("kind", ["plain", "extend"])
async def test_each_message_is_stored_once_although_connections_are_lost(
    cluster_under_test: ClusterUnderTest, channel: str, kind: str
) -> None:
    topic: str = getattr(cluster_under_test, kind)
    receipts: dict[bytes, Receipt] = {}
    with anyio.fail_after(200):
        async with Consumer(
            topic, channel, lookupd=cluster_under_test.lookupd, start=Position.latest(), queue_position=True
        ) as consumer:
            async with (
                Producer(cluster_under_test.lookupd, on_unknown="settle") as producer,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(_lose_connections, producer)
                async with anyio.create_task_group() as publishers:
                    for number in range(_PUBLISHERS):
                        publishers.start_soon(_publish, producer, topic, f"p{number}", receipts)
                tasks.cancel_scope.cancel()
            received = await finish_all(consumer, len(receipts))
            assert await nothing_for(consumer, 0.3)
    assert Counter(message.body for message in received) == dict.fromkeys(receipts, 1)
    places = {message.body: (message.partition, message.offset, message.size) for message in received}
    for body, receipt in receipts.items():
        if receipt.offset is not None:  # batches with headers have none, unless they were settled
            assert (receipt.partition, *placed(receipt)[1:]) == places[body]
