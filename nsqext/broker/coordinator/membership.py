"""Nodes that fail, leave and return: leases, elections and replacement."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio

from nsqext.errors import InvalidSetting

if TYPE_CHECKING:
    from nsqext.broker.coordinator.coordinator import Coordinator
    from nsqext.broker.coordinator.replication import ReplicaSet
    from nsqext.broker.coordinator.topics import ClusterMember

logger: logging.Logger = logging.getLogger(__name__)


def silent(coordinator: Coordinator, member: ClusterMember) -> None:
    """Start the lease of a killed or frozen node; it keeps its partitions until the end."""
    for replicas in coordinator.replica_sets_on(member.name):
        coordinator.apply_roles(replicas)
    _start_lease(coordinator, member)


def _start_lease(coordinator: Coordinator, member: ClusterMember) -> None:
    if member.name not in coordinator.leases:
        scope = coordinator.leases[member.name] = anyio.CancelScope()
        coordinator.spawn(_lease, coordinator, member, scope)


async def _lease(coordinator: Coordinator, member: ClusterMember, scope: anyio.CancelScope) -> None:
    with scope:
        if member.present:  # else it has left
            await anyio.sleep(coordinator.options.lease)
            _gone(coordinator, member)
        await anyio.sleep(coordinator.options.replace_after)
        _replace(coordinator, member)


def left(coordinator: Coordinator, member: ClusterMember) -> None:
    """Move a node's partitions when it ends on SIGTERM (captured: failover_r3_term_leader)."""
    member.alive = False
    _stop_lease(coordinator, member)
    _gone(coordinator, member)
    _start_lease(coordinator, member)


def thawed(coordinator: Coordinator, member: ClusterMember) -> None:
    """Take a thawed node back, as a follower if its lease has expired."""
    if not member.present:
        returned(coordinator, member)
        return
    _stop_lease(coordinator, member)
    for replicas in coordinator.replica_sets_on(member.name):
        if replicas.state.leader == member.name:
            _drop_absent(coordinator, replicas)
        else:
            coordinator.apply_roles(replicas)


def returned(coordinator: Coordinator, member: ClusterMember) -> None:
    """Take a restarted node back."""
    _stop_lease(coordinator, member)
    member.alive = member.present = True
    for replicas in coordinator.replica_sets_on(member.name):
        state = replicas.state
        replicas.forget(member.name)
        if state.leader == member.name or not coordinator.members[state.leader].present:
            _elect(coordinator, replicas)
        else:
            coordinator.apply_roles(replicas)


def _stop_lease(coordinator: Coordinator, member: ClusterMember) -> None:
    scope = coordinator.leases.pop(member.name, None)
    if scope is not None:
        scope.cancel()


def _elect(coordinator: Coordinator, replicas: ReplicaSet) -> None:
    reachable = [name for name in replicas.state.in_sync if coordinator.reachable(name)]
    chosen = replicas.state.candidate(reachable)
    if chosen is None:
        coordinator.apply_roles(replicas)
    else:
        coordinator.elect(replicas, chosen)


def _gone(coordinator: Coordinator, member: ClusterMember) -> None:
    member.present = False
    for replicas in coordinator.replica_sets_on(member.name):
        state = replicas.state
        if state.leader == member.name:
            _elect(coordinator, replicas)
        elif coordinator.reachable(state.leader):
            _drop_absent(coordinator, replicas)


def _drop_absent(coordinator: Coordinator, replicas: ReplicaSet) -> None:
    present = coordinator.present()
    coordinator.drop(replicas, [name for name in replicas.state.in_sync if name not in present])


def _replace(coordinator: Coordinator, member: ClusterMember) -> None:
    """Replace an absent node where another node can hold the partition.

    Where it is in sync it stays: of a partition without leader, it may be the only node with every message.
    """
    for replicas in coordinator.replica_sets_on(member.name):
        state, free = replicas.state, coordinator.free_nodes(replicas)
        if state.leader == member.name or member.name in state.in_sync or not free:
            continue
        try:
            coordinator.host(replicas, free[0])
        except InvalidSetting as error:
            logger.warning("%s cannot host a replica: %s", free[0], error)
            continue
        coordinator.unhost(replicas, member.name)
        state.replicas[state.replicas.index(member.name)] = free[0]
        coordinator.apply_roles(replicas)
