"""The addresses that servers of tests listen on."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.loopback import own_host

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.skipif(sys.platform != "linux", reason="only 127.0.0.1 is local")
def test_servers_of_two_processes_have_two_addresses_that_can_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    processes: Iterator[int] = iter((1, 2, 255, 256, 65_536, 2**22 - 1))
    monkeypatch.setattr(os, "getpid", lambda: next(processes))
    hosts = [own_host() for _ in range(6)]
    assert len({*hosts, "127.0.0.1"}) == 7
    for host in hosts:
        with socket.create_server((host, 0)) as server:
            assert server.getsockname()[0] == host


def test_a_port_that_a_test_has_reserved_is_one_of_the_shared_address() -> None:
    assert own_host(4150) == "127.0.0.1"
