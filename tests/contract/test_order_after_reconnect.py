"""The order within a key and of an ordered partition, while the consumer's own connections are cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nsqext import Consumer, OutgoingMessage, Producer
from tests.support.cluster import PARTITIONS, ClusterUnderTest
from tests.support.lost_connections import LossyConsumers, backward_steps, lossy, numbered, relayed_connections
from tests.support.messages import subscribed

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio


async def handled(
    cluster: ClusterUnderTest,
    topic: str,
    make: Callable[[], Consumer],
    messages: dict[int | None, list[OutgoingMessage]],
    monkeypatch: pytest.MonkeyPatch,
) -> LossyConsumers:
    """Consume all messages while connections are cut."""
    async with subscribed(make()):
        pass  # creates the channel
    faulty = LossyConsumers([make()], 5)
    async with Producer(cluster.lookupd) as producer, relayed_connections(monkeypatch) as relays:
        await faulty.run(relays, producer, topic, messages)
    return faulty


async def test_lanes_never_repeat_an_earlier_message(
    cluster_under_test: ClusterUnderTest, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = cluster_under_test.extend

    def make() -> Consumer:
        return Consumer(
            topic,
            channel,
            lookupd=cluster_under_test.lookupd,
            key="of",
            concurrency=4,
            max_in_flight=20,
            **lossy(),
        )

    faulty = await handled(cluster_under_test, topic, make, numbered(PARTITIONS, 6, 150, 5), monkeypatch)
    assert backward_steps(faulty.begun) == []


async def test_an_ordered_partition_never_repeats_an_earlier_message(
    cluster_under_test: ClusterUnderTest, channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = cluster_under_test.ordered

    def make() -> Consumer:
        return Consumer(topic, channel, lookupd=cluster_under_test.lookupd, concurrency=4, **lossy())

    messages = {
        partition: [OutgoingMessage(message.body) for message in given]
        for partition, given in numbered(PARTITIONS, 1, 30, 5).items()
    }
    faulty = await handled(cluster_under_test, topic, make, messages, monkeypatch)
    assert backward_steps(faulty.begun) == []
    assert backward_steps(faulty.done) == []
