"""Large and many writes, and peers that read slowly or never."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio.lowlevel import current_token

from nsqext.errors import ConnectionLost, NotSent, NsqError, RequestTimeout
from tests.support.clock import replace_clock
from tests.support.connections import Caller, connected_peer, paired_connection, pub, until
from tests.support.fake_nsqd import ok
from tests.support.sleeps import settled

if TYPE_CHECKING:
    from collections.abc import Awaitable

pytestmark = pytest.mark.anyio

_BIG = 20_000_000
"""More bytes than the socket buffers accept while the peer does not read."""


@pytest.mark.usefixtures("either_reader")
async def test_a_request_that_the_kernel_sends_in_parts() -> None:
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        big, small = Caller(connection, pub(b"b" * _BIG)), Caller(connection, pub(b"small"))
        tasks.start_soon(big)
        await until(lambda: connection.sending)
        tasks.start_soon(small)
        assert (await peer.expect("PUB")).body == b"b" * _BIG
        assert (await peer.expect("PUB")).body == b"small"
        await peer.raw(ok(b"1") + ok(b"2"))
        await big.ended.wait()
        await small.ended.wait()
        assert (big.outcome, small.outcome) == (b"1", b"2")
        loop = current_token().native_token
        if hasattr(loop, "remove_writer"):
            assert not loop.remove_writer(connection.fileno()), (
                "the loop does not wake for a socket that can be written"
            )


@pytest.mark.parametrize("reads", [True, False])
async def test_large_requests_of_one_turn_are_sent_one_by_one(reads: bool) -> None:
    sizes = [10, _BIG, _BIG, 20, _BIG]
    async with connected_peer(request_timeout=30.0 if reads else 0.2) as (connection, peer):
        if not reads:
            peer.stop_reading()
        callers = [Caller(connection, pub(b"b" * size)) for size in sizes]
        async with anyio.create_task_group() as tasks:
            for caller in callers:
                tasks.start_soon(caller)
            if reads:
                bodies = [(await peer.expect("PUB")).body or b"" for _ in sizes]
                assert sorted(map(len, bodies)) == sorted(sizes)  # trio starts tasks in any order
                await peer.raw(b"".join(ok(b"%d" % number) for number in range(len(sizes))))
            for caller in callers:
                await until(caller.ended.is_set, connection)
    if reads:
        assert {caller.outcome for caller in callers} == {b"%d" % number for number in range(len(sizes))}
    else:
        kinds = [type(caller.outcome) for caller in callers]
        assert kinds.count(NotSent) >= 2  # all queued after the first large one, which was written in part
        assert kinds.count(RequestTimeout) >= 1


async def test_a_large_request_behind_small_ones_is_sent_alone() -> None:
    async with connected_peer(request_timeout=0.2) as (connection, peer):
        peer.stop_reading()
        sent = [connection.request(pub(b"b" * size)) for size in (10, 20, _BIG, _BIG)]
        kinds: list[type[NsqError]] = [NsqError] * len(sent)

        async def wait(number: int, response: Awaitable[bytes]) -> None:
            try:
                await response
            except NsqError as error:
                kinds[number] = type(error)

        async with anyio.create_task_group() as tasks:
            for number, response in enumerate(sent):
                tasks.start_soon(wait, number, response)
            await until(lambda: NsqError not in kinds, connection)
        assert kinds == [RequestTimeout, RequestTimeout, RequestTimeout, NotSent]


async def test_a_request_cancelled_while_it_is_sent_is_sent_completely() -> None:
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        big, small = Caller(connection, pub(b"b" * _BIG)), Caller(connection, pub(b"small"))
        tasks.start_soon(big)
        await until(lambda: connection.sending)
        big.scope.cancel()
        await big.ended.wait()
        tasks.start_soon(small)
        assert len((await peer.expect("PUB")).body or b"") == _BIG
        assert (await peer.expect("PUB")).body == b"small"
        await peer.raw(ok(b"1") + ok(b"2"))
        await small.ended.wait()
        assert small.outcome == b"2"


async def test_a_peer_that_never_reads_loses_the_connection() -> None:
    async with connected_peer(request_timeout=0.2) as (connection, peer), anyio.create_task_group() as tasks:
        peer.stop_reading()
        big, behind = Caller(connection, pub(b"b" * _BIG)), Caller(connection, pub(b"small"))
        tasks.start_soon(big)
        await until(lambda: connection.sending)
        tasks.start_soon(behind)
        await until(lambda: connection.in_flight == 2)
        await until(lambda: connection.closed, connection)
        await big.ended.wait()
        await behind.ended.wait()
        assert type(big.outcome) is RequestTimeout
        assert "no response within 0.2 s" in str(big.outcome)
        assert type(behind.outcome) is NotSent


@pytest.mark.usefixtures("either_reader")
async def test_drain_sends_pending_writes() -> None:
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        connection.write(pub(b"b" * _BIG))
        connection.write(pub(b"c"))
        for _ in range(3):
            tasks.start_soon(connection.drain)
        assert len((await peer.expect("PUB")).body or b"") == _BIG
        assert (await peer.expect("PUB")).body == b"c"


@pytest.mark.usefixtures("either_reader")
async def test_another_task_continues_a_cancelled_drain() -> None:
    with paired_connection() as (connection, right):
        scope, left = anyio.CancelScope(), _BIG

        async def give_up() -> None:
            with scope:
                await connection.drain()

        connection.write(b"x" * _BIG)
        with anyio.fail_after(25):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(give_up)
                await settled()
                tasks.start_soon(connection.drain)
                await settled()
                scope.cancel()
                while left:
                    await anyio.wait_readable(right)
                    left -= len(right.recv(1 << 20))
        assert not connection.sending


@pytest.mark.usefixtures("either_reader")
async def test_closing_ends_a_drain() -> None:
    async with connected_peer() as (connection, peer):
        peer.stop_reading()
        connection.write(pub(b"b" * _BIG))
        async with anyio.create_task_group() as drains:
            for _ in range(2):
                drains.start_soon(connection.drain)
            await until(lambda: connection.sending)
            connection.close()
            connection.close()
        assert connection.closed


async def test_a_peer_that_resets() -> None:
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        await peer.close()
        caller = Caller(connection, pub(b"b" * _BIG))
        tasks.start_soon(caller)
        await caller.ended.wait()
        assert isinstance(caller.outcome, ConnectionLost)
        assert connection.closed


async def test_writes_of_one_turn_share_a_send() -> None:
    with paired_connection() as (connection, right):
        right.setblocking(False)
        connection.write(b"a")
        connection.write(b"b")
        with pytest.raises(BlockingIOError):
            right.recv(10)
        connection.flush()
        connection.flush()
        assert right.recv(10) == b"ab"


async def test_a_reset_while_writing_ends_the_connection_once() -> None:
    with paired_connection() as (connection, right):
        right.close()
        connection.write(b"a")
        connection.flush()
        first = connection.protocol.error
        connection.write(b"b")
        connection.flush()
        assert isinstance(first, ConnectionLost)
        assert connection.protocol.error is first
        assert (connection.closed, connection.local_address) == (True, "")


async def test_acknowledgements_that_the_server_does_not_read_are_bounded() -> None:
    with paired_connection() as (connection, _):
        connection.write(b"x" * _BIG)
        connection.flush()
        for _ in range(16):
            connection.write(b"y" * (1 << 20))
            connection.flush()
        assert connection.usable
        connection.write(b"y")
        assert not connection.usable
        assert "the server does not read" in str(connection.protocol.error)


async def test_a_request_does_not_overtake_unsent_bytes_when_the_server_has_read_a_part() -> None:
    size = 4 << 20
    with paired_connection() as (connection, right):
        connection.write(b"w" * size)
        connection.flush()
        received = bytearray(right.recv(1 << 20))
        async with anyio.create_task_group() as tasks:
            caller = Caller(connection, pub(b"x"))
            tasks.start_soon(caller)
            await anyio.wait_all_tasks_blocked()
            right.setblocking(False)
            while len(received) < size + len(pub(b"x")):
                await anyio.wait_readable(right)
                received += right.recv(1 << 20)
            assert received.lstrip(b"w") == pub(b"x")
            right.send(ok(b"1"))
            await caller.ended.wait()
        assert caller.outcome == b"1"


async def test_acknowledgements_that_the_server_reads_late_do_not_add_up() -> None:
    part = 1 << 20
    with paired_connection() as (connection, right):
        for _ in range(20):
            for _ in range(2):
                connection.write(b"x" * part)
                connection.flush()
            left = 2 * part
            while left:
                left -= len(right.recv(part))
                connection.tick()
        assert connection.usable


async def test_a_server_that_never_reads_acknowledgements_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic()]
    replace_clock(monkeypatch, lambda: now[0])
    with paired_connection(request_timeout=5.0) as (connection, right):
        connection.write(b"x" * _BIG)
        connection.flush()
        now[0] += 4.9
        connection.tick()
        assert connection.usable
        right.recv(1 << 22)
        connection.tick()  # some bytes were sent: the timeout starts again
        now[0] += 4.9
        connection.tick()
        assert connection.usable
        now[0] += 0.2
        connection.tick()
        assert "did not read for 5 s" in str(connection.protocol.error)
