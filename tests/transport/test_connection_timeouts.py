"""Deadlines, heartbeats, and an event loop that was blocked."""

from __future__ import annotations

import time

import anyio
import pytest

from nsqext.errors import HeartbeatMissed, RequestTimeout
from nsqext.protocol.frames import HEARTBEAT
from tests.support.clock import replace_clock
from tests.support.connections import Caller, connected_peer, paired_connection, pub, until
from tests.support.fake_nsqd import ok

pytestmark = pytest.mark.anyio


async def test_a_deadline_fails_one_request_and_keeps_the_connection() -> None:
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        late = Caller(connection, pub(b"1"), deadline=time.monotonic() + 0.05)
        tasks.start_soon(late)
        await peer.expect("PUB")
        patient = Caller(connection, pub(b"2"), deadline=time.monotonic() + 60)
        tasks.start_soon(patient)
        await peer.expect("PUB")
        await until(late.ended.is_set, connection)
        assert type(late.outcome) is RequestTimeout
        assert isinstance(late.outcome, TimeoutError)
        assert late.outcome.maybe_stored
        assert not patient.ended.is_set()
        await peer.raw(ok(b"late") + ok(b"second"))
        await patient.ended.wait()
        assert patient.outcome == b"second"
        assert connection.usable


async def test_regular_responses_keep_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic()]
    replace_clock(monkeypatch, lambda: now[0])
    async with connected_peer(request_timeout=0.3) as (connection, peer), anyio.create_task_group() as tasks:
        callers = [Caller(connection, pub(b"x")) for _ in range(5)]
        for caller in callers:
            tasks.start_soon(caller)
            await peer.expect("PUB")
        for caller in callers[:4]:
            now[0] += 0.25
            connection.tick()
            await peer.answer()
            await caller.ended.wait()
            assert caller.outcome == b"OK"
        now[0] += 0.35
        connection.tick()
        assert connection.closed


async def test_heartbeats_do_not_restart_the_timeout_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic()]
    replace_clock(monkeypatch, lambda: now[0])
    async with connected_peer(request_timeout=0.3) as (connection, peer), anyio.create_task_group() as tasks:
        caller = Caller(connection, pub(b"x"))
        tasks.start_soon(caller)
        await peer.expect("PUB")
        now[0] += 0.2
        tasks.start_soon(peer.heartbeat)
        await until(lambda: connection.protocol.heartbeats, connection)
        now[0] += 0.2
        connection.tick()
        await caller.ended.wait()
        assert type(caller.outcome) is RequestTimeout


async def test_a_request_behind_other_writes_has_its_own_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic()]
    replace_clock(monkeypatch, lambda: now[0])
    async with connected_peer(request_timeout=0.3) as (connection, peer), anyio.create_task_group() as tasks:
        now[0] += 10
        connection.write(pub(b"written"))
        caller = Caller(connection, pub(b"x"))
        tasks.start_soon(caller)
        await peer.expect("PUB")
        await peer.expect("PUB")
        connection.tick()
        await peer.answer()
        await caller.ended.wait()
        assert caller.outcome == b"OK"


async def test_heartbeats_of_an_idle_connection_are_answered() -> None:
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        tasks.start_soon(peer.heartbeat)
        tasks.start_soon(until, lambda: connection.protocol.heartbeats, connection)
        await peer.expect_nop()


async def test_heartbeats_between_answers() -> None:
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        caller = Caller(connection, pub(b"x"))
        tasks.start_soon(caller)
        await peer.expect("PUB")
        await peer.raw(ok(HEARTBEAT) + ok(b"OK") + ok(HEARTBEAT))
        await caller.ended.wait()
        assert caller.outcome == b"OK"
        await peer.expect_nop()
        await peer.expect_nop()
        for body in (b"y", b"z"):
            tasks.start_soon(Caller(connection, pub(body)))
            await peer.expect("PUB")
            await peer.answer()
            await until(lambda: not connection.in_flight)
        assert b"".join(peer.received).count(b"NOP\n") == 2


async def test_a_silent_server_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected_peer() as (connection, _):
        monkeypatch.setattr(connection, "received_at", time.monotonic() - 3.1)
        for connection.heartbeat_interval in (0.0, 1.1):  # without heartbeats, and just before the end
            connection.tick()
            assert connection.usable
        connection.heartbeat_interval = 1.0
        connection.tick()
        assert isinstance(connection.protocol.error, HeartbeatMissed)
        assert connection.closed
        connection.tick()


async def test_a_received_response_counts_however_long_the_event_loop_was_blocked() -> None:
    with paired_connection(request_timeout=0.05) as (connection, right):
        caller = Caller(connection, pub(b"x"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(caller)
            await anyio.wait_all_tasks_blocked()
            right.send(ok())
            time.sleep(0.2)  # noqa: ASYNC251 - as a handler that blocks
            connection.tick()
        assert caller.outcome == b"OK"
        assert connection.usable


async def test_a_received_heartbeat_counts_however_long_the_event_loop_was_blocked() -> None:
    with paired_connection() as (connection, right):
        connection.heartbeat_interval = 0.01
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connection.read_forever)
            await anyio.wait_all_tasks_blocked()
            right.send(ok(HEARTBEAT))
            time.sleep(1.2)  # noqa: ASYNC251 - as a handler that blocks
            connection.tick()
            assert connection.usable
            tasks.cancel_scope.cancel()
