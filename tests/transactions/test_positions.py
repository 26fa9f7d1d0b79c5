"""Positions: the place in an ordered partition is committed with the effects of the handler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from secrets import token_hex
from typing import Any

import anyio
import pytest
from anyio.to_thread import run_sync
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from nsqext import Admin, Consumer, ExtFilter, Message, Position, Producer, Requeue
from nsqext.broker import Cluster
from nsqext.client.middleware import Handling
from nsqext.errors import DataLoss, InvalidInput, InvalidSetting, PartitionUnavailable
from nsqext.lookup.node_channels import LogBounds
from nsqext.transactions import Positions
from tests.support.consumers import eventually
from tests.support.messages import RecordingOwner, make_message
from tests.transactions.databases import rows_as_dicts

pytestmark = pytest.mark.anyio
_SECONDS = 25

Sessions = async_sessionmaker[AsyncSession]


@pytest.fixture
def topic(cluster: Cluster) -> Iterator[str]:
    """An ordered topic."""
    name = f"t_{token_hex(4)}"
    _create(cluster, name)
    yield name


def _create(cluster: Cluster, name: str) -> None:
    cluster.create_topic(name, partitions=1, ordered=True, channels=["ch"])


class Ledger:
    """A consumer whose handler writes each message to a table."""

    def __init__(self, cluster: Cluster, topic: str, sessions: Sessions, **settings: Any) -> None:
        self.positions: Positions[AsyncSession] = Positions(sessions.begin)
        self.consumer = Consumer(
            topic,
            "ch",
            cluster.lookupd,
            **{
                "start": self.positions,
                "middleware": [self.positions],
                "requeue_delay": 0.05,
                "backoff": "off",
                **settings,
            },
        )
        self.sessions = sessions
        self.failures = 0
        self.consumer.handler(self.note)

    async def note(self, message: Message) -> None:
        session = self.positions.session()
        await session.execute(
            text("INSERT INTO effects SELECT count(*), :body FROM effects"), {"body": message.body.decode()}
        )
        if self.failures:
            self.failures -= 1
            raise RuntimeError("fails once")

    async def effects(self) -> list[str]:
        async with self.sessions() as session:
            return list((await session.execute(text("SELECT body FROM effects ORDER BY number"))).scalars())

    async def holds(self, *bodies: str) -> None:
        with anyio.move_on_after(_SECONDS):
            while await self.effects() != list(bodies):  # noqa: ASYNC110 - a table has no event
                await anyio.sleep(0.05)
        assert await self.effects() == list(bodies)


async def publish(cluster: Cluster, topic: str, *bodies: str) -> None:
    async with Producer(cluster.lookupd) as producer:
        for body in bodies:
            await producer.publish(topic, body.encode(), key="k")


async def test_each_message_has_its_effect_once_and_in_order(cluster: Cluster, topic: str, sessions: Sessions) -> None:
    ledger = Ledger(cluster, topic, sessions)
    ledger.failures = 2
    async with ledger.consumer:
        await publish(cluster, topic, "a", "b", "c")
        await ledger.holds("a", "b", "c")
    assert ledger.failures == 0


@pytest.mark.parametrize("change", ["deleted", "emptied", "moved back", "moved to the end"])
async def test_a_consumer_continues_where_the_database_is_and_not_where_the_channel_is(
    cluster: Cluster, topic: str, sessions: Sessions, change: str
) -> None:
    first = Ledger(cluster, topic, sessions)
    async with first.consumer:
        await publish(cluster, topic, "a", "b")
        await first.holds("a", "b")
    await publish(cluster, topic, "c", "d")
    async with Admin(cluster.lookupd) as admin:
        match change:
            case "deleted":
                await admin.delete_channel(topic, "ch")
                await admin.create_channel(topic, "ch")
            case "emptied":
                await admin.empty_channel(topic, "ch")
            case "moved back":
                await admin.seek_channel(topic, "ch", Position.earliest())
            case _:
                await admin.seek_channel(topic, "ch", Position.latest())
    second = Ledger(cluster, topic, sessions)
    async with second.consumer:
        await second.holds("a", "b", "c", "d")
        await publish(cluster, topic, "e")
        await second.holds("a", "b", "c", "d", "e")


@pytest.mark.parametrize("change", ["emptied", "moved back", "moved to the end"])
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)  # where the consumer continues is read before
async def test_a_channel_that_is_moved_meanwhile_is_moved_back(
    cluster: Cluster, topic: str, sessions: Sessions, change: str
) -> None:
    ledger = Ledger(cluster, topic, sessions, requeue_delay=0.5)
    async with ledger.consumer, Admin(cluster.lookupd) as admin:
        await publish(cluster, topic, "a")
        await ledger.holds("a")
        ledger.failures = 1
        await publish(cluster, topic, "b", "c")
        await eventually(lambda: not ledger.failures, _SECONDS)
        match change:
            case "emptied":
                await admin.empty_channel(topic, "ch")
            case "moved back":
                await admin.seek_channel(topic, "ch", Position.earliest())
            case _:
                await admin.seek_channel(topic, "ch", Position.latest())
        await publish(cluster, topic, "d")
        await ledger.holds("a", "b", "c", "d")


async def test_a_topic_that_was_created_again_ends_the_consumer(
    cluster: Cluster, topic: str, sessions: Sessions
) -> None:
    ledger = Ledger(cluster, topic, sessions)
    async with ledger.consumer:
        await publish(cluster, topic, "a", "b")
        await ledger.holds("a", "b")
    for bodies in ((), ("1",), ("1", "2", "3"), ("longer than a and b", "x", "y", "z")):
        await run_sync(lambda: cluster.delete_topic(topic))
        await run_sync(_create, cluster, topic)
        await publish(cluster, topic, *bodies)
        again = Ledger(cluster, topic, sessions)
        with pytest.raises(DataLoss, match="the log is not the log in which ch has handled"):
            with anyio.fail_after(_SECONDS):
                await again.consumer.serve()
        assert await again.effects() == ["a", "b"]
    await again.positions.forget(topic, "ch")
    fresh = Ledger(cluster, topic, sessions)
    async with fresh.consumer:
        await publish(cluster, topic, "new")
        with anyio.fail_after(_SECONDS):
            while "new" not in await fresh.effects():  # noqa: ASYNC110 - a table has no event
                await anyio.sleep(0.05)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_every_message_has_its_effect_once_through_changes_of_the_leader(sessions: Sessions) -> None:
    with Cluster(nodes=3) as cluster:
        cluster.create_topic("ordered", partitions=1, replicas=3, ordered=True, channels=["ch"])
        ledger = Ledger(cluster, "ordered", sessions)
        bodies = [str(number) for number in range(60)]
        async with ledger.consumer:
            for first in range(0, 60, 20):
                await publish(cluster, "ordered", *bodies[first : first + 10])
                killed = cluster.leader("ordered", 0)
                await run_sync(cluster.kill, killed)
                await publish(cluster, "ordered", *bodies[first + 10 : first + 20])
                await run_sync(cluster.restart, killed)
            await ledger.holds(*bodies)


async def test_what_leaves_messages_out_is_refused(cluster: Cluster, topic: str, sessions: Sessions) -> None:
    left_out = {"tag": "t", "max_attempts": 3, "sample_rate": 10, "ext_filter": ExtFilter(1, "country", "NL")}
    for name, value in left_out.items():
        with pytest.raises(InvalidSetting, match=f"{name}=.* leaves messages out"):
            Ledger(cluster, topic, sessions, **{name: value})
    with pytest.raises(InvalidSetting, match="no effect without start"):
        Ledger(cluster, topic, sessions, start=None)
    Producer(cluster.lookupd, middleware=[Positions(sessions.begin)])  # it leaves nothing out
    with pytest.raises(InvalidSetting, match="start_existing has no effect"):
        Ledger(cluster, topic, sessions, start_existing=True)


async def test_a_consumer_that_does_not_receive_in_order_is_refused(
    cluster: Cluster, sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"t_{token_hex(4)}"
    await run_sync(lambda: cluster.create_topic(name, partitions=1, channels=["ch"]))
    ledger = Ledger(cluster, name, sessions)
    async with ledger.consumer:
        await publish(cluster, name, "a")
        await eventually(lambda: "Positions needs a consumer that receives messages in order" in caplog.text, _SECONDS)
    assert await ledger.effects() == []


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_message_that_was_not_received_in_order_is_refused(sessions: Sessions) -> None:
    message = make_message(RecordingOwner(), offset=100)

    async def refused(_: Handling) -> None:
        raise AssertionError("it is not handled")

    with pytest.raises(InvalidInput, match="in order"):
        await Positions(sessions.begin).handle(Handling([message], "ch"), refused)


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_partition_waits_for_a_database_that_does_not_respond(sessions: Sessions) -> None:
    """It would begin where the channel is, and messages would have their effects twice, or not at all."""
    async with sessions.begin() as session:
        await session.execute(text("DROP TABLE nsqext_position"))
    with pytest.raises(PartitionUnavailable, match="its position cannot be read from the database"):
        await Positions(sessions.begin).start_of("t", "ch", 3, LogBounds(0, 200, 0))


async def handled(
    positions: Positions[AsyncSession], number: int, channel: str = "ch", offset: int = 100
) -> RecordingOwner:
    """Handle a message of 34 bytes; return its subscription."""
    message = make_message(owner := RecordingOwner(in_order=True), number, offset=offset, timestamp=1)
    message.size = 34

    async def handle(_: Handling) -> None:
        """Do nothing."""

    await positions.handle(Handling([message], channel), handle)
    return owner


@pytest.mark.parametrize(
    ("log", "start"),
    [
        (LogBounds(0, 134, 134), None),
        (LogBounds(0, 200, 134), None),
        (LogBounds(100, 200, 200), Position.offset(100)),
        (LogBounds(0, 200, None), Position.offset(100)),
        (LogBounds(120, 200, 0), Position.offset(120)),
        (LogBounds(134, 200, 200), Position.offset(134)),
        (LogBounds(0, 133, 133), "it ends at byte 133"),
        (LogBounds(135, 200, 200), "from byte 134 to 135 were removed"),
    ],
)
@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_partition_is_read_from_the_last_message_or_the_next(
    sessions: Sessions, log: LogBounds, start: Position | str | None
) -> None:
    positions: Positions[AsyncSession] = Positions(sessions.begin)
    owner = await handled(positions, 1)
    await positions.start_of("t", "ch", 3, LogBounds(0, 200, 200))  # a subscription that received nothing
    assert await positions.start_of("t", "other", 3, log) is None
    if isinstance(start, str):
        with pytest.raises(DataLoss, match=start):
            await positions.start_of("t", "ch", 3, log)
    else:
        assert await positions.start_of("t", "ch", 3, log) == start
        if start is None or log.begin > 100:  # the message at byte 100 is not delivered again
            await handled(positions, 2, offset=134)
    assert owner.commands == []


async def test_connections_that_return_rows_as_dicts_are_used(database: str) -> None:
    """Positions were read as the names of their columns."""
    positions: Positions[Any] = Positions(lambda: rows_as_dicts(database))
    await handled(positions, 1)
    assert await positions.start_of("t", "ch", 3, LogBounds(0, 200, 200)) == Position.offset(100)
    await handled(positions, 1)
    assert positions.skipped == 1


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_partition_does_not_begin_with_a_message_that_was_read_before_the_channel_was_moved(
    sessions: Sessions, caplog: pytest.LogCaptureFixture
) -> None:
    """Those before it would be skipped as handled. Others may have finished them: then it is delivered each time."""
    positions: Positions[AsyncSession] = Positions(sessions.begin)
    for attempts, begin in ((1, 100), (1, 134), (1, None), (3, 99), (3, 99), (2, 98), (1, 100), (3, 99)):
        for attempt in range(1, attempts + 1):
            assert await positions.start_of("t", "ch", 3, LogBounds(0, 200, begin)) is None
            if attempt < attempts:
                with pytest.raises(Requeue) as again:
                    await handled(positions, 1)
                assert again.value.backoff is False
                async with sessions() as session:
                    assert (await session.execute(text("SELECT count(*) FROM nsqext_position"))).scalar_one() == 0
        if attempts == 2:
            continue  # the message before it is delivered next
        await handled(positions, 1)
        assert await positions.start_of("t", "ch", 3, LogBounds(0, 200, 134)) is None
        await positions.forget("t", "ch")
    assert await positions.start_of("t", "ch", 3, LogBounds(100, 200, 0)) is None  # what was before it was removed
    await handled(positions, 1)
    assert caplog.messages == 3 * ["ch begins at byte 100, because no message from byte 99 on was delivered"]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_message_counts_as_missing_after_three_moves_in_succession(sessions: Sessions) -> None:
    """Servers send what they had read before a move."""
    positions: Positions[AsyncSession] = Positions(sessions.begin)
    await handled(positions, 1)
    for offset in (134, 134, 100, 134, 134, 134):
        assert await positions.start_of("t", "ch", 3, LogBounds(0, 200, 200)) == Position.offset(100)
        with nullcontext() if offset == 100 else pytest.raises(Requeue):
            await handled(positions, 1 if offset == 100 else 2, offset=offset)
    with pytest.raises(DataLoss, match="byte 100 begins no message"):
        await positions.start_of("t", "ch", 3, LogBounds(0, 200, 200))


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
async def test_a_channel_that_is_forgotten_begins_where_it_is_and_others_end(sessions: Sessions) -> None:
    positions: Positions[AsyncSession] = Positions(sessions.begin)
    for channel in ("ch", "other"):
        await handled(positions, 1, channel)
        with pytest.raises(Requeue):  # another message at the same place
            await handled(positions, 2, channel)
    await positions.forget("t", "ch")
    log = LogBounds(0, 200, 200)
    assert await positions.start_of("t", "ch", 3, log) is None
    with pytest.raises(DataLoss, match="byte 100 holds a newer message"):
        await positions.start_of("t", "other", 3, log)
    assert await positions.start_of("t", "other", 3, log) == Position.offset(100)
