"""The connection pool: one connection per node, opened once for all callers, closed when unused."""

from __future__ import annotations

import anyio
import pytest

from nsqext.client.events import ClientEvents
from nsqext.client.producer.connection_pool import ConnectionPool, PooledNode
from nsqext.errors import ConnectionFailed, InvalidState, NsqError
from nsqext.protocol.client.commands import NOP
from nsqext.transport.connection import Connection
from nsqext.transport.options import ConnectionOptions
from nsqext.types import Address
from tests.support.clock import replace_clock
from tests.support.fake_nsqd import obey, scripted_node, until

pytestmark = pytest.mark.anyio


async def connect_to(pool: ConnectionPool, node: PooledNode) -> Connection:
    """Return the connection to a node, over TCP."""
    connection = await pool.connection(node)
    assert isinstance(connection, Connection)
    return connection


async def test_concurrent_callers_share_one_connection() -> None:
    async with scripted_node(obey()) as node:
        pool = ConnectionPool(ConnectionOptions(), ClientEvents())
        place = pool.node(node.address)
        assert pool.node(node.address) is place
        connections = []

        async def connect() -> None:
            connections.append(await connect_to(pool, place))

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(connect)
        assert len(node.peers) == 1
        assert len(set(map(id, connections))) == 1
        connections[0].close()
        assert await connect_to(pool, place) is not connections[0]
        await pool.aclose()
        with pytest.raises(InvalidState):
            await connect_to(pool, place)


async def test_concurrent_callers_share_one_failure(closed_address: Address) -> None:
    pool = ConnectionPool(ConnectionOptions(), ClientEvents())
    place = pool.node(closed_address)
    errors: list[NsqError] = []

    async def connect() -> None:
        with pytest.raises(ConnectionFailed) as caught:
            await connect_to(pool, place)
        errors.append(caught.value)

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(connect)
    assert len(set(map(id, errors))) == 4
    assert place.rests.next() <= 0.8, "one or two attempts"
    assert place.rest_until > 0


async def test_when_the_connecting_caller_is_cancelled_another_one_connects() -> None:
    async with scripted_node(granted=None) as node:
        pool = ConnectionPool(ConnectionOptions(), ClientEvents())
        place = pool.node(node.address)
        scope, done = anyio.CancelScope(), anyio.Event()

        async def cancelled() -> None:
            with scope:
                await connect_to(pool, place)

        async def patient() -> None:
            await connect_to(pool, place)
            done.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancelled)
            await until(lambda: len(node.peers) == 1)
            first = node.peers[0]
            await first.read_magic()
            await first.expect("IDENTIFY")
            tasks.start_soon(patient)
            scope.cancel()
            await until(lambda: len(node.peers) == 2)
            await node.peers[1].handshake({"version": "1.3.0"})
            with anyio.fail_after(25):
                await done.wait()
            await first.expect_end()
        await pool.aclose()


@pytest.mark.parametrize("share", [0.5, 1.0])
async def test_a_node_rests_longer_after_each_failure(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    replace_clock(monkeypatch, lambda: 1000.0)
    monkeypatch.setattr("nsqext.waits.chance.uniform", lambda low, high: low if share < 1 else high)
    place = ConnectionPool(ConnectionOptions(), ClientEvents()).node(Address("n", 1))
    rests = []
    for _ in range(8):
        place.failed(ConnectionFailed("refused"))
        rests.append(round(place.rest_until - 1000.0, 6))
    assert rests == [rest * share for rest in (0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0)]


async def test_closing_sends_pending_writes() -> None:
    async with scripted_node() as node:
        pool = ConnectionPool(ConnectionOptions(), ClientEvents())
        connection = await connect_to(pool, pool.node(node.address))
        peer = await node.accept()
        connection.write(NOP)
        await pool.aclose()
        await peer.expect_nop()
        await peer.expect_end()


async def test_a_node_that_does_not_read_does_not_keep_the_others_open() -> None:
    async with scripted_node() as stuck, scripted_node() as idle:
        pool = ConnectionPool(ConnectionOptions(), ClientEvents())
        connections = []
        for node in (stuck, idle):
            connections.append(await connect_to(pool, pool.node(node.address)))
            (await node.accept()).stop_reading()
        connections[0].write(b"x" * 20_000_000)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.aclose)
            await anyio.wait_all_tasks_blocked()
            pool.node(Address("127.0.0.1", 1))  # another task finds a node in the meantime
        assert [connection.closed for connection in connections] == [True, True]
