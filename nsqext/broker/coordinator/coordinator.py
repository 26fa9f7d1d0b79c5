"""The coordinator's core: who is there, which topics exist, and every node told its role in every partition.

Everything runs in the loop of the cluster. What is decided is in `nsqext.broker.coordinator.policy`; it is carried
out here, in `membership` (nodes that come and go), `joining` (copies that catch up), `administration` (what operators
ask).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import anyio
from attrs import frozen

from nsqext.broker.coordinator import policy as decisions
from nsqext.broker.coordinator.leader_handover import commit_all, mirror_channels, pass_channels
from nsqext.broker.coordinator.replication import ReplicaSet
from nsqext.errors import InvalidSetting

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

    from nsqext.broker.coordinator.members import Member
    from nsqext.broker.coordinator.topics import PartitionState, TopicState

__all__ = ("Coordinator", "CoordinatorOptions")

_MIRROR = 0.2
"""Seconds after which followers learn how far channels have come; what changes in between comes twice after a crash."""

_RPC_COUNTS = (
    *("RPCCalls", "RPCTime", "BytesWritten", "BytesRead", "ReadCalls", "ReadErrors", "WriteCalls", "WriteErrors"),
    *("DialCalls", "DialErrors", "AcceptCalls", "AcceptErrors"),
)
_ERROR_COUNTS = (
    *("WriteEpochError", "WriteNotLeaderError", "WriteQuorumError", "WriteBusyError", "RpcCheckFailed"),
    *("LeadershipError", "TopicCoordMissingError", "LocalErr"),
)


@frozen
class CoordinatorOptions:
    """How the coordinator keeps time; all in seconds.

    Attributes:
        lease: how long a node that fell silent still counts as present; the real cluster's is 20.
        join_pause: how long writes wait while a replica that caught up is taken in; about 3 in the real cluster.
        replace_after: when a node that is away is replaced by another one, where there is one.
    """

    lease: float = 0.3
    join_pause: float = 0.05
    replace_after: float = 600.0

    def __attrs_post_init__(self) -> None:
        for name in ("lease", "join_pause", "replace_after"):
            if not getattr(self, name) >= 0:
                raise InvalidSetting(f"{name}={getattr(self, name)!r} is not a time in seconds")


class Coordinator:
    """Topics, partitions and nodes of one cluster.

    Args:
        options: its times.

    Attributes:
        members: the nodes by name.
        topics: the topics by name.
        sets: the copies of each partition, by topic and number.
        upgrading: an operator announced an upgrade.
        watchers: called after each change of topics or roles.
    """

    def __init__(self, options: CoordinatorOptions | None = None) -> None:
        self.options: CoordinatorOptions = options or CoordinatorOptions()
        self.members: dict[str, Member] = {}
        self.topics: dict[str, TopicState] = {}
        self.sets: dict[tuple[str, int], ReplicaSet] = {}
        self.upgrading = False
        self.watchers: list[Callable[[], None]] = []
        self.joining: set[tuple[str, int, str]] = set()
        self.leases: dict[str, anyio.CancelScope] = {}
        self.join: Callable[[Coordinator, ReplicaSet, str], Coroutine[Any, Any, None]] | None = None
        self._group: TaskGroup | None = None

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep leases and bring copies up to date, until cancelled."""
        async with anyio.create_task_group() as self._group:
            for replicas in list(self.sets.values()):  # what was opened from the disk
                self.settle(replicas)
                self.tend(replicas)
            task_status.started()
            while True:
                await anyio.sleep(_MIRROR)
                for replicas in list(self.sets.values()):
                    self.mirror(replicas)

    def spawn(self, function: Callable[..., Coroutine[Any, Any, object]], *args: object) -> None:
        """Run a function beside the others."""
        if self._group is not None:
            self._group.start_soon(function, *args)

    # --- questions ------------------------------------------------------------------------------------------------

    def reachable(self, name: str) -> bool:
        """Tell whether a node answers."""
        member = self.members.get(name)
        return member is not None and member.reachable

    def present(self) -> set[str]:
        """Return the nodes that are there, or whose lease runs still."""
        return {name for name, member in self.members.items() if member.present}

    def usable(self) -> list[Member]:
        """Return the nodes that may be given new partitions."""
        return [member for member in self.members.values() if member.alive and not member.removing]

    def load(self) -> dict[str, tuple[int, int]]:
        """Return, for each usable node, how many partitions it leads and how many it holds."""
        counts = {member.name: [0, 0] for member in self.usable()}
        for replicas in self.sets.values():
            for name in replicas.state.replicas:
                if name in counts:
                    counts[name][0] += name == replicas.state.leader
                    counts[name][1] += 1
        return {name: (leads, holds) for name, (leads, holds) in counts.items()}

    def sets_of(self, name: str) -> list[ReplicaSet]:
        """Return the partitions that a node holds a copy of."""
        return [replicas for replicas in self.sets.values() if name in replicas.state.replicas]

    def partitions(self, topic: str) -> Iterator[ReplicaSet]:
        """Give the partitions of a topic."""
        for partition in self.topics[topic].partitions:
            yield self.sets[topic, partition]

    def writable(self, replicas: ReplicaSet) -> bool:
        """Tell whether a partition takes writes; one that was deleted does not."""
        state = replicas.state
        if self.sets.get((replicas.topic, replicas.partition)) is not replicas:
            return False
        return self.members[state.leader].alive and decisions.is_open(state, self.topics[replicas.topic].spec)

    def stats(self, node: str, topic: str, partition: int) -> dict[str, Any]:
        """Return what a node answers to ``/coordinator/stats`` (captured: cluster_stats).

        Args:
            node: whose answer.
            topic: only this topic; without one no partition is told.
            partition: only this partition, every one that the node holds when it is negative.
        """
        held = [
            replicas
            for replicas in self.sets_of(node)
            if replicas.topic == topic and (partition < 0 or replicas.partition == partition)
        ]
        return {
            "rpc_stats": dict.fromkeys(_RPC_COUNTS, 0),
            "ErrStats": dict.fromkeys(_ERROR_COUNTS, 0) | {"OtherCoordErrs": {}},
            "topic_coord_stats": [self._coordinated(replicas) for replicas in held],
        }

    def _coordinated(self, replicas: ReplicaSet) -> dict[str, Any]:
        state = replicas.state
        stats = {name: {"hostname": "", "node_id": self.members[name].distributed_id} for name in state.replicas}
        behind = [stats[name] | {"progress": 0} for name in state.replicas if name not in state.in_sync]
        return {
            "node": "",
            "name": replicas.topic,
            "partition": replicas.partition,
            "isr_stats": [stats[name] for name in state.in_sync],
            "catchup_stats": behind or None,
        }

    @property
    def stable(self) -> bool:
        """Whether every partition has all its replicas in sync."""
        whole = all(set(found.state.replicas) == set(found.state.in_sync) for found in self.sets.values())
        return whole and not self.upgrading and all(member.alive for member in self.members.values())

    # --- changes --------------------------------------------------------------------------------------------------

    def open(self, topic: TopicState, partition: int, state: PartitionState) -> None:
        """Have a partition hosted by its nodes.

        Raises:
            InvalidSetting: the disk of one of them cannot be used; none of them hosts it then.
        """
        replicas = ReplicaSet(topic.name, partition, state, self.reachable)
        try:
            for name in state.replicas:
                self.host(replicas, name)
        except InvalidSetting:
            for name in list(replicas.hosts):
                self.members[name].node.unhost(topic.name, partition)
            raise
        topic.partitions[partition] = state
        self.sets[topic.name, partition] = replicas
        self._prefer_whole(replicas)
        for channel in topic.registered:
            replicas.leader.channel(channel)
        self.apply(replicas)
        self.settle(replicas)

    def _prefer_whole(self, replicas: ReplicaSet) -> None:
        """Have another copy that is in sync lead when the leader's was cut off on its disk: it has all of it."""
        before, state = replicas.leader, replicas.state
        counts = {
            name: replicas.hosts[name].partition.log.end_count for name in state.in_sync if name in replicas.hosts
        }
        longest = max(counts, key=lambda name: counts[name])
        if counts[longest] > counts[state.leader]:
            decisions.take_office(state, longest, self.present())
            pass_channels(before, replicas.leader)

    def host(self, replicas: ReplicaSet, name: str) -> None:
        """Have a node hold a copy of a partition, as a follower at first.

        Raises:
            InvalidSetting: its disk cannot be used.
        """
        meta = self.topics[replicas.topic].spec.meta()
        hosted = self.members[name].node.host(replicas.topic, replicas.partition, meta)
        hosted.leader = hosted.writable = False
        hosted.partition.suspend()
        replicas.hosts[name] = hosted

    def unhost(self, replicas: ReplicaSet, name: str) -> None:
        """Take a copy away from a node."""
        replicas.hosts.pop(name, None)
        replicas.forget(name)
        self.members[name].node.unhost(replicas.topic, replicas.partition, destroy=True)

    def close(self, topic: TopicState) -> None:
        """Have a topic forgotten by every node."""
        for partition in list(topic.partitions):
            replicas = self.sets.pop((topic.name, partition))
            for name in list(replicas.hosts):
                self.unhost(replicas, name)
            replicas.state.epoch += 1
            replicas.notify()
        del self.topics[topic.name]
        self.tell()

    def elect(self, replicas: ReplicaSet, name: str) -> None:
        """Make an in-sync node the leader; consumers of the old one are closed, the new one knows what is done."""
        before = replicas.leader
        decisions.take_office(replicas.state, name, self.present())
        if replicas.leader is not before:
            before.suspend()
            pass_channels(before, replicas.leader)
        self.apply(replicas)
        self.settle(replicas)

    def settle(self, replicas: ReplicaSet) -> None:
        """Commit what the leader holds, as soon as all that are in sync hold it, too."""
        if replicas.push():
            commit_all(replicas.leader)
        else:
            self.spawn(self._settle, replicas)
        self.mirror(replicas)

    async def _settle(self, replicas: ReplicaSet) -> None:
        epoch = replicas.state.epoch
        while not replicas.push():
            await replicas.wait()
            if replicas.state.epoch != epoch or replicas.state.resigned:
                return
        commit_all(replicas.leader)

    def take_in(self, replicas: ReplicaSet, name: str) -> None:
        """Count a copy that has everything as in sync."""
        state = replicas.state
        state.joining.discard(name)
        if name not in state.in_sync:
            state.in_sync.append(name)
        if len(state.in_sync) >= self.topics[replicas.topic].spec.quorum:
            state.resigned = False
        self.apply(replicas)
        self.settle(replicas)

    def channels_changed(self, topic: str, partition: int, channel: str) -> None:
        """Hear from a node that a channel came or went."""
        replicas = self.sets.get((topic, partition))
        if replicas is not None:
            self.mirror(replicas)

    def mirror(self, replicas: ReplicaSet) -> None:
        """Give the followers that answer the leader's channels."""
        state = replicas.state
        if len(replicas.hosts) > 1 and self.reachable(state.leader):
            for name, hosted in replicas.hosts.items():
                if name != state.leader and name in state.in_sync and self.reachable(name):
                    mirror_channels(replicas.leader, hosted.partition)

    def apply(self, replicas: ReplicaSet) -> None:
        """Tell every node its role in a partition, and start what is missing."""
        topic, state = self.topics[replicas.topic], replicas.state
        open_ = decisions.is_open(state, topic.spec)
        for name, hosted in replicas.hosts.items():
            led = hosted.leader
            hosted.leader = name == state.leader and not state.resigned and self.members[name].alive
            hosted.writable = hosted.leader and open_
            hosted.epoch = state.epoch
            hosted.meta = topic.spec.meta()
            hosted.auto_create_channels = not topic.spec.disable_channel_auto_create
            hosted.replicate = replicas.replicate if hosted.leader and len(state.in_sync) > 1 else None
            if hosted.leader and not led:
                hosted.partition.resume()
            elif led and not hosted.leader:
                hosted.partition.suspend()
        replicas.notify()
        self.tend(replicas)
        self.tell()

    def tend(self, replicas: ReplicaSet) -> None:
        """Start catching up for every copy that is there and not in sync."""
        state = replicas.state
        if not self.reachable(state.leader) or self.join is None or self._group is None:
            return
        for name in state.replicas:
            key = (replicas.topic, replicas.partition, name)
            if name not in state.in_sync and self.reachable(name) and key not in self.joining:
                self.joining.add(key)
                self.spawn(self.join, self, replicas, name)

    def tell(self) -> None:
        """Call the watchers."""
        for watcher in list(self.watchers):
            watcher()
