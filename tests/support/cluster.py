"""The cluster of the contract tests: the embedded one, or a running real one."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from secrets import token_hex
from typing import TYPE_CHECKING

import anyio
from attrs import define, field, frozen

from nsqext import Admin, Producer
from nsqext.broker import Cluster
from tests.support.node_restarts import start_nodes, until_nodes_lead
from tests.support.topic_plan import TopicPlan

if TYPE_CHECKING:
    from nsqext.types import Address

__all__ = (
    "KILL",
    "PARTITIONS",
    "REAL",
    "REAL_ORIGINAL",
    "RESTART_LOOKUPD",
    "START",
    "ClusterUnderTest",
    "Killable",
    "Original",
    "Truncatable",
    "killable_cluster",
    "running_cluster",
    "running_original",
    "truncatable_cluster",
)

REAL = os.environ.get("NSQEXT_TEST_LOOKUPD", "")
"""Lookup address of a real cluster; empty for the embedded one."""

KILL = os.environ.get("NSQEXT_TEST_KILL_LEADER", "")
"""Command that kills a node of the real cluster; ``{n}`` is its number, from 1, among the nodes sorted by address."""

START = os.environ.get("NSQEXT_TEST_START_NODE", "")
"""Command that starts such a node again."""

RESTART_LOOKUPD = os.environ.get("NSQEXT_TEST_RESTART_LOOKUPD", "")
"""Command that restarts nsqlookupd of the real cluster, which then forgets that a node is being removed."""

REAL_ORIGINAL = os.environ.get("NSQEXT_TEST_NSQ_LOOKUPD", "")
"""HTTP addresses of nsqlookupd of a real original NSQ; empty without one."""

PARTITIONS = 2
"""Partitions of the topics for all tests."""
READY = ("ready",)
"""A channel without consumers: lookup does not offer a topic without channels to producers."""
_UPGRADES = 3


@frozen
class Node:
    """Addresses of one nsqd."""

    tcp: str
    http: str


@define
class ClusterUnderTest:
    """A cluster with topics for all tests; each test uses a channel of its own.

    Attributes:
        lookupd: lookup addresses.
        nodes: nsqd nodes.
        plain: topic without extend support, with two partitions on two nodes.
        extend: topic with extend support and two partitions.
        ordered: ordered topic with two partitions.
        upgradable: plain topics of one partition, each for one test that upgrades it.
    """

    lookupd: list[str]
    nodes: list[Node]
    plain: str
    extend: str
    ordered: str
    upgradable: list[str] = field(factory=list)

    def wait_until_led(self) -> None:
        """Wait until all nodes run, and all partitions of the shared topics have a leader."""
        topics = dict.fromkeys((self.plain, self.extend, self.ordered), PARTITIONS)
        anyio.run(until_nodes_lead, self.lookupd, [node.tcp for node in self.nodes], topics)

    async def make_channel(self, topic: str) -> str:
        """Create a channel without consumers; return its name."""
        name = f"made_{token_hex(4)}"
        await self.make_named_channel(topic, name)
        return name

    async def make_named_channel(self, topic: str, name: str) -> None:
        """Create a channel without consumers."""
        async with Admin(self.lookupd) as admin:
            await admin.create_channel(topic, name)

    async def upgrade(self, topic: str) -> None:
        """Give a topic extend support."""
        async with Admin(self.lookupd) as admin:
            await admin.upgrade_topic(topic)


@frozen
class Original:
    """An original NSQ.

    Attributes:
        lookupd: lookup addresses.
        nodes: TCP addresses of the nsqd nodes.
    """

    lookupd: list[str]
    nodes: list[str]


@contextmanager
def running_original(*, real: bool) -> Iterator[Original]:
    """Yield an embedded original NSQ, or the real one."""
    if real:
        lookupd = REAL_ORIGINAL.split(",")
        yield Original(lookupd, [node.tcp for node in anyio.run(_nodes_of, lookupd)])
        return
    with Cluster(nodes=2, generation="original") as cluster:
        yield Original(cluster.lookupd, [node.tcp for node in cluster.nodes.values()])


async def _nodes_of(lookupd: list[str]) -> list[Node]:
    async with Admin(lookupd) as admin:
        return [Node(_text(node.tcp), _text(node.http)) for node in await admin.nodes()]


@contextmanager
def running_cluster() -> Iterator[ClusterUnderTest]:
    """Yield the cluster with its topics, and delete the topics at the end."""
    if REAL:
        with _with_topics(REAL.split(",")) as cluster:
            yield cluster
    else:
        with Cluster(nodes=3) as embedded, _with_topics(embedded.lookupd) as cluster:
            yield cluster


@contextmanager
def _with_topics(lookupd: list[str]) -> Iterator[ClusterUnderTest]:
    run = token_hex(4)
    plans = {
        "plain": TopicPlan(f"contract_plain_{run}", PARTITIONS, channels=READY, spread=True),
        "extend": TopicPlan(f"contract_extend_{run}", PARTITIONS, extend=True, channels=READY),
        "ordered": TopicPlan(f"contract_ordered_{run}", PARTITIONS, ordered=True, channels=READY),
        **{
            f"upgrade{number}": TopicPlan(f"contract_upgrade{number}_{run}", channels=READY)
            for number in range(_UPGRADES)
        },
    }
    nodes = anyio.run(_make_topics, lookupd, list(plans.values()))
    try:
        yield ClusterUnderTest(
            lookupd=lookupd,
            nodes=nodes,
            plain=plans["plain"].name,
            extend=plans["extend"].name,
            ordered=plans["ordered"].name,
            upgradable=[plans[f"upgrade{number}"].name for number in range(_UPGRADES)],
        )
    finally:
        anyio.run(_delete_topics, lookupd, [plan.name for plan in plans.values()])


async def _make_topics(lookupd: list[str], plans: list[TopicPlan]) -> list[Node]:
    async with Admin(lookupd) as admin, anyio.create_task_group() as tasks:
        for plan in plans:
            tasks.start_soon(plan.create, admin)
    return await _nodes_of(lookupd)


def _text(address: Address | None) -> str:
    assert address is not None
    return str(address)


async def _delete_topics(lookupd: list[str], topics: Iterable[str]) -> None:
    async with Admin(lookupd) as admin:
        for topic in topics:
            await admin.delete_topic(topic)


@frozen
class Killable:
    """A cluster with a topic of one partition and three replicas.

    Attributes:
        lookupd: lookup addresses.
        topic: the topic.
        kill: function that kills the node with a TCP address.
    """

    lookupd: list[str]
    topic: str
    kill: Callable[[str], None]


@contextmanager
def killable_cluster(*, extend: bool = False) -> Iterator[Killable]:
    """Yield a cluster whose nodes may be killed: a new embedded one, or the real one, whose nodes run at the end."""
    topic = f"contract_kill_{token_hex(4)}"
    if not REAL:
        with Cluster(nodes=3) as cluster:
            cluster.create_topic(topic, replicas=3, extend=extend, channels=READY)
            names = {node.tcp: node.name for node in cluster.nodes.values()}
            yield Killable(cluster.lookupd, topic, lambda address: cluster.kill(names[address]))
        return
    lookupd = REAL.split(",")
    nodes = anyio.run(_make_killable, lookupd, topic, extend)
    killed = list[int]()

    def kill(address: str) -> None:
        killed.append(nodes.index(address) + 1)
        subprocess.run(shlex.split(KILL.format(n=killed[-1])), check=True)

    try:
        yield Killable(lookupd, topic, kill)
    finally:
        start_nodes(START, killed)
        anyio.run(until_nodes_lead, lookupd, nodes, {})  # lookup does not offer a topic whose channel was forgotten
        anyio.run(_delete_topics, lookupd, [topic])


async def _make_killable(lookupd: list[str], topic: str, extend: bool) -> list[str]:
    async with Admin(lookupd) as admin:
        await admin.create_topic(topic, replicas=3, extend=extend, channels=READY, wait=150.0)
        return [str(node.tcp) for node in await admin.nodes()]


@frozen
class Truncatable:
    """A cluster whose leaders may lose messages.

    Attributes:
        lookupd: lookup addresses.
        create: function that creates a topic of one partition and one replica; returns it, and a function that makes
            its leader lose the messages that it acknowledged last. Its argument is how many the embedded cluster keeps.
    """

    lookupd: list[str]
    create: Callable[[int], tuple[str, Callable[[], None]]]


@contextmanager
def truncatable_cluster() -> Iterator[Truncatable]:
    """Yield a cluster whose leaders may lose messages: a new embedded one, or the real one."""
    topics = list[str]()

    def name() -> str:
        topics.append(f"contract_truncated_{token_hex(4)}")
        return topics[-1]

    if not REAL:
        with Cluster(nodes=1) as cluster:

            def create(keep: int) -> tuple[str, Callable[[], None]]:
                topic = name()
                cluster.create_topic(topic, channels=READY)
                return topic, lambda: cluster.faults.truncate(topic, 0, keep)

            yield Truncatable(cluster.lookupd, create)
        return
    lookupd = REAL.split(",")

    def create_real(keep: int) -> tuple[str, Callable[[], None]]:
        topic = name()
        number = anyio.run(_make_truncatable, lookupd, topic)

        def truncate() -> None:
            # the server writes to its log in large blocks, and loses the last one
            subprocess.run(shlex.split(KILL.format(n=number)), check=True)
            start_nodes(START, [number])

        return topic, truncate

    try:
        yield Truncatable(lookupd, create_real)
    finally:
        anyio.run(_delete_topics, lookupd, topics)


async def _make_truncatable(lookupd: list[str], topic: str) -> int:
    """Create a topic; returns the number of its leader."""
    async with Admin(lookupd) as admin:
        await admin.create_topic(topic, replicas=1, channels=READY, wait=150.0)
        async with Producer(lookupd) as producer:
            leader = (await producer.publish(topic, b"the first message")).node
        return [str(node.tcp) for node in await admin.nodes()].index(str(leader)) + 1
