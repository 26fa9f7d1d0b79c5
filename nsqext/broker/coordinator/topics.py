"""State of topics and partitions in the coordinator: plain values, changed by its decisions only."""

from __future__ import annotations

from typing import Any

from attrs import define, evolve, field, frozen

from nsqext.types import TopicMeta


@frozen
class TopicSpec:
    """Specification of a topic; a topic with an equal one may be created again (captured: topic_create)."""

    partition_num: int = 1  # number of partitions
    replica: int = 1  # copies of each partition
    suggest_load: int = 0  # load for placement; stored, not used
    sync_every: int = 0  # messages between two syncs to the disk; 0 for the server's default
    retention_days: int = 0  # days that finished messages are kept; 0 for the server's default
    ordered: bool = False  # SUB_ORDERED is required; several partitions may live on one node
    multi_part: bool = False  # several partitions may live on one node
    extend: bool = False  # messages may carry JSON headers
    disable_channel_auto_create: bool = False  # channels have to be registered

    @property
    def shares_nodes(self) -> bool:
        """Whether one node may hold several partitions."""
        return self.ordered or self.multi_part

    @property
    def quorum(self) -> int:
        """In-sync replicas that a write needs, more than half of the replicas, as captured in failover_kill_leader."""
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
    """One partition."""

    leader: str  # the node that was elected last; it may be dead
    replicas: list[str]  # the nodes that hold a copy, in sync or not
    in_sync: list[str]  # replicas that have every acknowledged message, the leader included
    epoch: int = 1  # grows with each election
    resigned: bool = False  # the leader lost its majority (captured: failover_kill_follower)
    joining: set[str] = field(factory=set)  # nodes about to join the in-sync replicas; writes wait for them


@define
class TopicState:
    """One topic."""

    name: str
    spec: TopicSpec
    partitions: dict[int, PartitionState] = field(factory=dict)
    registered: list[str] = field(factory=list)

    def change(self, **changes: Any) -> None:
        self.spec = evolve(self.spec, **changes)
