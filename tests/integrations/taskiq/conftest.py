"""Clusters of both generations for Taskiq."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from secrets import token_hex
from typing import Any

import pytest

from nsqext.broker import Cluster
from nsqext.integrations.taskiq import NsqBroker

Opened = Callable[..., AbstractAsyncContextManager[NsqBroker]]


@pytest.fixture
def anyio_backend() -> str:
    """Taskiq runs on asyncio."""
    return "asyncio"


@pytest.fixture(scope="module", params=["redesigned", "original"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One node."""
    with Cluster(nodes=1, generation=request.param) as cluster:
        yield cluster


@pytest.fixture
def opened(cluster: Cluster) -> Opened:
    """Return a function that starts a broker with queues and settings, and shuts it down."""

    @asynccontextmanager
    async def open_broker(*queues: str, **settings: Any) -> AsyncIterator[NsqBroker]:
        broker = NsqBroker(cluster.lookupd, queues=queues or (f"q_{token_hex(4)}",), **settings)
        await broker.startup()
        try:
            yield broker
        finally:
            await broker.shutdown()

    return open_broker
