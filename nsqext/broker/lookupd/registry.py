"""What nodes registered at a lookup node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any, NamedTuple

from attrs import define, field

__all__ = ("PeerInfo", "Producer", "Registration", "Registry")

NEVER = -6795364578871345152
"""Nanoseconds that the real server prints for a time that was never set."""


class Registration(NamedTuple):
    """What a node may be registered for: ``client``, ``topic`` or ``channel``, with names where they belong.

    Standalone nodes of the redesigned generation register partitions: the subkey of a topic is its partition, that of a
    channel ``partition:channel``.
    """

    category: str
    key: str = ""
    subkey: str = ""

    def matches(self, category: str, key: str, subkey: str) -> bool:
        """Return whether it is meant; ``*`` means every name."""
        return category == self.category and key in ("*", self.key) and subkey in ("*", self.subkey)


@define(eq=False)
class PeerInfo:
    """What a node told about itself.

    Attributes:
        id: its end of the connection.
        members: what `/lookup` shows.
        seen: when it was heard of last, in nanoseconds since 1970.
    """

    id: str
    members: dict[str, Any]
    seen: int

    @property
    def address(self) -> str:
        """``host:http_port``, as tombstones name it."""
        return f"{self.members['broadcast_address']}:{self.members['http_port']}"


@define(eq=False)
class Producer:
    """A node under one registration.

    Attributes:
        peer: the node.
        hidden_at: when a tombstone was set, in nanoseconds since 1970; None without one.
    """

    peer: PeerInfo
    hidden_at: int | None = None


@define(eq=False)
class Registry:
    """All registrations of one lookup node.

    Attributes:
        wall: nanoseconds since 1970.
        inactive_timeout: seconds after which a silent node is not shown.
        tombstone_lifetime: seconds that a tombstone hides a node.
    """

    wall: Callable[[], int]
    inactive_timeout: float = 300.0
    tombstone_lifetime: float = 45.0
    _table: dict[Registration, dict[str, Producer]] = field(factory=dict, alias="table")

    def picture(self) -> Registry:
        """Return a copy that later changes do not reach."""
        table = {key: {name: copy(found) for name, found in held.items()} for key, held in self._table.items()}
        return Registry(self.wall, self.inactive_timeout, self.tombstone_lifetime, table)

    def empty(self) -> Registry:
        """Return a registry like this one with nothing in it."""
        return Registry(self.wall, self.inactive_timeout, self.tombstone_lifetime)

    # --- changes --------------------------------------------------------------------------------------------------

    def add(self, registration: Registration, peer: PeerInfo | None = None) -> None:
        """Add a registration, with a node or without one."""
        producers = self._table.setdefault(registration, {})
        if peer is not None:
            producers.setdefault(peer.id, Producer(peer))

    def remove(self, registration: Registration, peer: PeerInfo | None = None) -> None:
        """Remove a registration, or one node from it.

        A registration without nodes stays, unless it is of an ephemeral topic or channel.
        """
        if peer is None:
            self._table.pop(registration, None)
            return
        self.leave(registration, peer)
        ephemeral = (registration.subkey or registration.key).endswith("#ephemeral")
        if ephemeral and not self._table.get(registration):
            self._table.pop(registration, None)

    def leave(self, registration: Registration, peer: PeerInfo) -> None:
        """Remove one node from a registration, which stays whatever it is of."""
        self._table.get(registration, {}).pop(peer.id, None)

    def forget(self, peer: PeerInfo) -> None:
        """Remove a node everywhere, because its connection ended; its registrations stay without it."""
        for producers in self._table.values():
            producers.pop(peer.id, None)

    def hide(self, topic: str, address: str) -> None:
        """Set a tombstone for a node, ``host:http_port``, under a topic."""
        self._mark(topic, address, self.wall())

    def show(self, topic: str, address: str) -> None:
        """Take the tombstone of a node away."""
        self._mark(topic, address, None)

    def _mark(self, topic: str, address: str, at: int | None) -> None:
        for registration in self.find("topic", topic, "*"):
            for producer in self._table[registration].values():
                if producer.peer.address == address:
                    producer.hidden_at = at

    # --- questions ------------------------------------------------------------------------------------------------

    def find(self, category: str, key: str, subkey: str = "") -> list[Registration]:
        """Return the registrations that match; ``*`` matches every name."""
        return [registration for registration in self._table if registration.matches(category, key, subkey)]

    def producers(self, category: str, key: str = "", subkey: str = "") -> list[Producer]:
        """Return the nodes of the registrations that match, each once."""
        found: dict[str, Producer] = {}
        for registration in self.find(category, key, subkey):
            for name, producer in self._table[registration].items():
                found.setdefault(name, producer)
        return list(found.values())

    def topics_of(self, peer: PeerInfo) -> list[tuple[str, Producer]]:
        """Return the topics that a node is registered for."""
        return [
            (registration.key, producers[peer.id])
            for registration, producers in self._table.items()
            if registration.category == "topic" and peer.id in producers
        ]

    def is_active(self, producer: Producer) -> bool:
        """Tell whether a node was heard of lately."""
        return self.wall() - producer.peer.seen <= self.inactive_timeout * 1e9

    def is_hidden(self, producer: Producer) -> bool:
        """Tell whether a tombstone hides a node."""
        return producer.hidden_at is not None and self.wall() - producer.hidden_at < self.tombstone_lifetime * 1e9

    def __iter__(self) -> Iterator[tuple[Registration, list[Producer]]]:
        return iter([(registration, list(producers.values())) for registration, producers in self._table.items()])
