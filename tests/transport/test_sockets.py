"""Opening of sockets, for all kinds of names: connected, or closed after an error."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import anyio
import pytest

from nsqext.errors import ConnectionFailed
from nsqext.transport.handshake import connect, open_connection
from nsqext.transport.options import ConnectionOptions
from nsqext.types import Address
from tests.support.clock import run_in_virtual_time

pytestmark = pytest.mark.anyio


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


async def test_a_socket_does_not_block_and_does_not_delay(listener: socket.socket) -> None:
    sock = await connect(Address(*listener.getsockname()), 5)
    with sock:
        assert not sock.getblocking()
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getpeername() == listener.getsockname()


async def test_no_server_listens(closed_address: Address) -> None:
    with pytest.raises(ConnectionFailed, match="refused") as caught:
        await connect(closed_address, 5)
    assert caught.value.node == str(closed_address)
    assert caught.value.retryable


async def test_every_address_of_a_name_is_tried(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, closed_address: Address
) -> None:
    good, bad = listener.getsockname(), (closed_address.host, closed_address.port)
    places = [bad, good]

    async def both(*_: object, **__: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", place) for place in places]

    monkeypatch.setattr(anyio, "getaddrinfo", both)
    with await connect(Address("two", 1), 5) as sock:
        assert sock.getpeername() == good
    places = [("255.255.255.255", 1), bad]
    with pytest.raises(ConnectionFailed, match="refused"):
        await connect(Address("two", 1), 5)


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A listener whose queue of connections is full, so that it does not respond to others."""
    with socket.socket() as server, ExitStack() as stack:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield server


def test_a_silent_address_leaves_time_for_the_next(
    silent: socket.socket, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def both(*_: object, **__: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", one.getsockname()) for one in (silent, listener)]

    async def find() -> None:
        began = anyio.current_time()
        with await connect(Address("two", 1), 2) as sock:
            assert sock.getpeername() == listener.getsockname()
        assert anyio.current_time() - began == pytest.approx(1.0)

    monkeypatch.setattr(anyio, "getaddrinfo", both)
    run_in_virtual_time(monkeypatch, find)


def test_each_address_has_an_equal_share_of_what_is_left(
    silent: socket.socket, closed_address: Address, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = (closed_address.host, closed_address.port)

    async def all_of_them(*_: object, **__: object) -> list[Any]:
        places = [bad, silent.getsockname(), listener.getsockname()]
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", place) for place in places]

    async def find() -> None:
        began = anyio.current_time()
        with await connect(Address("three", 1), 6):
            assert anyio.current_time() - began == pytest.approx(3.0), "the first address was refused at once"

    monkeypatch.setattr(anyio, "getaddrinfo", all_of_them)
    run_in_virtual_time(monkeypatch, find)


@pytest.mark.parametrize("host", ["b\xfccher..de", "a..b", "x" * 70, "a\0b"])
async def test_an_unusable_host_name(host: str) -> None:
    with pytest.raises(ConnectionFailed):  # a lookup node may return any address
        await connect(Address(host, 4150), 5)


async def test_the_address_of_this_host_can_be_chosen(listener: socket.socket) -> None:
    with await connect(Address(*listener.getsockname()), 5, "127.0.0.2") as sock:
        assert sock.getsockname()[0] == "127.0.0.2"
    with pytest.raises(ConnectionFailed, match="no connection"):
        await connect(Address(*listener.getsockname()), 5, "192.0.2.1")


async def test_a_name_without_address(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(*_: object, **__: object) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(anyio, "getaddrinfo", unknown)
    with pytest.raises(ConnectionFailed, match="Name or service not known") as failed:
        await connect(Address("nowhere", 1), 5)
    assert "lookup" not in failed.value.message
    with pytest.raises(
        ConnectionFailed, match=r"lookup 10.0.0.1:4161 lists the node .*nowhere:1, whose name is unknown"
    ):
        await connect(Address("nowhere", 1, listed_by="10.0.0.1:4161"), 5)


def test_time_runs_out_and_the_socket_is_closed(silent: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    async def known(*_: object, **__: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", silent.getsockname())]

    async def find() -> None:
        with pytest.raises(ConnectionFailed, match=r"within 9 s"):
            await connect(Address("127.0.0.1", 1), 9)

    monkeypatch.setattr(anyio, "getaddrinfo", known)  # name resolution uses a thread
    run_in_virtual_time(monkeypatch, find)


def test_the_handshake_has_what_is_left_of_the_time(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slowly(*_: object, **__: object) -> list[Any]:
        await anyio.sleep(6)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", listener.getsockname())]

    async def find() -> None:
        began = anyio.current_time()
        with pytest.raises(ConnectionFailed, match="sent no response for 9 s"):
            await open_connection(Address("slow", 1), ConnectionOptions(connect_timeout=9))
        assert anyio.current_time() - began == pytest.approx(9)

    monkeypatch.setattr(anyio, "getaddrinfo", slowly)
    run_in_virtual_time(monkeypatch, find)
