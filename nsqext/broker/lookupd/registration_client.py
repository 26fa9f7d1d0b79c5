"""A node registers at lookup nodes, over TCP as the real one does when no coordinator places its topics."""

from __future__ import annotations

import socket
from struct import Struct
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import anyio
import orjson
from anyio.streams.buffered import BufferedByteReceiveStream
from attrs import define, field

from nsqext.broker.http_client import HttpClient, HttpRequestFailed
from nsqext.broker.listeners import split_address
from nsqext.broker.lookupd.session import MAGIC_V1
from nsqext.errors import InvalidSetting
from nsqext.protocol.names import is_ephemeral

if TYPE_CHECKING:
    from anyio.abc import SocketStream, TaskGroup

    from nsqext.broker.nsqd.node import Node
    from nsqext.types import Address

__all__ = ("RegistrationClient",)

_SIZE = Struct(">i")
_TIMEOUT = 5.0  # the real one waits for a second, which a busy machine may take between two programs
_CLOSING = 1.0
_LOOK = 1.0  # how often it looks whether lookup nodes were added or taken away
_MAX_ANSWER = 5 * 1024 * 1024
_BROKEN = (OSError, anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead, TimeoutError, ValueError)


@define(eq=False)
class _Peer:
    """One lookup node, as the registering node sees it."""

    address: str
    stream: SocketStream | None = None
    reader: BufferedByteReceiveStream | None = None
    info: dict[str, Any] = field(factory=dict)
    removed: bool = False

    async def ask(self, data: bytes) -> bytes:
        """Send a command and return the answer; raises one of _BROKEN when the lookup node is not there."""
        if self.stream is None or self.reader is None:
            raise ConnectionError(self.address)
        with anyio.fail_after(_TIMEOUT):
            await self.stream.send(data)
            size = _SIZE.unpack(await self.reader.receive_exactly(_SIZE.size))[0]
            if not 0 <= size <= _MAX_ANSWER:
                raise ValueError(f"an answer of {size} bytes")
            return await self.reader.receive_exactly(size) if size else b""

    async def close(self) -> None:
        """Close the connection."""
        stream, self.stream, self.reader = self.stream, None, None
        if stream is not None:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSING):
                await stream.aclose()


def _http_address(peer: _Peer) -> str:
    return f"{peer.info['broadcast_address']}:{peer.info['http_port']}"


class RegistrationClient:
    """Tells lookup nodes what a node hosts.

    Args:
        node: the node; its callbacks are taken.
        tcp: where clients connect to.
        http: where its HTTP API is.
        ping_interval: seconds between two signs of life; lookup nodes that went away are tried again then.
        partitions: partitions are registered (redesigned generation), not just topics.
    """

    def __init__(
        self, node: Node, tcp: Address, http: Address, ping_interval: float = 15.0, *, partitions: bool = False
    ) -> None:
        self.node = node
        self._partitions = partitions
        self.ping_interval = ping_interval
        self._identity = {
            "version": node.limits.version,
            "tcp_port": tcp.port,
            "http_port": http.port,
            "hostname": socket.gethostname(),
            "broadcast_address": node.options.broadcast_address,
            "topology_zone": node.limits.topology_zone,
            "topology_region": node.limits.topology_region,
        }
        self._peers: dict[str, _Peer] = {}
        self._commands: list[str] = []
        self._news = anyio.Event()
        self._tasks: TaskGroup | None = None
        self._http = HttpClient(_TIMEOUT)
        node.on_topic_created = self._topic_created
        node.on_topic_deleted = lambda topic: self._tell(f"UNREGISTER {topic}")
        node.on_channel_created = lambda topic, number, channel: self._tell(
            f"REGISTER {self._place(topic, number)} {channel}"
        )
        node.on_channel_deleted = lambda topic, number, channel: self._tell(
            f"UNREGISTER {self._place(topic, number)} {channel}"
        )

    def _place(self, topic: str, partition: int) -> str:
        return f"{topic} {partition}" if self._partitions else topic

    def _tell(self, command: str) -> None:
        self._commands.append(command)
        self._news.set()

    def _topic_created(self, topic: str) -> None:
        if self._partitions:
            for hosted in self.node.partitions(topic):
                self._tell(f"REGISTER {topic} {hosted.partition.partition}")
            return
        self._tell(f"REGISTER {topic}")
        if self._tasks is not None:
            self._tasks.start_soon(self._take_channels, topic)

    async def run(self) -> None:
        """Keep the registrations true until cancelled; then the connections are closed, which removes them."""
        try:
            async with anyio.create_task_group() as self._tasks:
                due = anyio.current_time()
                while True:
                    await self.node.faults.gate()
                    await self._sync_peers()
                    if anyio.current_time() >= due:
                        due = anyio.current_time() + self.ping_interval
                        self._commands.insert(0, "PING")
                    await self._send_news()
                    with anyio.move_on_after(min(due - anyio.current_time(), _LOOK)):
                        await self._news.wait()
                    self._news = anyio.Event()
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSING):
                await self._http.aclose()
            for peer in self._peers.values():
                await peer.close()

    async def _send_news(self) -> None:
        while self._commands:
            command = self._commands[0]
            for peer in list(self._peers.values()):
                await self._command(peer, command)
            self._commands.pop(0)

    async def _sync_peers(self) -> None:
        wanted = self.node.switches.lookupd_addresses
        for address in [address for address in self._peers if address not in wanted]:
            await self._peers.pop(address).close()
        for address in wanted:
            if address not in self._peers:
                self._peers[address] = _Peer(address)
                await self._connect(self._peers[address])

    async def _command(self, peer: _Peer, command: str) -> None:
        if peer.stream is None:
            await self._connect(peer)  # tells everything, this news included
            return
        try:
            await peer.ask(f"{command}\n".encode())
        except _BROKEN:
            await peer.close()

    async def _connect(self, peer: _Peer) -> None:
        """Connect, identify, and register all that is here; a lookup node that is not there is tried again later."""
        try:
            address = split_address(peer.address)
            with anyio.fail_after(_TIMEOUT):
                peer.stream = await anyio.connect_tcp(address.host, address.port)
            peer.reader = BufferedByteReceiveStream(peer.stream)
            body = orjson.dumps(self._identity)
            answer = await peer.ask(MAGIC_V1 + b"IDENTIFY\n" + _SIZE.pack(len(body)) + body)
            peer.info = orjson.loads(answer)
            for command in self._everything():
                await peer.ask(command.encode())
        except (*_BROKEN, InvalidSetting):
            await peer.close()

    def _everything(self) -> list[str]:
        commands: list[str] = []
        for (topic, number), hosted in self.node.hosted.items():
            names, place = list(hosted.partition.channels), self._place(topic, number)
            commands += [f"REGISTER {place} {name}\n" for name in names] or [f"REGISTER {place}\n"]
        return commands

    async def _take_channels(self, topic: str) -> None:
        """Make the channels that a new topic has elsewhere, so that they get its messages from the first one on."""
        addresses = [_http_address(peer) for peer in self._peers.values() if peer.info.get("broadcast_address")]
        if not addresses:
            return
        names: dict[str, None] = {}
        for address in addresses:
            try:
                answer = await self._http.request("GET", f"http://{address}/channels?{urlencode({'topic': topic})}")
                names |= dict.fromkeys(orjson.loads(answer.content)["channels"])
            except (HttpRequestFailed, ValueError, KeyError, TypeError):
                continue
        for hosted in self.node.partitions(topic):
            for name in names:
                if not is_ephemeral(name):
                    self.node.channel(hosted, name)
