"""The writing half: one piece for each turn, nothing lost that the kernel does not take, and an end that wakes."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import anyio
import pytest

from nsqext.errors import ConnectionLost, NsqError
from nsqext.transport.wire import Wire
from nsqext.types import Address

pytestmark = pytest.mark.anyio

_BIG = bytes(range(256)) * 40_000


class _Wire(Wire):
    __slots__ = ("failed",)

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock, Address("127.0.0.1", 1))
        self.failed: list[tuple[NsqError, int]] = []

    def _fail(self, error: NsqError, unsent: int = 0) -> None:
        self.failed.append((error, unsent))
        self._shut()


@pytest.fixture
def pair() -> Iterator[tuple[_Wire, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        far.setblocking(False)
        yield _Wire(near), far


async def test_what_is_written_in_one_turn_leaves_as_one_piece(pair: tuple[_Wire, socket.socket]) -> None:
    wire, far = pair
    wire.write(b"a")
    wire.write(b"b")
    with pytest.raises(BlockingIOError):
        far.recv(10)
    wire.flush()
    wire.flush()
    assert far.recv(10) == b"ab"


async def test_what_the_kernel_does_not_take_follows_in_order(pair: tuple[_Wire, socket.socket]) -> None:
    wire, far = pair
    wire.write(_BIG)
    wire.flush()
    wire.write(b"behind")
    received = bytearray()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wire.drain)
            tasks.start_soon(wire.drain)
            while len(received) < len(_BIG) + 6:
                await anyio.wait_readable(far)
                received += far.recv(1 << 20)
    assert bytes(received) == _BIG + b"behind"
    assert wire.failed == []


async def test_a_peer_that_is_gone_fails_it_once(pair: tuple[_Wire, socket.socket]) -> None:
    wire, far = pair
    far.close()
    wire.write(b"a")
    wire.flush()
    wire.write(b"b")
    wire.flush()
    (failure,) = wire.failed
    assert (type(failure[0]), wire.closed, wire.local_address) == (ConnectionLost, True, "")


async def test_the_end_wakes_who_drains(pair: tuple[_Wire, socket.socket]) -> None:
    wire, _ = pair
    wire.write(_BIG)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wire.drain)
            await anyio.wait_all_tasks_blocked()
            wire._shut()
    assert wire.closed
