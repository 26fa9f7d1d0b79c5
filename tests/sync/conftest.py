"""A cluster for the tests of the blocking clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from anyio.from_thread import BlockingPortalProvider

from nsqext.broker import Cluster
from nsqext.sync.loop import shared_loop


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes, shared by all tests here."""
    with Cluster(nodes=2) as cluster:
        yield cluster


@pytest.fixture
def own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the clients of a test an event loop of their own, which ends with the last of them."""
    monkeypatch.setattr(shared_loop, "provider", BlockingPortalProvider("asyncio"))
