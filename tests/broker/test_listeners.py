"""Listening sockets and the addresses of their clients."""

from __future__ import annotations

import errno
import socket

import pytest

from nsqext.broker import listeners
from nsqext.broker.listeners import ListenError, listen, listen_early, peer_name


@pytest.mark.parametrize("host", ["", "0.0.0.0", "[::]"])  # noqa: S104 - what the original programs use by default
def test_a_wildcard_listens_on_both_families(host: str) -> None:
    with listen(f"{host}:0") as listener:
        port = listener.getsockname()[1]
        for client_host in ("127.0.0.1", "::1"):
            with socket.create_connection((client_host, port), 5) as client:
                listener.setblocking(True)
                accepted, peer = listener.accept()
                accepted.close()
                own = client.getsockname()[1]
                assert peer_name(peer) == (f"[::1]:{own}" if ":" in client_host else f"127.0.0.1:{own}")


def test_an_address_listens_on_its_family_only() -> None:
    with listen("127.0.0.1:0") as listener:
        assert listener.family is socket.AF_INET


class _Socket(socket.socket):
    """A socket on a machine without IPv6."""

    def bind(self, address: object) -> None:
        if self.family is socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        super().bind(address)  # type: ignore[arg-type]


def test_a_wildcard_listens_on_ipv4_where_ipv6_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "make_socket", _Socket)
    with listen(":0") as listener:
        assert listener.family is socket.AF_INET


def test_an_address_in_use_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []

    def make(*kind: int) -> socket.socket:
        made.append(socket.socket(*kind))
        return made[-1]

    monkeypatch.setattr(listeners, "make_socket", make)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ListenError, match=f"listen \\({address}\\) failed"):
            listen(address)
        assert [sock.fileno() for sock in made] == [-1]


def test_a_socket_that_was_opened_early_is_used_once_and_an_error_waits() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        listen_early([address, "127.0.0.1:0"])
        with listen("127.0.0.1:0") as first, listen("127.0.0.1:0") as second:
            assert first is not second
        with pytest.raises(ListenError):
            listen(address)
