"""Which connections of a pool are looked at, kept and closed, without sockets."""

from __future__ import annotations

import logging
from copy import copy
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from nsqext.client.events import ClientEvent, ClientEvents
from nsqext.client.producer.connection_pool import ConnectionPool, PooledNode
from nsqext.errors import ConnectionFailed, ConnectionLost, InvalidState, NsqError
from nsqext.protocol.identify import Negotiated
from nsqext.transport.options import ConnectionOptions
from nsqext.types import Address
from tests.support.clock import replace_clock
from tests.support.sleeps import replace_sleep

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio


class Connection:
    """A connection that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.error: NsqError | None = None
        self.in_flight = 0
        self.busy = False
        self.received_at = 0.0
        self.on_request: Callable[[], None] | None = None

    @property
    def usable(self) -> bool:
        return self.error is None

    def tick(self) -> None:
        self.calls.append("tick")

    def close(self) -> None:
        self.calls.append("close")

    async def drain(self) -> None:
        self.calls.append("drain")


class Pool(ConnectionPool):
    """A pool whose nodes answer at once."""

    def __init__(self) -> None:
        self.seen: list[ClientEvent] = []
        events = ClientEvents()
        events.add(self.seen.append)
        super().__init__(ConnectionOptions(), events)
        self.made: list[Connection] = []
        self.refusal: NsqError | None = None
        self.hold: anyio.Event | None = None

    async def _open(self, node: PooledNode) -> Any:
        if self.hold is not None:
            await self.hold.wait()
        if self.refusal is not None:
            raise copy(self.refusal)
        self.made.append(Connection())
        return self.made[-1], Negotiated(version="1-HA.1")

    async def opened(self, *names: str) -> list[Connection]:
        for name in names:
            await self.connection(self.node(Address(name, 1)))
        return self.made


async def test_a_node_is_known_by_its_address_and_keeps_its_http_address() -> None:
    pool = Pool()
    node = pool.node(Address("n", 1), Address("n", 2))
    assert pool.node(Address("n", 1)) is node
    assert node.http == Address("n", 2)
    assert pool.node(Address("n", 1), Address("n", 3)).http == Address("n", 3)
    assert (pool.connections, pool.in_flight, node.in_flight) == (0, 0, 0)


async def test_a_connection_is_used_until_it_has_an_error() -> None:
    pool = Pool()
    (first,) = await pool.opened("n", "n")
    first.in_flight = 3
    assert (pool.connections, pool.in_flight) == (1, 3)
    first.error = ConnectionLost("lost")
    assert pool.connections == 0
    await pool.opened("n")
    assert (len(pool.made), pool.connections, first.calls) == (2, 1, ["close"])
    assert [(event.kind, event.detail) for event in pool.seen] == [
        ("connected", ""),
        ("disconnected", "lost"),
        ("connected", ""),
    ]


async def test_an_old_route_uses_the_connection_of_a_node_that_is_known_again() -> None:
    pool = Pool()
    node = pool.node(Address("n", 1))
    pool.keep_only([])
    pool.tick()
    assert pool._nodes == {}
    again = await pool.connection(pool.node(Address("n", 1)))
    assert await pool.connection(node) is again
    assert node.redesigned


async def test_a_node_that_was_forgotten_is_known_again_when_it_is_used() -> None:
    pool = Pool()
    node = pool.node(Address("n", 1))
    pool.keep_only([])
    pool.tick()
    await pool.connection(node)
    assert pool._nodes == {node.address: node}


async def test_callers_at_the_same_time_share_a_connection_whose_node_is_kept() -> None:
    pool = Pool()
    pool.hold = anyio.Event()
    opening, wanted = pool.node(Address("n", 1)), pool.node(Address("m", 1))
    connections: list[object] = []

    async def connect() -> None:
        connections.append(await pool.connection(opening))

    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(connect)
            await anyio.wait_all_tasks_blocked()
            pool.keep_only([wanted.address])
            pool.tick()
            assert set(pool._nodes.values()) == {opening, wanted}
            pool.hold.set()
    assert connections == [pool.made[0]] * 2


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
async def test_busy_connections_are_looked_at_often_and_idle_ones_rarely(idle: bool, busy: bool, wanted: bool) -> None:
    pool = Pool()
    (connection,) = await pool.opened("n")
    connection.busy, connection.in_flight = busy, int(busy)
    pool.keep_only([Address("n", 1)] if wanted else [])
    pool.tick(idle=idle)
    looked = idle or busy or not wanted
    assert ("tick" in connection.calls) is looked
    assert ("close" in connection.calls) is (not wanted and not busy)
    if not wanted and not busy:
        pool.tick(idle=idle)
        assert pool._nodes == {}


async def test_a_connection_with_an_error_is_closed_once_nothing_waits_for_it() -> None:
    pool = Pool()
    (connection,) = await pool.opened("n")
    connection.error, connection.in_flight = ConnectionLost("lost"), 1
    pool.tick()
    assert "close" not in connection.calls
    connection.in_flight = 0
    pool.tick()
    assert "close" in connection.calls
    assert list(pool._nodes) == [Address("n", 1)], "the node is wanted"


async def test_a_pool_is_quiet_when_nothing_was_received_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    replace_clock(monkeypatch, lambda: now)
    pool = Pool()
    assert pool._quiet()
    one, two = await pool.opened("n", "m")
    assert pool._quiet()
    two.received_at = now
    assert not pool._quiet()
    two.received_at, one.busy = 0.0, True
    assert not pool._quiet()


@pytest.mark.parametrize("quiet", [True, False])
async def test_connections_in_use_are_looked_at_four_times_a_second(
    quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, rests, ticks = 1000.0, list[float](), list[bool]()

    async def wait(seconds: float) -> None:
        nonlocal now
        now += seconds
        if len(ticks) == 30:
            raise InvalidState("it has seen enough")

    async def rest(longest: float) -> None:
        rests.append(longest)
        await wait(longest)

    pool = Pool()
    replace_clock(monkeypatch, lambda: now)
    replace_sleep(monkeypatch, wait)
    monkeypatch.setattr(pool, "_quiet", lambda: quiet)
    monkeypatch.setattr(pool, "_rest", rest)
    monkeypatch.setattr(pool, "tick", lambda *, idle: ticks.append(idle))
    with pytest.raises(InvalidState):
        await pool.run()
    assert ticks == ([True] * 30 if quiet else ([False] * 14 + [True]) * 2), "all of them every 3.75 s"
    assert rests == [3.75] * 31 * quiet


@pytest.mark.parametrize("wake", ["request", "connection", None])
async def test_a_pool_rests_until_it_is_used(wake: str | None) -> None:
    pool = Pool()
    (connection,) = await pool.opened("n")
    rested: list[bool] = []

    async def rest() -> None:
        await pool._rest(0.02 if wake is None else 20.0)
        rested.append(True)

    with anyio.fail_after(25):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rest)
            await anyio.wait_all_tasks_blocked()
            assert connection.on_request is not None
            if wake == "request":
                connection.on_request()
            elif wake == "connection":
                await pool.opened("m")
    assert (rested, connection.on_request) == ([True], None)


async def test_a_node_that_cannot_be_reached_is_avoided_until_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_clock(monkeypatch, lambda: 1000.0)
    pool = Pool()
    node = pool.node(Address("n", 1))
    pool.refusal = ConnectionFailed("down")
    for _ in range(3):
        with pytest.raises(ConnectionFailed):
            await pool.connection(node)
    assert isinstance(node.failure, ConnectionFailed)
    assert (node.rest_until > 1000.0, node.connecting) == (True, None)
    errors = await pool.connect_all([Address("n", 1), Address("m", 1)])
    assert sorted(str(error.node) for error in errors) == ["m:1", "n:1"]
    pool.refusal = None
    await pool.connection(node)
    assert node.rest_until == 0.0
    assert pool.node(node.address).failure is None
    assert node.rests.next() == 0.2, "the next failure is the first one again"


async def test_ends_of_connections_are_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    replace_clock(monkeypatch, lambda: now)
    caplog.set_level(logging.INFO, "nsqext.producer")
    pool = Pool()
    for seconds in (0.0, 59.0, 1.0):
        now += seconds
        (*_, connection) = await pool.opened("n")
        connection.error = ConnectionLost("lost")
        pool.tick()
        now += 0.5 * (seconds == 0.0)
    await pool.opened("n")
    pool.keep_only([])
    pool.tick()
    assert [record.getMessage() for record in caplog.records] == [
        "connected to n:1",
        "connection to n:1 ended: lost",
        "connected to n:1: back after 59.5 s",
        "connection to n:1 ended: lost",
        "connected to n:1: back after 0.0 s",
    ], "a connection that no topic needs ends without a log record"


async def test_a_closed_pool_has_no_connections(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nsqext.producer")
    pool = Pool()
    one, two = await pool.opened("n", "m")
    two.error = ConnectionLost("lost")
    await pool.aclose()
    assert [record.getMessage() for record in caplog.records] == ["connected to n:1", "connected to m:1"]
    assert [connection.calls for connection in (one, two)] == [["drain", "close"]] * 2
    assert [event.detail for event in pool.seen if event.kind == "disconnected"] == ["closed", "lost"]
    with pytest.raises(InvalidState, match="the producer is closed"):
        await pool.opened("n")


async def test_a_connection_that_opens_while_the_pool_closes_is_closed() -> None:
    pool = Pool()
    opening = pool._open

    async def close_meanwhile(node: PooledNode) -> Any:
        await pool.aclose()
        return await opening(node)

    pool._open = close_meanwhile  # type: ignore[method-assign]
    with pytest.raises(InvalidState, match="the producer was closed"):
        await pool.opened("n")
    assert pool.made[0].calls == ["close"]
    assert pool.connections == 0
