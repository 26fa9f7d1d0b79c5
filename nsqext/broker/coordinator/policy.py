"""The coordinator's decisions: pure functions of what it knows and of who is alive."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsqext.broker.coordinator.topics import PartitionState, TopicSpec

__all__ = ("candidate", "is_open", "lose", "place", "take_office")


def place(
    spec: TopicSpec, load: Mapping[str, tuple[int, int]], existing: Mapping[int, PartitionState]
) -> dict[int, list[str]] | None:
    """Choose nodes for the partitions that have none yet.

    Args:
        spec: what the topic asks for.
        load: for each node that may be used, how many partitions it leads and how many it holds.
        existing: partitions that are placed already.

    Returns:
        For each new partition its nodes, the leader first; None when there are too few nodes.
    """
    if len(load) < spec.nodes_needed():
        return None
    leads = {node: counts[0] for node, counts in load.items()}
    holds = {node: counts[1] for node, counts in load.items()}
    here = dict.fromkeys(load, 0)
    for state in existing.values():
        for node in state.replicas:
            if node in here:
                here[node] += 1
    placed: dict[int, list[str]] = {}
    for partition in range(spec.partition_num):
        if partition in existing:
            continue
        order = sorted(load, key=lambda node: (here[node], leads[node], holds[node], node))
        if not spec.shares_nodes:
            order = [node for node in order if not here[node]]
        chosen = order[: spec.replica]
        if len(chosen) < spec.replica:
            return None
        placed[partition] = chosen
        leads[chosen[0]] += 1
        for node in chosen:
            here[node] += 1
            holds[node] += 1
    return placed


def candidate(state: PartitionState, alive: Collection[str]) -> str | None:
    """Return the in-sync node that should lead, the present leader first; None when none of them is alive.

    A node that is not in sync is never chosen: it may lack what was acknowledged.
    """
    if state.leader in alive and state.leader in state.in_sync:
        return state.leader
    return next((node for node in state.in_sync if node in alive), None)


def take_office(state: PartitionState, node: str, present: Collection[str]) -> None:
    """Make an in-sync node the leader, with a higher epoch.

    Args:
        state: the partition.
        node: the new leader.
        present: nodes that are alive, or whose lease runs still; the others are not in sync any more.
    """
    state.leader = node
    state.epoch += 1
    state.resigned = False
    state.joining.clear()
    state.in_sync = [node, *(other for other in state.in_sync if other != node and other in present)]


def lose(state: PartitionState, node: str, spec: TopicSpec) -> None:
    """Take a node that was not the leader out of the in-sync set.

    A leader that is left without a majority resigns: it answers E_FAILED_ON_NOT_LEADER, and is still what access=r
    shows (captured: failover_kill_follower).
    """
    state.joining.discard(node)
    if node in state.in_sync:
        state.in_sync.remove(node)
        state.resigned = len(state.in_sync) < spec.quorum


def is_open(state: PartitionState, spec: TopicSpec) -> bool:
    """Tell whether the partition takes writes, provided that its leader is alive."""
    return len(state.in_sync) >= spec.quorum and not state.joining and not state.resigned
