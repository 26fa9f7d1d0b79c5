"""An inbox that remembers places in the log: a channel that is read again, by several workers, has no effect twice."""

from __future__ import annotations

from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from nsqext import Admin, Consumer, Message, Position, Producer
from nsqext.transactions import Inbox, OutboxStore, inbox
from tests.support.consumers import eventually

if TYPE_CHECKING:
    from tests.support.cluster import ClusterUnderTest

pytestmark = pytest.mark.anyio
_SECONDS = 60
_COUNT = 120


@pytest.fixture
def anyio_backend() -> str:
    """SQLAlchemy's asynchronous sessions run on asyncio."""
    return "asyncio"


def _worker(
    cluster: ClusterUnderTest, channel: str, sessions: async_sessionmaker[AsyncSession]
) -> tuple[Consumer, Inbox[AsyncSession]]:
    memory = Inbox(sessions.begin)
    consumer = Consumer(
        cluster.plain,
        channel,
        cluster.lookupd,
        middleware=[memory],
        queue_position=True,
        concurrency=3,
        requeue_delay=0.1,
        backoff="off",
    )

    @consumer.handler
    async def handle(message: Message) -> None:
        if not message.body.startswith(channel.encode()):
            return
        await memory.session().execute(text("INSERT INTO effects VALUES (:b)"), {"b": message.body.decode()})
        if message.attempts == 1 and message.body.endswith(b"0"):
            raise RuntimeError("fails once")

    return consumer, memory


async def test_a_channel_that_is_read_again_has_no_effect_twice(
    cluster_under_test: ClusterUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox, "MERGE_EVERY", 20)
    channel, topic = f"i_{token_hex(4)}", cluster_under_test.plain
    OutboxStore(f"sqlite:///{tmp_path}/o.db", create=True).close()
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/o.db", connect_args={"timeout": 30})
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE effects (body TEXT)"))
    sessions = async_sessionmaker(engine)
    bodies = [f"{channel}:{number}" for number in range(_COUNT)]
    async with Producer(cluster_under_test.lookupd) as producer, Admin(cluster_under_test.lookupd) as admin:
        await admin.create_channel(topic, channel)
        where = (await producer.publish(topic, bodies[0].encode(), partition=0, trace_id=1)).offset
        assert where is not None
        await producer.publish_many(topic, [body.encode() for body in bodies[1:]], partition=0)
        for again in (False, True):
            if again:
                await admin.seek_channel(topic, channel, Position.offset(where), partitions=[0])
            (first, one), (second, two) = (_worker(cluster_under_test, channel, sessions) for _ in range(2))
            async with first, second:
                await eventually(
                    lambda: first.statistics().finished + second.statistics().finished >= _COUNT,  # noqa: B023
                    _SECONDS,
                )
            if again:
                assert one.skipped + two.skipped >= _COUNT
        await admin.delete_channel(topic, channel)
    async with sessions() as session:
        found = sorted((await session.execute(text("SELECT body FROM effects"))).scalars())
        rows = (await session.execute(text("SELECT count(*) FROM nsqext_inbox_range"))).scalar_one()
    await engine.dispose()
    assert found == sorted(bodies)
    assert rows < _COUNT
