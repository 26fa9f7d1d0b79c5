"""Responses match their requests under cancellation, full socket buffers and failing peers."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import pytest

from nsqext.errors import (
    ConnectionLost,
    HeartbeatMissed,
    InvalidState,
    NotSent,
    NsqError,
    ProtocolError,
    RequestTimeout,
)
from nsqext.errors.server import BadMessage, NotLeader
from nsqext.protocol.client.client_protocol import MAX_NOTICES
from nsqext.protocol.frames import HEARTBEAT
from nsqext.transport import connection as module
from nsqext.transport.connection import Connection
from nsqext.transport.handshake import open_connection
from nsqext.transport.options import ConnectionOptions
from nsqext.types import Address
from tests.support.fake_nsqd import Peer, error, message, ok, scripted_node

pytestmark = pytest.mark.anyio

_BIG = 20_000_000
"""More bytes than the socket buffers accept while the peer does not read."""


@asynccontextmanager
async def _connected(request_timeout: float = 10.0) -> AsyncIterator[tuple[Connection, Peer]]:
    options = ConnectionOptions(request_timeout=request_timeout)
    with anyio.fail_after(30):
        async with scripted_node() as node:
            connection, _ = await open_connection(node.address, options)
            try:
                yield connection, await node.accept()
            finally:
                connection.close()


def _pub(body: bytes) -> bytes:
    return b"PUB t\n" + len(body).to_bytes(4, "big") + body


class _Caller:
    """A request in a task of its own."""

    def __init__(
        self, connection: Connection, data: bytes, deadline: float = float("inf"), breaks: bool = False
    ) -> None:
        self.scope = anyio.CancelScope()
        self.outcome: bytes | NsqError | None = None
        self.ended = anyio.Event()
        self._request = (connection, data, deadline, breaks)

    async def __call__(self) -> None:
        connection, data, deadline, breaks = self._request
        try:
            with self.scope:
                try:
                    self.outcome = await connection.request(data, deadline, breaks=breaks)
                except NsqError as failure:
                    self.outcome = failure
        finally:
            self.ended.set()


async def _until(condition: object, connection: Connection | None = None) -> None:
    assert callable(condition)
    with anyio.fail_after(25):
        while not condition():
            if connection is not None:
                connection.tick()
            await anyio.sleep(0.005)


async def test_a_lone_request_gets_its_response() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        caller = _Caller(connection, _pub(b"x"))
        tasks.start_soon(caller)
        assert (await peer.expect("PUB")).body == b"x"
        assert connection.in_flight == 1
        await peer.answer(b"OK")
        await caller.ended.wait()
        assert caller.outcome == b"OK"
        assert connection.in_flight == 0


async def test_requests_of_one_turn_share_a_send_and_get_their_responses_in_order() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        callers = [_Caller(connection, _pub(b"%d" % number)) for number in range(50)]
        for caller in callers:
            tasks.start_soon(caller)
        commands = [await peer.expect("PUB") for _ in range(50)]
        assert len(peer.received) <= 3
        await peer.raw(b"".join(ok(command.body or b"") for command in commands))
        for number, caller in enumerate(callers):
            await caller.ended.wait()
            assert caller.outcome == b"%d" % number


async def test_an_error_response_fails_one_request_only() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        first, second = _Caller(connection, _pub(b"1")), _Caller(connection, _pub(b"2"))
        tasks.start_soon(first)
        tasks.start_soon(second)
        await peer.expect("PUB")
        await peer.expect("PUB")
        await peer.raw(error("E_FAILED_ON_NOT_LEADER") + ok())
        await first.ended.wait()
        await second.ended.wait()
        assert {type(first.outcome), type(second.outcome)} == {NotLeader, bytes}
        assert connection.usable


async def test_requests_after_a_fatal_error_are_not_sent() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        first = _Caller(connection, _pub(b"0"))
        tasks.start_soon(first)
        await peer.expect("PUB")
        rest = [_Caller(connection, _pub(b"x")) for _ in range(3)]
        for caller in rest:
            tasks.start_soon(caller)
        for _ in rest:
            await peer.expect("PUB")
        await peer.error("E_BAD_MESSAGE too big")
        for caller in (first, *rest):
            await caller.ended.wait()
        assert type(first.outcome) is BadMessage
        assert [type(caller.outcome) for caller in rest] == [NotSent] * 3
        assert connection.closed
        with pytest.raises(NotSent, match="E_BAD_MESSAGE"):
            await connection.request(_pub(b"y"))


async def test_an_error_in_a_batch_that_breaks_the_stream_ends_the_connection() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        first = _Caller(connection, _pub(b"0"), breaks=True)
        tasks.start_soon(first)
        await peer.expect("PUB")
        second = _Caller(connection, _pub(b"1"))
        tasks.start_soon(second)
        await peer.expect("PUB")
        await peer.error("E_EXT_NOT_SUPPORT x")
        await first.ended.wait()
        await second.ended.wait()
        assert isinstance(first.outcome, NsqError)
        assert type(second.outcome) is ConnectionLost
        assert not connection.usable


async def test_a_close_in_the_middle_of_a_frame_is_a_lost_connection() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        caller = _Caller(connection, _pub(b"x"))
        tasks.start_soon(caller)
        await peer.expect("PUB")
        await peer.raw(ok(b"OK")[:7])
        await peer.close()
        await caller.ended.wait()
        assert type(caller.outcome) is ConnectionLost
        assert "closed the connection" in str(caller.outcome)


@pytest.mark.parametrize(
    "garbage", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 100, b"\0\0\0\x06\0\0\0\x09OK", b"\0\0\0\1\0\0\0\0"]
)
async def test_bytes_of_another_protocol_end_the_connection(garbage: bytes) -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        caller = _Caller(connection, _pub(b"x"))
        tasks.start_soon(caller)
        await peer.expect("PUB")
        await peer.raw(garbage)
        await caller.ended.wait()
        assert type(caller.outcome) is ConnectionLost
        assert connection.closed


async def test_a_response_without_a_request_ends_the_connection() -> None:
    async with _connected() as (connection, peer):
        await peer.answer(b"OK")
        await _until(lambda: connection.closed, connection)
        with pytest.raises(NotSent, match="response without a request"):
            await connection.request(_pub(b"x"))


async def test_a_connection_closed_while_idle_is_noticed_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_FRESH", -1.0)
    async with _connected() as (connection, peer):
        await peer.close()
        await anyio.wait_readable(connection._sock) if connection._watch is None else await _until(
            lambda: connection.closed
        )
        with pytest.raises(NotSent):
            await connection.request(_pub(b"x"))


# Cancellation


async def test_the_late_response_to_a_cancelled_request_is_discarded() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        callers = [_Caller(connection, _pub(b"%d" % number)) for number in range(4)]
        for caller in callers:
            tasks.start_soon(caller)
            await peer.expect("PUB")
        for number in (0, 2):
            callers[number].scope.cancel()
            await callers[number].ended.wait()
        await peer.raw(b"".join(ok(b"%d" % number) for number in range(4)))
        for number in (1, 3):
            await callers[number].ended.wait()
            assert callers[number].outcome == b"%d" % number
        assert connection.in_flight == 0
        assert connection.usable


async def test_when_the_reading_task_is_cancelled_the_next_one_reads() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        first = _Caller(connection, _pub(b"1"))
        tasks.start_soon(first)
        await peer.expect("PUB")
        others = [_Caller(connection, _pub(b"x")) for _ in range(3)]
        for caller in others:
            tasks.start_soon(caller)
            await peer.expect("PUB")
        first.scope.cancel()
        others[0].scope.cancel()
        await first.ended.wait()
        await peer.raw(ok() * 3)
        await others[1].ended.wait()
        assert others[1].outcome == b"OK"
        await peer.raw(ok())
        await others[2].ended.wait()
        assert others[2].outcome == b"OK"


async def test_a_response_and_a_cancellation_in_the_same_turn() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        caller = _Caller(connection, _pub(b"x"))
        tasks.start_soon(caller)
        await peer.expect("PUB")
        caller.scope.cancel()
        connection.protocol.receive_data(ok())
        await caller.ended.wait()
        assert connection.usable
        assert connection.in_flight == 0


async def test_a_poll_that_receives_the_response_of_the_next_reader_wakes_another() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        callers = [_Caller(connection, _pub(b"x")) for _ in range(3)]
        for caller in callers:
            tasks.start_soon(caller)
        for _ in callers:
            await peer.expect("PUB")
        # on trio the first one reads: its response passes the reading on, and a tick follows before the next one runs
        connection.protocol.receive_data(ok())
        connection.protocol.receive_data(ok())
        await peer.raw(ok())
        for caller in callers:
            await caller.ended.wait()
            assert caller.outcome == b"OK"


# Socket buffers


async def test_a_request_that_the_kernel_sends_in_parts() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        big, small = _Caller(connection, _pub(b"b" * _BIG)), _Caller(connection, _pub(b"small"))
        tasks.start_soon(big)
        await _until(lambda: connection._rest)
        tasks.start_soon(small)
        assert (await peer.expect("PUB")).body == b"b" * _BIG
        assert (await peer.expect("PUB")).body == b"small"
        await peer.raw(ok(b"1") + ok(b"2"))
        await big.ended.wait()
        await small.ended.wait()
        assert (big.outcome, small.outcome) == (b"1", b"2")


@pytest.mark.parametrize("reads", [True, False])
async def test_large_requests_of_one_turn_are_sent_one_by_one(reads: bool) -> None:
    sizes = [10, _BIG, _BIG, 20, _BIG]
    async with _connected(request_timeout=30.0 if reads else 0.2) as (connection, peer):
        if not reads:
            peer.stop_reading()
        callers = [_Caller(connection, _pub(b"b" * size)) for size in sizes]
        async with anyio.create_task_group() as tasks:
            for caller in callers:
                tasks.start_soon(caller)
            if reads:
                bodies = [(await peer.expect("PUB")).body or b"" for _ in sizes]
                assert sorted(map(len, bodies)) == sorted(sizes)  # trio starts tasks in any order
                await peer.raw(b"".join(ok(b"%d" % number) for number in range(len(sizes))))
            for caller in callers:
                await _until(caller.ended.is_set, connection)
    if reads:
        assert {caller.outcome for caller in callers} == {b"%d" % number for number in range(len(sizes))}
    else:
        kinds = [type(caller.outcome) for caller in callers]
        assert kinds.count(NotSent) >= 2  # all queued after the first large one, which was written in part
        assert kinds.count(RequestTimeout) >= 1


async def test_a_large_request_behind_small_ones_is_sent_alone() -> None:
    async with _connected(request_timeout=0.2) as (connection, peer):
        peer.stop_reading()
        sent = [connection.send_request(_pub(b"b" * size)) for size in (10, 20, _BIG, _BIG)]
        kinds: list[type[NsqError]] = [NsqError] * len(sent)

        async def wait(number: int, response: Awaitable[bytes]) -> None:
            try:
                await response
            except NsqError as error:
                kinds[number] = type(error)

        async with anyio.create_task_group() as tasks:
            for number, response in enumerate(sent):
                tasks.start_soon(wait, number, response)
            await _until(lambda: NsqError not in kinds, connection)
        assert kinds == [RequestTimeout, RequestTimeout, RequestTimeout, NotSent]


async def test_a_request_cancelled_while_it_is_sent_is_sent_completely() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        big, small = _Caller(connection, _pub(b"b" * _BIG)), _Caller(connection, _pub(b"small"))
        tasks.start_soon(big)
        await _until(lambda: connection._rest)
        big.scope.cancel()
        await big.ended.wait()
        tasks.start_soon(small)
        assert len((await peer.expect("PUB")).body or b"") == _BIG
        assert (await peer.expect("PUB")).body == b"small"
        await peer.raw(ok(b"1") + ok(b"2"))
        await small.ended.wait()
        assert small.outcome == b"2"


async def test_a_peer_that_never_reads_loses_the_connection() -> None:
    async with _connected(request_timeout=0.2) as (connection, peer), anyio.create_task_group() as tasks:
        peer.stop_reading()
        big, behind = _Caller(connection, _pub(b"b" * _BIG)), _Caller(connection, _pub(b"small"))
        tasks.start_soon(big)
        await _until(lambda: connection._rest)
        tasks.start_soon(behind)
        await _until(lambda: connection.in_flight == 2)
        await _until(lambda: connection.closed, connection)
        await big.ended.wait()
        await behind.ended.wait()
        assert type(big.outcome) is RequestTimeout
        assert "no response within 0.2 s" in str(big.outcome)
        assert type(behind.outcome) is NotSent
        assert peer.commands == []


async def test_drain_sends_pending_writes() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        connection.write(_pub(b"b" * _BIG))
        connection.write(_pub(b"c"))
        for _ in range(3):
            tasks.start_soon(connection.drain)
        assert len((await peer.expect("PUB")).body or b"") == _BIG
        assert (await peer.expect("PUB")).body == b"c"


async def test_closing_ends_a_drain() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        peer.stop_reading()
        connection.write(_pub(b"b" * _BIG))
        for _ in range(2):
            tasks.start_soon(connection.drain)
        await _until(lambda: connection._rest)
        connection.close()
        connection.close()
        assert peer.commands == []


# Time


async def test_a_deadline_fails_one_request_and_keeps_the_connection() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        late = _Caller(connection, _pub(b"1"), deadline=time.monotonic() + 0.05)
        tasks.start_soon(late)
        await peer.expect("PUB")
        patient = _Caller(connection, _pub(b"2"), deadline=time.monotonic() + 60)
        tasks.start_soon(patient)
        await peer.expect("PUB")
        await _until(late.ended.is_set, connection)
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
    monkeypatch.setattr("nsqext.transport.connection._clock", lambda: now[0])
    async with _connected(request_timeout=0.3) as (connection, peer), anyio.create_task_group() as tasks:
        callers = [_Caller(connection, _pub(b"x")) for _ in range(5)]
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


async def test_a_request_behind_other_writes_has_its_own_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr("nsqext.transport.connection._clock", lambda: now)
    async with _connected(request_timeout=0.3) as (connection, peer), anyio.create_task_group() as tasks:
        connection._oldest = now - 100
        connection.write(_pub(b"written"))
        caller = _Caller(connection, _pub(b"x"))
        tasks.start_soon(caller)
        await peer.expect("PUB")
        await peer.expect("PUB")
        connection.tick()
        await peer.answer()
        await caller.ended.wait()
        assert caller.outcome == b"OK"


async def test_heartbeats_of_an_idle_connection_are_answered() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        tasks.start_soon(peer.heartbeat)
        tasks.start_soon(_until, lambda: connection.protocol.heartbeats, connection)
        await peer.expect_nop()


async def test_heartbeats_between_answers() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        caller = _Caller(connection, _pub(b"x"))
        tasks.start_soon(caller)
        await peer.expect("PUB")
        await peer.raw(ok(HEARTBEAT) + ok(b"OK") + ok(HEARTBEAT))
        await caller.ended.wait()
        assert caller.outcome == b"OK"
        await peer.expect_nop()
        await peer.expect_nop()


async def test_a_silent_server_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _connected() as (connection, _):
        connection.heartbeat_interval = 1.0
        connection.tick()
        assert connection.usable
        monkeypatch.setattr(connection, "_received", time.monotonic() - 3.1)
        connection.tick()
        assert isinstance(connection.protocol.error, HeartbeatMissed)
        assert connection.closed
        connection.tick()


# Messages


async def test_messages_are_delivered_in_lists_and_reading_ends_with_the_reason() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        taken: list[list[bytes]] = []
        ended: list[NsqError] = []
        connection.on_messages = taken.append

        async def read() -> None:
            try:
                await connection.read_forever()
            except NsqError as failure:
                ended.append(failure)

        tasks.start_soon(read)
        await peer.raw(message(1) + message(2))
        await _until(lambda: sum(map(len, taken)) == 2)
        await peer.close()
        await _until(lambda: ended)
        assert type(ended[0]) is ConnectionLost


async def test_a_second_reader_is_refused_where_tasks_read() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        if connection._watch is not None:
            return
        caller = _Caller(connection, _pub(b"x"))
        tasks.start_soon(caller)
        await peer.expect("PUB")
        await _until(lambda: connection._reading)
        with pytest.raises(InvalidState):
            await connection.read_forever()
        await peer.answer()


async def test_closing_fails_all_pending_requests() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        callers = [_Caller(connection, _pub(b"x")) for _ in range(3)]
        for caller in callers:
            tasks.start_soon(caller)
        for _ in callers:
            await peer.expect("PUB")
        assert connection.local_address.startswith("127.0.0.1:")
        connection.close()
        for caller in callers:
            await caller.ended.wait()
            assert type(caller.outcome) is ConnectionLost
        assert connection.local_address == ""
        await peer.expect_end()


async def test_requests_not_sent_before_the_loss_raise_not_sent() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        sent = _Caller(connection, _pub(b"1"))
        tasks.start_soon(sent)
        await peer.expect("PUB")
        connection._flush_due = True  # as if another task were about to flush
        kept = _Caller(connection, _pub(b"2"))
        tasks.start_soon(kept)
        await _until(lambda: connection.in_flight == 2)
        await peer.close()
        await kept.ended.wait()
        await sent.ended.wait()
        assert type(sent.outcome) is ConnectionLost
        assert type(kept.outcome) is NotSent


async def test_a_peer_that_resets() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        await peer.close()
        caller = _Caller(connection, _pub(b"b" * _BIG))
        tasks.start_soon(caller)
        await caller.ended.wait()
        assert isinstance(caller.outcome, ConnectionLost)
        assert connection.closed


@contextmanager
def _paired(request_timeout: float = 10.0) -> Iterator[tuple[Connection, socket.socket]]:
    """A connection and the socket of its peer, to write to without an await."""
    left, right = socket.socketpair()
    left.setblocking(False)
    connection = Connection(left, Address("127.0.0.1", 1), max_frame_size=1000, request_timeout=request_timeout)
    connection.finish_handshake()
    with right:
        yield connection, right
        connection.close()


async def test_a_received_response_counts_however_long_the_event_loop_was_blocked() -> None:
    with _paired(request_timeout=0.05) as (connection, right):
        caller = _Caller(connection, _pub(b"x"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(caller)
            await anyio.wait_all_tasks_blocked()
            right.send(ok())
            time.sleep(0.2)  # noqa: ASYNC251 - as a handler that blocks
            connection.tick()
        assert caller.outcome == b"OK"
        assert connection.usable


async def test_a_received_heartbeat_counts_however_long_the_event_loop_was_blocked() -> None:
    with _paired() as (connection, right):
        connection.heartbeat_interval = 0.01
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(connection.read_forever)
            await anyio.wait_all_tasks_blocked()
            right.send(ok(HEARTBEAT))
            time.sleep(1.2)  # noqa: ASYNC251 - as a handler that blocks
            connection.tick()
            assert connection.usable
            tasks.cancel_scope.cancel()


async def test_responses_after_an_error_that_closes_match_no_request() -> None:
    async with _connected() as (connection, peer), anyio.create_task_group() as tasks:
        callers = [_Caller(connection, _pub(b"%d" % number)) for number in range(3)]
        for caller in callers:
            tasks.start_soon(caller)
        for _ in callers:
            await peer.expect("PUB")
        await peer.raw(error("E_TOPIC_NOT_EXIST") + ok() + ok())
        for caller in callers:
            await caller.ended.wait()
        outcomes = sorted(type(caller.outcome).__name__ for caller in callers)
        assert outcomes == ["NotSent", "NotSent", "TopicNotExist"]


# Writing without a response


async def test_writes_of_one_turn_share_a_send() -> None:
    with _paired() as (connection, right):
        right.setblocking(False)
        connection.write(b"a")
        connection.write(b"b")
        with pytest.raises(BlockingIOError):
            right.recv(10)
        connection.flush()
        connection.flush()
        assert right.recv(10) == b"ab"


async def test_a_reset_while_writing_ends_the_connection_once() -> None:
    with _paired() as (connection, right):
        right.close()
        connection.write(b"a")
        connection.flush()
        first = connection.protocol.error
        connection.write(b"b")
        connection.flush()
        assert isinstance(first, ConnectionLost)
        assert connection.protocol.error is first
        assert (connection.closed, connection.local_address) == (True, "")


async def test_acknowledgements_that_the_server_does_not_read_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_UNSENT", 100_000)
    with _paired() as (connection, _):
        connection.write(b"x" * _BIG)
        connection.flush()
        for _ in range(99):
            connection.write(b"y" * 1000)
            connection.flush()
        assert connection.usable
        connection.write(b"y" * 2000)
        assert not connection.usable
        assert "the server does not read" in str(connection.protocol.error)


async def test_a_server_that_never_reads_acknowledgements_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [time.monotonic()]
    monkeypatch.setattr(module, "_clock", lambda: now[0])
    with _paired(request_timeout=5.0) as (connection, right):
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


# Hostile servers


async def test_a_message_without_a_subscription_ends_the_connection() -> None:
    with _paired() as (connection, right):
        right.send(message(1))
        connection.poll()
        assert isinstance(connection.protocol.error, ProtocolError)


async def test_rejected_acknowledgements_are_bounded() -> None:
    with _paired() as (connection, right):
        flood, most = error("E_FIN_FAILED x") * 1000, 0
        for _ in range(11):
            right.sendall(flood)
            for _ in range(3):
                connection.poll()
                most = max(most, len(connection.protocol.notices))
        assert isinstance(connection.protocol.error, ProtocolError)
        assert 0 < most <= MAX_NOTICES
        assert connection.protocol.notices == []  # a connection that ended keeps none, however long others refer to it
