"""The producer's connections: one for each node, made when it is needed, shared by all partitions of the node.

One connection a node means that what is published to a partition travels on one connection, in the order of the calls.
"""

from __future__ import annotations

import anyio

from nsqext.errors import InvalidState, NsqError
from nsqext.protocol.identify import IdentifyRequest, Negotiated
from nsqext.transport.connection import Connection
from nsqext.transport.handshake import open_connection
from nsqext.transport.options import ConnectionOptions
from nsqext.types import Address

__all__ = ("NodePool", "PooledNode")

_TICK = 0.25


class PooledNode:
    """A node and the connection to it."""

    __slots__ = ("address", "connecting", "connection", "negotiated", "node")

    def __init__(self, address: Address) -> None:
        self.address = address
        self.node = str(address)
        self.connection: Connection | None = None
        self.negotiated = Negotiated()
        self.connecting: anyio.Event | None = None


class NodePool:
    """Connections by node.

    Args:
        options: how to connect.
    """

    def __init__(self, options: ConnectionOptions) -> None:
        self._options = options
        self._nodes: dict[Address, PooledNode] = {}
        self._closed = False

    def node(self, address: Address) -> PooledNode:
        """Return the place of a node, without connecting."""
        found = self._nodes.get(address)
        if found is None:
            found = self._nodes[address] = PooledNode(address)
        return found

    async def connection(self, node: PooledNode) -> Connection:
        """Return the connection to a node, making it if there is none that can be used.

        Callers that come while it is being made wait for the same one. Cancellation of the one that makes it lets the next
        one try.

        Raises:
            ConnectionFailed: the node cannot be reached.
            NsqError: the node refuses, or is no nsqd.
        """
        while True:
            connection = node.connection
            if connection is not None and connection.usable:
                return connection
            if self._closed:
                raise InvalidState("the producer is closed", node=node.node)
            if node.connecting is None:
                return await self._connect(node)
            await node.connecting.wait()

    async def _connect(self, node: PooledNode) -> Connection:
        node.connecting = done = anyio.Event()
        try:
            if node.connection is not None:
                node.connection.close()
                node.connection = None
            connection, node.negotiated = await open_connection(node.address, self._options, IdentifyRequest())
            if self._closed:
                connection.close()
                raise InvalidState("the producer was closed meanwhile", node=node.node)
            node.connection = connection
        finally:
            node.connecting = None
            done.set()
        return connection

    async def run(self) -> None:
        """Look after the connections for ever: heartbeats, silence, answers that take too long."""
        while True:
            await anyio.sleep(_TICK)
            for node in self._nodes.values():
                if node.connection is not None:
                    node.connection.tick()

    @property
    def in_flight(self) -> int:
        """Number of requests whose answer is awaited."""
        return sum(node.connection.in_flight for node in self._nodes.values() if node.connection is not None)

    async def aclose(self) -> None:
        """Send what is written, then close all connections."""
        self._closed = True
        for node in self._nodes.values():
            connection, node.connection = node.connection, None
            if connection is None:
                continue
            try:
                with anyio.move_on_after(1):
                    await connection.drain()
            except NsqError:
                continue
            finally:
                connection.close()
