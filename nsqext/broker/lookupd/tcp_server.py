"""nsqlookupd's TCP side: one session without I/O for each nsqd, and the server that accepts them."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

import anyio
from attrs import asdict, define, field

from nsqext.broker.listeners import peer_name
from nsqext.broker.lookupd.registry import RegisteredNode, Registration, Registry
from nsqext.protocol.lookupd_tcp import LookupdCommand, LookupdCommandParser, PeerInfo, encode_response
from nsqext.protocol.server.request_error import RequestError

if TYPE_CHECKING:
    from anyio.abc import TaskGroup, TaskStatus

    from nsqext.broker.lookupd.classic import ClassicLookupd

logger: logging.Logger = logging.getLogger("nsqext.broker.lookupd")

_READ = 65536
_ACCEPT_PAUSE = 0.05


@define(eq=False)
class LookupSession:
    """One connection of an nsqd: executes its commands and returns the responses."""

    registry: Registry  # the registrations
    remote: str  # the nsqd's end of the connection, ``host:port``
    own: PeerInfo  # response to IDENTIFY
    partitions: bool = False  # registrations name a partition after the topic (redesigned generation)
    node: RegisteredNode | None = field(default=None, init=False)  # the nsqd; None before IDENTIFY
    closing: bool = field(default=False, init=False)  # close the connection after the responses
    _parser: LookupdCommandParser = field(init=False)

    @_parser.default
    def _make_parser(self) -> LookupdCommandParser:
        return LookupdCommandParser(partitions=self.partitions)

    def receive(self, data: bytes) -> bytes:
        """Process received bytes; return the responses."""
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
        """Remove the registrations of the nsqd, because its connection ended."""
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
        members = {"remote_address": self.remote} | asdict(peer)
        del members["distributed_id"]  # of clusters only, whose nodes do not register by TCP
        self.node = RegisteredNode(self.remote, members, self.registry.wall())
        logger.info(
            "CLIENT(%s): IDENTIFY Address:%s TCP:%d HTTP:%d Version:%s",
            *(self.remote, peer.broadcast_address, peer.tcp_port, peer.http_port, peer.version),
        )
        self.registry.add(Registration("client"), self.node)
        return self.own.encode()

    def _registrations(self, command: LookupdCommand) -> tuple[Registration, str]:
        """Return the registration of the topic, and what precedes the channel in the subkeys of its channels."""
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

    def __init__(self, lookupd: ClassicLookupd, *, partitions: bool = False) -> None:
        self._lookupd = lookupd  # the lookup node
        self._partitions = partitions  # registrations name a partition after the topic (redesigned generation)
        self._scope = anyio.CancelScope()

    async def serve(
        self, listener: socket.socket, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve at a listening socket until `kill` or cancellation, then close it."""
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    task_status.started()
                    await self._accept(listener, tasks)
        finally:
            listener.close()

    def kill(self) -> None:
        """Close the listener and all connections at once."""
        self._scope.cancel()

    async def _accept(self, listener: socket.socket, tasks: TaskGroup) -> None:
        while True:
            await anyio.wait_readable(listener)
            try:
                sock, peer = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                continue
            except OSError:  # out of file descriptors: the connection stays in the backlog
                await anyio.sleep(_ACCEPT_PAUSE)
                continue
            sock.setblocking(False)
            logger.info("TCP: new client(%s)", peer_name(peer))
            tasks.start_soon(self._serve_node, sock, peer_name(peer))

    async def _serve_node(self, sock: socket.socket, remote: str) -> None:
        session = LookupSession(self._lookupd.registry, remote, self._lookupd.peer_info(), self._partitions)
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
            return  # the connection is broken
        finally:
            session.end()
            sock.close()
            logger.info("PROTOCOL(V1): [%s] exiting ioloop", remote)
