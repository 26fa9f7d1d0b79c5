"""The answer of a node to ``/coordinator/stats``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nsqext.broker.nsqd.node import COORDINATOR_ERRORS

if TYPE_CHECKING:
    from nsqext.broker.coordinator.coordinator import Coordinator
    from nsqext.broker.coordinator.replication import ReplicaSet

__all__ = ("coordinator_stats",)

_RPC_COUNTS = (
    *("RPCCalls", "RPCTime", "BytesWritten", "BytesRead", "ReadCalls", "ReadErrors", "WriteCalls", "WriteErrors"),
    *("DialCalls", "DialErrors", "AcceptCalls", "AcceptErrors"),
)


def coordinator_stats(coordinator: Coordinator, node: str, topic: str, partition: int) -> dict[str, Any]:
    """Return a node's answer to ``/coordinator/stats`` (captured: cluster_stats).

    Args:
        coordinator: the coordinator of the cluster.
        node: name of the node that answers.
        topic: only this topic; without one no partition is listed.
        partition: only this partition; all partitions that the node holds if it is negative.
    """
    held = [
        replicas
        for replicas in coordinator.replica_sets_on(node)
        if replicas.topic == topic and (partition < 0 or replicas.partition == partition)
    ]
    return {
        "rpc_stats": dict.fromkeys(_RPC_COUNTS, 0),
        "ErrStats": dict.fromkeys(COORDINATOR_ERRORS, 0) | {"OtherCoordErrs": {}},
        "topic_coord_stats": [_partition_stats(coordinator, replicas) for replicas in held],
    }


def _partition_stats(coordinator: Coordinator, replicas: ReplicaSet) -> dict[str, Any]:
    state, members = replicas.state, coordinator.members
    stats = {name: {"hostname": "", "node_id": members[name].distributed_id} for name in state.replicas}
    behind = [stats[name] | {"progress": 0} for name in state.replicas if name not in state.in_sync]
    return {
        "node": "",
        "name": replicas.topic,
        "partition": replicas.partition,
        "isr_stats": [stats[name] for name in state.in_sync],
        "catchup_stats": behind or None,
    }
