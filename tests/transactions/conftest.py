"""Databases of both kinds, with the tables of outbox and inbox."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from secrets import token_hex

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from nsqext.broker import Cluster
from nsqext.transactions import OutboxStore
from tests.transactions.databases import url_of


@pytest.fixture
def anyio_backend() -> str:
    """SQLAlchemy's asynchronous sessions run on asyncio."""
    return "asyncio"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One node of the redesigned generation."""
    with Cluster(nodes=1) as cluster:
        yield cluster


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database with empty tables, as `OutboxStore` takes it."""
    found: str = f"sqlite:///{tmp_path}/o.db" if request.param == "sqlite" else request.getfixturevalue("postgres")
    with OutboxStore(found, create=True) as store, closing(store.connect()) as connection:
        for table in ("nsqext_outbox", "nsqext_outbox_relay", "nsqext_inbox", "nsqext_inbox_range", "nsqext_position"):
            connection.execute(f"DELETE FROM {table}")  # noqa: S608
        connection.execute("UPDATE nsqext_outbox_shard SET owner = '', until = 0")
    return found


@pytest.fixture
def topic(cluster: Cluster) -> str:
    """An ordered topic with extend support."""
    name = f"t_{token_hex(4)}"
    cluster.create_topic(name, partitions=1, ordered=True, extend=True, channels=["ch"])
    return name


@pytest.fixture
async def sessions(database: str) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    """Sessions of a database with an empty table of effects."""
    engine = create_async_engine(url_of(database, "async"))
    async with engine.begin() as connection:
        await connection.execute(text("DROP TABLE IF EXISTS effects"))
        await connection.execute(text("CREATE TABLE effects (number INTEGER, body TEXT)"))
    yield async_sessionmaker(engine)
    await engine.dispose()
