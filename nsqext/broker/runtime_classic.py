"""Runtime of a cluster of the original generation: independent nodes that register at lookup nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from nsqext.broker.lookupd.classic import ClassicLookupd, classic_app
from nsqext.broker.lookupd.registration_client import RegistrationClient
from nsqext.broker.lookupd.registry import Registry
from nsqext.broker.runtime import ManagedLookupd, Runtime
from nsqext.errors import InvalidInput, TopicNotFound
from nsqext.protocol.server.negotiate import ServerLimits

if TYPE_CHECKING:
    from nsqext.broker.coordinator.topics import Member, TopicSpec
    from nsqext.broker.lookupd.lookupd import LookupNode
    from nsqext.broker.options import ClusterOptions, ClusterShape
    from nsqext.types import Address

_REGISTRATION_TIMEOUT = 5.0  # seconds


class RuntimeClassic(Runtime):
    """Nodes without a coordinator."""

    def __init__(self, shape: ClusterShape, options: ClusterOptions) -> None:
        super().__init__(shape, options, options.limits or ServerLimits.original())
        self._classic: list[ClassicLookupd] = []

    def create_lookupd(self, name: str, tcp: Address, http: Address) -> ManagedLookupd:
        options, shown = self.options, self.advertised(tcp)
        registry = Registry(self.clock.wall, options.inactive_producer_timeout, options.tombstone_lifetime)
        lookupd = ClassicLookupd(
            registry, self.limits.version, shown.host, name=name, tcp=shown, http=self.advertised(http)
        )
        self._classic.append(lookupd)
        return ManagedLookupd(lookupd, classic_app(lookupd), tcp, http, guard=self.http_guard)

    def add_member(self, member: Member) -> RegistrationClient:
        """Open the topics of a node's data path; return the client that registers the node at lookup nodes."""
        member.node.load()
        member.node.switches.lookupd_addresses = [str(running.tcp) for running in self.lookupds.values()]
        known = self._known_channels
        return RegistrationClient(member.node, member.tcp, member.http, self.options.lookup_ping, known_channels=known)

    def _known_channels(self, topic: str) -> list[str]:
        alive = [lookupd.registry for lookupd in self._classic if lookupd.alive]
        return list(dict.fromkeys(found.subkey for registry in alive for found in registry.find("channel", topic, "*")))

    async def wait_registered(self) -> None:
        """Return when every lookup node shows all nodes with their topics, or after 5 seconds."""
        with anyio.move_on_after(_REGISTRATION_TIMEOUT):
            for lookupd in self._classic:
                while not self._shows_all_nodes(lookupd):  # noqa: ASYNC110 - registrations have no event
                    await anyio.sleep(0.002)

    def _shows_all_nodes(self, lookupd: ClassicLookupd) -> bool:
        registry = lookupd.registry
        shown = sum(1 + len(registry.topics_of(found.node)) for found in registry.producers("client"))
        return shown >= sum(1 + len(running.member.node.hosted) for running in self.nodes.values())

    def lookupd_changed(self, lookupd: LookupNode) -> None:
        """Clear the registrations of a lookup node that was started again; nodes register with their next PING."""
        for found in self._classic:
            if found is lookupd and found.alive:
                found.clear()

    async def create_topic(self, name: str, spec: TopicSpec, channels: tuple[str, ...], dispatch: str = "") -> None:
        """Create a topic on every node; return when every lookup node shows all of them."""
        if spec.partition_num != 1 or spec.replica != 1 or spec.ordered or spec.extend or dispatch:
            raise InvalidInput(
                "the original NSQ has no partitions, replicas, ordered topics, extend headers or dispatch types",
                topic=name,
            )
        for running in self.nodes.values():
            hosted = running.member.node.create_topic(name)
            for channel in channels:
                running.member.node.channel(hosted, channel)
        alive = sum(running.member.alive for running in self.nodes.values())
        for lookupd in self._classic:
            while lookupd.alive and not _shows_topic(lookupd, name, channels, alive):  # noqa: ASYNC110 - registrations have no event
                await anyio.sleep(0.005)

    def delete_topic(self, name: str) -> None:
        deleted = [running.member.node.delete_topic(name) for running in self.nodes.values()]
        if not any(deleted):
            raise TopicNotFound("unknown topic", topic=name)


def _shows_topic(lookupd: ClassicLookupd, name: str, channels: tuple[str, ...], nodes: int) -> bool:
    registry = lookupd.registry
    counts = [len(registry.producers("channel", name, channel)) for channel in channels]
    return min([len(registry.producers("topic", name)), *counts]) >= nodes
