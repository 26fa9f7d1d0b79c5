"""The inside of a cluster of the original generation: nodes on their own, which register at lookup nodes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import anyio

from nsqext.broker.lookupd.classic import ClassicLookupd
from nsqext.broker.lookupd.registration_client import RegistrationClient
from nsqext.broker.lookupd.registry import Registry
from nsqext.broker.runtime import NodeChange, Runtime
from nsqext.errors import InvalidInput, TopicNotFound
from nsqext.protocol.server.negotiate import ServerLimits

if TYPE_CHECKING:
    from nsqext.broker.coordinator.members import Member
    from nsqext.broker.coordinator.topics import TopicSpec
    from nsqext.broker.lookupd.lookupd import Lookupd
    from nsqext.broker.options import ClusterOptions, ClusterShape
    from nsqext.types import Address

__all__ = ("RuntimeClassic",)

_SETTLING = 5.0


class RuntimeClassic(Runtime):
    """Nodes without a coordinator."""

    def __init__(self, shape: ClusterShape, options: ClusterOptions) -> None:
        super().__init__(shape, options, options.limits or ServerLimits.original())

    def make_lookupd(self, name: str, tcp: Address, http: Address) -> ClassicLookupd:
        """Make a lookup node."""
        options = self.options
        registry = Registry(self.clock.wall, options.inactive_producer_timeout, options.tombstone_lifetime)
        return ClassicLookupd(name, registry, self.limits.version, tcp.host, tcp, http)

    def make_registrar(self, member: Member) -> RegistrationClient:
        """Have a node register at every lookup node."""
        member.node.switches.lookupd_addresses = [str(running.lookupd.tcp) for running in self.lookupds.values()]
        member.node.load()
        return RegistrationClient(member.node, member.tcp, member.http, self.options.lookup_ping)

    def jobs(self) -> list[Callable[..., Coroutine[Any, Any, None]]]:
        """Nothing runs beside the servers."""
        return []

    async def settle(self) -> None:
        """Wait until every lookup node shows all nodes with their topics; not for ever, should one be out of reach."""
        with anyio.move_on_after(_SETTLING):
            for lookupd in self.lookupds_named(None):
                while not self._knows_all(lookupd):  # noqa: ASYNC110 - lookup tells nobody
                    await anyio.sleep(0.002)

    def _knows_all(self, lookupd: Lookupd | ClassicLookupd) -> bool:
        if not isinstance(lookupd, ClassicLookupd):
            return False
        told = sum(1 + len(lookupd.registry.topics_of(one.peer)) for one in lookupd.registry.producers("client"))
        return told >= sum(1 + len(running.member.node.hosted) for running in self.nodes.values())

    def node_changed(self, member: Member, change: NodeChange) -> None:
        """Nobody decides anything: lookup notices by itself."""

    def lookupd_changed(self, lookupd: Lookupd | ClassicLookupd) -> None:
        """Have a lookup node that was started again know nothing; nodes register anew with their next sign of life."""
        if isinstance(lookupd, ClassicLookupd) and lookupd.alive:
            lookupd.forget()

    async def create_topic(self, name: str, spec: TopicSpec, channels: tuple[str, ...], dispatch: str = "") -> None:
        """Create a topic on every node; returns when every lookup node shows all of them."""
        if spec.partition_num != 1 or spec.replica != 1 or spec.ordered or spec.extend or dispatch:
            raise InvalidInput("the original NSQ has no partitions, replicas, order, headers or dispatch", topic=name)
        for running in self.nodes.values():
            hosted = running.member.node.create_topic(name)
            for channel in channels:
                running.member.node.channel(hosted, channel)
        alive = sum(running.member.alive for running in self.nodes.values())
        for lookupd in self.lookupds_named(None):
            while lookupd.alive and not self._shows(lookupd, name, channels, alive):  # noqa: ASYNC110 - lookup tells nobody
                await anyio.sleep(0.005)

    def _shows(self, lookupd: Lookupd | ClassicLookupd, name: str, channels: tuple[str, ...], nodes: int) -> bool:
        if not isinstance(lookupd, ClassicLookupd):
            return False
        registry = lookupd.registry
        counts = [len(registry.producers("channel", name, channel)) for channel in channels]
        return min([len(registry.producers("topic", name)), *counts]) >= nodes

    def delete_topic(self, name: str) -> None:
        """Delete a topic on every node."""
        deleted = [running.member.node.delete_topic(name) for running in self.nodes.values()]
        if not any(deleted):
            raise TopicNotFound("there is no such topic", topic=name)
