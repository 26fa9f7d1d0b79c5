"""The servers that Spark is tested with: the embedded cluster, or a real one that runs already."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from secrets import token_hex

import anyio
from attrs import define, field

from nsqext import Admin
from nsqext.broker import Cluster
from nsqext.sync import Consumer, Message, Producer
from tests.support.topic_plan import TopicPlan

__all__ = ("REAL", "Servers", "collect", "running_servers")

REAL = os.environ.get("NSQEXT_TEST_LOOKUPD", "")
"""Lookup address of a real cluster; empty for the embedded one."""

_PAUSE = 4.0


@define
class Servers:
    """A cluster that makes topics for tests.

    Attributes:
        lookupd: lookup addresses.
        cluster: the embedded cluster; None where it is a real one.
        topics: those that were made at a real cluster.
        first: number of the first message of a new partition.
        channel: a channel that every topic has from the beginning, without consumers.
    """

    lookupd: Sequence[str]
    cluster: Cluster | None
    topics: list[str] = field(factory=list)
    first: int = 0
    channel: str = "ready"

    @property
    def options(self) -> dict[str, str]:
        """What every read and every write is given."""
        return {"lookupd": ",".join(self.lookupd)}

    def make_topic(
        self, word: str = "t", partitions: int = 1, *, extend: bool = False, ordered: bool = False, replicas: int = 1
    ) -> str:
        """Make a topic that takes messages; returns its name.

        Replicas are those of the embedded cluster: a real one makes one copy.
        """
        name = f"{word}_{token_hex(4)}"
        if self.cluster is not None:
            self.cluster.create_topic(
                name, partitions, extend=extend, ordered=ordered, replicas=replicas, channels=[self.channel]
            )
        else:
            anyio.run(_make, self.lookupd, TopicPlan(name, partitions, extend, ordered, (self.channel,)), self.topics)
        return name

    def publish(self, topic: str, bodies: Sequence[bytes], partition: int | None = None) -> None:
        """Publish messages to a partition, in their order."""
        with Producer(self.lookupd) as producer:
            producer.publish_many(topic, bodies, partition=partition)


@contextmanager
def running_servers(nodes: int = 3) -> Iterator[Servers]:
    """Give the servers; topics of a real cluster are deleted in the end."""
    if not REAL:
        with Cluster(nodes) as cluster:
            yield Servers(cluster.lookupd, cluster)
        return
    servers = Servers(REAL.split(","), None)
    try:
        yield servers
    finally:
        anyio.run(_delete, servers.lookupd, servers.topics)


async def _make(lookupd: Sequence[str], plan: TopicPlan, topics: list[str]) -> None:
    async with Admin(lookupd) as admin, anyio.create_task_group() as tasks:
        topics.append(plan.name)
        tasks.start_soon(_nudge, admin, topics)
        await plan.create(admin)
        tasks.cancel_scope.cancel()


async def _nudge(admin: Admin, topics: list[str]) -> None:
    """Create further topics: a real cluster assigns a topic when the next one is created, or once in a minute."""
    while True:
        await anyio.sleep(_PAUSE)
        topics.append(f"nudge_{token_hex(4)}")
        await admin.create_topic(topics[-1], wait=0)


async def _delete(lookupd: Sequence[str], topics: Sequence[str]) -> None:
    async with Admin(lookupd) as admin:
        for topic in topics:
            await admin.delete_topic(topic, missing_ok=True)


def collect(servers: Servers, topic: str, count: int) -> list[Message]:
    """Return the first messages of a topic, read without Spark."""
    found: list[Message] = []
    with Consumer(topic, servers.channel, lookupd=list(servers.lookupd), queue_position=True) as consumer:
        for message in consumer:
            message.finish()
            found.append(message)
            if len(found) == count:
                break
    return found
