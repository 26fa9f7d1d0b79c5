"""Runtimes of the generations: with a coordinator, or with nodes that register at lookup nodes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from nsqext.broker.coordinator import admin_ops as admin
from nsqext.broker.coordinator import membership
from nsqext.broker.coordinator.coordinator import Coordinator, CoordinatorOptions
from nsqext.broker.coordinator.state_file import StateFile
from nsqext.broker.coordinator.topics import TopicSpec
from nsqext.broker.engine.options import make_kind
from nsqext.broker.engine.storage.files import usable
from nsqext.broker.engine.storage.log import Refusal
from nsqext.broker.lookupd.api import lookupd_app
from nsqext.broker.lookupd.lookupd import Lookupd, LookupdGroup, LookupServer
from nsqext.broker.lookupd.original import OriginalLookupd, original_app
from nsqext.broker.lookupd.registration_client import RegistrationClient
from nsqext.broker.lookupd.registry import Registry
from nsqext.broker.runtime import ManagedLookupd, ManagedNode, NodeChange, Runtime
from nsqext.errors import InvalidInput, InvalidSetting, NsqError, PartitionUnavailable, TopicNotFound
from nsqext.protocol.identify import KEY_FAILOVER
from nsqext.protocol.server.negotiate import ServerLimits

if TYPE_CHECKING:
    from pathlib import Path

    from nsqext.broker.coordinator.replication import ReplicaSet
    from nsqext.broker.coordinator.topics import ClusterMember
    from nsqext.broker.options import ClusterOptions, ClusterShape
    from nsqext.types import Address

_REGISTRATION_TIMEOUT = 5.0  # seconds
_DELETED = "the topic was deleted while it was created"
_ON_CHANGE = {
    NodeChange.SILENT: membership.silent,
    NodeChange.LEAVING: membership.left,
    NodeChange.THAWED: membership.thawed,
    NodeChange.RETURNED: membership.returned,
}
_RPC_COUNTS = (
    *("RPCCalls", "RPCTime", "BytesWritten", "BytesRead", "ReadCalls", "ReadErrors", "WriteCalls", "WriteErrors"),
    *("DialCalls", "DialErrors", "AcceptCalls", "AcceptErrors"),
)
_ERROR_COUNTS = (
    *("WriteEpochError", "WriteNotLeaderError", "WriteQuorumError", "WriteBusyError", "RpcCheckFailed"),
    *("LeadershipError", "TopicCoordMissingError", "LocalErr"),
)


# by these files, a data path shows the generation of its cluster: the other one would not find its messages, or take
# the logs of nodes for copies of each other
_STATE, _ORIGINAL_MARK = "cluster.json", "generation.original"


def _refuse_other(folder: Path, mark: str, generation: str) -> None:
    """Raise InvalidSetting for the data path of a cluster of another generation."""
    if (folder / mark).exists():
        raise InvalidSetting(
            f"{folder} has the messages of a cluster of the {generation} generation",
            hint=f"give generation={generation!r} (nsqext broker --generation {generation}), or another data path",
        )


class RuntimeRedesigned(Runtime):
    """Nodes with a coordinator."""

    def __init__(self, shape: ClusterShape, options: ClusterOptions) -> None:
        super().__init__(shape, options, options.limits or ServerLimits())
        times = CoordinatorOptions(options.lease, options.join_pause, options.replace_after)
        self.coordinator: Coordinator = Coordinator(times)
        self.group: LookupdGroup = LookupdGroup()
        self._state_file: StateFile | None = None

    def create_lookupd(self, name: str, tcp: Address, http: Address) -> ManagedLookupd:
        """Create a lookup node; the first is the leader."""
        shown_tcp, shown_http = self.advertised(tcp), self.advertised(http)
        lookupd = Lookupd(self.coordinator, self.group, name=name, tcp=shown_tcp, http=shown_http)
        self.group.nodes.append(lookupd)
        self.group.elect()
        return ManagedLookupd(lookupd, lookupd_app(lookupd), tcp, http, guard=self.http_guard)

    def add_member(self, member: ClusterMember) -> None:
        self.coordinator.members[member.name] = member
        member.node.on_channel_created = member.node.on_channel_deleted = self.coordinator.channels_changed
        member.node.place = {"rpc_port": str(member.http.port), "id": member.number}
        member.node.coordinator_stats = partial(coordinator_stats, self.coordinator, member.name)

    def create_servers(self) -> None:
        folder = self.shape.data_path
        if folder is not None:
            _refuse_other(folder, _ORIGINAL_MARK, "original")
        super().create_servers()
        if folder is not None:
            self._state_file = file = StateFile(self.coordinator, folder / _STATE)
            file.load()
            file.save_all()
            self.coordinator.watchers.append(file.save)

    def background_jobs(self) -> list[Callable[..., Coroutine[Any, Any, None]]]:
        return [self.coordinator.run, *([self._state_file.run] if self._state_file else [])]

    # Topics

    async def create_topic(self, name: str, spec: TopicSpec, channels: tuple[str, ...], dispatch: str = "") -> None:
        try:
            kind = make_kind(dispatch, fixed=True)
        except Refusal as refusal:
            raise InvalidSetting(refusal.text) from refusal
        if kind is not None and kind.type == KEY_FAILOVER and spec.ordered:
            raise InvalidInput("the channels of an ordered topic cannot be dispatched by key_failover", topic=name)
        try:
            admin.create_topic(self.coordinator, name, spec)
        except Refusal as error:
            if name in self.coordinator.topics:
                hint = "delete it first, or choose another name"
            else:
                hint = "check partitions and replicas against the number of nodes that run"
            raise InvalidInput(f"the topic cannot be created: {error.text}", topic=name, hint=hint) from error
        if spec.disable_channel_auto_create:
            admin.register_channels(self.coordinator, name, list(channels))
        for replicas in list(self.coordinator.partitions(name)):
            for channel in channels:
                leader = self.coordinator.members[replicas.state.leader].node
                hosted = leader.hosted[name, replicas.partition]
                leader.channel(hosted, channel)
                try:
                    hosted.partition.admit(channel, kind)
                except Refusal as refusal:
                    raise InvalidInput(refusal.text, topic=name) from refusal
            while not self._accepts_writes(replicas):
                await replicas.changes.wait()
                if not self.coordinator.exists(replicas):
                    raise TopicNotFound(_DELETED, topic=name)

    def delete_topic(self, name: str) -> None:
        try:
            admin.delete_topic(self.coordinator, name)
        except Refusal as error:
            raise TopicNotFound("unknown topic", topic=name) from error

    def upgrade_topic(self, name: str) -> None:
        try:
            admin.update_topic(self.coordinator, name, extend=True)
        except Refusal as error:
            raise TopicNotFound("unknown topic", topic=name) from error

    def replicas(self, topic: str, partition: int) -> ReplicaSet:
        found = self.coordinator.replica_sets.get((topic, partition))
        if found is None:
            raise TopicNotFound("unknown partition", topic=topic, partition=partition)
        return found

    def _accepts_writes(self, replicas: ReplicaSet) -> bool:
        return self.coordinator.writable(replicas) and self.coordinator.reachable(replicas.state.leader)

    async def wait_writable(self, topic: str, partition: int, timeout: float) -> str:
        replicas = self.replicas(topic, partition)
        with anyio.move_on_after(timeout):
            while not self._accepts_writes(replicas):
                await replicas.changes.wait()
            return replicas.state.leader
        raise PartitionUnavailable(f"no writes accepted within {timeout} s", topic=topic, partition=partition)

    async def move_leader(self, topic: str, partition: int, name: str) -> None:
        self.node(name)
        source = self.replicas(topic, partition).state.leader
        if source == name:
            return
        try:
            await admin.move_partition(self.coordinator, topic, partition, source, name, leader=True)
        except Refusal as error:
            raise NsqError(f"the leader cannot be moved: {error.text}", topic=topic, partition=partition) from error

    # Nodes

    def node_changed(self, member: ClusterMember, change: NodeChange) -> None:
        _ON_CHANGE[change](self.coordinator, member)

    def isolate(self, name: str) -> None:
        """Cut a node off from coordinator and nodes, not from clients."""
        member = self.node(name).member
        if not member.isolated:
            member.isolated = True
            self.node_changed(member, NodeChange.SILENT)

    def rejoin(self, name: str) -> None:
        member = self.node(name).member
        if member.isolated:
            member.isolated = False
            if member.reachable:
                self.node_changed(member, NodeChange.THAWED)

    def lookupd_changed(self, lookupd: LookupServer) -> None:
        self.group.elect()


def coordinator_stats(coordinator: Coordinator, node: str, topic: str, partition: int) -> dict[str, Any]:
    """Return a node's answer to ``/coordinator/stats`` (captured: cluster_stats).

    A negative number selects all partitions of the topic; an empty topic selects none.
    """
    held = [
        replicas
        for replicas in coordinator.replica_sets_on(node)
        if replicas.topic == topic and (partition < 0 or replicas.partition == partition)
    ]
    return {
        "rpc_stats": dict.fromkeys(_RPC_COUNTS, 0),
        "ErrStats": dict.fromkeys(_ERROR_COUNTS, 0) | {"OtherCoordErrs": {}},
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


class RuntimeOriginal(Runtime):
    """Nodes without a coordinator."""

    def __init__(self, shape: ClusterShape, options: ClusterOptions) -> None:
        super().__init__(shape, options, options.limits or ServerLimits.original())
        self._original: list[OriginalLookupd] = []

    def create_servers(self) -> None:
        folder = self.shape.data_path
        if folder is not None:
            _refuse_other(folder, _STATE, "redesigned")
            with usable(folder):
                (folder / _ORIGINAL_MARK).touch()
                self._check_nodes(folder)
        super().create_servers()

    def _check_nodes(self, folder: Path) -> None:
        """Raise InvalidSetting if the data path has messages that no node of this cluster would serve."""
        served = {f"n{number + 1}" for number in range(self.shape.nodes)}
        left = [path.name for path in folder.glob("n[0-9]*") if path.name not in served and any(path.glob("*"))]
        if left:
            raise InvalidSetting(
                f"{folder} has topics of the nodes {', '.join(sorted(left))}, which this cluster does not have",
                hint="start at least as many nodes as before",
            )

    def create_lookupd(self, name: str, tcp: Address, http: Address) -> ManagedLookupd:
        options, shown = self.options, self.advertised(tcp)
        registry = Registry(self.clock.wall, options.inactive_producer_timeout, options.tombstone_lifetime)
        lookupd = OriginalLookupd(
            registry, self.limits.version, shown.host, name=name, tcp=shown, http=self.advertised(http)
        )
        self._original.append(lookupd)
        return ManagedLookupd(lookupd, original_app(lookupd), tcp, http, guard=self.http_guard)

    def add_member(self, member: ClusterMember) -> RegistrationClient:
        member.node.load()
        member.node.switches.lookupd_addresses = [str(running.tcp) for running in self.lookupds.values()]
        known = self._known_channels
        return RegistrationClient(member.node, member.tcp, member.http, self.options.lookup_ping, known_channels=known)

    def _known_channels(self, topic: str) -> list[str]:
        alive = [lookupd.registry for lookupd in self._original if lookupd.alive]
        return list(dict.fromkeys(found.subkey for registry in alive for found in registry.find("channel", topic, "*")))

    async def wait_registered(self) -> None:
        with anyio.move_on_after(_REGISTRATION_TIMEOUT):
            for lookupd in self._original:
                while not self._shows_all_nodes(lookupd):  # noqa: ASYNC110 - registrations have no event
                    await anyio.sleep(0.002)

    def _shows_all_nodes(self, lookupd: OriginalLookupd) -> bool:
        registry = lookupd.registry
        shown = sum(1 + len(registry.topics_of(found.node)) for found in registry.producers("client"))
        return shown >= sum(1 + len(running.member.node.hosted) for running in self.nodes.values())

    def lookupd_changed(self, lookupd: LookupServer) -> None:
        """Clear a restarted lookup node; nodes register with their next PING."""
        for found in self._original:
            if found is lookupd and found.alive:
                found.clear()

    async def create_topic(self, name: str, spec: TopicSpec, channels: tuple[str, ...], dispatch: str = "") -> None:
        """Create a topic on every node that is not down; return when every lookup node shows it there."""
        if spec != TopicSpec() or dispatch:
            raise InvalidInput(
                "the original NSQ has no partitions, replicas, ordered topics, extend headers, registered channels or "
                "dispatch types",
                topic=name,
            )
        if not self._registering():
            raise InvalidInput("the topic cannot be created: no node runs", topic=name, hint="restart or thaw a node")
        for running in self.nodes.values():
            if running.server is not None:
                try:
                    hosted = running.member.node.create_topic(name)
                except Refusal as refusal:
                    raise InvalidInput(f"the topic cannot be created: {refusal.text}", topic=name) from refusal
                for channel in channels:
                    running.member.node.channel(hosted, channel)
        for lookupd in self._original:
            while lookupd.alive and not _shows_topic(lookupd, name, channels, self._registering()):
                await anyio.sleep(0.005)
                if not any((name, 0) in running.member.node.hosted for running in self.nodes.values()):
                    raise TopicNotFound(_DELETED, topic=name)

    def _registering(self) -> int:
        """Return the number of nodes that run, and so register their topics."""
        return sum(map(_registers, self.nodes.values()))

    async def advance(self, seconds: float) -> None:
        """Advance the clock; nodes that run have sent their PINGs meanwhile."""
        await super().advance(seconds)
        ports = {found.member.tcp.port for found in self.nodes.values() if _registers(found)}
        for lookupd in self._original:
            for producer in lookupd.registry.producers("client"):
                if producer.node.members["tcp_port"] in ports:
                    producer.node.last_seen = self.clock.wall()

    def delete_topic(self, name: str) -> None:
        deleted = [running.member.node.delete_topic(name) for running in self.nodes.values()]
        if not any(deleted):
            raise TopicNotFound("unknown topic", topic=name)


def _registers(running: ManagedNode) -> bool:
    return running.server is not None and not running.member.node.faults.frozen


def _shows_topic(lookupd: OriginalLookupd, name: str, channels: tuple[str, ...], nodes: int) -> bool:
    registry = lookupd.registry
    counts = [len(registry.producers("channel", name, channel)) for channel in channels]
    return min([len(registry.producers("topic", name)), *counts]) >= nodes
