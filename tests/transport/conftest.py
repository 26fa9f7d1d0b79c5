"""Fixtures for tests of sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import EVERY_LOOP


@pytest.fixture(scope="module", params=list(EVERY_LOOP.values()), ids=list(EVERY_LOOP))
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """Every event loop."""
    return request.param


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two sockets that are connected; the first one does not block."""
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        yield near, far
