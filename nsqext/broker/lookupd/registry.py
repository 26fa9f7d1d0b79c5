"""Registrations of nsqd at a lookup node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any, NamedTuple

from attrs import define, field

NEVER = -6795364578871345152
"""Nanoseconds that the real server prints for a time that was never set."""

NODE_MEMBERS = ("remote_address", "hostname", "broadcast_address", "tcp_port", "http_port", "version")
"""What the redesigned server shows of a node."""


class Registration(NamedTuple):
    """Key of registrations: category ``client``, ``topic`` or ``channel``, and the names that belong to it.

    Standalone nodes of the redesigned generation register partitions: the subkey of a topic is its partition, that of a
    channel ``partition:channel``.
    """

    category: str
    key: str = ""
    subkey: str = ""

    def matches(self, category: str, key: str, subkey: str) -> bool:
        return category == self.category and key in ("*", self.key) and subkey in ("*", self.subkey)


@define(eq=False)
class RegisteredNode:
    """An nsqd that sent IDENTIFY."""

    id: str  # its end of the connection, ``host:port``
    members: dict[str, Any]  # its entry in `/lookup`
    last_seen: int  # time of its last PING, in nanoseconds since 1970

    @property
    def address(self) -> str:
        """``host:http_port``, the name that tombstones use."""
        return f"{self.members['broadcast_address']}:{self.members['http_port']}"


@define(eq=False)
class Producer:
    """A node in one registration."""

    node: RegisteredNode  # the nsqd
    hidden_at: int | None = None  # when a tombstone was set, in nanoseconds since 1970; None without one


@define(eq=False)
class Registry:
    """All registrations of one lookup node."""

    wall: Callable[[], int]  # nanoseconds since 1970
    inactive_timeout: float = 300.0  # seconds without PING after which a node is not shown
    tombstone_lifetime: float = 45.0  # seconds that a tombstone hides a node
    _table: dict[Registration, dict[str, Producer]] = field(factory=dict, init=False)
    _by_key: dict[tuple[str, str], dict[Registration, None]] = field(factory=dict, init=False)

    def snapshot(self) -> Registry:
        """Return a copy; later changes are not shown in it."""
        made = self.empty()
        for registration, held in self._table.items():
            made.add(registration)
            made._table[registration] = {name: copy(found) for name, found in held.items()}
        return made

    def empty(self) -> Registry:
        """Return an empty registry with the same settings."""
        return Registry(self.wall, self.inactive_timeout, self.tombstone_lifetime)

    # Changes

    def add(self, registration: Registration, node: RegisteredNode | None = None) -> None:
        producers = self._table.setdefault(registration, {})
        self._by_key.setdefault(registration[:2], {})[registration] = None
        if node is not None:
            producers.setdefault(node.id, Producer(node))

    def remove(self, registration: Registration, node: RegisteredNode | None = None) -> None:
        """Remove a registration, or one node from it; without nodes it stays, unless it is of an ephemeral name."""
        if node is None:
            self._delete(registration)
            return
        self.withdraw(registration, node)
        ephemeral = (registration.subkey or registration.key).endswith("#ephemeral")
        if ephemeral and not self._table.get(registration):
            self._delete(registration)

    def _delete(self, registration: Registration) -> None:
        self._table.pop(registration, None)
        of_key = self._by_key.get(registration[:2], {})
        of_key.pop(registration, None)
        if not of_key:
            self._by_key.pop(registration[:2], None)

    def withdraw(self, registration: Registration, node: RegisteredNode) -> None:
        """Remove one node from a registration; the registration stays, even of an ephemeral name."""
        self._table.get(registration, {}).pop(node.id, None)

    def remove_node(self, node: RegisteredNode) -> None:
        """Remove a node from all registrations; they stay without it."""
        for producers in self._table.values():
            producers.pop(node.id, None)

    def hide(self, topic: str, address: str) -> None:
        """Set a tombstone for a node (``host:http_port``) of a topic."""
        self._mark(topic, address, self.wall())

    def show(self, topic: str, address: str) -> None:
        self._mark(topic, address, None)

    def _mark(self, topic: str, address: str, at: int | None) -> None:
        for registration in self.find("topic", topic, "*"):
            for producer in self._table[registration].values():
                if producer.node.address == address:
                    producer.hidden_at = at

    # Queries

    def find(self, category: str, key: str, subkey: str = "") -> list[Registration]:
        """Return the registrations that match; ``*`` matches every name."""
        candidates = self._table if key == "*" else self._by_key.get((category, key), ())
        return [registration for registration in candidates if registration.matches(category, key, subkey)]

    def producers(self, category: str, key: str = "", subkey: str = "") -> list[Producer]:
        """Return the nodes of all registrations that match, without duplicates."""
        found: dict[str, Producer] = {}
        for registration in self.find(category, key, subkey):
            for name, producer in self._table[registration].items():
                found.setdefault(name, producer)
        return list(found.values())

    def topics_of(self, node: RegisteredNode) -> list[tuple[str, Producer]]:
        return [
            (registration.key, producers[node.id])
            for registration, producers in self._table.items()
            if registration.category == "topic" and node.id in producers
        ]

    def is_active(self, producer: Producer) -> bool:
        """Return whether a node sent PING within the inactive timeout."""
        return self.wall() - producer.node.last_seen <= self.inactive_timeout * 1e9

    def is_hidden(self, producer: Producer) -> bool:
        return producer.hidden_at is not None and self.wall() - producer.hidden_at < self.tombstone_lifetime * 1e9

    def __iter__(self) -> Iterator[tuple[Registration, list[Producer]]]:
        return iter([(registration, list(producers.values())) for registration, producers in self._table.items()])
