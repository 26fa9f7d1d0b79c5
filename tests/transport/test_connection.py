"""Responses match their requests under cancellation, errors and failing peers."""

from __future__ import annotations

import gc
import os
import socket
import time
from typing import TYPE_CHECKING, cast

import anyio
import pytest

from nsqext.errors import ConnectionLost, InvalidState, NotSent, NsqError, ProtocolError
from nsqext.errors.server import BadMessage, NotLeader
from nsqext.protocol.client.client_protocol import MAX_NOTICES, Reply
from nsqext.transport.connection import Connection
from nsqext.types import Address
from tests.support.clock import replace_clock
from tests.support.connections import Caller, connected_peer, paired_connection, pub, until
from tests.support.fake_nsqd import error, message, ok

if TYPE_CHECKING:
    from nsqext.protocol.frames import MessageData
    from nsqext.protocol.layers import Layer

pytestmark = pytest.mark.anyio


async def test_a_lone_request_gets_its_response() -> None:
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        announced: list[int] = []
        connection.on_request = lambda: announced.append(connection.in_flight)
        caller = Caller(connection, pub(b"x"))
        tasks.start_soon(caller)
        assert (await peer.expect("PUB")).body == b"x"
        assert (connection.in_flight, announced) == (1, [0])
        await peer.answer(b"OK")
        await caller.ended.wait()
        assert caller.outcome == b"OK"
        assert connection.in_flight == 0


async def test_requests_of_one_turn_share_a_send_and_get_their_responses_in_order() -> None:
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        callers = [Caller(connection, pub(b"%d" % number)) for number in range(50)]
        for caller in callers:
            tasks.start_soon(caller)
        commands = [await peer.expect("PUB") for _ in range(50)]
        assert len(peer.received) <= 3
        await peer.raw(b"".join(ok(command.body or b"") for command in commands))
        for number, caller in enumerate(callers):
            await caller.ended.wait()
            assert caller.outcome == b"%d" % number


async def test_an_error_response_fails_one_request_only() -> None:
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        first, second = Caller(connection, pub(b"1")), Caller(connection, pub(b"2"))
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
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        first = Caller(connection, pub(b"0"))
        tasks.start_soon(first)
        await peer.expect("PUB")
        rest = [Caller(connection, pub(b"x")) for _ in range(3)]
        for caller in rest:
            tasks.start_soon(caller)
        for _ in rest:
            await peer.expect("PUB")
        await peer.raw(error("E_BAD_MESSAGE too big") + ok() * 3)
        for caller in (first, *rest):
            await caller.ended.wait()
        assert type(first.outcome) is BadMessage
        assert [type(caller.outcome) for caller in rest] == [NotSent] * 3
        assert connection.closed
        with pytest.raises(NotSent, match="E_BAD_MESSAGE"):
            await connection.request(pub(b"y"))


async def test_an_error_in_a_batch_that_breaks_the_stream_ends_the_connection() -> None:
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        first = Caller(connection, pub(b"0"), breaks=True)
        tasks.start_soon(first)
        await peer.expect("PUB")
        second = Caller(connection, pub(b"1"))
        tasks.start_soon(second)
        await peer.expect("PUB")
        await peer.error("E_EXT_NOT_SUPPORT x")
        await first.ended.wait()
        await second.ended.wait()
        assert isinstance(first.outcome, NsqError)
        assert type(second.outcome) is ConnectionLost
        assert not connection.usable


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "HTTP"),
        (b"\xff" * 100, "frame size"),
        (b"\0\0\0\x06\0\0\0\x09OK", "frame type 9"),
        (b"\0\0\0\1\0\0\0\0", "frame size 1"),
        (ok(b"OK")[:7], "closed the connection"),  # in the middle of a frame
    ],
)
async def test_what_ends_a_connection_is_named(data: bytes, text: str) -> None:
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        caller = Caller(connection, pub(b"x"))
        tasks.start_soon(caller)
        await peer.expect("PUB")
        await peer.raw(data)
        await peer.close()
        await caller.ended.wait()
        assert type(caller.outcome) is ConnectionLost
        assert (text in str(caller.outcome), connection.closed) == (True, True)


async def test_a_response_without_a_request_ends_the_connection() -> None:
    async with connected_peer() as (connection, peer):
        await peer.answer(b"OK")
        await until(lambda: connection.closed, connection)
        with pytest.raises(NotSent, match="response without a request"):
            await connection.request(pub(b"x"))


async def test_a_connection_closed_while_idle_is_noticed_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [time.monotonic()]
    replace_clock(monkeypatch, lambda: now[0])
    async with connected_peer() as (connection, peer):
        await peer.close()
        now[0] += 1.0
        with pytest.raises(NotSent):
            await connection.request(pub(b"x"))


async def test_the_late_response_to_a_cancelled_request_is_discarded() -> None:
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        callers = [Caller(connection, pub(b"%d" % number)) for number in range(4)]
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


@pytest.mark.usefixtures("either_reader")
async def test_when_the_reading_task_is_cancelled_the_next_one_reads() -> None:
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        first = Caller(connection, pub(b"1"))
        tasks.start_soon(first)
        await peer.expect("PUB")
        others = [Caller(connection, pub(b"x")) for _ in range(3)]
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
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        caller = Caller(connection, pub(b"x"))
        tasks.start_soon(caller)
        await peer.expect("PUB")
        caller.scope.cancel()
        connection.protocol.receive_data(ok())
        await caller.ended.wait()
        assert connection.usable
        assert connection.in_flight == 0


@pytest.mark.usefixtures("either_reader")
async def test_a_poll_that_receives_the_response_of_the_next_reader_wakes_another() -> None:
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        callers = [Caller(connection, pub(b"x")) for _ in range(3)]
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


@pytest.mark.usefixtures("either_reader")
async def test_messages_are_delivered_in_lists_and_reading_ends_with_the_reason() -> None:
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        taken: list[list[MessageData]] = []
        ended: list[NsqError] = []
        connection.on_messages = taken.append

        async def read() -> None:
            try:
                await connection.read_forever()
            except NsqError as failure:
                ended.append(failure)

        tasks.start_soon(read)
        await peer.raw(message(1) + message(2))
        await until(lambda: sum(map(len, taken)) == 2)
        await peer.close()
        await until(lambda: ended)
        assert type(ended[0]) is ConnectionLost


class Stream:
    """A socket with message frames; also a layer that changes nothing.

    Attributes:
        available: most bytes of a read.
        sizes: bytes that were asked for, of each read.
    """

    def __init__(self, frames: bytes) -> None:
        self.available = 1 << 30
        self.sizes: list[int] = []
        self._frames = frames

    def recv(self, size: int) -> bytes:
        self.sizes.append(size)
        size = min(size, self.available)
        data, self._frames = self._frames[:size], self._frames[size:]
        return data

    def decode(self, data: bytes) -> bytes:
        return data

    def close(self) -> None:
        pass


@pytest.mark.parametrize("layered", [False, True])
async def test_reads_grow_while_they_are_full_and_shrink_afterwards(layered: bool) -> None:
    rest = len(message(1, b""))
    small, large = (message(1, bytes(size - rest)) for size in (1 << 10, 300 << 10))
    stream = Stream(small * 3056 + large + small * 9000)
    connection = Connection(cast("socket.socket", stream), Address("n", 1), max_frame_size=1 << 20)
    connection.protocol.read_ahead()
    connection.on_messages = lambda messages: None
    if layered:
        connection.add_layer(cast("Layer", stream))

    def sizes(reads: int) -> list[int]:
        """Return the sizes of the next reads, in KiB."""
        stream.sizes.clear()
        for _ in range(reads):
            connection.poll()
        return [size >> 10 for size in stream.sizes]

    if layered:
        assert sizes(3) == [16, 16, 16]
        return
    assert sizes(8) == [16, 32, 64, 128, 256, 512, 1024, 1024]
    stream.available = 100 << 10
    assert sizes(3) == [1024, 100, 100], "the rest of a large message is read alone"
    stream.available = 1024
    assert sizes(8) == [1024, 512, 256, 128, 64, 32, 16, 16]
    connection.read_at_least(1 << 21)
    stream.available = 1 << 30
    assert sizes(2) == [2048, 2048]
    assert connection.usable


@pytest.mark.usefixtures("read_by_tasks")
async def test_a_second_reader_is_refused_where_tasks_read() -> None:
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        caller = Caller(connection, pub(b"x"))
        tasks.start_soon(caller)
        await peer.expect("PUB")
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(InvalidState):
            await connection.read_forever()
        await peer.answer()


async def test_a_request_that_has_its_response_is_freed_at_once() -> None:
    """A cycle with its task would keep the response until the next garbage collection."""
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        gc.collect()
        others = [each for each in gc.get_objects() if type(each) is Reply]
        gc.disable()
        try:
            for _ in range(5):
                caller = Caller(connection, pub(b"x"))
                tasks.start_soon(caller)
                await peer.expect("PUB")
                await peer.answer()
                await caller.ended.wait()
            assert [each for each in gc.get_objects() if type(each) is Reply] == others
        finally:
            gc.enable()


@pytest.mark.usefixtures("either_reader")
async def test_closing_fails_all_pending_requests() -> None:
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        callers = [Caller(connection, pub(b"x")) for _ in range(3)]
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
    async with connected_peer() as (connection, peer), anyio.create_task_group() as tasks:
        callers = [Caller(connection, pub(b"x" * size)) for size in (1, 20_000_000, 1)]
        tasks.start_soon(callers[0])
        await peer.expect("PUB")
        peer.stop_reading()
        tasks.start_soon(callers[1])
        await until(lambda: connection.sending)
        tasks.start_soon(callers[2])
        await until(lambda: connection.in_flight == 3)
        await peer.close()
        for caller in callers:
            await caller.ended.wait()
        assert [type(caller.outcome) for caller in callers] == [ConnectionLost, ConnectionLost, NotSent]


async def test_a_message_without_a_subscription_ends_the_connection() -> None:
    with paired_connection() as (connection, right):
        right.send(message(1))
        connection.poll()
        assert isinstance(connection.protocol.error, ProtocolError)


async def test_rejected_acknowledgements_are_bounded() -> None:
    with paired_connection() as (connection, right):
        right.sendall(error("E_FIN_FAILED x"))
        connection.poll()
        assert len(connection.protocol.notices) == 1
        connection.tick()
        assert connection.protocol.notices == []
        flood, most = error("E_FIN_FAILED x") * 1000, 0
        for _ in range(11):
            right.sendall(flood)
            for _ in range(3):
                connection.poll()
                most = max(most, len(connection.protocol.notices))
        assert isinstance(connection.protocol.error, ProtocolError)
        assert 0 < most <= MAX_NOTICES
        assert connection.protocol.notices == []  # a connection that ended keeps none, however long others refer to it


@pytest.mark.parametrize("fails", [True, False])
async def test_a_connection_that_fails_is_reset_so_that_the_kernel_sends_nothing_later(fails: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        client.setblocking(False)
        connection = Connection(client, Address("127.0.0.1", 1), max_frame_size=1000, request_timeout=10.0)
        if fails:
            connection.fail(ConnectionLost("no heartbeat"))
        else:
            connection.close()
        with peer:
            peer.settimeout(10.0)
            if fails:
                with pytest.raises(ConnectionResetError):
                    peer.recv(1)
            else:
                assert peer.recv(1) == b""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("breaks", [False, True], ids=["closed", "failed"])
async def test_a_connection_ends_although_a_forked_process_lives(breaks: bool) -> None:
    """Otherwise the server redelivers its messages when heartbeats are missing."""
    reads, writes = os.pipe()
    with paired_connection() as (connection, peer):
        child = os.fork()
        if child == 0:
            os.close(writes)
            os.read(reads, 1)
            os._exit(0)
        os.close(reads)
        try:
            if breaks:
                connection.fail(ConnectionLost("lost"))
            else:
                connection.close()
            peer.settimeout(20)
            assert peer.recv(1) == b""
        finally:
            os.close(writes)
            os.waitpid(child, 0)  # noqa: ASYNC222 - it ends at once
