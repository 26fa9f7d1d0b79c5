"""Opening of sockets, for all kinds of names: connected, or closed after an error."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from nsqext.errors import ConnectionFailed
from nsqext.transport import handshake
from nsqext.transport.handshake import connect
from nsqext.types import Address

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

    async def both(*_: object, **__: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", place) for place in (bad, good)]

    monkeypatch.setattr(anyio, "getaddrinfo", both)
    with await connect(Address("two", 1), 5) as sock:
        assert sock.getpeername() == good


async def test_a_silent_address_leaves_time_for_the_next(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, black_hole = listener.getsockname(), ("192.0.2.1", 1)
    swallowed: list[socket.socket] = []

    async def both(*_: object, **__: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", place) for place in (black_hole, good)]

    async def connect_or_wait(sock: socket.socket, place: Any) -> None:
        if place == black_hole:
            swallowed.append(sock)
            await anyio.sleep_forever()
        await connect_as_ever(sock, place)

    connect_as_ever = handshake._connect
    monkeypatch.setattr(anyio, "getaddrinfo", both)
    monkeypatch.setattr(handshake, "_connect", connect_or_wait)
    with await connect(Address("two", 1), 2) as sock:
        assert sock.getpeername() == good
    assert [sock.fileno() for sock in swallowed] == [-1]


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
    with pytest.raises(ConnectionFailed, match="Name or service not known"):
        await connect(Address("nowhere", 1), 5)


async def test_time_runs_out_and_the_socket_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    async def never(sock: socket.socket, _: object) -> None:
        made.append(sock)
        await anyio.sleep_forever()

    async def known(*_: object, **__: object) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))]

    monkeypatch.setattr(anyio, "getaddrinfo", known)  # name resolution uses a thread, and may take the whole timeout
    monkeypatch.setattr("nsqext.transport.handshake._connect", never)
    with pytest.raises(ConnectionFailed, match=r"within 0\.01 s"):
        await connect(Address("127.0.0.1", 1), 0.01)
    assert [sock.fileno() for sock in made] == [-1]
