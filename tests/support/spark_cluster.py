"""The servers that Spark is tested with: the embedded cluster, or a real one that runs already."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from secrets import token_hex

import anyio
from attrs import define, field

from nsqext import ConsumerOptions, LookupOptions
from nsqext.broker import Cluster
from nsqext.cli.flights_topic import TopicPlan, make_writable
from nsqext.lookup.admin import LookupAdmin
from nsqext.lookup.client import LookupClient
from nsqext.sync import Consumer, Message, Producer

__all__ = ("REAL", "Servers", "collect", "running_servers")

REAL = os.environ.get("NSQEXT_TEST_LOOKUPD", "")
"""Lookup address of a real cluster; empty for the embedded one."""

_PAUSE = 4.0
_OPTIONS = LookupOptions(request_timeout=15.0)


@define
class Servers:
    """A cluster that makes topics for tests.

    Attributes:
        lookupd: lookup addresses.
        cluster: the embedded cluster; None where it is a real one.
        first: number of messages that a new partition holds already: a real cluster is asked whether it takes some.
        topics: those that were made at a real cluster.
        channel: a channel that every topic has from the beginning, and that nobody consumes.
        probe: body of the messages that a real cluster is asked with.
    """

    lookupd: Sequence[str]
    cluster: Cluster | None
    first: int
    topics: list[str] = field(factory=list)
    channel: str = "ready"
    probe: bytes = b"ready?"

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
            anyio.run(_make, self.lookupd, TopicPlan(name, partitions, extend=extend, ordered=ordered), self.topics)
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
            yield Servers(cluster.lookupd, cluster, 0)
        return
    servers = Servers(REAL.split(","), None, 1)
    try:
        yield servers
    finally:
        anyio.run(_delete, servers.lookupd, servers.topics)


async def _make(lookupd: Sequence[str], plan: TopicPlan, topics: list[str]) -> None:
    async with LookupClient(lookupd, _OPTIONS) as client, anyio.create_task_group() as tasks:
        admin = LookupAdmin(client)
        topics.append(plan.name)
        await admin.create_topic(
            plan.name,
            partitions=plan.partitions,
            extend=plan.extend,
            ordered=plan.ordered,
            multipart=not plan.ordered,
        )
        tasks.start_soon(_nudge, admin, topics)
        await make_writable(lookupd, admin, plan, _ignore)
        tasks.cancel_scope.cancel()


async def _nudge(admin: LookupAdmin, topics: list[str]) -> None:
    """Make further topics: a real cluster attends to one when the next one comes, and once in a minute otherwise."""
    while True:
        await anyio.sleep(_PAUSE)
        topics.append(f"nudge_{token_hex(4)}")
        await admin.create_topic(topics[-1])


def _ignore(partition: int) -> None:
    """Nobody watches."""


async def _delete(lookupd: Sequence[str], topics: Sequence[str]) -> None:
    async with LookupClient(lookupd, _OPTIONS) as client:
        for topic in topics:
            await LookupAdmin(client).delete_topic(topic)


def collect(servers: Servers, topic: str, count: int) -> list[Message]:
    """Return the first messages of a topic, read without Spark."""
    found: list[Message] = []
    options = ConsumerOptions(queue_position=True)
    with Consumer(topic, servers.channel, lookupd=list(servers.lookupd), options=options) as consumer:
        for message in consumer:
            message.finish()
            if message.body != servers.probe:
                found.append(message)
            if len(found) == count:
                break
    return found
