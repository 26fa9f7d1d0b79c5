"""Positions in a database: a consumer continues there, whatever happened to its channel, and says if it cannot."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
from anyio.to_thread import run_sync
from attrs import define, field
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from nsqext import Admin, Consumer, Message, Position, Producer
from nsqext.errors import DataLoss
from nsqext.transactions import OutboxStore, Positions
from tests.contract.test_topic_changes import soon_stable
from tests.support.cluster import REAL
from tests.support.node_restarts import published_again
from tests.support.topic_plan import TopicPlan, fresh_name

if TYPE_CHECKING:
    from tests.support.cluster import ClusterUnderTest, Truncatable

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]
_SECONDS = 60


@pytest.fixture
def anyio_backend() -> str:
    """SQLAlchemy's asynchronous sessions run on asyncio."""
    return "asyncio"


@define
class Ledger:
    """Effects of the messages of a channel whose bodies begin with its name.

    Attributes:
        lookupd: lookup addresses.
        topic: the topic.
        channel: the channel.
        sessions: those of its database.
        held: body whose handler waits for ``released``.
        entered: set when it waits.
    """

    lookupd: list[str]
    topic: str
    channel: str
    sessions: async_sessionmaker[AsyncSession]
    held: bytes = b""
    entered: anyio.Event = field(factory=anyio.Event)
    released: anyio.Event = field(factory=anyio.Event)
    positions: Positions[AsyncSession] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.positions = Positions(self.sessions.begin)

    def consumer(self) -> Consumer:
        """Return a consumer that continues at its positions."""
        found = Consumer(
            self.topic,
            self.channel,
            self.lookupd,
            ordered=True,
            requeue_delay=0.1,
            start=self.positions,
            middleware=[self.positions],
        )
        found.handler(self._handle)
        return found

    async def _handle(self, message: Message) -> None:
        if not message.body.startswith(self.channel.encode()):
            return
        if message.body == self.held:
            self.entered.set()
            await self.released.wait()
        statement = text("INSERT INTO effects (body) VALUES (:body)")
        await self.positions.session().execute(statement, {"body": message.body.decode()})

    async def effects(self, count: int) -> list[str]:
        """Return the effects in their order, as soon as there are that many, or a minute has passed."""
        found: list[str] = []
        with anyio.move_on_after(_SECONDS):
            while len(found) < count:
                await anyio.sleep(0.05)
                async with self.sessions() as session:
                    found = list((await session.execute(text("SELECT body FROM effects ORDER BY rowid"))).scalars())
        return found

    async def publish(self, *names: str, partition: int = 0) -> list[str]:
        """Publish messages of the channel; return their bodies."""
        bodies = [f"{self.channel}:{name}" for name in names]
        async with Producer(self.lookupd) as producer:
            for body in bodies:
                await producer.publish(self.topic, body.encode(), partition=partition)
        return bodies


@asynccontextmanager
async def opened(lookupd: list[str], topic: str, channel: str, folder: Path) -> AsyncIterator[Ledger]:
    """Yield a ledger with a new database."""
    OutboxStore(f"sqlite:///{folder}/effects.db", create=True).close()
    engine = create_async_engine(f"sqlite+aiosqlite:///{folder}/effects.db")
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE effects (body TEXT)"))
    yield Ledger(lookupd, topic, channel, async_sessionmaker(engine))
    await engine.dispose()


async def reset(admin: Admin, topic: str, channel: str, change: str) -> None:
    """Change where a channel is."""
    match change:
        case "deleted":
            await admin.delete_channel(topic, channel)
            await admin.create_channel(topic, channel)
        case "emptied":
            await admin.empty_channel(topic, channel)
        case "moved back":
            await admin.seek_channel(topic, channel, Position.earliest())
        case "moved to the end":
            await admin.seek_channel(topic, channel, Position.latest())


@pytest.mark.parametrize("change", ["nothing", "deleted", "emptied", "moved back", "moved to the end"])
async def test_each_message_has_its_effect_once_whatever_happened_to_the_channel(
    cluster_under_test: ClusterUnderTest, channel: str, tmp_path: Path, change: str
) -> None:
    cluster, expected = cluster_under_test, list[str]()
    async with (
        opened(cluster.lookupd, cluster.ordered, channel, tmp_path) as ledger,
        Admin(cluster.lookupd) as admin,
    ):
        await admin.create_channel(cluster.ordered, channel)
        for part in ("abcd", "efgh", "ijkl"):
            async with ledger.consumer():
                expected += await ledger.publish(*part)
                assert await ledger.effects(len(expected)) == expected
            expected += await ledger.publish(f"after {part}")
            await reset(admin, cluster.ordered, channel, change)
        await admin.delete_channel(cluster.ordered, channel)


@pytest.mark.parametrize("change", ["emptied", "moved back", "moved to the end"])
async def test_each_message_has_its_effect_once_whatever_happens_to_the_channel_meanwhile(
    cluster_under_test: ClusterUnderTest, channel: str, tmp_path: Path, change: str
) -> None:
    cluster = cluster_under_test
    async with (
        opened(cluster.lookupd, cluster.ordered, channel, tmp_path) as ledger,
        Admin(cluster.lookupd) as admin,
    ):
        ledger.held = f"{channel}:b".encode()
        await admin.create_channel(cluster.ordered, channel)
        async with ledger.consumer():
            expected = await ledger.publish(*"abcd")
            await ledger.entered.wait()
            await reset(admin, cluster.ordered, channel, change)
            expected += await ledger.publish(*"efgh")
            ledger.released.set()
            assert await ledger.effects(len(expected)) == expected
        await admin.delete_channel(cluster.ordered, channel)


async def test_each_message_has_its_effect_once_while_the_topic_is_expanded(
    cluster_under_test: ClusterUnderTest, channel: str, tmp_path: Path
) -> None:
    cluster, plan = cluster_under_test, TopicPlan(fresh_name("contract_expanded"), ordered=True)
    async with (
        opened(cluster.lookupd, plan.name, channel, tmp_path) as ledger,
        Admin(cluster.lookupd) as admin,
    ):
        await plan.create(admin)
        await admin.create_channel(plan.name, channel)
        try:
            expected = [await ledger.publish("before"), list[str]()]
            for part in ("ab", "cd", "ef"):
                async with ledger.consumer():
                    if part == "ab":
                        await ledger.effects(1)
                        async with soon_stable(cluster, plan.name):
                            await admin.expand_topic(plan.name, 2)
                    for number, bodies in enumerate(expected):
                        bodies += await ledger.publish(*(f"{number}{name}" for name in part), partition=number)
                    found = await ledger.effects(sum(map(len, expected)))
                    assert sorted(found) == sorted(expected[0] + expected[1])
                    for bodies in expected:
                        assert [body for body in found if body in bodies] == bodies
                for number, bodies in enumerate(expected):
                    bodies += await ledger.publish(f"{number} after {part}", partition=number)
                await reset(admin, plan.name, channel, "moved to the end")
        finally:
            await admin.delete_topic(plan.name)


async def test_a_truncated_log_ends_the_consumer_and_what_is_new_is_handled_after_forget(
    truncatable: Truncatable, channel: str, tmp_path: Path
) -> None:
    """A real leader that was killed comes back without the messages that it had acknowledged last."""
    lookupd = truncatable.lookupd
    for attempt in range(5):
        topic, truncate = await run_sync(truncatable.create, 20)
        folder = tmp_path / str(attempt)
        folder.mkdir()
        async with opened(lookupd, topic, channel, folder) as ledger, Admin(lookupd) as admin:
            await admin.create_channel(topic, channel)
            async with ledger.consumer():
                handled = await ledger.publish(*map(str, range(30)))
                assert await ledger.effects(30) == handled
            await run_sync(truncate)
            first = await published_again(lookupd, topic, f"{channel}:first".encode())
            if first is None:
                assert REAL, "only a real node may lose the leadership: it has lost messages that its commit log names"
                continue
            new = [f"{channel}:first"]
            for more in ((), map(str, range(30, 90))):  # the log is shorter than it was, and longer
                new += await ledger.publish(*more)
                with anyio.fail_after(_SECONDS), pytest.raises(DataLoss, match="the log is not the log in which"):
                    await ledger.consumer().serve()
                assert await ledger.effects(30) == handled
            await ledger.positions.forget(topic, channel)
            assert first.offset is not None
            await admin.seek_channel(topic, channel, Position.offset(first.offset))
            async with ledger.consumer():
                assert await ledger.effects(30 + len(new)) == handled + new
            return
