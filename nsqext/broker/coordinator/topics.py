"""State and decisions of the coordinator, without I/O."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field, frozen

from nsqext.types import TopicMeta

if TYPE_CHECKING:
    from nsqext.broker.nsqd.node import Node
    from nsqext.types import Address


@frozen
class TopicSpec:
    """Specification of a topic, which an equal create command repeats without error (captured: topic_create)."""

    partition_num: int = 1
    replica: int = 1  #: copies of each partition
    suggest_load: int = 0  #: load for placement; stored, not used
    sync_every: int = 0  #: messages between two syncs to disk; 0 for the server's default
    retention_days: int = 0  #: days to keep finished messages; 0 for the server's default
    ordered: bool = False  #: SUB_ORDERED is required; one node may hold several partitions
    multi_part: bool = False  #: one node may hold several partitions
    extend: bool = False  #: messages may carry JSON headers
    disable_channel_auto_create: bool = False  #: channels must be registered

    @property
    def shares_nodes(self) -> bool:
        return self.ordered or self.multi_part

    @property
    def quorum(self) -> int:
        """In-sync replicas that a write needs (captured in failover_kill_leader)."""
        return self.replica // 2 + 1

    def nodes_needed(self) -> int:
        return self.replica if self.shares_nodes else self.replica * self.partition_num

    def place(
        self, load: Mapping[str, tuple[int, int]], existing: Mapping[int, CoordinatedPartition]
    ) -> dict[int, list[str]] | None:
        """Choose nodes for unplaced partitions, the leader first; None with too few nodes.

        ``load`` has each usable node's numbers of led and held partitions.
        """
        if len(load) < self.nodes_needed():
            return None
        leads = {node: counts[0] for node, counts in load.items()}
        held = dict.fromkeys(load, 0)  # of this topic
        for state in existing.values():
            for node in state.replicas:
                if node in held:
                    held[node] += 1
        others = {node: counts[1] - held[node] for node, counts in load.items()}  # of other topics
        placed: dict[int, list[str]] = {}
        for partition in range(self.partition_num):
            if partition in existing:
                continue
            order = sorted(load, key=lambda node: (held[node], leads[node], others[node], node))
            if not self.shares_nodes:
                order = [node for node in order if not held[node]]
            chosen = order[: self.replica]
            if len(chosen) < self.replica:
                return None
            placed[partition] = chosen
            leads[chosen[0]] += 1
            for node in chosen:
                held[node] += 1
        return placed

    def meta(self) -> TopicMeta:
        return TopicMeta(
            partition_num=self.partition_num,
            replica=self.replica,
            extend_support=self.extend,
            ordered=self.ordered,
            multi_part=self.multi_part,
            disable_channel_auto_create=self.disable_channel_auto_create,
        )


@define
class CoordinatedPartition:
    """A partition."""

    leader: str  #: elected last; may be dead
    replicas: list[str]  #: in sync or not
    in_sync: list[str]  #: replicas with every acknowledged message, with the leader
    epoch: int = 1  #: grows with each election
    resigned: bool = False  #: the leader lost its majority
    joining: set[str] = field(factory=set)  #: nodes about to join the in-sync replicas; writes wait

    def candidate(self, alive: Collection[str]) -> str | None:
        """Return an in-sync node to lead, preferably the leader; None if all are dead."""
        if self.leader in alive and self.leader in self.in_sync:
            return self.leader
        return next((node for node in self.in_sync if node in alive), None)

    def promote(self, node: str, present: Collection[str]) -> None:
        """Make an in-sync node the leader, in a new epoch; absent in-sync replicas are dropped."""
        self.leader = node
        self.epoch += 1
        self.resigned = False
        self.joining.clear()
        self.in_sync = [node, *(other for other in self.in_sync if other != node and other in present)]

    def drop_from_in_sync(self, node: str, spec: TopicSpec) -> None:
        """Remove a follower from the in-sync replicas.

        A leader without a majority resigns: it answers E_FAILED_ON_NOT_LEADER, and lookup still shows it for access=r
        (captured: failover_kill_follower).
        """
        self.joining.discard(node)
        if node in self.in_sync:
            self.in_sync.remove(node)
            self.resigned = len(self.in_sync) < spec.quorum

    def is_writable(self, spec: TopicSpec) -> bool:
        return len(self.in_sync) >= spec.quorum and not self.joining and not self.resigned


@define
class TopicState:
    """A topic."""

    name: str
    spec: TopicSpec
    partitions: dict[int, CoordinatedPartition] = field(factory=dict)
    registered: list[str] = field(factory=list)

    def change(self, **changes: Any) -> None:
        self.spec = evolve(self.spec, **changes)


@define(eq=False)
class ClusterMember:
    """A node."""

    name: str  #: for example ``n1``
    node: Node  #: survives a kill, as its disk would
    tcp: Address  #: for clients
    http: Address
    number: int  #: from 1
    alive: bool = True
    isolated: bool = False  #: serves clients; neither the coordinator nor other nodes reach it
    present: bool = True  #: alive, or with an unexpired lease
    removing: bool = False  #: its partitions move away

    @property
    def reachable(self) -> bool:
        return self.alive and not self.isolated and not self.node.faults.frozen

    @property
    def address(self) -> str:
        """``host:http_port``, its name in tombstones."""
        return f"{self.http.host}:{self.http.port}"

    @property
    def entry(self) -> dict[str, Any]:
        """Its entry in the response to ``/lookup``."""
        return {
            "id": str(self.tcp),
            "remote_address": str(self.tcp),
            "hostname": self.node.options.hostname,
            "broadcast_address": self.tcp.host,
            "tcp_port": self.tcp.port,
            "http_port": self.http.port,
            "version": self.node.limits.version,
            "distributed_id": self.distributed_id,
        }

    @property
    def distributed_id(self) -> str:
        """Host, RPC port (the HTTP port), TCP port and number."""
        return f"{self.tcp.host}:{self.http.port}:{self.tcp.port}:{self.number}"
