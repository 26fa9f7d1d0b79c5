"""The table of failures of docs/explanation/guarantees.md: what is lost, and what happens twice."""

from __future__ import annotations

import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from anyio.to_thread import run_sync
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from nsqext import Admin, Position, Producer
from nsqext.broker import Cluster
from nsqext.transactions import Outbox, OutboxRelay, OutboxStore
from tests.support.command_line import Process, environment
from tests.support.programs import ROOT
from tests.transactions.databases import url_of
from tests.transactions.ledger import MODES, STEPS, Service, lost_response
from tests.transactions.test_outbox import connect, relay_until_empty

pytestmark = pytest.mark.anyio
_SECONDS = 25
_LEDGER = str(ROOT / "tests" / "transactions" / "ledger.py")

Sessions = async_sessionmaker[AsyncSession]
modes = pytest.mark.parametrize("mode", MODES)
# for what happens at the servers; that both databases remember what was handled is tested where a channel is moved back
one_database = pytest.mark.parametrize("database", ["sqlite"], indirect=True)


async def publish(cluster: Cluster, topic: str, *bodies: str) -> None:
    async with Producer(cluster.lookupd) as producer:
        for body in bodies:
            await producer.publish(topic, body.encode(), key="k")


# The process


@modes
@pytest.mark.parametrize("step", STEPS)
@one_database
async def test_a_process_that_is_killed_at_any_line_of_its_handler(
    cluster: Cluster, topic: str, sessions: Sessions, database: str, mode: str, step: str
) -> None:
    await publish(cluster, topic, "a", "b")
    words = (_LEDGER, mode, cluster.lookupd[0], topic, url_of(database, "async"), step)

    def killed() -> int:
        with Process(words, environment(), ROOT, imports=("tests.transactions.ledger", "aiosqlite")) as process:
            process.communicate(timeout=_SECONDS)
            return process.wait()

    assert await run_sync(killed) == -signal.SIGKILL
    service = Service(mode, topic, cluster.lookupd, sessions)
    committed = step == "FIN"
    assert await service.effects() == ({"a": 1} if committed else {})
    await service.finishes(2)
    assert await service.effects() == {"a": 2 if committed and mode == "plain" else 1, "b": 1}


# The database


@modes
async def test_a_database_that_is_down_before_the_commit(
    cluster: Cluster, topic: str, sessions: Sessions, mode: str
) -> None:
    failures: list[str] = []

    @asynccontextmanager
    async def begin() -> AsyncIterator[AsyncSession]:
        fails = failures.pop(0) if failures else ""
        if fails == "opens":
            raise ConnectionError("the database is down")
        async with sessions.begin() as session:
            yield session
            if fails == "commits":
                raise ConnectionError("the database was stopped")

    service = Service(mode, topic, cluster.lookupd, sessions, begin=begin)
    await service.check()
    failures += ["opens", "commits"] * 2
    await publish(cluster, topic, "a", "b")
    await service.finishes(2)
    assert failures == []
    assert await service.effects() == {"a": 1, "b": 1}


@modes
@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
async def test_a_backend_of_the_database_that_is_killed_during_the_handler(
    cluster: Cluster, topic: str, sessions: Sessions, mode: str
) -> None:
    kills: list[str] = []

    @asynccontextmanager
    async def begin() -> AsyncIterator[AsyncSession]:
        async with sessions.begin() as session:
            backend = (await session.execute(text("SELECT pg_backend_pid()"))).scalar_one()
            yield session
            if kills:
                kills.pop()
                async with sessions() as other:
                    await other.execute(text("SELECT pg_terminate_backend(:backend)"), {"backend": backend})

    service = Service(mode, topic, cluster.lookupd, sessions, begin=begin)
    await service.check()
    kills += ["once", "twice"]
    await publish(cluster, topic, "a", "b")
    await service.finishes(2)
    assert kills == []
    assert await service.effects() == {"a": 1, "b": 1}


@modes
async def test_a_database_that_is_down_after_the_commit(
    cluster: Cluster, topic: str, sessions: Sessions, mode: str
) -> None:
    failures: list[str] = []
    begin = partial(lost_response, sessions, failures)
    service = Service(mode, topic, cluster.lookupd, sessions, begin=begin)
    await service.check()
    failures.append("once")
    await publish(cluster, topic, "a", "b")
    await service.finishes(2)
    assert failures == []
    assert await service.effects() == {"a": 2 if mode == "plain" else 1, "b": 1}


# The channel and its partitions


@modes
@one_database
@pytest.mark.parametrize("change", ["emptied", "deleted"])
async def test_a_channel_that_is_emptied_or_deleted(
    cluster: Cluster, topic: str, sessions: Sessions, mode: str, change: str
) -> None:
    await publish(cluster, topic, "a")
    await Service(mode, topic, cluster.lookupd, sessions).finishes(1)
    await publish(cluster, topic, "b", "c", "d")
    async with Admin(cluster.lookupd) as admin:
        if change == "emptied":
            await admin.empty_channel(topic, "ch")
        else:
            await admin.delete_channel(topic, "ch")
            await admin.create_channel(topic, "ch")
    await publish(cluster, topic, "e")
    service = Service(mode, topic, cluster.lookupd, sessions)
    await service.finishes(4 if mode == "positions" else 1)
    found = await service.effects()
    if mode != "positions":
        found.pop("b", None)  # the server had read it before the channel was emptied
        assert found == {"a": 1, "e": 1}
    else:
        assert found == dict.fromkeys("abcde", 1)


@modes
async def test_a_channel_that_is_moved_back(cluster: Cluster, topic: str, sessions: Sessions, mode: str) -> None:
    """As a leader does that does not know what was finished."""
    await publish(cluster, topic, "a", "b")
    service = Service(mode, topic, cluster.lookupd, sessions)
    await service.finishes(2)
    async with Admin(cluster.lookupd) as admin:
        await admin.seek_channel(topic, "ch", Position.earliest())
    await publish(cluster, topic, "c")
    again = Service(mode, topic, cluster.lookupd, sessions)
    await again.finishes(2 if mode == "positions" else 3)
    twice = 2 if mode == "plain" else 1
    assert await again.effects() == {"a": twice, "b": twice, "c": 1}


@modes
@one_database
async def test_a_leader_that_is_killed(sessions: Sessions, mode: str) -> None:
    with Cluster(nodes=3) as cluster:
        cluster.create_topic("t", partitions=1, replicas=3, ordered=True, extend=True, channels=["ch"])
        service = Service(mode, "t", cluster.lookupd, sessions)
        bodies = [str(number) for number in range(60)]
        async with service.consumer:
            await publish(cluster, "t", *bodies[:30])
            await run_sync(cluster.kill, cluster.leader("t", 0))
            await publish(cluster, "t", *bodies[30:])
            await service.quiet(30)
        found = await service.effects()
    assert found.keys() == set(bodies)
    if mode != "plain":
        assert set(found.values()) == {1}


@modes
@one_database
async def test_partitions_that_are_added(cluster: Cluster, topic: str, sessions: Sessions, mode: str) -> None:
    service = Service(mode, topic, cluster.lookupd, sessions)
    async with service.consumer, Producer(cluster.lookupd) as producer, Admin(cluster.lookupd) as admin:
        before = [str(number) for number in range(20)]
        for body in before:
            await producer.publish(topic, body.encode(), key=body)
        await admin.expand_topic(topic, 3)
        after = [str(number) for number in range(20, 60)]
        partitions = {(await producer.publish(topic, body.encode(), key=body)).partition for body in after}
        await service.quiet(60)
    assert partitions == {0, 1, 2}
    assert await service.effects() == dict.fromkeys(before + after, 1)


@one_database
@pytest.mark.parametrize("mode", ["plain", "inbox"])
async def test_a_topic_that_is_created_again(cluster: Cluster, topic: str, sessions: Sessions, mode: str) -> None:
    """Its offsets begin at 0 once more; positions refuse it, see test_positions."""
    for body in ("a", "b"):
        await publish(cluster, topic, body)
        await Service(mode, topic, cluster.lookupd, sessions).finishes(1)
        await run_sync(cluster.delete_topic, topic)
        create = partial(cluster.create_topic, partitions=1, ordered=True, extend=True, channels=["ch"])
        await run_sync(create, topic)
    assert await Service(mode, topic, cluster.lookupd, sessions).effects() == {"a": 1, "b": 1}


# The publisher


class _Fails(OutboxStore):
    """Ends the relay before it publishes, or before it deletes what was published."""

    at = ""

    def rows(self, *arguments: Any) -> Any:
        if self.at == "before the publish":
            raise OSError("killed")
        return super().rows(*arguments)

    def delete(self, *arguments: Any) -> None:
        if self.at == "after the publish":
            raise OSError("killed")
        super().delete(*arguments)


@modes
@pytest.mark.parametrize("at", ["before the publish", "after the publish"])
async def test_a_relay_that_is_killed(
    cluster: Cluster, topic: str, sessions: Sessions, database: str, mode: str, at: str
) -> None:
    connection = connect(database)
    Outbox().add(connection, topic, b"a", key="k")
    connection.commit()
    connection.close()
    with _Fails(database) as store:
        store.at = at
        async with Producer(cluster.lookupd) as producer:
            with pytest.raises(OSError, match="killed"):
                await OutboxRelay(store).run(producer)
    await relay_until_empty(cluster, database)
    twice = at == "after the publish"
    service = Service(mode, topic, cluster.lookupd, sessions)
    await service.finishes(2 if twice else 1)
    assert await service.effects() == {"a": 2 if twice and mode != "inbox" else 1}


@modes
async def test_a_publish_whose_outcome_was_unknown_and_that_was_repeated(
    cluster: Cluster, topic: str, sessions: Sessions, mode: str
) -> None:
    async with Producer(cluster.lookupd) as producer:
        for _ in range(2):
            await producer.publish(topic, b"a", headers={"nsqext_id": "1"}, key="k")
            await producer.publish(topic, b"b", key="k")
    service = Service(mode, topic, cluster.lookupd, sessions)
    await service.finishes(4)
    assert await service.effects() == {"a": 1 if mode == "inbox" else 2, "b": 2}


# The page


def test_the_page_names_tests_that_exist() -> None:
    page = Path(ROOT, "docs", "explanation", "guarantees.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(tests/\S+?\.py)::(\w+)`", page))
    assert len(named) >= 10
    for file, name in named:
        assert re.search(rf"^(async )?def {name}\(", Path(ROOT, file).read_text(encoding="utf-8"), re.MULTILINE), name
    listed = {name for file, name in named if file.endswith("test_failures.py")}
    written = set(re.findall(r"^async def (test_\w+)", Path(__file__).read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == written
