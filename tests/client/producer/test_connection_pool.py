"""The connection pool: one connection per node, opened once for all callers, looked at, and closed when unused."""

from __future__ import annotations

import logging
from copy import copy
from typing import TYPE_CHECKING, Any, cast

import anyio
import pytest

from nsqext.client.events import ClientEvent, ClientEvents
from nsqext.client.producer.connection_pool import ConnectionPool, PooledNode
from nsqext.errors import ConnectionFailed, ConnectionLost, InvalidState, NsqError
from nsqext.protocol.identify import Negotiated
from nsqext.transport.options import ConnectionOptions
from nsqext.types import Address
from tests.support.clock import replace_clock, run_in_virtual_time
from tests.support.fake_nsqd import scripted_node

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio


class Connection:
    """A connection that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.error: NsqError | None = None
        self.finished = False
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

    def __init__(self, half_closed_for: float | None = None) -> None:
        self.seen: list[ClientEvent] = []
        events = ClientEvents()
        events.add(self.seen.append)
        super().__init__(ConnectionOptions(), events, None, half_closed_for)
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


async def test_its_numbers_are_read_in_a_thread_while_nodes_are_added() -> None:
    """A scrape of the metrics failed: the dictionary of nodes had changed its size."""
    pool = Pool()

    class Used:
        usable = True

        @property
        def in_flight(self) -> int:
            pool.node(Address("other", 1))  # as the event loop does meanwhile
            return 2

    pool.node(Address("n", 1)).connection = cast("Any", Used())
    assert (pool.in_flight, pool.connections) == (2, 1)


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


async def test_a_node_that_was_forgotten_is_known_again_when_it_is_used() -> None:
    pool = Pool()
    node, other = pool.node(Address("n", 1)), pool.node(Address("m", 1))
    pool.keep_only([])
    pool.tick()
    again = await pool.connection(pool.node(node.address))
    assert again is not node.connection, "the node was forgotten"
    assert await pool.connection(node) is again, "an old route uses the connection of the new node"
    assert node.redesigned
    await pool.connection(other)
    assert pool.node(other.address) is other


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
            assert (pool.node(opening.address), pool.node(wanted.address)) == (opening, wanted)
            pool.hold.set()
    assert connections == [pool.made[0]] * 2


async def test_callers_at_the_same_time_share_one_failure() -> None:
    pool = Pool()
    pool.hold, pool.refusal = anyio.Event(), ConnectionFailed("refused")
    node, errors = pool.node(Address("n", 1)), list[NsqError]()

    async def connect() -> None:
        with pytest.raises(ConnectionFailed) as caught:
            await pool.connection(node)
        errors.append(caught.value)

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(connect)
        await anyio.wait_all_tasks_blocked()
        pool.hold.set()
    assert len(set(map(id, errors))) == 4, "each caller has an error of its own"
    assert node.rests.next() <= 0.8, "one or two attempts"
    assert node.rest_until > 0


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
async def test_busy_connections_are_looked_at_often_and_idle_ones_rarely(idle: bool, busy: bool, wanted: bool) -> None:
    pool = Pool()
    (connection,), node = await pool.opened("n"), pool.node(Address("n", 1))
    connection.busy, connection.in_flight = busy, int(busy)
    pool.keep_only([Address("n", 1)] if wanted else [])
    pool.tick(idle=idle)
    looked = idle or busy or not wanted
    assert ("tick" in connection.calls) is looked
    assert ("close" in connection.calls) is (not wanted and not busy)
    if not wanted and not busy:
        pool.tick(idle=idle)
        assert pool.node(node.address) is not node, "it is forgotten"


async def test_a_connection_with_an_error_is_closed_once_nothing_waits_for_it() -> None:
    pool = Pool()
    (connection,), node = await pool.opened("n"), pool.node(Address("n", 1))
    connection.error, connection.in_flight = ConnectionLost("lost"), 1
    pool.tick()
    assert "close" not in connection.calls
    connection.in_flight = 0
    pool.tick()
    assert "close" in connection.calls
    pool.tick()
    assert pool.node(node.address) is node, "it is wanted"


def test_connections_in_use_are_looked_at_four_times_a_second_and_idle_ones_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pool rests while nothing is in flight and nothing was received for a second, until it is used."""
    ticks: list[tuple[float, bool]] = []

    async def use_and_leave() -> None:
        began = anyio.current_time()

        def since() -> float:
            return anyio.current_time() - began

        async def until_time(seconds: float) -> None:
            await anyio.sleep(began + seconds - anyio.current_time())

        pool = Pool()
        (connection,) = await pool.opened("n")
        connection.received_at = began - 1.0
        monkeypatch.setattr(pool, "tick", lambda *, idle: ticks.append((since(), idle)))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.run)
            await until_time(9.0)
            assert ticks == [(4.0, True), (8.0, True)], "it rests"
            ticks.clear()
            assert connection.on_request is not None
            connection.on_request()
            connection.busy = True
            await until_time(17.1)
            assert [seconds for seconds, _ in ticks] == [9.25 + 0.25 * number for number in range(32)]
            assert [seconds for seconds, idle in ticks if idle] == [11.75, 15.5], "all of them every 3.75 s"
            assert connection.on_request is None
            connection.busy, connection.received_at = False, anyio.current_time()
            await until_time(18.2)
            assert (ticks[-1][0], connection.on_request) == (18.0, None), "a second has not passed"
            await until_time(18.6)
            assert (ticks[-1][0], connection.on_request is not None) == (18.25, True)
            (_, other) = await pool.opened("m")
            other.received_at = anyio.current_time()
            await until_time(19.0)
            assert ticks[-1][0] == pytest.approx(18.85), "it rests no longer"
            tasks.cancel_scope.cancel()
        assert connection.on_request is None

    run_in_virtual_time(monkeypatch, use_and_leave)


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
    pool.hold = anyio.Event()

    async def open_one() -> None:
        with pytest.raises(InvalidState, match="the producer was closed"):
            await pool.opened("n")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(open_one)
        await anyio.wait_all_tasks_blocked()
        await pool.aclose()
        pool.hold.set()
    assert pool.made[0].calls == ["close"]
    assert pool.connections == 0


async def test_a_node_that_does_not_read_does_not_keep_the_others_open() -> None:
    async with scripted_node() as stuck, scripted_node() as idle:
        pool = ConnectionPool(ConnectionOptions(), ClientEvents())
        connections: list[Any] = []
        for node in (stuck, idle):
            connections.append(await pool.connection(pool.node(node.address)))
            (await node.accept()).stop_reading()
        connections[0].write(b"x" * 20_000_000)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.aclose)
            await anyio.wait_all_tasks_blocked()
            pool.node(Address("127.0.0.1", 1))  # another task finds a node in the meantime
        assert [connection.closed for connection in connections] == [True, True]


async def test_a_half_closed_connection_ends_with_the_server_or_its_time_or_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, clock = Pool(half_closed_for=60.0), [100.0]
    monkeypatch.setattr("nsqext.client.producer.connection_pool._clock", lambda: clock[0])
    names = ("finished", "late", "closed")
    connections = await pool.opened(*names)
    for connection in connections:
        connection.error = ConnectionLost("lost")
        pool.tick()
        clock[0] += 20.0
    assert [connection.calls.count("close") for connection in connections] == [0, 0, 0]
    connections[0].finished = True
    pool.tick()
    assert [connection.calls.count("close") for connection in connections] == [1, 0, 0]
    clock[0] = 180.0
    pool.tick()
    assert [connection.calls.count("close") for connection in connections] == [1, 1, 0]
    await pool.aclose()
    assert [connection.calls.count("close") for connection in connections] == [1, 1, 1]
