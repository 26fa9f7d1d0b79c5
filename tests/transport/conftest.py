"""Fixtures for tests of sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest


@pytest.fixture
def read_by_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no event loop watch sockets: the tasks that wait for responses read, as on trio."""
    monkeypatch.setattr("nsqext.transport.connection.watch_readable", lambda *_: None)


@pytest.fixture(params=[False, True], ids=["as the loop reads", "by tasks"])
def either_reader(request: pytest.FixtureRequest) -> None:
    """Run a test with both ways to read."""
    if request.param:
        request.getfixturevalue("read_by_tasks")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two sockets that are connected; the first one does not block."""
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        yield near, far
