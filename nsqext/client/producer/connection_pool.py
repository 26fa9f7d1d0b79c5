"""The producer's connections: one per node, opened on first use, so that publishes to a partition keep their order."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from copy import copy
from math import inf
from typing import TYPE_CHECKING, TypeAlias

import anyio
from attrs import define, field

from nsqext.errors import InvalidState, NsqError
from nsqext.waits import Doubling, Waiters, chance

if TYPE_CHECKING:
    from nsqext.client.events import ClientEvents
    from nsqext.client.producer.http_connection import HttpConnection
    from nsqext.client.tasks import BackgroundTasks
    from nsqext.protocol.identify import Negotiated
    from nsqext.transport.connection import Connection
    from nsqext.transport.options import ConnectionOptions
    from nsqext.types import Address

logger: logging.Logger = logging.getLogger("nsqext.producer")

_TICK = 0.25  # seconds between checks of a connection with a request in flight
_IDLE_TICK = 5.0  # longest time between checks of an idle connection, which only heartbeats need
_TICKS_PER_HEARTBEAT = 8
_QUIET = 1.0  # seconds without a response until a connection counts as unused
_FIRST_REST = 0.2
_LONGEST_REST = 5.0
_LAST = 1.0  # seconds for sending written bytes when the pool is closed
_LOG_PAUSE = 60.0  # seconds between two logged ends of connections to a node

_clock = time.monotonic

PooledConnection: TypeAlias = "Connection | HttpConnection"


class PooledNode:
    """A node and its connection."""

    def __init__(self, address: Address) -> None:
        self.address: Address = address
        self.node: str = str(address)
        #: None if lookup does not list it, and for fixed nodes
        self.http: Address | None = None
        self.connection: PooledConnection | None = None  #: may be broken
        self.redesigned: bool = False  #: False until it is connected
        self.connecting: anyio.Event | None = None
        self.failure: NsqError | None = None  #: of the last attempt to connect
        #: times of avoidance after failed attempts
        self.rests: Doubling = Doubling(_FIRST_REST, _LONGEST_REST)
        #: end of the avoidance, in seconds of the monotonic clock
        self.rest_until: float = 0.0
        self.wanted: bool = True  #: a topic needs the node
        self.reported: bool = False  #: an event reported the connection, but not its end
        self.logged_at: float | None = None  #: last log of the end of a connection
        self.ended_at: float | None = None  #: logged end, without a later logged connection

    @property
    def in_flight(self) -> int:
        return 0 if self.connection is None else self.connection.in_flight

    def failed(self, error: NsqError) -> None:
        """Record a failed attempt to connect, and avoid the node temporarily."""
        self.failure = error
        longest = self.rests.next()
        self.rest_until = _clock() + chance.uniform(longest / 2, longest)

    def log_connected(self) -> None:
        """Log the first connection, and reconnections after a logged end."""
        if self.logged_at is None:
            self.logged_at = float("-inf")
            logger.info("connected to %s", self.node, extra={"node": self.node})
        elif self.ended_at is not None:
            seconds = _clock() - self.ended_at
            logger.info("connected to %s: back after %.1f s", self.node, seconds, extra={"node": self.node})
        self.ended_at = None

    def log_ended(self, reason: object) -> None:
        """Log the end of a connection, at a limited rate."""
        now = _clock()
        if self.logged_at is not None and now - self.logged_at >= _LOG_PAUSE:
            self.logged_at = self.ended_at = now
            logger.info("connection to %s ended: %s", self.node, reason, extra={"node": self.node})


@define(eq=False, slots=False)
class ConnectionPool:
    """Connections by node."""

    _options: ConnectionOptions
    _events: ClientEvents
    _http_tasks: BackgroundTasks | None = None  # for HTTP requests
    # seconds that a failed connection may be half closed, until the server ends it; None to reset it at once
    _half_closed_for: float | None = None
    _half_closed: list[tuple[float, PooledConnection]] = field(factory=list, init=False)  # with the time of the reset
    _nodes: dict[Address, PooledNode] = field(factory=dict, init=False)
    _closed: bool = field(default=False, init=False)
    # woken by a request or a new connection while the pool rests
    _used: Waiters = field(factory=Waiters, init=False)

    def node(self, address: Address, http: Address | None = None) -> PooledNode:
        """Return the node of a TCP address (of an HTTP address for fixed nodes and HTTP), without connecting.

        ``http`` is the HTTP address from lookup.
        """
        found = self._nodes.get(address)
        if found is None:
            found = self._nodes[address] = PooledNode(address)
        found.http = http or found.http
        return found

    def keep_only(self, wanted: Collection[Address]) -> None:
        """Keep these nodes; `tick` closes the idle connections of the others."""
        for address, node in self._nodes.items():
            node.wanted = address in wanted

    async def connection(self, node: PooledNode) -> PooledConnection:
        """Return the connection to a node; connect if it is not usable. Raises ConnectionFailed.

        Concurrent callers share the outcome. If the connecting caller is cancelled, another connects.
        """
        while True:
            connection = node.connection
            if connection is not None and connection.usable:
                return connection
            if self._closed:
                raise InvalidState("the producer is closed", node=node.node)
            known = self._nodes.setdefault(node.address, node)
            if known is not node:
                # an old route uses a node that was forgotten and is known again
                node.redesigned = known.redesigned
                node = known
                continue
            if node.connecting is None:
                return await self._connect(node)
            await node.connecting.wait()
            if node.failure is not None:
                # every waiting task needs its own traceback
                raise copy(node.failure) from node.failure.__cause__

    async def _connect(self, node: PooledNode) -> PooledConnection:
        node.connecting = done = anyio.Event()
        node.failure = None
        try:
            self._ended(node)
            connection, negotiated = await self._open(node)
            node.redesigned = negotiated.redesigned
            if self._closed:
                connection.close()
                raise InvalidState("the producer was closed", node=node.node)
            node.connection = connection
            self._used.wake()
            node.rests.reset()
            node.rest_until = 0.0
            node.reported = True
            node.log_connected()
            self._events.emit("connected", None, None, node.node)
        except NsqError as error:
            node.failed(error)
            raise
        finally:
            node.connecting = None
            done.set()
        return connection

    async def _open(self, node: PooledNode) -> tuple[PooledConnection, Negotiated]:
        if self._http_tasks is None:
            from nsqext.transport.handshake import open_connection

            connection, negotiated = await open_connection(node.address, self._options)
            connection.half_closes = self._half_closed_for is not None
            return connection, negotiated
        from nsqext.client.producer.http_connection import open_http_connection

        address = node.http or node.address
        return await open_http_connection(address, node.node, self._options, self._http_tasks.start_soon)

    async def connect_all(self, addresses: Collection[Address]) -> list[NsqError]:
        """Connect to nodes concurrently; return the errors."""
        errors: list[NsqError] = []

        async def connect(address: Address) -> None:
            try:
                await self.connection(self.node(address))
            except NsqError as error:
                errors.append(error.at(node=str(address)))

        async with anyio.create_task_group() as tasks:
            for address in addresses:
                tasks.start_soon(connect, address)
        return errors

    def _ended(self, node: PooledNode) -> None:
        """Forget and report a connection that ended."""
        connection, node.connection = node.connection, None
        if connection is None:
            return
        reason = connection.error
        if self._half_closed_for is None or connection.usable or connection.finished:
            connection.close()
        else:
            self._half_closed.append((_clock() + self._half_closed_for, connection))
        if node.reported:
            node.reported = False
            if reason is not None and not self._closed:
                node.log_ended(reason)
            self._events.emit("disconnected", None, None, node.node, str(reason or "closed"))

    async def run(self) -> None:
        """Call `tick` periodically, until cancelled."""
        rest = min(_IDLE_TICK, self._options.heartbeat_interval / _TICKS_PER_HEARTBEAT)
        idle_due = _clock() + rest
        while True:
            if self._quiet():
                await self._rest(idle_due - _clock())
            await anyio.sleep(_TICK)
            idle = _clock() >= idle_due
            if idle:
                idle_due = _clock() + rest
            self.tick(idle=idle)

    def _quiet(self) -> bool:
        """Return whether no connection is in use."""
        now = _clock()
        return not any(one.busy or now - one.received_at < _QUIET for one in self._connections())

    async def _rest(self, longest: float) -> None:
        """Wait for a request, a new connection, or some seconds."""
        resting = self._connections()
        for connection in resting:
            connection.on_request = self._used.wake
        try:
            with anyio.move_on_after(longest):
                await self._used.wait()
        finally:
            for connection in resting:
                connection.on_request = None

    def tick(self, *, idle: bool = True) -> None:
        """Check connections: heartbeats, silent servers, expired requests."""
        for node in tuple(self._nodes.values()):
            connection = node.connection
            if connection is None:
                if not node.wanted and node.connecting is None:
                    del self._nodes[node.address]
                continue
            if not idle and node.wanted and not connection.busy:
                continue
            connection.tick()
            if not connection.in_flight and not (node.wanted and connection.usable):
                self._ended(node)
        if self._half_closed:
            self._close_half_closed(_clock())

    def _close_half_closed(self, now: float = inf) -> None:
        """Close connections that the server has ended, or that it has not ended in time."""
        waiting: list[tuple[float, PooledConnection]] = []
        for due, connection in self._half_closed:
            if due > now and not connection.finished:
                waiting.append((due, connection))
            else:
                connection.close()
        self._half_closed = waiting

    def _connections(self) -> list[PooledConnection]:
        """Return the connections of all nodes, broken ones too; any thread may read the statistics."""
        return [node.connection for node in tuple(self._nodes.values()) if node.connection is not None]

    @property
    def connections(self) -> int:
        return sum(connection.usable for connection in self._connections())

    @property
    def in_flight(self) -> int:
        return sum(connection.in_flight for connection in self._connections())

    async def aclose(self) -> None:
        """Send written bytes, for at most a second, then close all connections."""
        self._closed = True
        try:
            with anyio.move_on_after(_LAST):
                for connection in self._connections():
                    await connection.drain()
        finally:
            for node in self._nodes.values():
                self._ended(node)
            self._close_half_closed()
