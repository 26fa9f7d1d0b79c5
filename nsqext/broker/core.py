"""The inside of a cluster of the redesigned generation: everything that runs in its loop."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio
from attrs import evolve

from nsqext.broker.clock import Clock
from nsqext.broker.coordinator import administration as admin
from nsqext.broker.coordinator import membership
from nsqext.broker.coordinator.coordinator import Coordinator, CoordinatorOptions
from nsqext.broker.coordinator.joining import join
from nsqext.broker.coordinator.members import Member
from nsqext.broker.faults import NodeFaults
from nsqext.broker.lookupd.lookupd import Lookupd, LookupdGroup
from nsqext.broker.nsqd.node import Node
from nsqext.broker.nsqd.options import NodeOptions
from nsqext.broker.ports import Ports, split_address
from nsqext.broker.running import RunningLookupd, RunningNode
from nsqext.errors import InvalidInput, InvalidState, NsqError, PartitionUnavailable, TopicNotFound
from nsqext.protocol.negotiate import ServerLimits

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

    from nsqext.broker.coordinator.replicas import ReplicaSet
    from nsqext.broker.coordinator.topics import TopicSpec
    from nsqext.broker.options import ClusterOptions, ClusterShape
    from nsqext.types import Address

__all__ = ("Core",)


class Core:
    """Nodes, lookup nodes and the coordinator; every method but `__init__` runs in the loop.

    Args:
        shape: what there is to be.
        options: the rest.
    """

    def __init__(self, shape: ClusterShape, options: ClusterOptions) -> None:
        self.shape = shape
        self.options = options
        self.clock = Clock()
        self.ports = Ports()
        times = CoordinatorOptions(options.lease, options.join_pause, options.replace_after)
        self.coordinator = Coordinator(times)
        self.coordinator.join = join
        self.group = LookupdGroup()
        self.nodes: dict[str, RunningNode] = {}
        self.lookupds: dict[str, RunningLookupd] = {}
        self._stopping = anyio.Event()
        self._tasks: TaskGroup | None = None

    # --- life -----------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Run until `stop`; every socket is closed and every port given back then."""
        try:
            self._make_nodes()
            self._make_lookupds()
            async with anyio.create_task_group() as self._tasks:
                await self._tasks.start(self.coordinator.run)
                for lookupd in self.lookupds.values():
                    await lookupd.start(self._tasks)
                for node in self.nodes.values():
                    await node.start(self._tasks)
                task_status.started()
                await self._stopping.wait()
                await self._end()
        finally:
            self.ports.release()

    def stop(self) -> None:
        """End the cluster."""
        self._stopping.set()

    async def _end(self) -> None:
        for lookupd in self.lookupds.values():
            await lookupd.kill()
        for running in self.nodes.values():
            running.member.node.faults.heal()
            await running.kill()
            for topic, partition in list(running.member.node.hosted):
                running.member.node.unhost(topic, partition)
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()

    def _address(self, given: tuple[str, ...], number: int) -> Address:
        wanted = given[number] if number < len(given) else ":0"
        return self.ports.take(split_address(wanted, self.options.host))

    def _make_nodes(self) -> None:
        options = self.options
        limits = options.limits or ServerLimits()
        for number in range(self.shape.nodes):
            name = f"n{number + 1}"
            settings = NodeOptions(
                limits=evolve(limits, tls=limits.tls or options.tls is not None, auth=bool(options.auth_addresses)),
                clock=self.clock.now,
                wall=self.clock.wall,
                broadcast_address=options.host,
                tls=options.tls,
                auth_addresses=options.auth_addresses,
                data_path=self.shape.data_path / name if self.shape.data_path else None,
                memory_bound=options.memory_bound,
            )
            node = Node(name, settings, NodeFaults())
            tcp, http = self._address(options.nsqd_tcp, number), self._address(options.nsqd_http, number)
            member = Member(name, node, tcp, http, number + 1)
            self.coordinator.members[name] = member
            self.nodes[name] = RunningNode(member)

    def _make_lookupds(self) -> None:
        for number in range(self.shape.lookupds):
            name = f"l{number + 1}"
            lookupd = Lookupd(name, self.coordinator, self.group)
            lookupd.http = self._address(self.options.lookupd_http, number)
            lookupd.tcp = self._address(self.options.lookupd_tcp, number)
            self.group.nodes.append(lookupd)
            self.lookupds[name] = RunningLookupd(lookupd)
        self.group.elect()

    # --- topics ---------------------------------------------------------------------------------------------------

    async def create_topic(self, name: str, spec: TopicSpec, channels: tuple[str, ...]) -> None:
        """Create a topic with channels; returns when every partition takes writes."""
        try:
            admin.create_topic(self.coordinator, name, spec)
        except admin.Refused as error:
            raise InvalidInput(
                f"the topic cannot be created: {error.text}", topic=name, hint="see the partitions, replicas and nodes"
            ) from error
        if spec.disable_channel_auto_create:
            admin.register_channels(self.coordinator, name, list(channels))
        for replicas in self.coordinator.partitions(name):
            for channel in channels:
                leader = self.coordinator.members[replicas.state.leader].node
                leader.channel(leader.hosted[name, replicas.partition], channel)
            while not self.coordinator.writable(replicas):
                await replicas.wait()

    def delete_topic(self, name: str) -> None:
        """Delete a topic."""
        try:
            admin.delete_topic(self.coordinator, name)
        except admin.Refused as error:
            raise TopicNotFound("there is no such topic", topic=name) from error

    def upgrade_topic(self, name: str) -> None:
        """Turn a topic into an extend topic."""
        try:
            admin.update_topic(self.coordinator, name, extend=True)
        except admin.Refused as error:
            raise TopicNotFound("there is no such topic", topic=name) from error

    async def wait_writable(self, topic: str, partition: int, timeout: float) -> str:
        """Return the leader's name when the partition takes writes."""
        replicas = self.replicas(topic, partition)
        with anyio.move_on_after(timeout):
            while not self.coordinator.writable(replicas):
                await replicas.wait()
            return replicas.state.leader
        raise PartitionUnavailable(f"the partition took no writes within {timeout} s", topic=topic, partition=partition)

    def replicas(self, topic: str, partition: int) -> ReplicaSet:
        """Return the copies of a partition."""
        found = self.coordinator.sets.get((topic, partition))
        if found is None:
            raise TopicNotFound("there is no such partition", topic=topic, partition=partition)
        return found

    # --- nodes ----------------------------------------------------------------------------------------------------

    def _server(self, name: str) -> RunningNode | RunningLookupd:
        found = self.nodes.get(name) or self.lookupds.get(name)
        if found is None:
            known = ", ".join([*self.nodes, *self.lookupds])
            raise InvalidInput(f"there is no node {name!r}", hint=f"the cluster has {known}")
        return found

    async def kill(self, name: str) -> None:
        """Kill a node as ``kill -9`` does."""
        running = self._server(name)
        if isinstance(running, RunningLookupd):
            running.lookupd.alive = False
            self.group.elect()
            await running.kill()
            return
        running.member.alive = False
        await running.kill()
        running.member.node.faults.thaw()
        membership.silent(self.coordinator, running.member)

    async def terminate(self, name: str) -> None:
        """End a node as SIGTERM does: its partitions pass to others first."""
        running = self._server(name)
        if isinstance(running, RunningLookupd):
            await self.kill(name)
            return
        membership.left(self.coordinator, running.member)
        await running.drain()

    async def restart(self, name: str) -> None:
        """Start a node that was killed; one that runs is killed first. It has what it had."""
        running = self._server(name)
        if self._tasks is None:
            raise InvalidState("the cluster is not running")
        if running.server is not None:
            await self.kill(name)
        await running.start(self._tasks)
        if isinstance(running, RunningLookupd):
            running.lookupd.alive = True
            self.group.elect()
        else:
            membership.returned(self.coordinator, running.member)

    def node(self, name: str) -> RunningNode:
        """Return an nsqd."""
        running = self._server(name)
        if not isinstance(running, RunningNode):
            raise InvalidInput(f"{name!r} is a lookup node")
        return running

    def lookupds_named(self, name: str | None) -> list[Lookupd]:
        """Return one lookup node, or all of them."""
        if name is None:
            return [running.lookupd for running in self.lookupds.values()]
        running = self._server(name)
        if not isinstance(running, RunningLookupd):
            raise InvalidInput(f"{name!r} is not a lookup node")
        return [running.lookupd]

    def freeze(self, name: str) -> None:
        """Stop a node where it stands."""
        member = self.node(name).member
        member.node.faults.freeze()
        membership.silent(self.coordinator, member)

    def thaw(self, name: str) -> None:
        """Let a frozen node go on."""
        member = self.node(name).member
        member.node.faults.thaw()
        if member.alive:
            membership.thawed(self.coordinator, member)

    def heal(self) -> None:
        """Take every fault away but kills."""
        for name, running in self.nodes.items():
            if running.member.node.faults.frozen:
                self.thaw(name)
            running.member.node.faults.heal()
        for lookupd in self.lookupds_named(None):
            lookupd.see_truth()

    async def advance(self, seconds: float) -> None:
        """Let time pass at once, and have every node see it."""
        self.clock.advance(seconds)
        for running in self.nodes.values():
            if running.server is not None:
                running.server.busy = True
                running.member.node.tick()
                running.server.flush()

    async def move_leader(self, topic: str, partition: int, name: str) -> None:
        """Make another node the leader of a partition; a node without a copy gets the old leader's."""
        self.node(name)
        replicas = self.replicas(topic, partition)
        source = replicas.state.leader
        if source == name:
            return
        move = partial(admin.move_partition, self.coordinator, topic, partition, source, name, leader=True)
        try:
            await move()
        except admin.Refused as error:
            raise NsqError(f"the leader cannot be moved: {error.text}", topic=topic, partition=partition) from error
