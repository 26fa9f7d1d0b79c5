"""Fixtures for tests of sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two sockets that are connected; the first one does not block."""
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        yield near, far
