"""What schedules have found in clients, each as a scenario of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nsqext import BatchFailed, OutgoingMessage, Producer, ProducerOptions
from nsqext.testing.simulation import run_seed

if TYPE_CHECKING:
    from nsqext.testing import World


async def batch_waits_for_lookup(world: World) -> None:
    """Publish a batch while lookup is slow and the node does not respond."""
    await world.cluster.create_topic("orders", 1, extend=True, channels=["billing"])
    for running in world.cluster.runtime.lookupds.values():
        running.lookupd.delay = 1.5
    async with Producer(world.cluster.lookupd, options=ProducerOptions(timeout=4.0)) as producer:
        world.cluster.freeze(world.cluster.leader("orders"))
        began = world.now
        with pytest.raises(BatchFailed):
            await producer.publish_many("orders", [OutgoingMessage(b"one", key="k"), OutgoingMessage(b"two")])
        assert 3.9 < world.now - began < 4.5
        world.cluster.thaw(world.cluster.leader("orders"))


def test_the_timeout_of_a_batch_includes_the_wait_for_lookup() -> None:
    """The timeout began when the topic was known: a batch took up to three times as long as ``timeout``."""
    run = run_seed(batch_waits_for_lookup, 1, ())
    assert run.error is None
