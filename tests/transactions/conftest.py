"""Databases of both kinds, with the tables of outbox and inbox."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.orders.postgres import postgres_server
from nsqext.broker import Cluster
from nsqext.transactions import OutboxStore


@pytest.fixture
def anyio_backend() -> str:
    """SQLAlchemy's asynchronous sessions run on asyncio."""
    return "asyncio"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One node of the redesigned generation."""
    with Cluster(nodes=1) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """A server for the tests of a process."""
    with postgres_server() as address:
        yield address


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with empty tables, as `OutboxStore` takes it."""
    found: str = f"sqlite:///{tmp_path}/o.db" if request.param == "sqlite" else request.getfixturevalue("postgres")
    with OutboxStore(found, create=True) as store:
        for table in ("nsqext_outbox", "nsqext_outbox_relay", "nsqext_inbox", "nsqext_inbox_range", "nsqext_position"):
            store._connection.execute(f"DELETE FROM {table}")  # noqa: S608
        store._connection.execute("UPDATE nsqext_outbox_shard SET owner = '', until = 0")
    return found
