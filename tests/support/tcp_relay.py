"""A TCP relay between a client and a node, which can cut its connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, SocketAttribute, SocketStream

__all__ = ("Relay", "relaying")


class Relay:
    """Forwards bytes in both directions.

    Args:
        target: ``host:port`` of the node.
        rate: bytes that clients send to it in a second; None for no limit.
    """

    def __init__(self, target: str, rate: float | None = None) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._rate = rate
        self._scopes: list[anyio.CancelScope] = []
        self.address = ""
        """Address that it listens on."""
        self.connections = 0
        """Number of connections so far."""

    def cut(self, chosen: Callable[[], bool] = lambda: True) -> None:
        """Close all connections, or those that are chosen; new ones are accepted."""
        for scope in self._scopes.copy():
            if chosen():
                self._scopes.remove(scope)
                scope.cancel()

    async def serve(self, client: SocketStream) -> None:
        """Relay one connection; close it if the node accepts none."""
        self.connections += 1
        with anyio.CancelScope() as scope, suppress(OSError):
            self._scopes.append(scope)
            async with (
                client,
                await anyio.connect_tcp(self._host, self._port) as node,
                anyio.create_task_group() as tasks,
            ):
                tasks.start_soon(self._pass_on, client, node, scope, self._rate)
                tasks.start_soon(self._pass_on, node, client, scope, None)
        if scope in self._scopes:  # it ended by itself
            self._scopes.remove(scope)

    async def _pass_on(
        self, source: ByteReceiveStream, sink: ByteSendStream, scope: anyio.CancelScope, rate: float | None
    ) -> None:
        try:
            async for data in source:
                if rate is not None:
                    await anyio.sleep(len(data) / rate)
                await sink.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass  # either side may close at any time
        scope.cancel()


@asynccontextmanager
async def relaying(target: str, port: int = 0, rate: float | None = None) -> AsyncIterator[Relay]:
    """Run a relay to a node, on a free port or on a given one; see `Relay`."""
    relay = Relay(target, rate)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port)
    port = listener.extra_attributes[SocketAttribute.local_port]()
    relay.address = f"127.0.0.1:{port}"
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, relay.serve)
        yield relay
        tasks.cancel_scope.cancel()
