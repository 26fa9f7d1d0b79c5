"""Decisions of the coordinator: pure functions of its state and of the nodes that are alive."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsqext.broker.coordinator.topics import PartitionState, TopicSpec


def place(
    spec: TopicSpec, load: Mapping[str, tuple[int, int]], existing: Mapping[int, PartitionState]
) -> dict[int, list[str]] | None:
    """Choose nodes for the partitions that are not placed yet, the leader first; None when there are too few nodes.

    ``load`` has for each usable node how many partitions it leads and how many it holds.
    """
    if len(load) < spec.nodes_needed():
        return None
    leads = {node: counts[0] for node, counts in load.items()}
    held = dict.fromkeys(load, 0)  # partitions of this topic
    for state in existing.values():
        for node in state.replicas:
            if node in held:
                held[node] += 1
    others = {node: counts[1] - held[node] for node, counts in load.items()}  # partitions of other topics
    placed: dict[int, list[str]] = {}
    for partition in range(spec.partition_num):
        if partition in existing:
            continue
        order = sorted(load, key=lambda node: (held[node], leads[node], others[node], node))
        if not spec.shares_nodes:
            order = [node for node in order if not held[node]]
        chosen = order[: spec.replica]
        if len(chosen) < spec.replica:
            return None
        placed[partition] = chosen
        leads[chosen[0]] += 1
        for node in chosen:
            held[node] += 1
    return placed


def candidate(state: PartitionState, alive: Collection[str]) -> str | None:
    """Return the in-sync node that should lead, the present leader if it is alive; None if all are dead.

    A node that is not in sync is never chosen: it may lack acknowledged messages.
    """
    if state.leader in alive and state.leader in state.in_sync:
        return state.leader
    return next((node for node in state.in_sync if node in alive), None)


def promote(state: PartitionState, node: str, present: Collection[str]) -> None:
    """Make an in-sync node the leader, with a higher epoch; nodes that are not present leave the in-sync replicas."""
    state.leader = node
    state.epoch += 1
    state.resigned = False
    state.joining.clear()
    state.in_sync = [node, *(other for other in state.in_sync if other != node and other in present)]


def drop_from_in_sync(state: PartitionState, node: str, spec: TopicSpec) -> None:
    """Remove a follower from the in-sync replicas.

    A leader without a majority resigns: it answers E_FAILED_ON_NOT_LEADER, and lookup still shows it for access=r
    (captured: failover_kill_follower).
    """
    state.joining.discard(node)
    if node in state.in_sync:
        state.in_sync.remove(node)
        state.resigned = len(state.in_sync) < spec.quorum


def is_writable(state: PartitionState, spec: TopicSpec) -> bool:
    """Return whether the partition accepts writes if its leader is alive."""
    return len(state.in_sync) >= spec.quorum and not state.joining and not state.resigned
