"""The coordinator: nodes, topics, and every node's role in every partition.

`topics` decides, this class executes. `membership` handles nodes that fail and return, `admin_ops` the requests of
operators.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import anyio
from attrs import frozen

from nsqext.broker.coordinator.replication import ReplicaSet, commit_all, copy_records, hand_over_channels
from nsqext.broker.engine.storage.log import Refusal
from nsqext.errors import InvalidSetting

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

    from nsqext.broker.coordinator.topics import ClusterMember, CoordinatedPartition, TopicState

_MIRROR = 0.2  # seconds between copies of channel positions to followers; a crash of the leader loses later positions
_RETRY = 1.0  # seconds until a replica with a full disk catches up again

logger: logging.Logger = logging.getLogger(__name__)


@frozen
class CoordinatorOptions:
    """See `nsqext.broker.options.ClusterOptions`."""

    lease: float = 0.3  #: 20 in the real cluster
    join_pause: float = 0.05  #: about 3 in the real cluster
    replace_after: float = 600.0


class Coordinator:
    """Topics, partitions and nodes of a cluster."""

    def __init__(self, options: CoordinatorOptions | None = None) -> None:
        self.options: CoordinatorOptions = options or CoordinatorOptions()
        self.members: dict[str, ClusterMember] = {}
        self.topics: dict[str, TopicState] = {}
        self.replica_sets: dict[tuple[str, int], ReplicaSet] = {}
        self.upgrading = False  #: an operator announced an upgrade
        #: called with the name of a topic after a change of it or its roles
        self.watchers: list[Callable[[str], None]] = []
        #: topic, partition and node of each replica that catches up
        self.catching_up: set[tuple[str, int, str]] = set()
        self.leases: dict[str, anyio.CancelScope] = {}  #: of silent nodes, and of absent nodes until they are replaced
        self.separated: set[frozenset[str]] = set()  #: pairs of nodes without a connection
        self._group: TaskGroup | None = None
        self._counted: dict[tuple[str, int], tuple[str, tuple[str, ...]]] = {}
        self._leads: Counter[str] = Counter()
        self._holds: Counter[str] = Counter()

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run leases and catch-ups, and mirror channels, until cancelled."""
        async with anyio.create_task_group() as self._group:
            for replicas in list(self.replica_sets.values()):  # opened from the disk
                self.commit_when_replicated(replicas)
                self.start_catch_ups(replicas)
            task_status.started()
            while True:
                await anyio.sleep(_MIRROR)
                for replicas in list(self.replica_sets.values()):
                    self.mirror(replicas)

    def spawn(self, function: Callable[..., Coroutine[Any, Any, object]], *args: object) -> None:
        if self._group is not None:
            self._group.start_soon(function, *args)

    # Queries

    def reachable(self, name: str) -> bool:
        member = self.members.get(name)
        return member is not None and member.reachable

    def connected(self, source: str, target: str) -> bool:
        return self.reachable(target) and frozenset((source, target)) not in self.separated

    def present(self) -> set[str]:
        return {name for name, member in self.members.items() if member.present}

    def usable(self) -> list[ClusterMember]:
        return [member for member in self.members.values() if member.reachable and not member.removing]

    def load(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of led and held partitions of each usable node."""
        return {member.name: (self._leads[member.name], self._holds[member.name]) for member in self.usable()}

    def free_nodes(self, replicas: ReplicaSet) -> list[str]:
        """Return usable nodes without a replica of a partition, fewest partitions first."""
        free = [member.name for member in self.usable() if member.name not in replicas.state.replicas]
        return sorted(free, key=lambda name: (self._holds[name], name))

    def _count(self, replicas: ReplicaSet) -> None:
        """Update the nodes' load after a change of a partition; the cost does not grow with topics."""
        key, state = (replicas.topic, replicas.partition), replicas.state
        before = self._counted.pop(key, None)
        if before is not None:
            self._leads[before[0]] -= 1
            self._holds.subtract(before[1])
        if self.exists(replicas):
            self._counted[key] = state.leader, tuple(state.replicas)
            self._leads[state.leader] += 1
            self._holds.update(state.replicas)

    def replica_sets_on(self, name: str) -> list[ReplicaSet]:
        return [replicas for replicas in self.replica_sets.values() if name in replicas.state.replicas]

    def partitions(self, topic: str) -> Iterator[ReplicaSet]:
        for partition in self.topics[topic].partitions:
            yield self.replica_sets[topic, partition]

    def exists(self, replicas: ReplicaSet) -> bool:
        return self.replica_sets.get((replicas.topic, replicas.partition)) is replicas

    def writable(self, replicas: ReplicaSet) -> bool:
        state = replicas.state
        if not self.exists(replicas):
            return False
        return self.members[state.leader].alive and state.is_writable(self.topics[replicas.topic].spec)

    @property
    def stable(self) -> bool:
        in_sync = all(set(found.state.replicas) == set(found.state.in_sync) for found in self.replica_sets.values())
        return in_sync and not self.upgrading and all(member.alive for member in self.members.values())

    # Topics and replicas

    def open_partition(self, topic: TopicState, partition: int, state: CoordinatedPartition) -> None:
        """Host a partition on its nodes; with an unusable disk on no node, and raise `InvalidSetting`."""
        replicas = ReplicaSet(topic.name, partition, state, self.connected)
        try:
            for name in state.replicas:
                self.host(replicas, name)
        except InvalidSetting:
            for name in list(replicas.hosts):
                self.members[name].node.unhost(topic.name, partition)
            raise
        topic.partitions[partition] = state
        self.replica_sets[topic.name, partition] = replicas
        self._prefer_longest(replicas)
        for channel in topic.registered:
            replicas.leader.channel(channel)
        self.apply_roles(replicas)
        self.commit_when_replicated(replicas)

    def _prefer_longest(self, replicas: ReplicaSet) -> None:
        """Elect the longest whole in-sync replica if the leader lost messages on disk."""
        before, state = replicas.leader, replicas.state
        counts = {
            name: replicas.hosts[name].partition.log.whole_count for name in state.in_sync if name in replicas.hosts
        }
        longest = max(counts, key=lambda name: counts[name])
        if counts[longest] > counts[state.leader]:
            state.promote(longest, self.present())
            hand_over_channels(before, replicas.leader)

    def host(self, replicas: ReplicaSet, name: str) -> None:
        """Host a replica, first as a follower; raises `InvalidSetting` for an unusable disk."""
        meta = self.topics[replicas.topic].spec.meta()
        hosted = self.members[name].node.host(replicas.topic, replicas.partition, meta)
        hosted.leader = hosted.writable = False
        hosted.partition.suspend()
        replicas.hosts[name] = hosted

    def drop(self, replicas: ReplicaSet, names: list[str]) -> None:
        for name in names:
            replicas.state.drop_from_in_sync(name, self.topics[replicas.topic].spec)
        self.apply_roles(replicas)

    def unhost(self, replicas: ReplicaSet, name: str) -> None:
        replicas.hosts.pop(name, None)
        replicas.forget(name)
        self.members[name].node.unhost(replicas.topic, replicas.partition, destroy=True)

    def remove_topic(self, topic: TopicState) -> None:
        for partition in list(topic.partitions):
            replicas = self.replica_sets.pop((topic.name, partition))
            for name in list(replicas.hosts):
                self.unhost(replicas, name)
            self._count(replicas)
            replicas.state.epoch += 1
            replicas.changes.wake()
        del self.topics[topic.name]
        self.notify_watchers(topic.name)

    # Leaders and followers

    def elect(self, replicas: ReplicaSet, name: str) -> None:
        """Make an in-sync node the leader; consumers of the old leader are closed.

        Messages that a follower lacks are delivered after it has them.
        """
        before = replicas.leader
        replicas.state.promote(name, self.present())
        if replicas.leader is not before:
            hand_over_channels(before, replicas.leader)
        replicas.uncommit_tail()
        self.apply_roles(replicas)
        self.commit_when_replicated(replicas)

    def apply_roles(self, replicas: ReplicaSet) -> None:
        topic, state = self.topics[replicas.topic], replicas.state
        writable = state.is_writable(topic.spec)
        for name, hosted in replicas.hosts.items():
            led = hosted.leader
            hosted.leader = name == state.leader and not state.resigned and self.members[name].alive
            hosted.writable = hosted.leader and writable
            hosted.epoch = state.epoch
            hosted.meta = topic.spec.meta()
            hosted.auto_create_channels = not topic.spec.disable_channel_auto_create
            hosted.replicate = replicas.replicate if hosted.leader and len(state.in_sync) > 1 else None
            if hosted.leader and not led:
                hosted.partition.resume()
            elif led and not hosted.leader:
                hosted.partition.suspend()
        replicas.changes.wake()
        self.start_catch_ups(replicas)
        self.notify_watchers(replicas.topic)

    def commit_when_replicated(self, replicas: ReplicaSet) -> None:
        if replicas.push():
            commit_all(replicas.leader)
        else:
            self.spawn(self._commit_later, replicas)
        self.mirror(replicas)

    async def _commit_later(self, replicas: ReplicaSet) -> None:
        epoch = replicas.state.epoch
        while not replicas.push():
            await replicas.changes.wait()
            if replicas.state.epoch != epoch or replicas.state.resigned:
                return
        commit_all(replicas.leader)

    def channels_changed(self, topic: str, partition: int, channel: str) -> None:
        replicas = self.replica_sets.get((topic, partition))
        if replicas is not None:
            self.mirror(replicas)

    def mirror(self, replicas: ReplicaSet) -> None:
        state = replicas.state
        if self.reachable(state.leader):
            for name in state.in_sync:
                if name != state.leader and name in replicas.hosts and self.connected(state.leader, name):
                    replicas.mirror_to(name)

    def notify_watchers(self, topic: str) -> None:
        for watcher in list(self.watchers):
            watcher(topic)

    # Links between nodes

    def separate(self, first: str, second: str) -> None:
        """Cut the link between two nodes; a leader drops the follower after a lease."""
        pair = frozenset((first, second))
        if pair not in self.separated:
            self.separated.add(pair)
            self.spawn(self._drop_separated, pair)

    async def _drop_separated(self, pair: frozenset[str]) -> None:
        await anyio.sleep(self.options.lease)
        for replicas in list(self.replica_sets.values()) if pair in self.separated else ():
            state = replicas.state
            dropped = [name for name in pair if name != state.leader and name in state.in_sync and state.leader in pair]
            if dropped:
                self.drop(replicas, dropped)

    def connect(self, first: str, second: str) -> None:
        """Restore the link between two nodes; dropped followers catch up."""
        pair = frozenset((first, second))
        if pair in self.separated:
            self.separated.discard(pair)
            for replicas in list(self.replica_sets.values()):
                if pair <= set(replicas.state.replicas):
                    self.apply_roles(replicas)

    # Catch-up

    def start_catch_ups(self, replicas: ReplicaSet) -> None:
        state = replicas.state
        self._count(replicas)
        if not self.reachable(state.leader) or self._group is None:
            return
        for name in state.replicas:
            key = (replicas.topic, replicas.partition, name)
            if name not in state.in_sync and self.connected(state.leader, name) and key not in self.catching_up:
                self.catching_up.add(key)
                self.spawn(self._catch_up, replicas, name)

    async def _catch_up(self, replicas: ReplicaSet, name: str) -> None:
        """Copy what a replica lacks; add it to the in-sync replicas.

        A changed leader, a silent node or a deleted topic ends it without success; this change starts the next
        catch-up. A full disk is tried again after a second.
        """
        key, state, epoch = (replicas.topic, replicas.partition, name), replicas.state, replicas.state.epoch

        def is_current() -> bool:
            return (
                self.exists(replicas)
                and state.epoch == epoch
                and name in state.replicas
                and self.connected(state.leader, name)
                and self.reachable(state.leader)
            )

        try:
            if is_current() and await self._copy_all(replicas, name, is_current):
                self._add_in_sync(replicas, name)
                return
        except Refusal as refusal:
            logger.warning("%s cannot catch up: %s", name, refusal.text)
            self._leave_joining(replicas, name)
            await anyio.sleep(_RETRY)
        finally:
            self.catching_up.discard(key)
        self._leave_joining(replicas, name)

    async def _copy_all(self, replicas: ReplicaSet, name: str, is_current: Callable[[], bool]) -> bool:
        """Copy all records; writes wait during the last step (captured: failover_r3_term_leader)."""
        replicas.align(name)
        source, target = replicas.leader, replicas.hosts[name].partition
        while not copy_records(source, target):
            await anyio.lowlevel.checkpoint()
            if not is_current():
                return False
        replicas.state.joining.add(name)
        self.apply_roles(replicas)
        await anyio.sleep(self.options.join_pause)
        if not is_current():
            return False
        while not copy_records(source, target):
            pass
        return True

    def _add_in_sync(self, replicas: ReplicaSet, name: str) -> None:
        state = replicas.state
        state.joining.discard(name)
        if name not in state.in_sync:
            state.in_sync.append(name)
        if len(state.in_sync) >= self.topics[replicas.topic].spec.quorum:
            state.resigned = False
        self.apply_roles(replicas)
        self.commit_when_replicated(replicas)

    def _leave_joining(self, replicas: ReplicaSet, name: str) -> None:
        replicas.state.joining.discard(name)
        if self.exists(replicas):
            self.apply_roles(replicas)
