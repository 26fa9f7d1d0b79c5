"""State of topics and partitions in the coordinator: plain values, changed by its decisions only."""

from __future__ import annotations

from typing import Any

from attrs import define, evolve, field, frozen

from nsqext.types import TopicMeta

__all__ = ("PartitionState", "TopicSpec", "TopicState")


@frozen
class TopicSpec:
    """Specification of a topic; a topic with an equal one may be created again (captured: topic_create).

    Attributes:
        partition_num: number of partitions.
        replica: copies of each partition.
        suggest_load: load for placement; stored, not used.
        sync_every: messages between two syncs to the disk; 0 for the server's default.
        retention_days: days that finished messages are kept; 0 for the server's default.
        ordered: SUB_ORDERED is required; several partitions may live on one node.
        multi_part: several partitions may live on one node.
        extend: messages may carry JSON headers.
        disable_channel_auto_create: channels have to be registered.
    """

    partition_num: int = 1
    replica: int = 1
    suggest_load: int = 0
    sync_every: int = 0
    retention_days: int = 0
    ordered: bool = False
    multi_part: bool = False
    extend: bool = False
    disable_channel_auto_create: bool = False

    @property
    def shares_nodes(self) -> bool:
        """Whether one node may hold several partitions."""
        return self.ordered or self.multi_part

    @property
    def quorum(self) -> int:
        """In-sync replicas that a write needs, more than half of the replicas.

        Captured: failover_kill_leader.
        """
        return self.replica // 2 + 1

    def nodes_needed(self) -> int:
        """Return the smallest number of nodes that the topic fits on."""
        return self.replica if self.shares_nodes else self.replica * self.partition_num

    def meta(self) -> TopicMeta:
        """Return the metadata that lookup publishes."""
        return TopicMeta(
            partition_num=self.partition_num,
            replica=self.replica,
            extend_support=self.extend,
            ordered=self.ordered,
            multi_part=self.multi_part,
            disable_channel_auto_create=self.disable_channel_auto_create,
        )


@define
class PartitionState:
    """One partition.

    Attributes:
        leader: the node that was elected last; it may be dead.
        replicas: the nodes that hold a copy, in sync or not.
        in_sync: replicas that have every acknowledged message, the leader included.
        epoch: grows with each election.
        resigned: the leader lost its majority (captured: failover_kill_follower).
        joining: nodes about to join the in-sync replicas; writes wait for them.
    """

    leader: str
    replicas: list[str]
    in_sync: list[str]
    epoch: int = 1
    resigned: bool = False
    joining: set[str] = field(factory=set)


@define
class TopicState:
    """One topic."""

    name: str
    spec: TopicSpec
    partitions: dict[int, PartitionState] = field(factory=dict)
    registered: list[str] = field(factory=list)

    def change(self, **changes: Any) -> None:
        """Change the spec."""
        self.spec = evolve(self.spec, **changes)
