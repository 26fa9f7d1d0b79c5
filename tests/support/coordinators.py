"""A coordinator with nodes that have no sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from nsqext.broker.coordinator.coordinator import Coordinator, CoordinatorOptions
from nsqext.broker.coordinator.topics import ClusterMember
from nsqext.broker.engine.options import NodeOptions
from nsqext.broker.engine.storage.partition_store import NewMessage
from nsqext.broker.nsqd.node import Hosted, Node
from nsqext.types import Address

QUICK = CoordinatorOptions(lease=0.05, join_pause=0.01)


def make_coordinator(nodes: int = 3, options: CoordinatorOptions = QUICK, *, folder: Path | None = None) -> Coordinator:
    """Return a coordinator with nodes n1, n2 and so on, which have fake addresses; their data is in this folder."""
    coordinator = Coordinator(options)
    for number in range(1, nodes + 1):
        path = folder / f"n{number}" if folder else None
        node = Node(f"n{number}", NodeOptions(hostname="host", data_path=path))
        tcp, http = Address("127.0.0.1", 1000 + number), Address("127.0.0.1", 2000 + number)
        coordinator.members[node.name] = ClusterMember(node.name, node, tcp, http, number)
    return coordinator


@asynccontextmanager
async def running(nodes: int = 3, options: CoordinatorOptions = QUICK) -> AsyncIterator[Coordinator]:
    """Yield a coordinator whose background tasks run: leases expire, and copies catch up."""
    coordinator = make_coordinator(nodes, options)
    async with anyio.create_task_group() as group:
        await group.start(coordinator.run)
        yield coordinator
        group.cancel_scope.cancel()


def hosted(coordinator: Coordinator, name: str, topic: str = "t", partition: int = 0) -> Hosted:
    """Return a node's copy of a partition."""
    return coordinator.members[name].node.hosted[topic, partition]


async def publish(coordinator: Coordinator, body: bytes, topic: str = "t", partition: int = 0) -> None:
    """Publish on the leader, like a session."""
    leader = coordinator.replica_sets[topic, partition].state.leader
    found = hosted(coordinator, leader, topic, partition)
    stored = found.partition.put([NewMessage(body)])
    if found.replicate is not None:
        await found.replicate(stored)
    found.partition.commit(stored)


def bodies(coordinator: Coordinator, name: str, topic: str = "t", partition: int = 0) -> list[bytes]:
    """Return the bodies in a node's copy."""
    log = hosted(coordinator, name, topic, partition).partition.log
    entries = [log.at(number) for number in range(log.start_count + 1, log.end_count + 1)]
    return [entry.record.body for entry in entries if entry is not None]


async def until(coordinator: Coordinator, done: str, topic: str = "t", partition: int = 0) -> None:
    """Wait until an expression over ``state`` and ``writable`` is true.

    Args:
        coordinator: the coordinator.
        done: ``leader=n2``, ``sync=n1,n2`` (in any order) or ``writable``.
        topic: the topic.
        partition: the partition.
    """
    replicas = coordinator.replica_sets[topic, partition]
    key, _, value = done.partition("=")
    with anyio.fail_after(25):
        while True:
            state = replicas.state
            if key == "writable" and coordinator.writable(replicas):
                return
            if key == "leader" and state.leader == value:
                return
            if key == "sync" and sorted(state.in_sync) == value.split(","):
                return
            await replicas.changes.wait()


def wrong_roles(coordinator: Coordinator) -> list[tuple[str, int, str]]:
    """Return topic, partition and node of each replica whose role is not what the state of its partition says."""
    wrong = []
    for replicas in coordinator.replica_sets.values():
        state, spec = replicas.state, coordinator.topics[replicas.topic].spec
        for name, found in replicas.hosts.items():
            leads = name == state.leader and not state.resigned and coordinator.members[name].alive
            writes = leads and len(state.in_sync) >= spec.quorum and not state.joining
            copies = leads and len(state.in_sync) > 1
            expected = (leads, writes, copies, not leads, state.epoch)
            actual = (found.leader, found.writable, found.replicate is not None, found.partition.suspended, found.epoch)
            if actual != expected:
                wrong.append((replicas.topic, replicas.partition, name))
    return wrong


def counted(coordinator: Coordinator) -> dict[str, tuple[int, int]]:
    """Count leaders and replicas of each usable node over all partitions."""
    states = [replicas.state for replicas in coordinator.replica_sets.values()]
    return {
        member.name: (
            sum(state.leader == member.name for state in states),
            sum(member.name in state.replicas for state in states),
        )
        for member in coordinator.usable()
    }
