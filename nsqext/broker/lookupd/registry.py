"""Registrations of nsqd at a lookup node, sessions without I/O, and their TCP server."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
from attrs import asdict, define, field

from nsqext.broker.listeners import peer_name
from nsqext.errors import outside_text
from nsqext.protocol.lookupd_tcp import LookupdCommand, LookupdCommandParser, PeerInfo, encode_response
from nsqext.protocol.server.request_error import RequestError

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

NEVER = -6795364578871345152
"""The real server's nanoseconds for a time that was never set."""

NODE_MEMBERS = ("remote_address", "hostname", "broadcast_address", "tcp_port", "http_port", "version")
"""What the redesigned server shows of a node, in its order; the original server shows its place behind them."""
logger: logging.Logger = logging.getLogger("nsqext.broker.lookupd")
_READ = 65536
_ACCEPT_PAUSE = 0.05


class Registration(NamedTuple):
    """Category ``client``, ``topic`` or ``channel``, with topic and channel.

    Standalone redesigned nodes register partitions: a topic's subkey is its partition, a channel's is
    ``partition:channel``.
    """

    category: str
    key: str = ""
    subkey: str = ""

    def matches(self, category: str, key: str, subkey: str) -> bool:
        return category == self.category and key in ("*", self.key) and subkey in ("*", self.subkey)


@define(eq=False)
class RegisteredNode:
    """An nsqd after IDENTIFY."""

    id: str  #: ``host:port`` of its end of the connection
    members: dict[str, Any]  #: its entry in `/lookup`
    last_seen: int  #: last PING, in nanoseconds since 1970

    @property
    def address(self) -> str:
        """``host:http_port``, its name in tombstones."""
        return f"{self.members['broadcast_address']}:{self.members['http_port']}"


@define(eq=False)
class ListedProducer:
    """A node in a registration."""

    node: RegisteredNode
    hidden_at: int | None = None  #: when a tombstone was set, in nanoseconds since 1970


@define(eq=False)
class Registry:
    """The registrations of a lookup node."""

    wall: Callable[[], int]  #: nanoseconds since 1970
    inactive_timeout: float = 300.0  #: seconds without PING until a node is hidden
    tombstone_lifetime: float = 45.0  #: seconds that a tombstone hides a node
    _table: dict[Registration, dict[str, ListedProducer]] = field(factory=dict, init=False)
    _by_key: dict[tuple[str, str], dict[Registration, None]] = field(factory=dict, init=False)

    def snapshot(self) -> Registry:
        made = self.empty()
        for registration, held in self._table.items():
            made.add(registration)
            made._table[registration] = {name: copy(found) for name, found in held.items()}
        return made

    def empty(self) -> Registry:
        return Registry(self.wall, self.inactive_timeout, self.tombstone_lifetime)

    # Changes

    def add(self, registration: Registration, node: RegisteredNode | None = None) -> None:
        producers = self._table.setdefault(registration, {})
        self._by_key.setdefault(registration[:2], {})[registration] = None
        if node is not None:
            producers.setdefault(node.id, ListedProducer(node))

    def remove(self, registration: Registration, node: RegisteredNode | None = None) -> None:
        """Remove a registration, or a node from it; an empty ephemeral registration is removed, too."""
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
        """Remove a node from a registration, which stays even for an ephemeral name."""
        self._table.get(registration, {}).pop(node.id, None)

    def remove_node(self, node: RegisteredNode) -> None:
        for producers in self._table.values():
            producers.pop(node.id, None)

    def hide(self, topic: str, address: str, hidden: bool = True) -> None:
        """Set or remove a node's (``host:http_port``) tombstone for a topic."""
        at = self.wall() if hidden else None
        for registration in self.find("topic", topic, "*"):
            for producer in self._table[registration].values():
                if producer.node.address == address:
                    producer.hidden_at = at

    # Queries

    def find(self, category: str, key: str, subkey: str = "") -> list[Registration]:
        """Return matching registrations; ``*`` matches every name."""
        candidates = self._table if key == "*" else self._by_key.get((category, key), ())
        return [registration for registration in candidates if registration.matches(category, key, subkey)]

    def producers(self, category: str, key: str = "", subkey: str = "") -> list[ListedProducer]:
        """Return the nodes of all matching registrations, without duplicates."""
        found: dict[str, ListedProducer] = {}
        for registration in self.find(category, key, subkey):
            for name, producer in self._table[registration].items():
                found.setdefault(name, producer)
        return list(found.values())

    def topics_of(self, node: RegisteredNode) -> list[tuple[str, ListedProducer]]:
        return [
            (registration.key, producers[node.id])
            for registration, producers in self._table.items()
            if registration.category == "topic" and node.id in producers
        ]

    def is_active(self, producer: ListedProducer) -> bool:
        return self.wall() - producer.node.last_seen <= self.inactive_timeout * 1e9

    def is_hidden(self, producer: ListedProducer) -> bool:
        return producer.hidden_at is not None and self.wall() - producer.hidden_at < self.tombstone_lifetime * 1e9

    def __iter__(self) -> Iterator[tuple[Registration, list[ListedProducer]]]:
        return iter([(registration, list(producers.values())) for registration, producers in self._table.items()])


@define(eq=False)
class LookupSession:
    """Connection of an nsqd."""

    registry: Registry
    remote: str  #: ``host:port`` of the nsqd
    own: PeerInfo  #: response to IDENTIFY
    partitions: bool = False  #: registrations name partitions (redesigned generation)
    node: RegisteredNode | None = field(default=None, init=False)  #: None before IDENTIFY
    closing: bool = field(default=False, init=False)  #: close after the responses
    _parser: LookupdCommandParser = field(init=False)

    @_parser.default
    def _make_parser(self) -> LookupdCommandParser:
        return LookupdCommandParser(partitions=self.partitions)

    def receive(self, data: bytes) -> bytes:
        self._parser.receive(data)
        responses: list[bytes] = []
        while not self.closing:
            try:
                command = self._parser.next_command()
                if command is None:
                    break
                response = self._execute(command)
            except RequestError as error:
                self.closing = True
                response = str(error).encode("utf-8", "surrogateescape")
            responses.append(encode_response(response))
        return b"".join(responses)

    def end(self) -> None:
        """Remove the nsqd from all registrations."""
        if self.node is not None:
            self.registry.remove_node(self.node)

    def _execute(self, command: LookupdCommand) -> bytes:
        if command.peer is not None:
            return self._identify(command.peer)
        if command.verb == "PING":
            if self.node is not None:
                self.node.last_seen = self.registry.wall()
        elif self.node is not None:  # the parser refuses registrations before IDENTIFY
            execute = self._register if command.verb == "REGISTER" else self._unregister
            execute(self.node, command)
        return b"OK"

    def _identify(self, peer: PeerInfo) -> bytes:
        sent = {"remote_address": self.remote} | asdict(peer)
        del sent["distributed_id"]  # nodes of clusters do not register by TCP
        members = {name: sent[name] for name in NODE_MEMBERS} | sent
        self.node = RegisteredNode(self.remote, members, self.registry.wall())
        logger.info(
            "CLIENT(%s): IDENTIFY Address:%s TCP:%d HTTP:%d Version:%s",
            *(self.remote, outside_text(peer.broadcast_address), peer.tcp_port, peer.http_port),
            outside_text(peer.version),
        )
        self.registry.add(Registration("client"), self.node)
        return self.own.encode()

    def _registrations(self, command: LookupdCommand) -> tuple[Registration, str]:
        """Return the topic's registration, and the prefix of its channels' subkeys."""
        if not self.partitions:
            return Registration("topic", command.topic), ""
        return Registration("topic", command.topic, str(command.partition)), f"{command.partition}:"

    def _register(self, node: RegisteredNode, command: LookupdCommand) -> None:
        topic, prefix = self._registrations(command)
        if command.channel:
            self.registry.add(Registration("channel", command.topic, prefix + command.channel), node)
            logger.info(
                "DB: client(%s) REGISTER category:channel key:%s subkey:%s",
                *(self.remote, command.topic, prefix + command.channel),
            )
        self.registry.add(topic, node)
        logger.info("DB: client(%s) REGISTER category:topic key:%s subkey:%s", self.remote, topic.key, topic.subkey)

    def _unregister(self, node: RegisteredNode, command: LookupdCommand) -> None:
        topic, prefix = self._registrations(command)
        logger.info("DB: client(%s) UNREGISTER key:%s subkey:%s", self.remote, topic.key, prefix + command.channel)
        if command.channel:
            self.registry.remove(Registration("channel", command.topic, prefix + command.channel), node)
            return
        for registration in self.registry.find("channel", command.topic, "*"):
            if registration.subkey.startswith(prefix):
                self.registry.withdraw(registration, node)
        self.registry.remove(topic, node)


class LookupTcpServer:
    """Accepts connections of nsqd."""

    def __init__(self, make_session: Callable[[str], LookupSession]) -> None:
        self._make_session = make_session  # gets ``host:port`` of a connection
        self._scope = anyio.CancelScope()

    async def serve(
        self, listener: socket.socket, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until `kill` or cancellation; then close the socket."""
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    task_status.started()
                    await self._accept(listener, tasks)
        finally:
            listener.close()

    def kill(self) -> None:
        self._scope.cancel()

    async def _accept(self, listener: socket.socket, tasks: TaskGroup) -> None:
        while True:
            await anyio.wait_readable(listener)
            try:
                sock, peer = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                continue
            except OSError:  # no free file descriptor: the connection waits in the backlog
                await anyio.sleep(_ACCEPT_PAUSE)
                continue
            sock.setblocking(False)
            logger.info("TCP: new client(%s)", peer_name(peer))
            tasks.start_soon(self._serve_node, sock, peer_name(peer))

    async def _serve_node(self, sock: socket.socket, remote: str) -> None:
        session = self._make_session(remote)
        try:
            while not session.closing:
                await anyio.wait_readable(sock)
                data = sock.recv(_READ)
                if not data:
                    break
                rest = session.receive(data)
                while rest:
                    await anyio.wait_writable(sock)
                    rest = rest[sock.send(rest) :]
        except OSError:
            return
        finally:
            session.end()
            sock.close()
            logger.info("PROTOCOL(V1): [%s] exiting ioloop", remote)
