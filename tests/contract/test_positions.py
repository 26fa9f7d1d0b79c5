"""Positions in a database: a consumer continues there, whatever happened to its channel."""

from __future__ import annotations

from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

import anyio
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from nsqext import Admin, Consumer, Message, Position, Producer
from nsqext.transactions import OutboxStore, Positions

if TYPE_CHECKING:
    from tests.support.cluster import ClusterUnderTest

pytestmark = pytest.mark.anyio
_SECONDS = 60


@pytest.fixture
def anyio_backend() -> str:
    """SQLAlchemy's asynchronous sessions run on asyncio."""
    return "asyncio"


async def _effects(sessions: async_sessionmaker[AsyncSession], count: int) -> list[str]:
    found: list[str] = []
    with anyio.move_on_after(_SECONDS):
        while len(found) < count:
            await anyio.sleep(0.1)
            async with sessions() as session:
                found = list((await session.execute(text("SELECT body FROM effects ORDER BY rowid"))).scalars())
    return found


@pytest.mark.parametrize("change", ["nothing", "deleted", "emptied", "moved back", "moved to the end"])
async def test_each_message_has_its_effect_once_whatever_happened_to_the_channel(
    cluster_under_test: ClusterUnderTest, tmp_path: Path, change: str
) -> None:
    channel, topic = f"p_{token_hex(4)}", cluster_under_test.ordered
    OutboxStore(f"sqlite:///{tmp_path}/effects.db", create=True).close()
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/effects.db")
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE effects (body TEXT)"))
    sessions = async_sessionmaker(engine)
    positions = Positions(sessions.begin)

    async def handle(message: Message) -> None:
        if message.body.startswith(channel.encode()):
            await positions.session().execute(text("INSERT INTO effects VALUES (:b)"), {"b": message.body.decode()})

    bodies = [f"{channel}:{number}" for number in range(12)]
    expected: list[str] = []
    async with Producer(cluster_under_test.lookupd) as producer, Admin(cluster_under_test.lookupd) as admin:
        await admin.create_channel(topic, channel)
        for part in (bodies[:4], bodies[4:8], bodies[8:]):
            consumer = Consumer(topic, channel, cluster_under_test.lookupd, start=positions, middleware=[positions])
            consumer.handler(handle)
            async with consumer:
                for body in part:
                    await producer.publish(topic, body.encode(), partition=0)
                expected += part
                assert await _effects(sessions, len(expected)) == expected
            late = f"{channel}:after {part[-1]}"
            await producer.publish(topic, late.encode(), partition=0)
            expected.append(late)
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
        await admin.delete_channel(topic, channel)
    await engine.dispose()
