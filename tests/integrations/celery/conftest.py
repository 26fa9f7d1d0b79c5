"""Clusters of both generations for kombu."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from secrets import token_hex
from typing import Any

import kombu
import pytest

import nsqext.integrations.celery  # noqa: F401 - registers the URLs
from nsqext.broker import Cluster
from nsqext.integrations.celery.nsq_clients import NsqClients
from nsqext.sync.loop import shared_loop
from tests.integrations.celery.scripted import ScriptedServers

Connect = Callable[..., kombu.Connection]


@pytest.fixture(autouse=True)
def every_client_is_closed() -> Iterator[None]:
    """Check that a test leaves no blocking client open, each of which has a lease of the shared event loop."""
    before = shared_loop.provider._leases
    yield
    assert shared_loop.provider._leases == before


@pytest.fixture(scope="module", params=["redesigned", "original"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One node."""
    with Cluster(nodes=1, generation=request.param) as cluster:
        yield cluster


@pytest.fixture
def connect(cluster: Cluster) -> Iterator[Connect]:
    """Return a function that opens a connection with transport options."""
    opened: list[Any] = []

    def make(**options: Any) -> Any:
        connection = kombu.Connection(f"nsq://{cluster.lookupd[0]}", transport_options=options)
        opened.append(connection)
        return connection

    yield make
    for connection in opened:
        connection.release()


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"q_{token_hex(4)}"


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> ScriptedServers:
    """Stand in for the servers of all clients."""
    found = ScriptedServers()
    monkeypatch.setattr(NsqClients, "producer", found)
    monkeypatch.setattr(NsqClients, "admin", found)
    monkeypatch.setattr(NsqClients, "consumer", found.consumer)
    return found
