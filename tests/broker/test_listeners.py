"""Listening sockets and the addresses of their clients."""

from __future__ import annotations

import socket

import pytest

from nsqext.broker.listeners import listen, peer_name


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
