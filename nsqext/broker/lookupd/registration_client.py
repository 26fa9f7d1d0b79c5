"""Client of nsqlookupd's TCP protocol, with which an nsqd without coordinator registers topics and channels."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import anyio
import orjson
from anyio.streams.buffered import BufferedByteReceiveStream
from attrs import define

from nsqext.broker.listeners import split_address
from nsqext.errors import NsqError, outside_text
from nsqext.errors.server import server_error
from nsqext.http.client import HttpClient, HttpRequestFailed
from nsqext.protocol.lookupd_tcp import MAGIC, PING, PeerInfo, identify, register, response_size, unregister
from nsqext.protocol.names import is_ephemeral
from nsqext.waits import Wakeup

if TYPE_CHECKING:
    from anyio.abc import SocketStream, TaskGroup

    from nsqext.broker.nsqd.node import Node
    from nsqext.types import Address

_TIMEOUT = 5.0  # the real nsqd waits one second, which a busy machine may exceed
_CLOSE_TIMEOUT = 1.0  # seconds
_POLL = 1.0  # seconds between two looks at the configuration
_QUESTIONS = 4  # concurrent requests for channels; with thousands, the connection pool takes quadratic time
_FAILURES = (OSError, anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead, TimeoutError, NsqError)
logger: logging.Logger = logging.getLogger(__name__)
_Encode = Callable[[str, "str | None", "int | None"], bytes]


@define(eq=False)
class _LookupConnection:
    """Connection to a lookup node."""

    address: str  #: ``host:port`` of the TCP side
    stream: SocketStream | None = None  #: None while closed
    info: PeerInfo | None = None  #: response to IDENTIFY
    reported: bool = False  #: its failure was logged

    async def connect(self, identity: PeerInfo) -> None:
        address = split_address(self.address)
        with anyio.fail_after(_TIMEOUT):
            self.stream = await anyio.connect_tcp(address.host, address.port)
        self.info = PeerInfo.decode(await self.request(MAGIC + identify(identity)))

    async def request(self, data: bytes) -> bytes:
        """Send a command and return the response; raises `_FAILURES`."""
        if self.stream is None:
            raise ConnectionError(self.address)
        with anyio.fail_after(_TIMEOUT):
            await self.stream.send(data)
            received = BufferedByteReceiveStream(self.stream)  # the server sends nothing unasked
            response = await received.receive_exactly(response_size(await received.receive_exactly(4)))
        if response.startswith(b"E_"):
            raise server_error(response, node=self.address)  # the server closes the connection
        return response

    async def close(self) -> None:
        stream, self.stream = self.stream, None
        if stream is not None:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_TIMEOUT):
                await stream.aclose()


def _log_command(connection: _LookupConnection, command: bytes) -> None:
    level = logging.DEBUG if command == PING else logging.INFO
    logger.log(level, "LOOKUPD(%s): %s", connection.address, command.decode("utf-8", "replace").rstrip())


class RegistrationClient:
    """Registers a node's topics and channels at lookup nodes."""

    def __init__(
        self,
        node: Node,
        tcp: Address,
        http: Address,
        ping_interval: float = 15.0,
        *,
        partitions: bool = False,
        known_channels: Callable[[str], Iterable[str]] | None = None,
    ) -> None:
        self.node = node  #: its ``on_…`` callbacks are set
        self._partitions = partitions  # registers partitions (redesigned generation), not topics
        # channels that lookup nodes of this process know of a topic; None to ask over HTTP
        self._known_channels = known_channels
        self.ping_interval = ping_interval  #: seconds between two PINGs, and between two attempts to connect
        self._identity = PeerInfo(
            broadcast_address=node.options.broadcast_address,
            tcp_port=tcp.port,
            http_port=http.port,
            version=node.limits.version,
            hostname=socket.gethostname(),
            topology_zone=node.limits.topology_zone,
            topology_region=node.limits.topology_region,
        )
        self._connections: dict[str, _LookupConnection] = {}
        self._commands: list[bytes] = []
        self._wakeup = Wakeup()
        self._tasks: TaskGroup | None = None
        self._http = HttpClient(_TIMEOUT)
        self._questions = anyio.CapacityLimiter(_QUESTIONS)
        node.on_topic_created = self._topic_created
        node.on_topic_deleted = lambda topic: self._queue(unregister(topic))
        node.on_channel_created = partial(self._channel_changed, register)
        node.on_channel_deleted = partial(self._channel_changed, unregister)

    def _partition(self, number: int) -> int | None:
        return number if self._partitions else None

    def _queue(self, command: bytes) -> None:
        self._commands.append(command)
        self._wakeup.wake()

    def _channel_changed(self, encode: _Encode, topic: str, partition: int, channel: str) -> None:
        self._queue(encode(topic, channel, self._partition(partition)))

    def _topic_created(self, topic: str) -> None:
        if self._partitions:
            for hosted in self.node.partitions(topic):
                self._queue(register(topic, None, hosted.partition.partition))
            return
        self._queue(register(topic))
        if self._known_channels is not None:
            self._add_channels(topic, self._known_channels(topic))
        elif self._tasks is not None:
            self._tasks.start_soon(self._create_known_channels, topic)

    async def run(self) -> None:
        """Keep registrations up to date until cancelled; closed connections then remove them."""
        try:
            async with anyio.create_task_group() as self._tasks:
                due = anyio.current_time()
                while True:
                    await self.node.faults.gate()
                    await self._update_connections()
                    if anyio.current_time() >= due:
                        due = anyio.current_time() + self.ping_interval
                        self._commands.insert(0, PING)
                    await self._send_commands()
                    with anyio.move_on_after(min(due - anyio.current_time(), _POLL)):
                        await self._wakeup.wait()
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_CLOSE_TIMEOUT):
                await self._http.aclose()
            for connection in self._connections.values():
                await connection.close()

    async def _send_commands(self) -> None:
        while self._commands:
            command = self._commands[0]
            await self.node.faults.gate()
            for connection in list(self._connections.values()):
                await self._send(connection, command)
            self._commands.pop(0)

    async def _update_connections(self) -> None:
        """Connect to lookup nodes new in the configuration, disconnect from removed lookup nodes."""
        wanted = self.node.switches.lookupd_addresses
        for address in [address for address in self._connections if address not in wanted]:
            logger.info("LOOKUP(%s): removing peer", address)
            await self._connections.pop(address).close()
        for address in wanted:
            if address not in self._connections:
                logger.info("LOOKUP(%s): adding peer", address)
                self._connections[address] = _LookupConnection(address)
                await self._connect(self._connections[address])

    async def _send(self, connection: _LookupConnection, command: bytes) -> None:
        if connection.stream is None:
            await self._connect(connection)  # registers the subject of this command, too
            return
        _log_command(connection, command)
        try:
            await connection.request(command)
        except _FAILURES as error:
            await self._close_failed(connection, error)

    async def _connect(self, connection: _LookupConnection) -> None:
        """Connect and register everything; after a failure the next PING tries again."""
        logger.info("LOOKUP connecting to %s", connection.address)
        try:
            await connection.connect(self._identity)
            logger.info("LOOKUPD(%s): peer info %s", connection.address, outside_text(str(connection.info)))
            for command in self._all_registrations():
                _log_command(connection, command)
                await connection.request(command)
        except _FAILURES as error:
            await self._close_failed(connection, error)
        else:
            connection.reported = False

    async def _close_failed(self, connection: _LookupConnection, error: BaseException) -> None:
        await connection.close()
        if not connection.reported:
            connection.reported = True
            reason = str(error) or type(error).__name__
            logger.info("nsqlookupd %s: %s; retried every %g s", connection.address, reason, self.ping_interval)

    def _all_registrations(self) -> list[bytes]:
        commands: list[bytes] = []
        for (topic, number), hosted in self.node.hosted.items():
            partition = self._partition(number)
            channels = [register(topic, name, partition) for name in hosted.partition.channels]
            commands += channels or [register(topic, None, partition)]
        return commands

    async def _create_known_channels(self, topic: str) -> None:
        """Create the channels that lookup nodes know of a new topic: they get its first messages."""
        infos = [connection.info for connection in self._connections.values() if connection.info is not None]
        if not infos:
            return
        names: dict[str, None] = {}
        for info in infos:
            host = f"{info.broadcast_address}:{info.http_port}"
            try:
                async with self._questions:
                    response = await self._http.request("GET", f"http://{host}/channels?{urlencode({'topic': topic})}")
                names |= dict.fromkeys(orjson.loads(response.content)["channels"])
            except (HttpRequestFailed, ValueError, KeyError, TypeError):
                continue
        self._add_channels(topic, names)

    def _add_channels(self, topic: str, names: Iterable[str]) -> None:
        lasting = [name for name in names if not is_ephemeral(name)]
        for hosted in self.node.partitions(topic):
            self.node.add_channels(hosted, lasting)
